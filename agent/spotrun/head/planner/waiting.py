"""What a job waits for while it does not train: whether it has enough nodes, and one line for operators. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from spotrun.head.fleet.classify import Condition
from spotrun.head.planner import departure, idle, patience, regroup
from spotrun.head.planner.liveness import eligible
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import Node, View, named

NAMED = 4  # machines that a line names
LONGEST = 80  # characters of what a node says that it is doing
VERBS = {
    "booting": "to boot",
    "checking": "to be checked",
    "unfit": "to become fit",
    "silent": "to report",
    "replacing": "to be replaced",
}


def enough(view: View, ready: list[Node]) -> bool:
    """Whether to begin with the nodes that are ready.

    `max` nodes are enough. `min` nodes are enough for a later generation, or if no more nodes are expected soon.
    """
    nodes = view.job.spec.nodes
    if not nodes.min <= len(ready) < nodes.max:
        return len(ready) >= nodes.max
    return view.job.generation > 0 or view.expected <= len(ready) or view.now - view.waiting_since > TIMEOUTS.gather


def reason(view: View) -> str:
    """What the job waits for, such as `1 of 2 nodes ready; waiting for spot-1 to boot, 12 s`.

    Empty only if the job trains or has ended.
    """
    job = view.job
    if job.ended_already:
        return ""
    if job.draining and job.current:
        settled = {node.name for node in view.nodes if node.phase in ("drained", "failed", "succeeded")}
        settled |= {node.name for node in regroup.gone_on(view)}
        names = [member.node for member in job.current.members if member.node not in settled]
        return f"waiting for {', '.join(names)} to stop after step {job.draining.step}" if names else ""
    if job.current is not None:
        leaving = departure.decide(view)
        return leaving.reason if leaving and not leaving.stop else ""
    saving = f"waiting for the state of step {job.saving.ref.step} to get into the bucket" if job.saving else ""
    if job.ending or job.stopping:
        keeping = f"waiting for {job.keeper.node} to put the folders of keep into the bucket" if job.keeper else ""
        return saving or _reports(view) or keeping or "about to end"
    if job.paused or job.blocked:
        return job.paused or job.blocked
    if job.resting and (found := idle.condition(view)):
        return str(found["text"])
    return _machines(view) or saving or regroup.reason(view) or _reports(view) or "about to start"


def _reports(view: View) -> str:
    """The nodes whose reports the head needs before it can say where the newest state is; empty: it needs none."""
    holders = patience.unsaved(view)
    if holders and not any(node.connected for node in holders):
        return f"waiting for {_names(node.name for node in holders)} to report: the newest state is there"
    if not view.blind():
        return ""
    known = {node.name for node in view.nodes}
    away = (member.node for member in (*view.job.last, *named(view.job)) if member.node not in known)
    return f"waiting for {_names(away)} to report to the head, which began a moment ago"


def _names(nodes: Iterable[str]) -> str:
    found = sorted(nodes)
    more = [f"{len(found) - NAMED} more"] if len(found) > NAMED else []
    return ", ".join(found[:NAMED] + more)


def _machines(view: View) -> str:
    """The nodes that are ready, and the machines that are expected, without those that leave."""
    there, nodes = eligible(view), view.job.spec.nodes
    ready = {node.name for node in there}
    known = {node.name: node for node in view.nodes if node.connected}
    missing = []
    for name, each in view.conditions.items():
        node = known.get(name)
        if name in ready or not (verb := _verb(each, node)):
            continue
        doing, since = node.doing if node else ("", 0.0)
        if doing:
            missing.append(f"{name} ({doing[:LONGEST]}, {idle.duration(view.now - since)})")
        else:
            missing.append(f"{name} {verb}, {idle.duration(view.now - each.since)}")
    if not missing and enough(view, there):
        return ""
    if view.queued and len(view.conditions) < nodes.min:
        return view.queued
    wanted = f"{nodes.min}" if nodes.max == nodes.min else f"{nodes.min} to {nodes.max}"
    more = [f"{len(missing) - NAMED} more"] if len(missing) > NAMED else []
    return f"{len(ready)} of {wanted} nodes ready; waiting for {'; '.join(missing[:NAMED] + more) or 'machines'}"


def _verb(condition: Condition, node: Node | None) -> str:
    if condition.state != "ready" or node is None:
        return VERBS.get(condition.state, "")
    if not node.free:
        return "to be left by another job"
    return {"preparing": "to prepare", "idle": "to take the job"}.get(node.phase, "to be ready")
