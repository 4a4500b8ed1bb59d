// The curves of a run: what run.log was given, a chart for each name, with a mark for each interruption.
import { ask, colour, el, number } from "./dom.js";
import { spending, text } from "./timeline.js";

export const AXES = { steps: "step", times: "time", samples: "samples", dollars: "dollars" };

let found = null, problem = "", axis = "steps", logarithmic = false, filter = "", page = 1, turn = 0;
const SHOWN = 12;
const ASKED = 48; // names that the server takes in one request
const LONGEST = 6000; // bytes of names in one request: the server takes about 8,000 bytes of address

// turn: counts the runs that were opened. An answer that is for an earlier one is dropped.
export function open() { [found, problem, filter, page, turn] = [null, "", "", 1, turn + 1]; }

const wanted = () => (found?.names ?? []).filter((name) => name.toLowerCase().includes(filter)).slice(0, SHOWN * page);

// Whether a part of the curves has not been read yet.
export const unfinished = () => Boolean(found?.unread) && !problem;

export const wrong = () => problem;

export async function look(path) {
  const mine = turn;
  try {
    let answer = null;
    for (const names of requests(wanted())) {
      const next = await ask(path(`curves${names ? `?names=${names}` : ""}`));
      if (mine !== turn) return;
      answer = { ...next, curves: [...(answer?.curves ?? []), ...next.curves], unread: Math.max(answer?.unread ?? 0, next.unread) };
    }
    [found, problem] = [answer, ""];
  } catch (error) {
    if (mine === turn) problem = error.message;
  }
}

// A name as the server reads it in `names`: without line breaks, which end a name there.
export const plain = (name) => encodeURIComponent(name.replace(/[%\n]/g, encodeURIComponent));

// The names as parts of addresses, in as many requests as they need. One request without names asks for the first ones.
function requests(names) {
  const found = [[]];
  let size = 0;
  for (const name of names.map((each) => `${plain(each)}%0A`)) {
    size += name.length;
    if (found.at(-1).length && (size > LONGEST || found.at(-1).length === ASKED)) {
      found.push([]);
      size = name.length;
    }
    found.at(-1).push(name);
  }
  return found.map((each) => each.join(""));
}

// x and y of some points on an axis, without points whose x is not known; x rises. JSON has null for NaN and infinities.
export function line(points, axis, spent) {
  const x = axis === "dollars" ? points.times.map(spent) : points[axis], rows = [];
  for (let row = 0; row < x.length; row += 1) if (Number.isFinite(x[row])) rows.push([x[row], points.values[row] ?? NaN]);
  rows.sort((a, b) => a[0] - b[0]);
  const kept = rows.filter((row, index) => index === rows.length - 1 || row[0] !== rows[index + 1][0]);
  return { x: kept.map((row) => row[0]), y: kept.map((row) => row[1]) };
}

// Dollars at any time, from a table: a curve has many points.
export function dollars(timeline) {
  const spans = timeline?.bars.flatMap((bar) => bar.spans) ?? [];
  if (!spans.length || !timeline.cost) return () => NaN;
  const exact = spending(timeline), start = Math.min(...spans.map((each) => each[1])), end = Math.max(...spans.map((each) => each[2]));
  const count = 512, width = (end - start) / count || 1;
  const known = Array.from({ length: count + 1 }, (_, index) => exact(start + index * width));
  return (time) => {
    const at = Math.min(count, Math.max(0, (time - start) / width)), low = Math.floor(at);
    return low >= count ? known[count] : known[low] + (at - low) * (known[low + 1] - known[low]);
  };
}

// The marks of interruptions on an axis. points: of a curve, to find the samples at a step.
function marks(timeline, points, spent) {
  return (timeline?.marks ?? []).map((mark) => {
    let x = mark.at;
    if (axis === "steps") x = mark.step;
    else if (axis === "dollars") x = spent(mark.at);
    else if (axis === "samples") x = points.samples[points.steps.findIndex((step) => step >= mark.step)] ?? NaN;
    return { x, text: text(mark) };
  }).filter((mark) => Number.isFinite(mark.x));
}

export function controls(redraw, more = "") {
  return el("div", { class: "row" },
    el("label", {}, "over ", el("select", { "aria-label": "Over", onchange: (event) => { axis = event.target.value; redraw(); } },
      Object.entries(AXES).map(([name, title]) => el("option", { value: name, selected: name === axis }, title)))),
    el("label", {}, el("input", { type: "checkbox", checked: logarithmic, onchange: (event) => { logarithmic = event.target.checked; redraw(); } }), " logarithmic"),
    more);
}

export const chosen = () => ({ axis, logarithmic });

export function draw(charts, timeline, redraw, look) {
  if (!found) return el("p", { class: problem ? "error" : "quiet" }, problem || "Loading …");
  if (!found.names.length) {
    charts.keep([]);
    return [el("p", { class: "quiet" }, "This run has logged no numbers: `run.log(loss=loss)` in the script makes a curve. Numbers reach the bucket some seconds after the script logs them."), problems()];
  }
  const spent = dollars(timeline), names = wanted();
  const shown = found.curves.filter((curve) => names.includes(curve.name));
  charts.keep(shown.map((curve) => curve.name));
  const nodes = shown.map((curve) => {
    const chart = charts.get(curve.name), counting = line(curve.count, axis, spent), void_ = line(curve.void, axis, spent);
    const lines = [{ name: curve.name, ...counting, colour: colour(0) }];
    if (void_.x.length) lines.push({ name: "void", ...void_, dots: true });
    chart.update(positive(lines), marks(timeline, curve.count, spent), { label: AXES[axis], time: axis === "times", logarithmic });
    return chart.slot();
  });
  const rest = found.names.length > names.length ? el("button", { type: "button", onclick: () => { page += 1; look(); redraw(); } }, "More curves") : "";
  return [
    controls(redraw, el("input", { type: "search", placeholder: `Filter ${number(found.names.length)} names (/)`, "aria-label": "Filter curves", oninput: (event) => { filter = event.target.value.toLowerCase(); look(); redraw(); } })),
    problem ? el("p", { class: "error" }, problem) : "",
    unfinished() ? el("p", { class: "quiet" }, `Reading … ${number(found.unread)} more blocks of points.`) : "",
    shown.some((curve) => !line(curve.count, axis, spent).x.length) ? el("p", { class: "quiet" }, `Points without a known value on this axis (${AXES[axis]}) are left out.`) : "",
    el("div", { class: "charts" }, nodes),
    el("p", { class: "quiet" }, "Dashed lines are interruptions; point at one to see what it cost. Dots are void points: their steps were done again. A long curve is thinned for drawing: each stretch of it keeps its least and greatest value."),
    rest, problems(),
  ];
}

// A logarithmic axis shows positive values only. NaN stays, because the chart says where it is.
export function positive(lines) {
  if (!logarithmic) return lines;
  return lines.map((each) => ({ ...each, y: each.y.map((value) => (value <= 0 ? null : value)) }));
}

function problems() {
  if (!found.problems.length) return "";
  return el("details", { "data-key": "problems" }, el("summary", { class: "bad" }, `Numbers are missing here: ${found.problems.length} ${found.problems.length === 1 ? "reason" : "reasons"}`), el("ul", {}, found.problems.map((each) => el("li", {}, each))));
}
