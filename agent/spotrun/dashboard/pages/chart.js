// Charts, drawn by uPlot: one chart for each name, with a line for each run, dots for what does not count, and marks.
import { clock, colour, el, number } from "./dom.js";

const HEIGHT = 220;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A chart that stays in the page: `update` gives it other data. options: title, label (of x), format (of x).
export class Chart {
  constructor(title) {
    this.title = title;
    this.box = el("div", { "data-keep": "" });
    this.odd = el("p", { class: "bad", hidden: true });
    this.node = el("figure", { class: "chart", "data-key": `chart ${title}`, "data-keep": "" }, el("h3", {}, title), this.box, this.odd);
    this.plot = null;
    this.zoom = null; // the range of x that a person has chosen; null: all points
    this.key = this.over = this.marked = "";
    this.sizes = new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: HEIGHT }));
    this.sizes.observe(this.box);
    this.themed = () => { this.key = ""; if (this.last) this.update(...this.last); };
    addEventListener("themechange", this.themed);
  }

  // What a page draws: the chart, or its place if it is in the page already. Moving it would cost its focus.
  slot() {
    return this.node.isConnected ? el("figure", { "data-key": this.node.dataset.key, "data-keep": "" }) : this.node;
  }

  width() { return Math.max(160, this.box.clientWidth || 400); }

  close() {
    this.sizes.disconnect();
    removeEventListener("themechange", this.themed);
    this.plot?.destroy();
  }

  // lines: [{name, x, y, dots}], each with rising x. In y, null is no value, and NaN is one that cannot be drawn.
  // marks: [{x, text}]. axis: {label, time, logarithmic}. A zoom stays while x has the same meaning.
  update(lines, marks, axis) {
    this.last = [lines, marks, axis];
    if (!this.box.isConnected && !this.plot) { requestAnimationFrame(() => this.box.isConnected && this.update(...this.last)); return; }
    this.marks = marks;
    const data = lines.length ? uPlot.join(lines.map((line) => [line.x, line.y.map((value) => (Number.isNaN(value) ? null : value))])) : [[], []];
    const key = JSON.stringify([lines.map((line) => [line.name, line.dots, line.colour]), axis]);
    const over = axis.label, marked = JSON.stringify(marks);
    if (!this.plot || key !== this.key) this.renew(lines, data, axis, over === this.over ? this.zoom : null);
    else if (!equal(data, this.plot.data)) {
      this.plot.setData(data, !this.zoom);
      if (this.zoom) this.plot.redraw();
    } else if (marked !== this.marked) this.plot.redraw(false);
    else return;
    newest(this.plot);
    [this.key, this.over, this.marked] = [key, over, marked];
    this.describe(lines, axis);
  }

  renew(lines, data, axis, zoom) {
    this.plot?.destroy();
    this.box.replaceChildren();
    this.zoom = zoom;
    this.plot = new uPlot(this.options(lines, axis), data, this.box);
    if (zoom) this.plot.setScale("x", zoom);
  }

  describe(lines, axis) {
    this.odd.textContent = lines.map((line) => odd(line, axis)).filter(Boolean).join(" ");
    this.odd.hidden = !this.odd.textContent;
    const said = lines.map((line) => `${line.name}: ${line.y.length} points, last ${number(line.y.at(-1))}`).join("; ");
    this.plot.root.setAttribute("role", "img");
    this.plot.root.setAttribute("aria-label", `${this.title}. ${said}`);
  }

  options(lines, axis) {
    const [fore, line, bad] = [css("--quiet"), css("--line"), css("--bad")];
    const look = { stroke: fore, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
    return {
      width: this.width(), height: HEIGHT,
      cursor: { drag: { x: true, y: false }, focus: { prox: 20 } },
      scales: { x: { time: Boolean(axis.time) }, y: { distr: axis.logarithmic ? 3 : 1 } },
      axes: [
        { ...look, space: 72, size: axis.time ? 48 : 32, ...(axis.time && { values: TIMES }) },
        { ...look, size: (_, texts) => 16 + 8 * Math.max(4, ...(texts ?? []).map((text) => text.length)), values: (_, splits, __, ___, step) => ticks(splits, axis.logarithmic ? 0 : step) },
      ],
      legend: { live: true },
      series: [
        { label: axis.label, value: (_, value) => (value === null ? "–" : axis.time ? new Date(value * 1000).toLocaleTimeString("en-GB") : number(value)) },
        ...lines.map((each, index) => ({
          label: each.name, stroke: each.colour ?? (each.dots ? css("--lost") : colour(index)), width: each.dots ? 0 : 1.5, spanGaps: false,
          points: each.dots ? { show: true, size: 4, fill: css("--lost") } : { show: each.x.length < 40, filter: (plot, at, all) => (all ? null : alone(plot.data[at])) },
          paths: each.dots ? () => null : undefined, value: (_, value) => (value === null || value === undefined ? "–" : number(value)),
        })),
      ],
      hooks: { draw: [(plot) => this.drawMarks(plot, bad)], setCursor: [(plot) => this.hover(plot)], setLegend: [newest], setScale: [(plot, key) => { if (key === "x") this.zoom = part(plot); }] },
    };
  }

  drawMarks(plot, stroke) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = stroke;
    ctx.setLineDash([4, 4]);
    for (const mark of this.marks) {
      const x = Math.round(plot.valToPos(mark.x, "x", true)) + 0.5;
      if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  hover(plot) {
    const left = plot.cursor.left;
    const near = left < 0 ? undefined : this.marks.find((mark) => Math.abs(plot.valToPos(mark.x, "x") - left) < 6);
    hint(near?.text, plot.over, left);
  }
}

// The texts of an axis: as many digits as tell neighbours apart. step: the distance of two; 0: they have many distances.
function ticks(values, step) {
  let digits = 0;
  while (step && digits < 20 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6 * step * 10 ** digits) digits += 1;
  const most = Math.max(...values.map((each) => Math.abs(each ?? 0)));
  return values.map((each) => {
    if (each === null) return "";
    if (!step || each === 0) return number(each);
    if (digits <= 4 && most < 1e6) return each.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
    const size = Math.floor(Math.log10(Math.abs(each)) + 1e-9);
    return each.toExponential(Math.min(20, Math.max(0, size + digits - (digits ? 0 : Math.floor(Math.log10(step))))));
  });
}

// The texts of a time axis, by the distance of two: always, and where year, day or minute change. See uPlot's axis.values.
const TIMES = [
  [31536000, "{YYYY}", null, null, null, null, null, null, 1],
  [2419200, "{MMM}", "\n{YYYY}", null, null, null, null, null, 1],
  [86400, "{MM}-{DD}", "\n{YYYY}", null, null, null, null, null, 1],
  [60, "{HH}:{mm}", "\n{YYYY}-{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1],
  [1, "{HH}:{mm}:{ss}", "\n{YYYY}-{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1],
  [0.001, ":{ss}.{fff}", "\n{YYYY}-{MM}-{DD} {HH}:{mm}", null, "\n{MM}-{DD} {HH}:{mm}", null, "\n{HH}:{mm}", null, 1],
];

// The range of x that a plot shows; null if it shows all points.
function part(plot) {
  const x = plot.data[0], { min, max } = plot.scales.x;
  return x.length && (min > x[0] || max < x.at(-1)) ? { min, max } : null;
}

// While no pointer is on a plot, its legend has the newest value of each line. If this is NaN, no older value takes its
// place. In uPlot's data, undefined is no value of the line: another line of the chart has a value at that x.
function newest(plot) {
  if (plot.cursor.left >= 0) return;
  const last = (values) => { let row = values.length - 1; while (row >= 0 && values[row] === undefined) row -= 1; return row < 0 ? null : row; };
  const idxs = plot.data.map(last);
  if (idxs.some((row, series) => row !== plot.legend.idxs?.[series])) plot.setLegend({ idxs }, true);
}

const equal = (one, other) => one.length === other.length
  && one.every((column, index) => column.length === other[index].length && column.every((value, row) => value === other[index][row]));

// The rows of values that have a gap on both sides: no line reaches them, so they are drawn as points.
// Undefined is no gap, see `newest`.
function alone(values) {
  const rows = [...values.keys()].filter((row) => values[row] !== undefined), gap = (at) => (values[rows[at]] ?? null) === null;
  return rows.filter((_, at) => !gap(at) && gap(at - 1) && gap(at + 1));
}

// What is said of values that cannot be drawn.
function odd(line, axis) {
  const rows = [...line.y.keys()].filter((row) => Number.isNaN(line.y[row])), first = line.x[rows[0]];
  if (!rows.length) return "";
  return `${line.name}: NaN or infinite in ${number(rows.length)} of ${number(line.y.length)} drawn points, the first at ${axis.label} ${axis.time ? clock(first, true) : number(first)}.`;
}

// The text at the pointer: one for the whole page.
let shown = null;
export function hint(text, over, left) {
  if (!text) { shown?.remove(); shown = null; return; }
  shown ??= document.body.appendChild(el("div", { class: "hover", role: "tooltip" }));
  shown.textContent = text;
  const box = over.getBoundingClientRect();
  shown.style.setProperty("left", `${Math.min(innerWidth - shown.offsetWidth - 8, box.left + left + 10)}px`);
  shown.style.setProperty("top", `${Math.max(4, box.top - shown.offsetHeight + 24)}px`);
}

// Charts by title, of one page. `sync` keeps those that are asked for and closes the others.
export class Charts {
  constructor() { this.known = new Map(); }
  get(title) {
    if (!this.known.has(title)) this.known.set(title, new Chart(title));
    return this.known.get(title);
  }
  keep(titles) {
    const wanted = new Set(titles);
    for (const [title, chart] of this.known) if (!wanted.has(title)) { chart.close(); this.known.delete(title); }
  }
  close() { this.keep([]); hint(""); }
}
