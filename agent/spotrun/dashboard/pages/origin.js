// Where a run came from: person, code, git, machines and packages.
import { bytes, clock, el, job, number, table } from "./dom.js";

export function draw(found) {
  const origin = found.provenance, git = origin?.git;
  return [
    el("section", { "aria-label": "Submission" }, el("h2", {}, "Submission"),
      origin ? table(["what", "value"], rows(origin, git, found.nodes).map(([name, value]) => [name, name, value]))
        : el("p", { class: "quiet" }, "Nobody has written it down: an older version submitted this run, or a program without make.")),
    remarks(found.remarks),
    git?.diff ? el("section", { "aria-label": "Changes" }, el("h2", {}, "Changes since the commit"),
      git.cut ? el("p", { class: "quiet" }, "They were too long: the end is missing.") : "",
      el("pre", { class: "scroll", tabindex: "0" }, git.diff)) : "",
    el("section", { "aria-label": "Nodes" }, el("h2", {}, "What the nodes had"),
      found.nodes.length ? table(["node", "since", "machine", "GPUs", "image", "Python", "torch"], found.nodes.map(node))
        : el("p", { class: "quiet" }, "No node has written it down yet."),
      found.left_out ? el("p", { class: "quiet" }, `${number(found.left_out)} more nodes are not shown.`) : ""),
    packages(found.nodes),
    file("Job file", origin?.job_file, origin?.job_path),
    file("Cluster file", origin?.cluster_file, origin?.cluster_path),
  ];
}

function rows(origin, git, nodes) {
  return [
    ["person", `${origin.user}@${origin.host}${origin.email ? ` <${origin.email}>` : ""}`],
    ["submitted", clock(origin.at, true)],
    ["spotrun", origin.version],
    ["code", `${origin.code} (${number(origin.files)} files)`],
    Number.isInteger(nodes[0]?.seed) && ["seed", String(nodes[0].seed)],
    git && ["commit", `${git.commit || "none"}${git.branch ? ` on ${git.branch}` : ""}${git.diff ? ", with changes" : ""}`],
    git?.remote && ["repository", git.remote],
    git?.untracked.length && ["files that git does not know", git.untracked.join(", ")],
    origin.rerun_of && ["repeats", el("a", { href: job(origin.rerun_of) }, origin.rerun_of)],
  ].filter(Boolean);
}

function remarks(said) {
  if (!said.tags.length && !said.notes.length) return "";
  return el("section", { "aria-label": "Remarks" }, el("h2", {}, "Tags and notes"),
    said.tags.length ? el("p", {}, said.tags.join(", ")) : "",
    said.notes.map((note) => el("p", {}, `${clock(note.at)} ${note.user}: ${note.text}`)));
}

function node(each) {
  const gpus = each.gpus.length ? `${each.gpus.length} × ${each.gpus[0]}, driver ${each.driver || "not known"}` : "none";
  const machine = `${each.type || "not known"}, ${number(each.cpus)} cores, ${bytes(each.memory)}, ${each.zone}`;
  return [`${each.node} ${each.boot}`, each.node, clock(each.at), machine, gpus, String(each.image.commit ?? "none").slice(0, 12), each.python, each.packages.torch ?? "–"];
}

function packages(nodes) {
  const found = nodes.at(-1)?.packages ?? {};
  const list = Object.entries(found).map(([name, version]) => `${name}==${version}\n`).join("");
  return list && el("section", { "aria-label": "Packages" }, el("h2", {}, `Packages of ${nodes.at(-1).node}`), el("pre", { class: "scroll", tabindex: "0" }, list));
}

function file(title, text, path) {
  return text && el("section", { "aria-label": title }, el("h2", {}, title, " ", el("small", { class: "quiet" }, path)), el("pre", { class: "scroll", tabindex: "0" }, text));
}
