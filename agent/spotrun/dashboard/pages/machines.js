// What the machines of a run did: charts with a line for each node or GPU, and a list of the ranks.
import { colour, el, number, span, table } from "./dom.js";

const CHARTS = [
  ["Processor, % of all cores", "cpu"], ["Memory, GB", "memory", 1e-9], ["Snapshots in memory (tmpfs), GB", "tmpfs", 1e-9],
  ["Disk in use, GB", "disk", 1e-9], ["Disk read, MB/s", "disk_read", 1e-6], ["Disk written, MB/s", "disk_write", 1e-6],
  ["Network received, MB/s", "net_in", 1e-6], ["Network sent, MB/s", "net_out", 1e-6],
  ["GPU in use, %", "gpu.use"], ["GPU memory, GB", "gpu.memory", 1e-9], ["GPU temperature, °C", "gpu.temperature"],
  ["GPU power, W", "gpu.power"], ["GPU clock, MHz", "gpu.sm_clock"], ["GPU uncorrected ECC errors", "gpu.ecc"],
];
const MOST = 32; // lines in a chart
const GAP = 120; // seconds without a reading after which a line ends. A node puts readings into the bucket once a minute

export function draw(charts, found, marks) {
  if (!found.nodes.length) return el("p", { class: "quiet" }, "Nothing has been measured yet. A node measures every 5 s while it has this run. The first values come after some seconds.");
  const shown = CHARTS.map(([title, name, scale]) => [title, lines(found, name, scale ?? 1)]).filter(([, each]) => each.length);
  charts.keep(shown.map(([title]) => title));
  const nodes = shown.map(([title, each]) => {
    const chart = charts.get(title);
    chart.update(each.slice(0, MOST), marks, { label: "time", time: true, logarithmic: false });
    return chart.slot();
  });
  return [
    found.left_out ? el("p", { class: "quiet" }, `This run is long or has many GPUs, so ${number(found.left_out)} blocks of values are left out.`) : "",
    found.nodes_left_out ? el("p", { class: "quiet" }, `${number(found.nodes_left_out)} more nodes are not shown.`) : "",
    shown.some(([, each]) => each.length > MOST) ? el("p", { class: "quiet" }, `Charts show ${MOST} lines at most.`) : "",
    ranks(found.ranks), throttled(found.nodes),
    el("div", { class: "charts" }, nodes),
    found.nodes.some((node) => node.gpus.length) ? "" : el("p", { class: "quiet" }, "These machines have no NVIDIA GPUs, or lack the library (NVML) that measures GPUs."),
  ];
}

// A line for each node or GPU that has values of this name.
export function lines({ nodes, left_out: leftOut }, name, scale) {
  const found = [], end = Math.max(...nodes.map((node) => node.times.at(-1) ?? 0));
  for (const node of nodes) {
    for (const [key, values] of Object.entries(node.series)) {
      const gpu = /^gpu([0-9]+)\.(.+)$/.exec(key);
      if (key !== name && !(gpu && `gpu.${gpu[2]}` === name)) continue;
      found.push({ name: gpu ? `${node.node} GPU ${gpu[1]}` : node.node, ...parted(node.times, values.map((value) => (value === null ? null : value * scale)), leftOut ? Infinity : GAP, end), colour: colour(found.length) });
    }
  }
  return found;
}

// A line with gaps for the time in which the node was gone, or did not have this run. gap: seconds. end: of all nodes.
function parted(times, values, gap, end) {
  const x = [], y = [];
  for (const [row, at] of times.entries()) {
    if (row && at - times[row - 1] > gap) { x.push(times[row - 1] + 1); y.push(null); }
    x.push(at);
    y.push(values[row]);
  }
  if (end - times.at(-1) > GAP) { x.push(times.at(-1) + 1); y.push(null); }
  return { x, y };
}

function ranks(rows) {
  if (!rows.length) return el("p", { class: "quiet" }, "The newest readings have no steps, so the speed of each rank is not known.");
  return el("section", { "aria-label": "Ranks" }, el("h2", {}, "Ranks in the last minute"),
    table(["rank", "node", "seconds a step", "before gradients", "factor"], rows.map((row) => [
      `rank ${row.rank}`, `rank ${row.rank}`, row.node, span3(row.step), span3(row.alone),
      row.factor === null ? "not known" : el("span", { class: row.factor > 1.2 ? "bad" : "" }, row.factor.toFixed(2)),
    ])),
    el("p", { class: "quiet" }, "The factor is the rank's time before a step's first gradients, divided by the median of all ranks. In that time, no rank waits for another, so a factor above 1 means a slow rank. A GPU works behind the processor, so a slow GPU may not show here: look at its clock."));
}

const span3 = (seconds) => (seconds < 1 ? `${(1000 * seconds).toFixed(1)} ms` : span(seconds));

function throttled(nodes) {
  const rows = nodes.flatMap((node) => node.throttle.map((reasons, index) => [node.node, index, reasons])).filter(([, , reasons]) => reasons.length);
  if (!rows.length) return "";
  return table(["node", "GPU", "slower because of"], rows.map(([node, index, reasons]) => [`${node} ${index}`, node, number(index), el("span", { class: "bad" }, reasons.join(", "))]));
}
