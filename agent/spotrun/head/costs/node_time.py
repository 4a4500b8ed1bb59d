"""Where the node time of a job went: node-seconds by what each machine was doing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from spotrun.head.job_state import JobState, good_seconds
from spotrun.head.view import Node, View

TRAINING = "training"  # member of a generation that has completed a step
COUNTED = "counted"  # the part of TRAINING that went into steps that counted
LOST = "lost"  # the rest of TRAINING: lost steps, and the time from the last step of a generation to its end
STARTING = "starting"  # boot, health checks, packages, and the first workers until their first step
WAITING = "waiting"  # ready, while the job has fewer machines than it needs
RECOVERY = "recovery"  # from an interruption to the next step
SPARE = "spare"  # ready, beside a generation that trains without it
LEAVING = "leaving"  # not a member any more: under notice, or its agent has ended before the machine
UNFIT = "unfit"  # failed its health checks
KEPT = "kept"  # kept for a person after the job has failed
SAVING = "saving"  # the job's last state goes into the bucket
BOOTING = "booting"  # the part of STARTING before the agent is connected; only timelines tell it apart
UNKNOWN = "unknown"  # counted by a head that did not tell these apart


def add(spent: Mapping[str, float], job: JobState, view: View, machines: Mapping[str, float]) -> dict[str, float]:
    """`spent` with more time. machines: the node-seconds of each, which are negative for time that is taken back."""
    found, kind_of = dict(spent), kinds(job, view)
    for machine, seconds in machines.items():
        kind = kind_of(machine)
        kind = STARTING if kind == BOOTING else kind
        if seconds < 0 and found.get(kind, 0.0) + seconds < 0:
            kind = max(found, key=lambda each: found[each], default=kind)
        found[kind] = found.get(kind, 0.0) + seconds
    return found


def kinds(job: JobState, view: View) -> Callable[[str], str]:
    """A function from a machine's name to what the machine does now: one of the kinds above, also BOOTING."""
    nodes = {node.name: node for node in view.nodes if node.connected}
    members = {member.node for member in job.members}
    served: set[str] | None = None  # machines that have served before; found when the first one is needed

    def kind(machine: str) -> str:
        nonlocal served
        if machine in members:
            return _member(job)
        found = _other(job, nodes.get(machine))
        if found != STARTING or machine in nodes:
            return found
        if served is None:
            served = {each.name for each in view.machines if each.joined}
        return LEAVING if machine in served else BOOTING

    return kind


def split(job: JobState) -> dict[str, float] | None:
    """`node_seconds` by kind. The values add up to `node_seconds`. None: not known, an older head counted them all."""
    if not job.spent:
        return None
    good = min(counted(job), job.node_seconds)
    found = {kind: seconds for kind, seconds in job.spent.items() if kind != TRAINING}
    training = job.spent.get(TRAINING, 0.0)
    unknown = max(0.0, job.node_seconds - training - sum(found.values()))
    if unknown > 1e-6 * job.node_seconds:
        found[UNKNOWN] = unknown
    if training >= good:
        found[LOST] = training - good
    else:  # steps count from the moment of the restore, but a machine trains from when the head sees its first step
        share = (job.node_seconds - good) / (sum(found.values()) or 1.0)
        found = {kind: seconds * share for kind, seconds in found.items()}
    return {COUNTED: good} | found


def counted(job: JobState) -> float:
    """Node-seconds in steps that counted, with those of the current generation."""
    return job.good_seconds + good_seconds(job.progress, job.size)


def stalled(job: JobState) -> float:
    """Node-seconds that the workers spent copying snapshots into memory; they are part of the steps' time."""
    return job.stalled + job.progress.stall * job.size


def _member(job: JobState) -> str:
    if job.has_stepped:
        return TRAINING
    return RECOVERY if job.interruptions and job.interruptions[-1].seconds is None else STARTING


def _other(job: JobState, node: Node | None) -> str:
    """What a machine does that is in no generation. node: None if its agent is not connected."""
    if job.ended_already:
        return KEPT
    if node is None or node.phase in ("checking", "preparing"):
        return STARTING
    if node.phase == "unfit":
        return UNFIT
    if job.phase == "finishing":
        return SAVING
    if node.leaving:
        return LEAVING
    return SPARE if job.current else WAITING
