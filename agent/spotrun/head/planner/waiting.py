"""What a job waits for while it does not train, in one line for operators. Pure."""

from __future__ import annotations

from spotrun.head.fleet.classify import Condition
from spotrun.head.planner import departure, idle, regroup
from spotrun.head.planner.liveness import eligible
from spotrun.head.view import Node, View

NAMED = 4  # machines that a line names
LONGEST = 80  # characters of what a node says that it is doing
VERBS = {
    "booting": "to boot",
    "checking": "to be checked",
    "unfit": "to become fit",
    "silent": "to report",
    "replacing": "to be replaced",
}


def reason(view: View) -> str:
    """What the job waits for, such as `1 of 2 nodes ready; waiting for spot-1 to boot, 12 s`; empty: for nothing."""
    job = view.job
    if job.ended_already or job.resting:
        return ""
    if job.draining and job.current:
        settled = {node.name for node in view.nodes if node.phase in ("drained", "failed", "succeeded")}
        names = [member.node for member in job.current.members if member.node not in settled]
        return f"waiting for {', '.join(names)} to stop after step {job.draining.step}" if names else ""
    if job.current is not None:
        leaving = departure.decide(view)
        return leaving.reason if leaving and not leaving.stop else ""
    if job.paused:
        return job.paused
    if job.blocked:
        return job.blocked
    saving = f"waiting for the state of step {job.saving.ref.step} to get into the bucket" if job.saving else ""
    return saving if job.ending or job.stopping else _machines(view) or saving or regroup.reason(view)


def _machines(view: View) -> str:
    """The nodes that are ready, and the machines that are expected. Machines that leave are not."""
    ready, nodes = {node.name for node in eligible(view)}, view.job.spec.nodes
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
    if not missing and len(ready) >= nodes.min:
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
