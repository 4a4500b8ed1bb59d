// Build and update the page. Text from the cluster becomes text nodes only: HTML in it is never parsed.

const HANDLERS = ["onclick", "onchange", "oninput", "onsubmit", "onkeydown"];

// An element. attributes: `on…` are functions; `style` is an object; null and false are left out. children: nodes,
// texts, numbers, and lists of these.
export function el(tag, attributes = {}, ...children) {
  const node = tag === "svg" || svgTags.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node[name] = value;
    else if (name === "style") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else if (name === "value") {
      node.value = value;
      if (tag === "input") node.defaultValue = value; // a text that was typed counts more, see `patch`
    }
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}
const SVG = "http://www.w3.org/2000/svg";
const svgTags = new Set(["path", "polyline", "rect", "line", "g", "circle", "text", "title"]);

// Make `target` show what `fresh` shows, with as few changes as possible: focus, scrolling and typed text stay.
// Elements with the same data-key are the same thing. What is in an element with data-keep is not touched.
export function patch(target, fresh) {
  const same = target.nodeType === fresh.nodeType && target.nodeName === fresh.nodeName;
  if (!same || target.dataset?.key !== fresh.dataset?.key) {
    target.replaceWith(fresh);
    return fresh;
  }
  if (target.nodeType === Node.TEXT_NODE) {
    if (target.data !== fresh.data) target.data = fresh.data;
    return target;
  }
  for (const name of HANDLERS) if (target[name] !== fresh[name]) target[name] = fresh[name];
  if (fresh.dataset?.keep !== undefined) return target;
  for (const { name } of [...target.attributes]) {
    if (name !== "style" && !(name === "open") && !fresh.hasAttribute(name)) target.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (name !== "style" && target.getAttribute(name) !== value) target.setAttribute(name, value);
  }
  if (target.style && target.style.cssText !== fresh.style.cssText) target.style.cssText = fresh.style.cssText;
  children(target, fresh);
  return target;
}

function children(target, fresh) {
  const known = new Map();
  for (const child of target.childNodes) if (child.dataset?.key !== undefined) known.set(child.dataset.key, child);
  let at = target.firstChild;
  for (const child of [...fresh.childNodes]) {
    const key = child.dataset?.key;
    const match = key !== undefined ? known.get(key) : at && at.dataset?.key === undefined ? at : null;
    if (!match) {
      target.insertBefore(child, at);
      continue;
    }
    if (match !== at) target.insertBefore(match, at);
    at = patch(match, child).nextSibling;
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

// Replace what an element contains.
export function show(target, ...nodes) {
  const fresh = target.cloneNode(false);
  fresh.append(...nodes.flat(Infinity).filter(Boolean));
  for (const name of HANDLERS) fresh[name] = target[name];
  patch(target, fresh);
}

// Ask the server; an Error with its words if it refuses.
export async function ask(path, body) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  };
  const response = await fetch(path, { ...options, credentials: "same-origin" });
  const text = await response.text();
  let found;
  try { found = JSON.parse(text); } catch { found = { error: text.trim() }; }
  if (!response.ok) throw new Error(found.error || `the server answered ${response.status}`);
  return found;
}

export const job = (id) => `#/run/${encodeURIComponent(id)}`;

export function money(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  return `$${value > 0 && value < 0.005 ? value.toPrecision(2) : value.toFixed(digits)}`;
}

export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(Number(value.toPrecision(4)));
}

// A number of things: "1 step", "2 steps".
export const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${at ? value.toFixed(1) : value} ${units[at]}`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}

// A time in this computer's time zone, with the date if it is not today. A page may have a thousand of them, and
// toLocaleTimeString takes longer than all the rest of such a page.
export function clock(at, seconds = false) {
  if (!at) return "–";
  const when = new Date(at * 1000), two = (value) => String(value).padStart(2, "0");
  const time = [when.getHours(), when.getMinutes(), ...(seconds ? [when.getSeconds()] : [])].map(two).join(":");
  if (new Date().toDateString() === when.toDateString()) return time;
  return `${when.getFullYear()}-${two(when.getMonth() + 1)}-${two(when.getDate())} ${time}`;
}

// Why a job does what it does, what is wrong with the job and since when, and which node the job keeps for SSH.
export function why(row) {
  const wrong = (row.conditions ?? []).filter((each) => each.text !== row.reason);
  const kept = row.kept ? [`keeps ${row.kept.node} for SSH until ${clock(row.kept.until)}, and pays for it; \`make stop ID=${row.id}\` lets it go`] : [];
  const texts = [...wrong.map((each) => `${each.text} (since ${clock(each.since)})`), ...kept];
  const parts = [[row.reason, row.placement].filter(Boolean).join("; "), ...texts.map((text) => el("span", { class: "bad" }, text))].filter(Boolean);
  return parts.length ? parts.flatMap((part, index) => (index ? ["; ", part] : [part])) : "";
}

// What is known about a job's deadline.
export function deadline({ deadline: at, in_time: kept, ended }) {
  const [look, text] = kept === null || kept === undefined ? ["", "not known whether the job will meet it"]
    : kept ? ["good", ended ? "met" : "met if the job keeps its pace"] : ["bad", ended ? "missed" : "missed if the job keeps its pace"];
  return el("span", { class: look }, `deadline ${clock(at)}: ${text}`);
}

export const badge = (phase, text = phase) => el("span", { class: `badge ${phase}` }, text ?? "–");

export function bar(value, most, label, warn = false) {
  const share = most > 0 ? Math.min(1, Math.max(0, value / most)) : 0;
  return el("span", { class: warn ? "bar warn" : "bar", role: "img", "aria-label": label, title: label },
    el("span", { style: { width: `${(share * 100).toFixed(1)}%` } }));
}

// A table whose cells name their columns, so that narrow screens can show a row as a card.
export function table(titles, rows, attributes = {}) {
  return el("table", attributes,
    el("thead", {}, el("tr", {}, titles.map((title) => el("th", { scope: "col" }, title)))),
    el("tbody", {}, rows.map(([key, ...cells]) => el("tr", { "data-key": key }, cells.map((cell, index) =>
      el("td", { "data-label": titles[index] }, el("div", {}, cell)))))));
}

// Eight colours that people with any colour vision can tell apart (Okabe and Ito, https://jfly.uni-koeln.de/color/).
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8d7a00", "#777777"];
export function colour(index) { return COLOURS[index % COLOURS.length]; }
// The colour of each text. It follows from the text and those before it. Two texts share a colour only if there are more
// texts than colours.
export function coloursOf(texts) {
  const found = new Map();
  for (const text of texts) {
    let sum = 0;
    for (const letter of text) sum = (sum * 31 + letter.codePointAt(0)) >>> 0;
    const taken = new Set(found.values());
    while (taken.size < COLOURS.length && taken.has(colour(sum))) sum += 1;
    found.set(text, colour(sum));
  }
  return found;
}
