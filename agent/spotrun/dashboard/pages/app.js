// The frame of all pages: navigation, the live stream, the banner, keys.
import { el, show } from "./dom.js";
import * as cluster from "./cluster.js";
import * as jobs from "./jobs.js";
import * as run from "./run.js";
import * as compare from "./compare.js";

const PAGES = { cluster, jobs, run, compare };
const ORDER = Object.keys(PAGES);
const EVERY = 400; // milliseconds between two drawings of live changes
const SILENCE = 15_000; // milliseconds without a sign of life, which the server gives every 5 s

// What all pages read. overview: null until the first document has come.
const state = { live: false, why: "connecting", old: false, at: 0, overview: null, query: new URLSearchParams(), argument: "" };
const main = document.getElementById("main");
let page = null, opened = "", drawn = 0, timer = 0, connected = false;

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  const next = ORDER.includes(name) ? name : "cluster";
  state.query = new URLSearchParams(query ?? "");
  state.argument = plain(rest.join("/"));
  const key = `${next}/${state.argument}`;
  if (opened !== key) {
    opened = key;
    page?.close?.();
    page = PAGES[next];
    page.open?.(state, draw);
    main.replaceChildren();
    document.title = `${state.argument || next} · spotrun`;
    main.focus({ preventScroll: true });
  }
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.dataset.page === next;
    here ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  }
  draw();
}

// The text that a part of an address stands for. A part that a person typed, such as "%", may not be valid: it stays.
function plain(part) {
  try { return decodeURIComponent(part); } catch { return part; }
}

// Draw now, or soon if the page was drawn a moment ago.
function draw() {
  const wait = drawn + EVERY - performance.now();
  if (wait > 0) {
    if (!timer) timer = setTimeout(() => { timer = 0; draw(); }, wait);
    return;
  }
  drawn = performance.now();
  frame();
  try {
    show(main, page.draw(state));
  } catch (error) {
    console.error(error);
    show(main, el("p", { class: "error" }, `This page cannot be drawn: ${error.message}`));
  }
}

function frame() {
  document.getElementById("cluster").textContent = state.overview?.cluster ?? "";
  const mark = document.getElementById("state");
  mark.textContent = !connected ? "not connected" : state.live ? "live" : state.old ? "old" : "from the bucket";
  mark.className = connected && state.live ? "live" : "away";
  const banner = document.getElementById("banner");
  const text = !connected
    ? "The dashboard has ended, or does not answer. Start it again with `make dashboard`, and open the address that it prints."
    : state.live ? "" : `The head does not answer: ${state.why}. ${state.old ? "What you see was known before that." : "What you see comes from the bucket."} When the head answers again, this page becomes live without a reload.`;
  banner.hidden = !text || (connected && !state.overview);
  if (banner.textContent !== text) banner.textContent = text;
}

function listen() {
  const source = new EventSource("api/live");
  // A connection that broke somewhere on its way, as through an SSH tunnel, may end without an error.
  const renew = () => {
    source.close();
    connected = false;
    draw();
    listen();
  };
  let silence;
  const wait = () => {
    clearTimeout(silence);
    silence = setTimeout(renew, SILENCE);
  };
  wait();
  const alive = () => {
    connected = true;
    wait();
  };
  source.onmessage = (message) => {
    alive();
    Object.assign(state, JSON.parse(message.data));
    draw();
  };
  source.addEventListener("alive", alive);
  source.onopen = () => { alive(); draw(); };
  source.onerror = () => {
    connected = false;
    draw();
    if (source.readyState !== EventSource.CLOSED) return wait(); // the browser connects again
    clearTimeout(silence);
    setTimeout(listen, 1000);
  };
}

const THEMES = ["auto", "light", "dark"];
function theme(next) {
  const at = THEMES.indexOf(localStorage.getItem("theme") ?? "auto");
  const name = THEMES[(Math.max(0, at) + (next ? 1 : 0)) % 3];
  localStorage.setItem("theme", name);
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = `theme: ${name}`;
  dispatchEvent(new Event("themechange"));
}

addEventListener("keydown", (event) => {
  const typing = event.target.matches?.("input, textarea, select");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const number = Number(event.key);
  if (number >= 1 && number <= ORDER.length) location.hash = `#/${ORDER[number - 1]}`;
  else if (event.key === "t") theme(true);
  else if (event.key === "/") {
    const field = main.querySelector("input[type=search]");
    if (field) { field.focus(); event.preventDefault(); }
  }
});

document.getElementById("theme").onclick = () => theme(true);
document.querySelector(".skip").onclick = (event) => { event.preventDefault(); main.focus(); };
addEventListener("hashchange", route);
theme(false);
route();
listen();
