"""The status document: what `spotrun ctl status` prints and the operator's display draws. Pure."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from spotrun.cloud.base import Instance
from spotrun.head import events, stragglers
from spotrun.head.capacity.place import Placements
from spotrun.head.capacity.situation import Placement
from spotrun.head.costs import job_totals, node_time
from spotrun.head.costs.bill import HOUR
from spotrun.head.fleet.classify import Condition
from spotrun.head.fleet.decide import decide
from spotrun.head.fleet.pools import Fleet
from spotrun.head.job_state import (
    AbortSave,
    Action,
    CountFailure,
    Drain,
    EndGeneration,
    Finish,
    JobState,
    KeepNode,
    LetGo,
    Release,
    Resume,
    SetIdle,
    Start,
    Stop,
)
from spotrun.head.planner import idle, liveness, silence
from spotrun.head.planner.plan import plan
from spotrun.head.planner.waiting import LONGEST
from spotrun.head.view import FleetView, Node, View, is_taken
from spotrun.spec import ClusterSpec
from spotrun.text import count

_OTHERS = "other version of spotrun: {}; the job may fail: update a cluster between two jobs"


def status(
    cluster: ClusterSpec,
    epoch: int,
    job: JobState | None,
    view: FleetView,
    views: Mapping[str, View],
    conditions: Mapping[str, Condition],
    fleet: Fleet,
    placements: Placements,
) -> dict[str, Any]:
    """Everything an operator may want to know, as JSON values, but for events.

    job: the one that the document is about. views: what each job sees, for jobs that have not ended or keep a node.
    placements: where each job may train.
    """
    instances = fleet.instances or []
    problems = _problems(decide(view, conditions).reasons if view.jobs else {}, fleet)
    return {
        "cluster": cluster.name,
        "head": {"epoch": epoch, "description": cluster.digest},
        "job": _placed(_explained(job, views.get(job.id)), placements.get(job.id)) if job else None,
        "jobs": [row(each, views[each.id]) for each in view.jobs],
        "nodes": _nodes(view, views, instances),
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
    }


def _problems(reasons: Mapping[str, str], fleet: Fleet) -> dict[str, str]:
    """By pool: all that is wrong with it, as one line. reasons: as in `FleetPlan`."""
    known = [(problem.pool, problem.message) for problem in fleet.problems]
    found: dict[str, dict[str, None]] = {}
    for pool, message in (*reasons.items(), *known, *fleet.surplus.messages.items()):
        found.setdefault(pool, {})[message] = None
    return {pool: "; ".join(filter(None, messages)) for pool, messages in found.items()}


def _placed(found: dict[str, Any], placement: Placement | None) -> dict[str, Any]:
    """A job's status with the reason of its placement."""
    return found | {"placement": placement.reason if placement else ""}


def _explained(job: JobState, view: View | None) -> dict[str, Any]:
    found = job_status(job, view)
    if view:
        found["reason"] = found["reason"] or plan(view).reason
    return found


def row(job: JobState, view: View | None = None) -> dict[str, Any]:
    """A job in a list of jobs. view: what it sees, if it has not ended or keeps a node."""
    found = _explained(job, view)
    keys = ("id", "name", "group", "priority", "phase", "reason", "step", "total_steps", "eta", "cost", "submitted")
    given = {node.name: node.devices for node in view.nodes if node.assigned} if view else {}
    nodes = {member.node: member.devices for member in (job.bound if view else job.members)} or given
    return {key: found[key] for key in (*keys, "kept", "conditions")} | {
        "nodes": [{"node": node, "devices": list(devices)} for node, devices in nodes.items()],
        "min": job.spec.nodes.min,
        "max": job.spec.nodes.max,
    }


def held(job: str) -> dict[str, Any]:
    """What the row of a held job says in place of its state's values."""
    why = f"held since the cluster was brought up; `make relaunch ID={job}` continues it"
    return {"id": job, "phase": "held", "reason": why, "nodes": [], "eta": None}


def job_status(job: JobState, view: View | None = None) -> dict[str, Any]:
    """The status of one job. It may have ended long ago: its state.json is enough."""
    progress = job.progress
    silent = view is not None and silence.since(view) is not None
    newest = [n.work.snapshot for n in view.nodes if n.work.snapshot] if view else []
    failure = None
    if job.failure:
        failure = job.failure.model_dump() | {"node": job.failed_node, "stacks": job.stacks or None}
    return {
        "id": job.id,
        "name": job.name,
        "group": job.spec.group,
        "priority": job.rank,
        "phase": "silent" if silent else phase(job),
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
        "kept": _kept(job) if view else None,
        "conditions": conditions(view) if view else [],
        "interruptions": [each.model_dump(exclude={"step_cost"}) for each in job.interruptions],
        "goodput": job_totals.goodput(job),
        "node_seconds": job.node_seconds,
        "node_time": node_time.split(job),
        "snapshot_seconds": node_time.stalled(job),
        "cost": job.cost or None,
        "budget": job.cost_limit,
        "hourly": 0.0 if job.over else job.hourly,
        "cost_to_end": cost_to_end(job),
        "account": [line.model_dump() for line in job.account],
    }


def phase(job: JobState) -> str:
    """A job's phase in the words of operators."""
    if job.phase == "waiting" and job.generation == 0:
        return "queued"
    return "paused" if job.paused and job.current is None and not job.ended_already else job.phase


def cost_to_end(job: JobState) -> float | None:
    """USD for the whole job if it goes on as at present; None if its end is not known."""
    if job.ended_already:
        return job.cost
    end = _eta(job)
    return None if end is None else job.cost + max(0.0, end - job.counted_at) * job.hourly / HOUR


def conditions(view: View) -> list[dict[str, object]]:
    """The problems of an unended job, the oldest first: each as {"since": epoch seconds, "text": one line}."""
    found = [_saving(node) for node in view.nodes if node.connected and node.work.job]
    found += [idle.condition(view), _silent(view)]
    found += [{"since": each.at, "text": stragglers.text(each)} for each in view.job.slow if view.job.current]
    return sorted((each for each in found if each), key=lambda each: float(str(each["since"])))


def _silent(view: View) -> dict[str, object] | None:
    """No node reports to the head."""
    since, news = silence.since(view), silence.news(view)
    return {"since": since, "text": news[1]} if since is not None and news else None


def _saving(node: Node) -> dict[str, object] | None:
    """A node that cannot upload its part of a checkpoint."""
    trouble = node.work.trouble
    if trouble is None:
        return None
    tries = count(trouble.tries, "try", "tries")
    text = f"{node.name} cannot save its part of the checkpoint of step {trouble.step} ({tries}): {trouble.message}"
    return {"since": trouble.since, "text": text}


def _kept(job: JobState) -> dict[str, Any] | None:
    """The node that is kept for a person, and what to do there: None if there is none."""
    kept, spec = job.kept_node, job.spec
    if kept is None:
        return None
    found = {"node": kept.member.node, "devices": list(kept.member.devices), "until": kept.until}
    if kept.place is None:
        return found
    commands = (["cd", kept.place.folder], [".", kept.place.env], ["python", spec.script, *spec.args])
    return found | kept.place.model_dump() | {"run": " && ".join(map(shlex.join, commands))}


def _eta(job: JobState) -> float | None:
    """When the last step will be done at the present pace (epoch seconds); None if that cannot be said."""
    progress = job.progress
    if job.ended_already or not (progress.total_steps and progress.pace and progress.stepped_at):
        return None
    return progress.stepped_at + (progress.total_steps - progress.step) * progress.pace


def _nodes(view: FleetView, views: Mapping[str, View], instances: Sequence[Instance]) -> list[dict[str, Any]]:
    silent = {node.name for node in view.nodes if node.connected and liveness.silent(view, node)}
    owners: dict[str, list[tuple[str, Node]]] = {}
    for job, each in views.items():
        for own in each.nodes:
            if own.connected and (own.assigned or own.work.job):
                owners.setdefault(own.name, []).append((job, own))
    found = []
    for instance in instances:
        node = view.by_name.get(instance.name)
        report = node.report if node and node.connected else None
        notice = report.notice if report and is_taken(report) else None
        mine = owners.get(instance.name, [])
        ordered = sorted(mine, key=lambda each: not each[1].assigned)
        owner, first = next(iter(ordered), ("", node))
        doing, since = first.doing if first and report else ("", 0.0)
        phase = _phase(view, owner, first) if first and report else None
        found.append(
            {
                "name": instance.name,
                "pool": instance.pool,
                "zone": instance.zone,
                "address": instance.address,
                "state": instance.state,
                "phase": "silent" if instance.name in silent else phase,
                "doing": doing[:LONGEST],
                "doing_seconds": max(0.0, view.now - since) if doing else None,
                "notice": notice.deadline if notice else (node and node.due) or None,
                "step": max((w.step for w in first.work.workers), default=None) if first and report else None,
                "devices": report.devices if report else None,
                "jobs": [_place(view, job, own) for job, own in mine],
            }
        )
    return found


def _phase(view: FleetView, job: str, node: Node) -> str:
    """What a node does for a job."""
    return "kept" if job in view.by_id and view.by_id[job].ended_already else node.phase


def _place(view: FleetView, job: str, node: Node) -> dict[str, Any]:
    """A job on a node. If the job has no devices there, the node still holds a state of it."""
    doing, since = node.doing
    return {
        "job": job,
        "devices": list(node.devices) if node.assigned else [],
        "phase": _phase(view, job, node),
        "doing": doing[:LONGEST],
        "doing_seconds": max(0.0, view.now - since) if doing else None,
        "step": max((worker.step for worker in node.work.workers), default=None),
    }


def event(job: JobState, action: Action) -> tuple[str, str] | None:
    """(kind, text) that tells operators about an action; None if there is nothing to tell."""
    match action:
        case Start():
            number = job.following.number if action.planned and job.following else job.next_number
            text = f"{events.begun(number, [member.node for member in action.members])}{_why(action)}"
            return events.BEGUN, text + (f"; {_OTHERS.format(', '.join(action.others))}" if action.others else "")
        case EndGeneration() if action.ending:
            failed = action.ending.phase == "failed"
            return (
                "generation",
                "the job has failed; its last state goes into the bucket" if failed else "the job is done",
            )
        case EndGeneration() if action.cause:  # without one the job has failed, which its own event says
            waits = "" if action.cause.kind in ("stop", "pause") else "; waiting for nodes"
            return "generation", f"none{waits}{_why(action)}"
        case Drain():
            more = f"; {action.reason}" if action.reason else ""
            return "drain", f"all stop after step {action.step}{_why(action)}{more}"
        case Release():
            why = action.reason or f"{action.node} is gone or silent"
            return "generation", f"the workers leave the generation, because {why}"
        case CountFailure():
            more = "" if action.counts else " (not counted: it may come from the interruption before)"
            return "failure", f"{action.node} rank {action.failure.rank}: {action.failure.message}{more}"
        case AbortSave():
            return "checkpoint", f"given up: {action.reason}"
        case SetIdle():
            return "job", action.why
        case KeepNode():
            until = time.strftime("%H:%M:%S", time.gmtime(action.node.until))
            return "node", f"{action.node.member.node} is kept for SSH until {until} UTC"
        case LetGo() if job.kept_node:
            return "node", f"{job.kept_node.member.node} is let go: {action.reason}"
        case Stop():
            return "job", action.reason
        case Resume():
            return "job", f"goes on from its checkpoint: {action.reason}"
        case Finish():
            return "job", action.phase + (f": {action.reason}" if action.reason else "")
    return None


def recovery(before: JobState, after: JobState) -> str:
    """What tells operators that an interruption is over; empty if none has ended between these two."""
    last = after.interruptions[-1] if after.interruptions else None
    lasted = before.interruptions and before.interruptions[-1].seconds is None
    if last is None or last.recovery is None or not lasted:
        return ""
    return f"after {last.recovery:.1f} s, {count(last.steps_lost or 0, 'step')} lost ({last.kind})"


def _why(action: Start | EndGeneration | Drain) -> str:
    cause = action.cause
    return f" ({cause.kind}{': ' + cause.node if cause.node else ''})" if cause else ""
