// The newest texts, images and histograms of a run, by name.
import { ask, clock, el, number } from "./dom.js";

let found = null, problem = "", turn = 0;

// turn: counts the runs that were opened. An answer that is for an earlier one is dropped.
export function open() {
  [found, problem, turn] = [null, "", turn + 1];
}

export const wrong = () => problem;

export async function look(path) {
  const mine = turn;
  try {
    const answer = await ask(path(`logged?have=${encodeURIComponent(found?.stamp ?? "")}`));
    if (mine !== turn) return;
    found = answer.items ? answer : { ...found, stamp: answer.stamp };
    problem = "";
  } catch (error) {
    if (mine === turn) problem = error.message;
  }
}

export function draw() {
  if (!found) return el("p", { class: problem ? "error" : "quiet" }, problem || "Loading …");
  if (!found.items.length) return el("p", { class: "quiet" }, "This run has logged no texts, images or histograms. run.log_text, run.log_image and run.log_histogram log them.");
  const names = new Map();
  for (const item of found.items) {
    const key = `${item.kind} ${item.name}`;
    names.set(key, [...(names.get(key) ?? []), item]);
  }
  return [...names].sort(([one], [other]) => (one < other ? -1 : 1)).map(([key, items]) =>
    el("section", { "aria-label": items[0].name, "data-key": key }, el("h2", {}, items[0].name, " ", el("small", { class: "quiet" }, items[0].kind)),
      el("div", { class: "shots" }, items.map(draw1))))
    .concat(found.left_out ? el("p", { class: "quiet" }, `${number(found.left_out)} older blocks are not shown.`) : "");
}

function draw1(item) {
  const where = `step ${number(item.step)}, ${clock(item.time, true)}${item.void ? ", void: this step was done again" : ""}`;
  return el("figure", { class: item.void ? "void" : null, "data-key": `${item.generation} ${item.step} ${item.time}` }, (Object.hasOwn(BODIES, item.kind) ? BODIES[item.kind] : other)(item, where), el("figcaption", {}, where));
}

const other = () => el("p", { class: "quiet" }, "This page cannot show it.");

const BODIES = {
  text: (item) => el("pre", { class: "scroll", tabindex: "0" }, item.text),
  // The type is fixed, so the browser takes the data for a picture and nothing else.
  image: (item, where) => el("img", { src: `data:image/png;base64,${item.text}`, alt: `${item.name}, ${where}` }),
  histogram: (item, where) => {
    const most = Math.max(1, ...item.counts), width = 100 / Math.max(1, item.counts.length);
    const from = number(item.edges[0]), to = number(item.edges.at(-1));
    return el("div", { role: "img", "aria-label": `${item.name}, ${where}: ${number(item.counts.reduce((sum, each) => sum + each, 0))} values from ${from} to ${to}` },
      el("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", class: "histogram" }, item.counts.map((count, index) =>
        el("rect", { x: index * width, y: 40 - (40 * count) / most, width: width * 0.9, height: (40 * count) / most }))),
      el("div", { class: "ends" }, el("span", {}, from), el("span", {}, to)));
  },
};
