// Parallel coordinates: what differs between runs. Each run is a line, each argument and result an axis.
import { colour, el, money, number } from "./dom.js";

const WIDTH = 120, HEIGHT = 220, TOP = 30, SIDE = 60; // of an axis and its surroundings, in pixels
const AXES = 12; // axes that are drawn
const LOGARITHMIC = 100; // greatest ÷ least value from which on an axis is logarithmic

// The arguments of a run's script: `--lr 0.1`, `--lr=0.1`, or a flag.
export function options(args) {
  const found = Object.create(null); // an argument may be called --constructor
  for (let at = 0; at < args.length; at += 1) {
    if (!args[at].startsWith("--")) continue;
    const [name, ...value] = args[at].slice(2).split("=");
    if (value.length) found[name] = value.join("=");
    else if (at + 1 < args.length && !/^--[a-z]/i.test(args[at + 1])) found[name] = args[at += 1];
    else found[name] = "yes";
  }
  return found;
}

// The axes of some runs: the arguments that differ, then the results. runs: {id, run}; run: what the server knows.
function axes(runs, metric) {
  const own = runs.map(({ run }) => options(run.spec.args ?? []));
  const names = [...new Set(own.flatMap(Object.keys))].filter((name) => new Set(own.map((each) => each[name])).size > 1);
  const found = names.sort().slice(0, AXES - 2).map((name) => ({ name, values: own.map((each) => each[name] ?? "–") }));
  if (metric) found.push({ name: `last ${metric}`, values: runs.map(({ run }) => (Object.hasOwn(run.metrics ?? {}, metric) ? run.metrics[metric] ?? "–" : "–")) });
  found.push({ name: "cost", values: runs.map(({ run }) => run.cost), text: (value) => money(value, 4) });
  return found.map(scaled);
}

// An axis with the height of each value, 0 to 1. Numbers have a scale; other texts stand at equal distances.
function scaled({ name, values, text }) {
  const numbers = values.map((value) => (value === "–" || value === "" ? NaN : Number(value)));
  const known = numbers.filter(Number.isFinite), least = Math.min(...known), most = Math.max(...known);
  if (known.length && values.every((value, index) => value === "–" || Number.isFinite(numbers[index]))) {
    const log = least > 0 && most / least >= LOGARITHMIC, scale = log ? Math.log : (value) => value;
    const width = scale(most) - scale(least), show = text ?? number;
    const heights = numbers.map((value) => (Number.isFinite(value) ? (width ? (scale(value) - scale(least)) / width : 0.5) : null));
    return { name, heights, ticks: width ? [[0, show(least)], [1, show(most)]] : [[0.5, show(least)]], shown: numbers.map(show), log };
  }
  const kinds = [...new Set(values.map(String))].sort();
  const height = (value) => (kinds.length > 1 ? kinds.indexOf(String(value)) / (kinds.length - 1) : 0.5);
  return { name, heights: values.map(height), ticks: kinds.slice(0, 9).map((kind) => [height(kind), kind]), shown: values.map(String), log: false };
}

// The drawing, and the same values as a table.
export function draw(runs, metric) {
  if (runs.length < 2) return "";
  const found = axes(runs, metric), width = WIDTH * (found.length - 1) + 2 * SIDE;
  const x = (index) => SIDE + index * WIDTH, y = (height) => TOP + (1 - height) * (HEIGHT - 2 * TOP);
  const title = (text, at, top, attributes = {}) => el("text", { x: at, y: top, "text-anchor": "middle", ...attributes }, text);
  const short = (text) => (text.length > 16 ? `${text.slice(0, 15)}…` : text);
  const lines = runs.map(({ id }, row) => {
    const points = found.map((axis, index) => (axis.heights[row] === null ? null : `${x(index)},${y(axis.heights[row]).toFixed(1)}`));
    const words = `${id}: ${found.map((axis) => `${axis.name} ${axis.shown[row]}`).join(", ")}`;
    return el("polyline", { points: points.filter(Boolean).join(" "), stroke: colour(row), "data-key": id }, el("title", {}, words));
  });
  const label = `Parallel coordinates of ${runs.length} runs: ${found.map((axis) => axis.name).join(", ")}`;
  return el("div", { class: "parallel" },
    el("svg", { role: "img", "aria-label": label, width, height: HEIGHT }, found.map((axis, index) => el("g", {},
      el("line", { x1: x(index), x2: x(index), y1: y(0), y2: y(1) }),
      title(short(axis.name), x(index), 14, { class: "axis" }),
      axis.ticks.map(([height, text]) => title(short(text), x(index), y(height) + (height > 0 ? -4 : 12))),
      el("title", {}, axis.name + (axis.log ? ", logarithmic" : "")))), lines),
    el("p", { class: "quiet" }, `Each line is a run. Axes are the arguments that differ${found.length >= AXES ? ` (the first ${AXES - 2})` : ""}, and the results.`));
}

// What differs, for a table: titles, and a row for each run.
export function differences(runs, metric) {
  const found = runs.length < 2 ? [] : axes(runs, metric).slice(0, metric ? -2 : -1);
  return { titles: found.map((axis) => axis.name), rows: runs.map((_, row) => found.map((axis) => axis.shown[row])) };
}
