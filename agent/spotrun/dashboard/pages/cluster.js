// The page of the whole cluster: money, pools, nodes and their devices, decisions, events.
import { badge, clock, coloursOf, el, job, money, number, span, table, why } from "./dom.js";

export function draw(state) {
  const seen = state.overview;
  if (!seen) return el("p", { class: "quiet" }, state.why);
  return el("div", {},
    el("h1", {}, "Cluster"),
    tiles(state),
    el("section", { "aria-label": "Pools" }, el("h2", {}, "Pools"), pools(seen, state.live)),
    el("section", { "aria-label": "Nodes" }, el("h2", {}, "Nodes and devices"), nodes(state)),
    el("section", { "aria-label": "Decisions" }, el("h2", {}, "Decisions, and why"), decisions(seen, state.live)),
    el("section", { "aria-label": "Events" }, el("h2", {}, "Events"), events(seen.events)),
  );
}

function tiles({ overview, live }) {
  const running = overview.nodes.filter((node) => node.state === "running").length;
  const active = overview.jobs.filter((each) => each.nodes?.length).length;
  const unended = overview.jobs.length + (overview.jobs_left_out ?? 0);
  const unknown = overview.unpriced ? `, ${overview.unpriced} without a known price` : "";
  const tile = (title, value, more) => el("div", { class: "tile" }, el("span", {}, title), el("b", {}, value), el("small", {}, more));
  return el("div", { class: "tiles" },
    tile("Money per hour now", live ? money(overview.hourly) : "not known", live ? `for machines that run${unknown}` : "the head does not answer"),
    tile("Machines", live ? running : "not known", live ? `of ${overview.nodes.length} that the cloud lists` : "the head does not answer"),
    tile("Jobs with nodes", live ? `${active} of ${overview.jobs.length}` : "not known", `${unended} ${unended === 1 ? "has" : "have"} not ended`),
    tile("Cost of idle devices", money(overview.idle_cost), "machine time that no job paid for"),
    tile("Head", overview.head ? `number ${overview.head.epoch}` : "away", overview.cloud),
  );
}

function pools(seen, live) {
  const titles = ["pool", "zone", "machine", "market", "$ per hour", "running / target / max", "problem", "the cloud says", "the head has seen"];
  return table(titles, seen.pools.map((pool) => [
    pool.name, el("b", {}, pool.name), pool.zone, pool.machine || "local process", pool.market,
    [money(pool.price, 3), pool.on_demand && pool.market !== "on-demand" ? el("small", {}, ` on-demand ${money(pool.on_demand, 3)}`) : "", spark(pool.advice.prices)],
    live ? `${pool.running ?? "?"} / ${pool.target ?? "?"} / ${pool.max}` : `? / ? / ${pool.max}`,
    pool.problem ? el("span", { class: "bad" }, pool.problem, pool.short ? ` (since ${clock(pool.short.since)})` : "") : live ? "none" : "not known",
    advice(pool.advice), own(pool.seen),
  ]), { class: "wide" });
}

function advice(said) {
  const parts = [
    said.obtainability && `chance to get all machines: ${percent(said.obtainability.value)}`,
    said.uptime && `a machine runs ${span(said.uptime.value)}`,
    said.preemptions && `the cloud took ${percent(said.preemptions.value)} of the machines that ended`,
  ].filter(Boolean);
  return parts.length ? parts.join("; ") : el("span", { class: "quiet" }, "nothing");
}

function own(seen) {
  if (!seen || !(seen.machine_hours > 0)) return el("span", { class: "quiet" }, "nothing yet");
  const short = seen.short_at ? `; too few machines at ${clock(seen.short_at)}` : "";
  return `${number(Math.round(seen.interruptions))} taken in ${span(3600 * seen.machine_hours)} of machine time${short}`;
}

const percent = (value) => `${(100 * value).toFixed(0)} %`;

// A small line of price changes.
function spark(prices) {
  if (!prices || prices.length < 2) return null;
  const values = prices.map(([, value]) => value), low = Math.min(...values), high = Math.max(...values);
  const [first, last] = [prices[0][0], prices.at(-1)[0]];
  const points = prices.map(([at, value]) =>
    `${(2 + (56 * (at - first)) / (last - first || 1)).toFixed(1)},${(14 - (12 * (value - low)) / (high - low || 1)).toFixed(1)}`);
  const text = `${prices.length} prices from ${money(low, 3)} to ${money(high, 3)}`;
  return el("svg", { class: "spark", viewBox: "0 0 60 16", role: "img", "aria-label": text }, el("polyline", { points: points.join(" ") }));
}

function nodes({ overview, live }) {
  if (!overview.nodes.length) {
    return el("p", { class: "quiet" }, live ? "There are no machines. The head asks for machines when a job needs them." : "Only the head knows the nodes, and the head does not answer.");
  }
  const titles = ["node", "pool", "state", "doing", "devices", "since"], colours = coloursOf(overview.jobs.map((each) => each.id));
  return table(titles, overview.nodes.map((node) => [
    node.name, el("b", {}, node.name), node.pool,
    [condition(node), node.notice ? el("span", { class: "bad" }, ` will be taken at ${clock(node.notice, true)}`) : ""],
    node.doing ? [node.doing, node.doing_seconds ? el("small", {}, ` ${span(node.doing_seconds)}`) : ""] : node.jobs.length && node.step >= 0 && node.step !== null ? `step ${number(node.step)}` : "",
    devices(node, colours), clock(node.since),
  ]));
}

// The workers of a sound node fail too: when they lose a peer.
function condition(node) {
  const phase = node.phase ?? node.state;
  return badge(phase, phase === "failed" ? "workers failed" : phase);
}

function devices(node, colours) {
  const owner = new Map();
  for (const each of node.jobs) for (const index of each.devices) owner.set(index, each.job);
  const count = Math.min(64, node.devices ?? 0);
  const squares = Array.from({ length: count }, (_, index) => {
    const whose = owner.get(index);
    const text = whose ? `device ${index}: ${whose}` : `device ${index}: free`;
    return el("span", { class: whose ? "device" : "device free", title: text, style: whose ? { "background-color": colours.get(whose) ?? "var(--quiet)" } : {} });
  });
  const names = [...new Set(owner.values())];
  return [el("span", { class: "devices" }, squares), names.map((id) => [" ", el("a", { href: job(id) }, id)]), names.length || !count ? "" : " free"];
}

function decisions(seen, live) {
  const rows = [];
  for (const trouble of seen.troubles ?? []) rows.push(["trouble", el("b", { class: "bad" }, "head"), trouble]);
  for (const each of seen.jobs) {
    const reason = why(each);
    if (reason) rows.push([`job ${each.id}`, el("a", { href: job(each.id) }, each.id), reason]);
  }
  for (const pool of seen.pools) if (pool.problem) rows.push([`pool ${pool.name}`, `pool ${pool.name}`, pool.problem]);
  if (seen.parked) rows.push(["parked", el("b", { class: "bad" }, "parked"), seen.parked.text]);
  const none = live ? "Nothing waits and nothing is wrong." : "Only the head decides, and the head does not answer.";
  return rows.length ? table(["what", "why"], rows) : el("p", { class: "quiet" }, none);
}

export function events(list) {
  if (!list?.length) return el("p", { class: "quiet" }, "None yet.");
  const rows = list.toReversed().map((each) => [
    `${each.at} ${each.kind} ${each.text}`, el("time", {}, clock(each.at, true)), badge(each.kind),
    [each.job ? el("a", { href: job(each.job) }, each.job) : "", each.job ? ": " : "", each.text],
  ]);
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Events" }, table(["at", "kind", "what"], rows));
}
