"""The status document: what `spotrun ctl status` prints and the operator's display draws. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spotrun.cloud.base import Instance
from spotrun.head import accounting, node_time
from spotrun.head.fleet.decide import decide
from spotrun.head.fleet.pools import Fleet
from spotrun.head.job_state import (
    ENDED,
    AbortSave,
    Action,
    CountFailure,
    Drain,
    EndGeneration,
    Finish,
    JobState,
    Resume,
    SetIdle,
    Start,
    Stop,
)
from spotrun.head.planner import idle, silence
from spotrun.head.planner.plan import plan
from spotrun.head.planner.waiting import LONGEST
from spotrun.head.view import Node, View
from spotrun.spec import ClusterSpec

EVENTS = 50  # newest ones in a status document


def status(
    cluster: ClusterSpec,
    epoch: int,
    job: JobState | None,
    view: View | None,
    fleet: Fleet,
    events: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Everything an operator may want to know, as JSON values."""
    instances = fleet.instances or []
    problems = {problem.pool: problem.message for problem in fleet.problems}
    for pool, problem in (decide(view).reasons if view and view.job.phase not in ENDED else {}).items():
        problems[pool] = "; ".join(filter(None, [problem, problems.get(pool)]))
    found = job_status(job, view) if job else None
    if found and view:
        found["reason"] = found["reason"] or plan(view).reason
    return {
        "cluster": cluster.name,
        "head": {"epoch": epoch, "description": cluster.digest},
        "job": found,
        "nodes": _nodes(view, instances),
        "pools": [
            {
                "name": pool.name,
                "target": fleet.sizes.get(pool.name, 0),
                "running": sum(i.pool == pool.name and i.state == "running" for i in instances),
                "max": pool.max,
                "problem": problems.get(pool.name),
            }
            for pool in cluster.pools
        ],
        "events": list(events)[-EVENTS:],
    }


def job_status(job: JobState, view: View | None = None) -> dict[str, Any]:
    """A job alone; also of one that ended long ago, from its state.json."""
    progress = job.progress
    silent = view is not None and silence.since(view) is not None
    newest = [n.report.snapshot for n in view.nodes if n.report.job == job.id and n.report.snapshot] if view else []
    failure = None
    if job.failure:
        failure = job.failure.model_dump() | {"node": job.failed_node, "stacks": job.stacks or None}
    return {
        "id": job.id,
        "name": job.name,
        "phase": "silent" if silent else job.phase,
        "reason": job.reason,
        "generation": job.generation,
        "members": [member.node for member in job.members],
        "step": job.reached,
        "total_steps": progress.total_steps,
        "samples_per_second": 0.0 if silent else progress.samples_per_second,
        "metrics": progress.metrics,
        "snapshot": max(newest, key=lambda ref: (ref.generation, ref.step)).step if newest else None,
        "checkpoint": job.checkpoints[0].step if job.checkpoints else None,
        "saving": job.saving.ref.step if job.saving else None,
        "restarts": job.restarts,
        "max_restarts": job.spec.max_restarts,
        "submitted": job.submitted,
        "deadline": job.submitted + job.spec.deadline if job.spec.deadline else None,
        "eta": None if silent else _eta(job),
        "started": job.started,
        "ended": job.ended,
        "failure": failure,
        "conditions": conditions(view) if view else [],
        "interruptions": [each.model_dump(exclude={"step_cost"}) for each in job.interruptions],
        "goodput": accounting.goodput(job),
        "node_seconds": job.node_seconds,
        "node_time": node_time.split(job),
        "snapshot_seconds": node_time.stalled(job),
        "cost": job.cost or None,
    }


def conditions(view: View) -> list[dict[str, object]]:
    """The problems of an unended job, the oldest first: each as {"since": epoch seconds, "text": one line}."""
    found = [_saving(node) for node in view.nodes if node.connected and node.report.job == view.job.id]
    found += [idle.condition(view), _silent(view)]
    return sorted((each for each in found if each), key=lambda each: float(str(each["since"])))


def _silent(view: View) -> dict[str, object] | None:
    """No node reports to the head."""
    since, news = silence.since(view), silence.news(view)
    return {"since": since, "text": news[1]} if since is not None and news else None


def _saving(node: Node) -> dict[str, object] | None:
    """A node that cannot upload its part of a checkpoint."""
    trouble = node.report.trouble
    if trouble is None:
        return None
    tries = "1 try" if trouble.tries == 1 else f"{trouble.tries} tries"
    text = f"{node.name} cannot save its part of the checkpoint of step {trouble.step} ({tries}): {trouble.message}"
    return {"since": trouble.since, "text": text}


def _eta(job: JobState) -> float | None:
    """When the last step will be done at the present pace (epoch seconds); None if that cannot be said."""
    progress = job.progress
    if job.ended_already or not (progress.total_steps and progress.pace and progress.stepped_at):
        return None
    return progress.stepped_at + (progress.total_steps - progress.step) * progress.pace


def _nodes(view: View | None, instances: Sequence[Instance]) -> list[dict[str, Any]]:
    known = {node.name: node for node in view.nodes} if view else {}
    silent = silence.names(view) if view else frozenset()
    found = []
    for instance in instances:
        node = known.get(instance.name)
        report = node.report if node and node.connected else None
        found.append(
            {
                "name": instance.name,
                "pool": instance.pool,
                "zone": instance.zone,
                "address": instance.address,
                "state": instance.state,
                "phase": "silent" if report and instance.name in silent else report.phase if report else None,
                "doing": report.doing[:LONGEST] if report else "",
                "doing_seconds": max(0.0, view.now - report.doing_since) if view and report and report.doing else None,
                "notice": report.notice.deadline if report and report.notice else (node and node.due) or None,
                "step": max((w.step for w in report.workers), default=None) if report else None,
            }
        )
    return found


def event(job: JobState, action: Action) -> tuple[str, str] | None:
    """(kind, text) that tells operators about an action; None if there is nothing to tell."""
    match action:
        case Start():
            names = ", ".join(member.node for member in action.members)
            nodes = "1 node" if len(action.members) == 1 else f"{len(action.members)} nodes"
            return "generation", f"{job.generation + 1}: {nodes} ({names}){_why(action)}"
        case EndGeneration() if action.ending:
            return "generation", "the job is done"
        case EndGeneration() if action.cause:  # without one the job has failed, which its own event says
            return "generation", f"none; waiting for nodes{_why(action)}"
        case Drain():
            return "drain", f"all stop after step {action.step}{_why(action)}"
        case CountFailure():
            return "failure", f"{action.node} rank {action.failure.rank}: {action.failure.message}"
        case AbortSave():
            return "checkpoint", f"given up: {action.reason}"
        case SetIdle():
            return "job", action.why
        case Stop():
            return "job", action.reason
        case Resume():
            return "job", f"goes on from its checkpoint: {action.reason}"
        case Finish():
            return "job", action.phase + (f": {action.reason}" if action.reason else "")
    return None


def _why(action: Start | EndGeneration | Drain) -> str:
    cause = action.cause
    return f" ({cause.kind}{': ' + cause.node if cause.node else ''})" if cause else ""
