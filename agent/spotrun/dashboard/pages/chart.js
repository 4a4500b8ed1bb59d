// Charts, drawn by uPlot: one chart for each name, with a line for each run, dots for what does not count, and marks.
import { colour, el, number } from "/pages/dom.js";

const HEIGHT = 220;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A chart that stays in the page: `update` gives it other data. options: title, label (of x), format (of x).
export class Chart {
  constructor(title) {
    this.title = title;
    this.box = el("div", { "data-keep": "" });
    this.node = el("figure", { class: "chart", "data-key": `chart ${title}`, "data-keep": "" }, el("h3", {}, title), this.box);
    this.plot = null;
    this.key = "";
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

  // lines: [{name, x, y, dots}], each with rising x. marks: [{x, text}]. axis: {label, time, logarithmic}.
  update(lines, marks, axis) {
    this.last = [lines, marks, axis];
    if (!this.box.isConnected && !this.plot) { requestAnimationFrame(() => this.box.isConnected && this.update(...this.last)); return; }
    this.marks = marks;
    const data = lines.length ? uPlot.join(lines.map((line) => [line.x, line.y])) : [[], []];
    const key = JSON.stringify([lines.map((line) => [line.name, line.dots, line.colour]), axis]);
    if (this.plot && key === this.key) {
      this.plot.setData(data);
      return;
    }
    this.key = key;
    this.plot?.destroy();
    this.box.replaceChildren();
    this.plot = new uPlot(this.options(lines, axis), data, this.box);
    this.describe(lines);
  }

  describe(lines) {
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
      axes: [{ ...look, label: undefined }, { ...look, size: 62, values: (_, splits) => splits.map((each) => (each === null ? "" : number(each))) }],
      legend: { live: true },
      series: [
        { label: axis.label, value: (_, value) => (value === null ? "–" : axis.time ? new Date(value * 1000).toLocaleTimeString("en-GB") : number(value)) },
        ...lines.map((each, index) => ({
          label: each.name, stroke: each.colour ?? (each.dots ? css("--lost") : colour(index)), width: each.dots ? 0 : 1.5, spanGaps: !each.dots,
          points: each.dots ? { show: true, size: 4, fill: css("--lost") } : { show: each.x.length < 40 },
          paths: each.dots ? () => null : undefined, value: (_, value) => (value === null || value === undefined ? "–" : number(value)),
        })),
      ],
      hooks: { draw: [(plot) => this.drawMarks(plot, bad)], setCursor: [(plot) => this.hover(plot)] },
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
