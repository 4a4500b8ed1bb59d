// The page of one run: what it did, what it logged, what interrupted it, what its machines did.
import { Charts } from "./chart.js";
import { events } from "./cluster.js";
import * as curves from "./curves.js";
import * as logged from "./logged.js";
import * as logs from "./logs.js";
import * as origin from "./origin.js";
import { ask, badge, bar, bytes, clock, count, deadline, el, job, money, number, span, table, why } from "./dom.js";
import * as machines from "./machines.js";
import * as timeline from "./timeline.js";

const EVERY = 2000; // milliseconds between two looks at a run that goes on
const LATE = 30; // seconds after a run's end in which its last readings and files reach the bucket
const TABS = { overview: "Curves and time", machines: "Machines", logged: "Texts and images", logs: "Logs", events: "Events", files: "Files", origin: "Provenance", job: "Job file" };

let id = "", tab = "overview", cluster = {}, run = null, parts = {}, problems = {}, redraw = () => {}, timer = 0, charts = new Charts(), busy = false, again = false, turn = 0, seen = 0;

export function open(state, draw) {
  [id, cluster, run, parts, problems, redraw, busy, again, seen] = [state.argument, state, null, {}, {}, draw, false, false, 0];
  charts = new Charts();
  curves.open();
  logged.open();
  logs.open(draw);
  tab = named(state.query) ?? "overview";
  if (!id) return;
  look();
  timer = setInterval(() => {
    if (!busy && !document.hidden && !complete()) look();
  }, EVERY);
}

export function close() {
  turn += 1;
  clearInterval(timer);
  charts.close();
}

// The tab that an address names; undefined: there is none of that name.
const named = (query) => Object.keys(TABS).find((name) => name === query.get("tab"));

const path = (part) => `api/runs/${encodeURIComponent(id)}${part ? `/${part}` : ""}`;

async function fetched(name, part = name) {
  const [found, wrong] = [parts, problems]; // of the run that is asked for, also if another one is opened meanwhile
  try {
    found[name] = await ask(path(part));
    delete wrong[name];
  } catch (error) {
    wrong[name] = error.message;
  }
}

const wantedBy = (tab) => (tab === "overview" ? ["timeline"] : tab === "job" || tab === "logged" ? [] : [tab]);
const MORE = { overview: curves, logged, logs }; // the tabs that ask for more by themselves

// Whether the run has ended, and the tab has what came late. A run that has ended may be relaunched.
function complete() {
  return Boolean(run?.ended) && !cluster.overview?.jobs.some((each) => each.id === id && !each.ended) && seen > run.ended + LATE && !["run", ...wantedBy(tab)].some((name) => problems[name]) && !MORE[tab]?.wrong();
}

// Ask for what the tab shows. turn: counts the runs that were opened and closed. What comes for an earlier one is dropped.
async function look() {
  again = busy;
  if (busy) return;
  busy = true;
  const mine = turn, begun = Date.now() / 1000;
  try {
    await fetched("run", "");
    if (mine !== turn) return;
    run = parts.run ?? run;
    redraw();
    await Promise.all(wantedBy(tab).map((name) => fetched(name)));
    if (mine !== turn) return;
    if (tab === "overview") {
      await curves.look(path);
      while (mine === turn && tab === "overview" && curves.unfinished()) {
        redraw();
        await curves.look(path);
      }
    }
    if (tab === "logs") logs.retry();
    if (tab === "logged") await logged.look(path);
    if (mine !== turn) return;
    seen = begun;
    redraw();
  } finally {
    if (mine === turn) {
      busy = false;
      if (again) look();
    }
  }
}

export function draw(state) {
  if (!id) return choose(state);
  const wanted = named(state.query) ?? "overview";
  if (wanted !== tab) {
    tab = wanted;
    look();
  }
  if (!run) {
    return el("div", {}, el("h1", {}, id), problems.run ? el("p", { class: "error" }, problems.run) : el("p", { class: "quiet" }, "Loading …"));
  }
  const live = state.overview?.jobs.find((each) => each.id === id), reason = why(live ?? run);
  return el("div", {},
    el("h1", {}, run.id, " ", badge(live?.phase ?? run.phase)),
    reason ? el("p", {}, reason) : "",
    run.failure ? el("pre", { class: "error", tabindex: "0" }, `rank ${run.failure.rank} on ${run.failure.node}: ${run.failure.message}\n${run.failure.traceback ?? ""}`) : "",
    tiles({ ...run, ...(live && { step: live.step, eta: live.eta, cost: live.cost, cost_to_end: live.cost_to_end, in_time: live.in_time }) }),
    el("nav", { class: "tabs", "aria-label": "Parts of this run" }, Object.entries(TABS).map(([name, title]) =>
      el("a", { href: `${job(id)}?tab=${name}`, "aria-current": name === tab ? "true" : null }, title))),
    el("div", { "data-key": `tab ${tab}` }, BODIES[tab]()));
}

function choose(state) {
  const rows = state.overview?.jobs ?? [];
  return el("div", {}, el("h1", {}, "Run"), rows.length
    ? el("ul", {}, rows.map((row) => el("li", { "data-key": row.id }, el("a", { href: job(row.id) }, row.id), " ", badge(row.phase))))
    : el("p", { class: "quiet" }, "No run is under way. ", el("a", { href: "#/jobs" }, "Jobs"), " lists the runs that have ended."));
}

function tiles(run) {
  const tile = (title, value, more) => el("div", { class: "tile" }, el("span", {}, title), el("b", {}, value), el("small", {}, more));
  const whole = run.total_steps ? ` of ${number(run.total_steps)}` : "";
  return el("div", { class: "tiles" },
    tile("Step", `${number(run.step)}${whole}`, [run.total_steps ? bar(run.step, run.total_steps, "progress") : "the number of steps is not known, ", pace(run)]),
    tile("Goodput", run.goodput === null ? "–" : `${(100 * run.goodput).toFixed(1)} %`, `of ${span(run.node_seconds)} of node time`),
    tile("Cost", money(run.cost), cost(run)),
    tile("Interruptions", number(run.interruptions.length), [`${count(run.interruptions.reduce((sum, each) => sum + (each.steps_lost ?? 0), 0), "step")} lost`, timeline.costs(parts.timeline)]),
    tile(run.ended ? "Ended" : "End", clock(run.ended ?? run.eta), end(run)),
  );
}

function pace(run) {
  const speed = run.samples_per_second && !run.ended ? `${number(Number(run.samples_per_second.toPrecision(3)))} samples/s, ` : "";
  return `${speed}generation ${run.generation}`;
}

function cost(run) {
  const whole = !run.ended && run.cost_to_end ? `${money(run.cost_to_end)} at its end` : "";
  const over = run.budget && Math.max(run.cost ?? 0, run.cost_to_end ?? 0) > run.budget;
  const budget = run.budget ? el("span", { class: over ? "bad" : "" }, `${whole ? "; " : ""}budget ${money(run.budget)}`) : "";
  return whole || budget ? [whole, budget] : "as far as prices are known";
}

function end(run) {
  const left = !run.ended && run.eta ? `in ${span(Math.max(0, run.eta - Date.now() / 1000))}; ` : "";
  return run.deadline ? [left, deadline(run)] : [left, `submitted ${clock(run.submitted)}`];
}

const wrong = (name) => (problems[name] ? el("p", { class: "error" }, problems[name]) : el("p", { class: "quiet" }, "Loading …"));

const BODIES = {
  overview: () => [
    el("section", { "aria-label": "Curves" }, el("h2", {}, "Curves"), curves.draw(charts, parts.timeline, redraw, look)),
    el("section", { "aria-label": "Timeline" }, el("h2", {}, "What the node time went into"), parts.timeline ? timeline.draw(parts.timeline) : wrong("timeline")),
    account(),
  ],
  machines: () => (parts.machines ? machines.draw(charts, parts.machines, marks()) : wrong("machines")),
  logged: () => logged.draw(),
  logs: () => logs.draw(path, parts.logs, problems.logs),
  events: () => (parts.events ? events(parts.events) : wrong("events")),
  files: () => (parts.files ? files(parts.files) : wrong("files")),
  origin: () => (parts.origin ? origin.draw(parts.origin) : wrong("origin")),
  job: () => [
    el("p", {}, `Code bundle ${run.code}. Keys of the job file that are not the default:`),
    el("pre", { tabindex: "0" }, JSON.stringify(run.spec, null, 2)),
  ],
};

const marks = () => run.interruptions.map((each) => ({ x: each.at, text: `${each.kind} ${each.node}` }));

function account() {
  if (!run.account.length) return "";
  const sum = run.account.reduce((total, line) => total + line.cost, 0);
  return el("section", { "aria-label": "Account" }, el("h2", {}, "The bill"),
    table(["month", "pool", "market", "machine time", "cost", "on-demand"], [
      ...run.account.map((line) => [`${line.month} ${line.pool} ${line.market}`, line.month, line.pool, line.market, span(line.seconds), money(line.cost, 4), line.unlisted ? "not known" : money(line.on_demand, 4)]),
      ["sum", "sum", "", "", span(run.account.reduce((total, line) => total + line.seconds, 0)), money(sum, 4), ""],
    ], { class: "short" }));
}

function files(found) {
  return [
    el("p", {}, `In the bucket at ${found.where}. Files of checkpoints, metrics and machines are counted by folder.`),
    table(["file", "objects", "size"], found.files.map((each) => [each.name, each.name, number(each.objects), bytes(each.bytes)])),
    found.left_out ? el("p", { class: "quiet" }, `${number(found.left_out)} more are not shown.`) : "",
  ];
}
