// The page of all jobs: those that have not ended, by group and priority, then those that have.
import { ask, badge, bar, clock, deadline, el, job, money, number, span, table, why } from "./dom.js";

let ended = [], more = false, loading = false, again = false, problem = "", filter = "", redraw = () => {}, asked = "", told = "";

export function open(_, draw) {
  redraw = draw;
  filter = "";
  told = "";
  load();
}

// again: whether a job has come or has ended since the list that is on its way was made.
async function load(before = "") {
  again = loading;
  if (loading) return;
  loading = true;
  try {
    const found = await ask(`api/jobs?most=100&before=${encodeURIComponent(before)}`);
    ended = before ? [...ended, ...found.rows] : found.rows;
    [more, problem] = [found.more, ""];
  } catch (error) {
    problem = error.message;
  }
  loading = false;
  redraw();
  if (again) load();
}

export function draw(state) {
  const seen = state.overview;
  if (!seen) return el("p", { class: "quiet" }, state.why);
  const unended = seen.jobs, ids = unended.map((each) => each.id).join(" ");
  if (ids !== asked) { // a job has come or has ended
    asked = ids;
    load();
  }
  const active = new Set(unended.map((each) => each.id));
  const others = ended.filter((each) => !active.has(each.id));
  const good = (each) => `${each.id} ${each.group ?? ""} ${each.phase}`.toLowerCase().includes(filter);
  return el("div", {},
    el("h1", {}, "Jobs"),
    el("p", {}, el("input", {
      type: "search", placeholder: "Filter by name, group or phase (/)", "aria-label": "Filter jobs",
      oninput: (event) => { filter = event.target.value.toLowerCase(); redraw(); },
    }), el("span", { role: "status" }, told ? ` ${told}` : "")),
    problem ? el("p", { class: "error" }, `The ended jobs cannot be listed: ${problem}`) : "",
    groups(unended.filter(good)).map(([name, rows]) => el("section", { "data-key": `group ${name}`, "aria-label": name || "Jobs without a group" },
      el("h2", {}, name ? `Group ${name}` : "Not ended", el("small", {}, ` ${rows.length}`)), list(rows, state.live))),
    seen.jobs_left_out ? el("p", { class: "quiet" }, `${number(seen.jobs_left_out)} more jobs that have not ended are not shown while the head does not answer.`) : "",
    unended.length ? "" : el("p", { class: "quiet" }, "No job is waiting or running. `make train JOB=…` runs one."),
    el("section", { "data-key": "ended", "aria-label": "Ended jobs" }, el("h2", {}, "Ended"),
      others.length ? list(others.filter(good), false) : el("p", { class: "quiet" }, loading ? "Loading …" : "None."),
      more && filter ? el("p", { class: "quiet" }, `The filter looks at the newest ${number(ended.length)} jobs only.`) : "",
      more ? el("button", { type: "button", onclick: () => load(ended.at(-1)?.id) }, "Older jobs") : ""),
  );
}

// Groups in the order of their first job; within a group, the highest priority first.
function groups(rows) {
  const found = new Map();
  for (const row of rows) found.set(row.group ?? "", [...(found.get(row.group ?? "") ?? []), row]);
  for (const each of found.values()) each.sort((a, b) => (b.priority ?? 0) - (a.priority ?? 0));
  return [...found];
}

function list(rows, live) {
  const titles = ["job", "phase", "priority", "nodes", "progress", "end", "cost", "why", "change"];
  return table(titles, rows.map((row) => [
    row.id, el("a", { href: job(row.id) }, row.id), badge(row.phase),
    live && !["held", "parked"].includes(row.phase) ? priority(row) : number(row.priority),
    el("span", { class: "whole" }, nodes(row)),
    progress(row), end(row), cost(row), el("span", { class: "why" }, why(row)), live ? actions(row) : "",
  ]), { class: "wide" });
}

function nodes(row) {
  if (!row.nodes) return "";
  const wanted = row.min === row.max ? String(row.max) : `${row.min}–${row.max}`;
  return row.ended ? wanted : `${row.nodes.length} of ${wanted}`;
}

function progress(row) {
  if (!row.total_steps) return row.step === undefined ? "" : `step ${number(row.step)}`;
  const text = `step ${number(row.step)} of ${number(row.total_steps)}`;
  return [bar(row.step, row.total_steps, text), el("small", {}, text)];
}

function end(row) {
  if (row.id && row.submitted === undefined) return "";
  const at = row.ended ? `ended ${clock(row.ended)}` : row.eta ? `${clock(row.eta)}, in ${span(Math.max(0, row.eta - Date.now() / 1000))}` : "end not known";
  return row.deadline ? [at, el("small", { class: "line" }, deadline(row))] : at;
}

function cost(row) {
  if (row.submitted === undefined) return "";
  const spent = row.cost ?? 0, whole = row.cost_to_end;
  const toEnd = row.ended || whole === null || whole === undefined ? "" : el("small", {}, ` ${money(whole)} at its end`);
  if (!row.budget) return [money(row.cost), toEnd];
  const over = spent > row.budget || (whole ?? 0) > row.budget;
  return [bar(spent, row.budget, `${money(spent)} of a budget of ${money(row.budget)}`, over), el("small", {}, `${money(spent)} of ${money(row.budget)}`), toEnd];
}

function priority(row) {
  return el("form", { class: "inline", onsubmit: (event) => {
    event.preventDefault();
    change(row.id, "priority", { to: Number(event.target.querySelector("input").value) });
  } }, el("input", {
    type: "number", min: -1000, max: 1000, step: 1, required: true, value: String(row.priority ?? 0), "aria-label": `Priority of ${row.id}`,
  }), el("button", { type: "submit", "aria-label": `Set the priority of ${row.id}` }, "set"));
}

function actions(row) {
  const first = { held: ["relaunch"], parked: [], paused: ["resume"] }[row.phase] ?? [row.ended ? [] : row.paused ? "resume" : "pause"].flat();
  const verbs = [...first, "stop"];
  return el("span", { class: "actions" }, verbs.map((verb) => el("button", {
    type: "button", "aria-label": `${verb} ${row.id}`,
    onclick: () => { if (verb !== "stop" || confirm(`Stop ${row.id}? Its state goes into the bucket.`)) change(row.id, verb, {}); },
  }, verb)));
}

async function change(id, verb, body) {
  told = `${verb}: asking the head …`;
  redraw();
  try {
    await ask(`api/jobs/${encodeURIComponent(id)}/${verb}`, body);
    told = `${verb} ${id}: done`;
  } catch (error) {
    told = `${verb} ${id}: ${error.message}`;
  }
  redraw();
}
