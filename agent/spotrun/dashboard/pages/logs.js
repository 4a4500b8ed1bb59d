// The logs of a run's workers: one log at a time, its end first; a search reads the log from its beginning.
import { ask, bytes, count, el } from "./dom.js";

let redraw = () => {}, chosen = "", piece = null, hits = null, text = "", problem = "", searching = false, failed = false, shownSize = -1, turn = 0;

// turn: counts the runs that were opened. An answer that is for an earlier one is dropped.
export function open(draw) {
  [redraw, chosen, piece, hits, text, problem, searching, failed, shownSize, turn] = [draw, "", null, null, "", "", false, false, -1, turn + 1];
}

// Whether the end of the log that is shown could not be read.
export const wrong = () => failed && !hits;

// Read it again at the next drawing.
export function retry() { if (wrong()) shownSize = -1; }

const name = (log) => `${log.generation}/${log.node}/${log.rank}`;
const query = (log, more) => `log?generation=${log.generation}&node=${encodeURIComponent(log.node)}&rank=${log.rank}${more}`;

export function draw(path, list, wrong) {
  if (!list) return el("p", { class: wrong ? "error" : "quiet" }, wrong ?? "Loading …");
  if (!list.length) return el("p", { class: "quiet" }, "No log is in the bucket yet. Nodes upload logs every few seconds.");
  const log = list.find((each) => name(each) === chosen) ?? list[0];
  if (name(log) !== chosen) {
    chosen = name(log);
    [piece, hits, shownSize] = [null, null, -1];
  }
  if (log.bytes !== shownSize && !hits && (!piece || piece.end === piece.size)) { // it has grown, and its end is shown
    shownSize = log.bytes;
    load(path, log);
  }
  return el("div", {},
    el("form", { class: "row", onsubmit: (event) => { event.preventDefault(); search(path, log, 0); } },
      el("label", {}, "Log ", el("select", { "aria-label": "Log", onchange: (event) => { chosen = event.target.value; [piece, hits, shownSize] = [null, null, -1]; redraw(); } },
        list.map((each) => el("option", { value: name(each), selected: name(each) === chosen }, `generation ${each.generation}, ${each.node}, rank ${each.rank} (${bytes(each.bytes)})`)))),
      el("input", { type: "search", placeholder: "Search this log (/)", "aria-label": "Search this log", oninput: (event) => { text = event.target.value; if (!text) { hits = null; shownSize = -1; redraw(); } } }),
      el("button", { type: "submit" }, searching ? "searching …" : "search")),
    problem ? el("p", { class: "error" }, problem) : "",
    hits ? found(path, log) : shown(path, log));
}

function shown(path, log) {
  if (!piece) return el("p", { class: "quiet" }, "Loading …");
  return el("div", {},
    piece.start > 0 ? el("p", {}, el("button", { type: "button", onclick: () => load(path, log, piece.start) }, "earlier"), ` bytes ${piece.start} to ${piece.end} of ${piece.size}`) : "",
    piece.end < piece.size ? el("p", {}, el("button", { type: "button", onclick: () => load(path, log) }, "to the end")) : "",
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Text of the log" }, el("pre", {}, piece.text || "(empty)")));
}

function found(path, log) {
  return el("div", {},
    el("p", { role: "status" }, `${count(hits.hits.length, "line")} found${hits.next === null ? "; the whole log was searched" : ` so far; searched ${bytes(hits.next)} of ${bytes(hits.size)}`}`,
      hits.next === null ? "" : [" ", el("button", { type: "button", onclick: () => search(path, log, hits.next) }, "search the rest")]),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Lines that were found" }, el("pre", {}, hits.hits.map((hit) => `${hit.text}\n`).join(""))));
}

async function load(path, log, end) {
  const asked = name(log), mine = turn;
  try {
    const answer = await ask(path(query(log, end === undefined ? "" : `&end=${end}`)));
    if (mine === turn && asked === chosen) [piece, problem, failed] = [answer, "", false];
  } catch (error) {
    if (mine === turn && asked === chosen) [problem, failed] = [error.message, end === undefined];
  }
  if (mine === turn) redraw();
}

async function search(path, log, from) {
  if (!text || searching) return;
  const asked = name(log), mine = turn;
  searching = true;
  redraw();
  try {
    const answer = await ask(path(query(log, `&grep=${encodeURIComponent(text)}&from=${from}`)));
    if (mine !== turn) return;
    if (asked === chosen) [hits, problem] = [from && hits ? { ...answer, hits: [...hits.hits, ...answer.hits] } : answer, ""];
  } catch (error) {
    if (mine !== turn) return;
    problem = error.message;
  }
  searching = false;
  redraw();
}
