"""What a job waits for while it does not train, in one line for operators. Pure."""

from __future__ import annotations

from spotrun.head.fleet.classify import Condition, classify
from spotrun.head.planner import idle
from spotrun.head.planner.liveness import eligible
from spotrun.head.view import View

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
    if job.ended_already or idle.resting(job):
        return ""
    if job.draining and job.current:
        settled = {node.name for node in view.nodes if node.report.phase in ("drained", "failed", "succeeded")}
        names = [member.node for member in job.current.members if member.node not in settled]
        return f"waiting for {', '.join(names)} to stop after step {job.draining.step}" if names else ""
    if job.current is not None:
        return ""
    saving = f"waiting for the state of step {job.saving.ref.step} to get into the bucket" if job.saving else ""
    return saving if job.ending or job.stopping else _machines(view) or saving


def _machines(view: View) -> str:
    """The nodes that are ready, and the machines that are expected. Machines that leave are not."""
    ready, nodes = {node.name for node in eligible(view)}, view.job.spec.nodes
    doing = {node.name: node.report for node in view.nodes if node.connected and node.report.doing}
    missing = []
    for name, each in classify(view).items():
        if name not in ready and (verb := _verb(each)):
            if report := doing.get(name):
                passed = idle.duration(view.now - report.doing_since)
                missing.append(f"{name} ({report.doing[:LONGEST]}, {passed})")
            else:
                missing.append(f"{name} {verb}, {idle.duration(view.now - each.since)}")
    if not missing and len(ready) >= nodes.min:
        return ""
    wanted = f"{nodes.min}" if nodes.max == nodes.min else f"{nodes.min} to {nodes.max}"
    more = [f"{len(missing) - NAMED} more"] if len(missing) > NAMED else []
    return f"{len(ready)} of {wanted} nodes ready; waiting for {'; '.join(missing[:NAMED] + more) or 'machines'}"


def _verb(condition: Condition) -> str:
    if condition.state == "ready":  # its agent serves jobs: the reason is its phase
        return {"preparing": "to prepare", "idle": "to take the job"}.get(condition.reason, "to be ready")
    return VERBS.get(condition.state, "")
