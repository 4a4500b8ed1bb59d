// Several runs in one chart: over steps, time since their start, samples or dollars.
import { Charts } from "./chart.js";
import * as curves from "./curves.js";
import { ask, badge, colour, el, job, money, number, span, table } from "./dom.js";
import { costs } from "./timeline.js";
import * as parallel from "./parallel.js";

const EVERY = 5000; // milliseconds between two looks at runs that go on
const LATE = 30_000; // milliseconds after a run's end in which its last data reach the bucket
const MOST = 8; // runs in a chart: there are eight colours
const GROUP = 64; // runs of a group
let rows = [], more = false, problem = "", filter = "", metric = "", charts = new Charts(), redraw = () => {}, known = new Map(), facts = new Map(), shown = [], timer = 0;

export function open(state, draw) {
  [redraw, filter, problem, charts, known, facts] = [draw, "", "", new Charts(), new Map(), new Map()];
  load();
  timer = setInterval(() => { if (!document.hidden) follow(state); }, EVERY);
}

export function close() {
  clearInterval(timer);
  charts.close();
}

// Look again at the runs that go on, or have ended a moment ago.
function follow({ overview }) {
  const going = new Set((overview?.jobs ?? []).map((row) => row.id)), now = Date.now();
  for (const id of shown) {
    const entry = known.get(id);
    if (!entry || entry.busy) continue;
    if (going.has(id)) entry.until = now + LATE;
    if (now > entry.until) continue;
    readRun(id, entry);
    if (facts.has(id)) readFacts(id);
  }
}

async function load(before = "") {
  try {
    const found = await ask(`api/jobs?most=200&before=${encodeURIComponent(before)}`);
    rows = before ? [...rows, ...found.rows] : found.rows;
    more = found.more;
  } catch (error) {
    problem = error.message;
  }
  redraw();
}

// What a run has; asked for once.
function run(id) {
  if (!known.has(id)) {
    const entry = { curves: null, timeline: null, problem: "", busy: false, until: Date.now() + LATE };
    known.set(id, entry);
    readRun(id, entry);
  }
  return known.get(id);
}

// What the server knows about a run; null until it has answered.
function about(id) {
  if (!facts.has(id)) {
    facts.set(id, null);
    readFacts(id);
  }
  return facts.get(id);
}

function readFacts(id) {
  const mine = facts;
  ask(`api/runs/${encodeURIComponent(id)}`).then((found) => { mine.set(id, found); redraw(); }, () => {});
}

// The jobs of the cluster, newest first.
function jobs(state) {
  const live = state.overview?.jobs ?? [], ids = new Set(rows.map((row) => row.id));
  return [...live.filter((row) => !ids.has(row.id)), ...rows];
}

// A long run's curves come in several answers, each with more of the run.
async function readRun(id, entry) {
  const path = `api/runs/${encodeURIComponent(id)}`;
  const names = metric ? `?names=${curves.plain(metric)}` : "";
  entry.busy = true;
  try {
    let [found, timeline] = await Promise.all([ask(`${path}/curves${names}`), ask(`${path}/timeline`)]);
    Object.assign(entry, { curves: found, timeline, problem: "" });
    while (found.unread && known.get(id) === entry) {
      redraw();
      entry.curves = found = await ask(`${path}/curves${names}`);
    }
  } catch (error) {
    entry.problem = error.message;
  }
  entry.busy = false;
  redraw();
}

export function draw(state) {
  const group = state.query.get("group"), all = jobs(state);
  const members = all.filter((row) => group && row.group === group).map((row) => row.id).slice(0, GROUP);
  const chosen = (state.query.get("runs") ?? "").split(",").filter(Boolean);
  shown = (chosen.length ? chosen : members).slice(0, MOST);
  const found = shown.map((id) => [id, run(id)]);
  const names = [...new Set(found.flatMap(([, each]) => each.curves?.names ?? []))].sort();
  if (!names.includes(metric)) metric = names.includes("loss") ? "loss" : names[0] ?? "";
  return el("div", {}, el("h1", {}, "Compare"),
    problem ? el("p", { class: "error" }, problem) : "",
    shown.length ? chart(found, names) : el("p", { class: "quiet" }, `Choose up to ${MOST} runs.`),
    shown.length ? summary(found) : "",
    differing(members.length ? members : shown),
    el("section", { "aria-label": "Runs" }, el("h2", {}, "Runs"), picker(all, group)));
}

function chart(found, names) {
  const { axis, logarithmic } = curves.chosen(), lines = [], notes = [];
  found.forEach(([id, each], index) => {
    if (each.problem) notes.push(`${id}: ${each.problem}`);
    const curve = each.curves?.curves.find((one) => one.name === metric);
    if (!each.curves) return;
    if (!curve) {
      if (each.curves.names.includes(metric)) { known.delete(id); run(id); } // another name has been chosen
      else notes.push(`${id} has not logged ${metric || "anything"}.`);
      return;
    }
    const points = curves.line(curve.count, axis, curves.dollars(each.timeline));
    // Runs began at different times: compare the time since each one's first point.
    const first = axis === "times" ? points.x[0] : 0;
    if (!points.x.length) notes.push(`${id}: no point has a known value on this axis. Choose another axis.`);
    lines.push({ name: id, x: points.x.map((x) => x - first), y: points.y, colour: colour(index) });
  });
  charts.keep(metric ? [metric] : []);
  if (!metric) return notes.map((note) => el("p", { class: "quiet" }, note));
  const one = charts.get(metric), label = axis === "times" ? "seconds" : curves.AXES[axis];
  one.update(curves.positive(lines), [], { label, time: false, logarithmic });
  return [
    curves.controls(redraw, el("label", {}, "of ", el("select", { "aria-label": "Of", onchange: (event) => { metric = event.target.value; redraw(); } },
      names.map((name) => el("option", { value: name, selected: name === metric }, name))))),
    one.slot(), notes.map((note) => el("p", { class: "quiet", "data-key": note }, note)),
  ];
}

// What differs between runs.
function differing(ids) {
  const ready = ids.map((id) => ({ id, run: about(id) })).filter((each) => each.run);
  if (ready.length < 2) return "";
  const { titles, rows } = parallel.differences(ready, metric);
  return el("section", { "aria-label": "Differences" }, el("h2", {}, "What differs"), parallel.draw(ready, metric),
    titles.length ? table(["run", ...titles], ready.map(({ id }, index) => [id, el("a", { href: job(id) }, id), ...rows[index]]))
      : el("p", { class: "quiet" }, "The scripts of these runs have the same arguments."));
}

function summary(found) {
  return table(["run", "last value", "goodput", "node time", "cost", "interruptions"], found.map(([id, each], index) => {
    const curve = each.curves?.curves.find((one) => one.name === metric), time = each.timeline;
    return [id, [el("i", { class: "device", style: { display: "inline-block", "background-color": colour(index) } }), " ", el("a", { href: job(id) }, id)],
      curve ? number(curve.count.values.at(-1)) : "–",
      time && time.goodput !== null ? `${(100 * time.goodput).toFixed(1)} %` : "–", time ? span(time.node_seconds) : "–",
      time ? money(time.cost, 4) : "–", time ? [number(time.marks.length), costs(time)] : "–"];
  }), { class: "short" });
}

function picker(all, group) {
  const groups = [...new Set(all.map((row) => row.group).filter(Boolean))].sort();
  const choose = (hash) => { history.replaceState(null, "", `#/compare${hash}`); dispatchEvent(new HashChangeEvent("hashchange")); };
  const good = all.filter((row) => `${row.id} ${row.group ?? ""}`.toLowerCase().includes(filter));
  const box = (id) => el("input", { type: "checkbox", "aria-label": `Compare ${id}`, checked: shown.includes(id), disabled: !shown.includes(id) && shown.length >= MOST,
    onchange: (event) => {
      const next = event.target.checked ? [...shown, id] : shown.filter((each) => each !== id);
      choose(`?runs=${next.map(encodeURIComponent).join(",")}`);
    } });
  return [
    el("p", {}, el("input", { type: "search", placeholder: "Filter runs (/)", "aria-label": "Filter runs", oninput: (event) => { filter = event.target.value.toLowerCase(); redraw(); } }),
      groups.length ? el("label", {}, " or all runs of the group ", el("select", { "aria-label": "Group", onchange: (event) => choose(event.target.value ? `?group=${encodeURIComponent(event.target.value)}` : "") },
        ["", ...groups].map((name) => el("option", { value: name, selected: name === (group ?? "") }, name || "–")))) : ""),
    table(["", "run", "phase", "group", "step", "cost"], good.map((row) => [row.id, box(row.id), el("a", { href: job(row.id) }, row.id), badge(row.phase), row.group ?? "", number(row.step), money(row.cost)])),
    more && filter ? el("p", { class: "quiet" }, `The filter looks at the newest ${number(all.length)} runs only.`) : "",
    more ? el("button", { type: "button", onclick: () => load(rows.at(-1)?.id) }, "Older runs") : "",
  ];
}
