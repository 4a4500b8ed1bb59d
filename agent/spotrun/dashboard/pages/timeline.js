// What each node's time went into: a bar for each node, the sums of the account, and a list of interruptions.
import { badge, clock, count, el, money, number, span, table } from "./dom.js";

export const KINDS = {
  counted: "steps that counted", lost: "void: lost steps, and the time from the last step of a generation to its end",
  booting: "booting", starting: "warming up: checks, packages, imports, first workers", recovery: "recovering",
  waiting: "idle: too few machines", spare: "idle: spare", leaving: "leaving", unfit: "unfit",
  kept: "kept for SSH", saving: "saving the last state", unknown: "not known", mixed: "long ago: several kinds together",
};
const SHORT = { counted: "stepping", lost: "void", starting: "warming up", recovery: "recovering", waiting: "idle", spare: "idle (spare)" };

export function draw(found) {
  const spans = found.bars.flatMap((bar) => bar.spans);
  if (!spans.length) return el("p", { class: "quiet" }, "No machine time has been recorded for this run so far. Heads of older versions do not record it.");
  const start = Math.min(...spans.map((each) => each[1])), end = Math.max(...spans.map((each) => each[2]));
  return el("div", {}, legend(found), lanes(found, start, end), missing(found), interruptions(found.marks));
}

// The sums are the head's own account; `starting` there is booting and warming up together.
function legend(found) {
  const sums = { ...(found.node_time ?? {}) };
  if (sums.starting !== undefined) {
    sums.booting = Math.min(found.booting, sums.starting);
    sums.starting -= sums.booting;
  }
  const whole = found.node_seconds;
  const rows = Object.entries(sums).filter(([, value]) => value > 0.0005 * whole).sort((a, b) => b[1] - a[1]);
  return el("div", {},
    el("p", {}, `Goodput ${found.goodput === null ? "not known" : `${(100 * found.goodput).toFixed(1)} %`}: steps that counted, of ${span(whole)} of node time`,
      found.cost ? `, which has cost ${money(found.cost, 4)}.` : "."),
    el("ul", { class: "legend" }, rows.map(([kind, value]) => el("li", { "data-key": kind, title: KINDS[kind] ?? kind },
      el("i", { class: `k-${kind}` }), `${SHORT[kind] ?? KINDS[kind] ?? kind} ${((100 * value) / whole).toFixed(1)} %`,
      found.cost ? el("small", {}, ` ${money((found.cost * value) / whole, 4)}`) : ""))));
}

function lanes(found, start, end) {
  const whole = end - start || 1, at = (time) => `${((100 * (time - start)) / whole).toFixed(3)}%`;
  const lane = (bar) => [
    el("span", { "data-key": `name ${bar.node}` }, bar.node),
    el("div", { class: "lane", "data-key": `lane ${bar.node}`, role: "img", "aria-label": summary(bar) },
      bar.spans.map(([kind, from, to, share]) => el("span", {
        class: `k-${kind}`, style: { left: at(from), width: `${((100 * (to - from)) / whole).toFixed(3)}%` },
        title: `${KINDS[kind] ?? kind}\n${clock(from, true)} to ${clock(to, true)}, ${span(to - from)}${part(share)}`,
      })),
      found.marks.filter((mark) => mark.node.split(", ").includes(bar.node)).map((mark) =>
        el("span", { class: "mark", style: { left: at(mark.at) }, title: text(mark) }))),
  ];
  return el("div", { class: "timeline" }, found.bars.map(lane), el("span", {}),
    el("div", { class: "axis" }, el("span", {}, clock(start, true)), el("span", {}, span(whole)), el("span", {}, clock(end, true))));
}

// The share of a machine; of the row of earlier machines, how many these were.
function part(share) {
  if (share > 1) return `, ${share.toFixed(1)} machines on average`;
  return share < 1 ? `, ${(100 * share).toFixed(0)} % of the machine` : "";
}

function summary(bar) {
  const sums = {};
  for (const [kind, from, to, share] of bar.spans) sums[kind] = (sums[kind] ?? 0) + (to - from) * Math.max(1, share);
  return `${bar.node}: ${Object.entries(sums).map(([kind, value]) => `${SHORT[kind] ?? kind} ${span(value)}`).join(", ")}`;
}

function missing(found) {
  const notes = ["The bars of a running job are some seconds old. The head does not know exactly when time was void, so void time is drawn around its interruption. The sums are exact."];
  if (found.missing > Math.max(1, 0.01 * found.node_seconds)) {
    notes.push(`${span(found.missing)} of node time are in the sums but not in the bars, because no head has recorded when that time was.`);
  }
  return el("p", { class: "quiet" }, notes.join(" "));
}

// What a mark on a chart says.
export function text(mark) {
  const until = mark.seconds === null ? "so far" : "until the next step";
  return [`${mark.kind}${mark.node ? ` of ${mark.node}` : ""} at step ${number(mark.step)}`,
    mark.seconds === null ? "no step since" : `${span(mark.seconds)} to the next step`,
    mark.steps_lost === null ? "lost steps are not known yet" : `${count(mark.steps_lost, "step")} lost`,
    mark.dollars === null ? (mark.counted ? "cost not known" : "its cost is known some seconds later") : `${money(mark.dollars, 4)} for lost steps and all node time ${until}, at the run's average price`].join("\n");
}

function interruptions(marks) {
  if (!marks.length) return el("p", { class: "quiet" }, "No interruptions.");
  return table(["interruption", "node", "at", "after step", "to the next step", "steps lost", "cost"], marks.map((mark) => [
    `${mark.at} ${mark.node}`, badge(mark.kind), mark.node || "–", clock(mark.at, true), number(mark.step),
    mark.seconds === null ? "no step since" : span(mark.seconds), mark.steps_lost === null ? "–" : number(mark.steps_lost),
    mark.dollars === null ? (mark.counted ? "not known" : "known soon") : money(mark.dollars, 4),
  ]), { class: "short" });
}

// What all interruptions together have cost so far, to be read after the number of lost steps.
export function costs(found) {
  const known = (found?.marks ?? []).map((mark) => mark.dollars).filter((dollars) => dollars !== null);
  if (!known.length || !found.cost) return "";
  const sum = known.reduce((total, dollars) => total + dollars, 0);
  return `, ${money(sum, 4)}: ${((100 * sum) / found.cost).toFixed(1)} % of the cost`;
}

// Dollars that the run had cost at a time: node time so far, at its average price.
export function spending(found) {
  const price = found.node_seconds > 0 ? found.cost / found.node_seconds : 0;
  const spans = found.bars.flatMap((bar) => bar.spans);
  return (time) => price * spans.reduce((sum, [, from, to, share]) => sum + Math.max(0, Math.min(to, time) - from) * share, 0);
}
