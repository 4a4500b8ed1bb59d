"""Who trains with whom, and what happens next: `plan(view)` is pure, and its tests are data.

A rule runs through it: a generation is never ended because the *head* cannot see. That a node is lost takes two
independent signals (see `health.lost`). Every rule looks at the whole view, so a head that has just been recreated
comes to the same decisions as the one before it.
"""

from __future__ import annotations

import math

from spotrun.head import health
from spotrun.head.health import Node, View
from spotrun.head.state import (
    Action,
    Cause,
    Conclude,
    Drain,
    Dump,
    Ending,
    Fail,
    Finish,
    Hold,
    JobState,
    Recreate,
    Save,
    Start,
    Stop,
    Unsave,
)
from spotrun.spec import JobSpec
from spotrun.wire import Failure, Member, StateRef

DRAIN_AHEAD = 0.3  # seconds between choosing a stop step and reaching it: several times what the order takes to arrive
DRAIN_PATIENCE = 60.0  # seconds to wait for a drain nobody's machine depends on
MARGIN_BEFORE_DEADLINE = 3.0  # seconds before a noticed node goes at which its drain is given up
SETTLE = 1.2  # seconds: two heartbeats and a bit, for a node's fate to show after a collective failed
GATHER = 10.0  # seconds a first generation waits for more than `min` nodes
SAVE_PATIENCE = 120.0  # seconds without the last part of a checkpoint before another try
ENDING_PATIENCE = 60.0  # seconds for the last state of a job to get into the bucket
RECREATE_AFTER = 20.0  # seconds of silence before a machine that nobody waits for is replaced


def plan(view: View) -> tuple[Action, ...]:
    """What to do now; the caller applies the actions in order and plans again when anything changes."""
    job = view.job
    if job.ended_already:
        return ()
    spec = JobSpec.model_validate(job.spec)
    if spec.budget is not None and job.cost >= spec.budget and not job.stopping and job.ending is None:
        return (Stop(f"the budget of ${spec.budget:g} is spent"),)
    lost = _replacements(view, spec)
    if job.current is None:
        return (*_assemble(view, spec), *lost)
    return (*_supervise(view, spec), *lost)


def _assemble(view: View, spec: JobSpec) -> tuple[Action, ...]:
    """No generation: begin one, or bring the state to safety meanwhile."""
    job = view.job
    if job.failure and job.restarts > spec.max_restarts:
        return (Finish("failed", _reason(job)),)
    if job.stopping and job.ending is None:
        return (Conclude(Ending(phase="stopped", reason=job.stopping)),)
    ready = view.eligible(spec)
    if job.ending is None:
        broken = [node for node in view.nodes if node.setup_failure]
        if broken and not ready and job.generation == 0:
            failure = broken[0].report.failure
            return (Finish("failed", f"set-up failed on {broken[0].name}: {failure.message if failure else ''}"),)
        if _enough(view, spec, ready):
            return (_start(job, ready, spec, None),)
    saving = _secure(view)
    if job.ending is not None and not saving and (job.saving is None or view.now > job.ending.deadline > 0):
        return (Finish(job.ending.phase, job.ending.reason),)
    if job.ending is not None and job.ending.deadline == 0:
        deadline = view.now + ENDING_PATIENCE
        return (Conclude(job.ending.model_copy(update={"deadline": deadline})), *saving)
    return saving


def _secure(view: View) -> tuple[Action, ...]:
    """Put the newest snapshot that any reachable node holds into the bucket, unless it is there."""
    job = view.job
    holders = [n for n in view.nodes if n.linked and n.report.job == job.id and n.report.snapshot and not n.gone]
    if not holders:
        return (Unsave("no node holds the state any more"),) if job.saving else ()
    best = max((n.report.snapshot for n in holders if n.report.snapshot), key=_order)
    if job.checkpoints and _order(job.checkpoints[0]) >= _order(best):
        return ()
    names = tuple(sorted(n.name for n in holders if n.report.snapshot == best))
    if job.saving and job.saving.ref == best and set(job.saving.holders) <= set(names):
        return ()
    return (Save(best, names),)


def _supervise(view: View, spec: JobSpec) -> tuple[Action, ...]:
    """A generation is under way: has it ended, must it end, is a checkpoint due?"""
    job = view.job
    members = view.members()
    here = [node for node in members if node is not None and node.report.generation == job.generation]
    if len(here) == len(members) and all(n.report.phase == "succeeded" for n in here):
        return (Hold(ending=Ending(phase="succeeded")),)
    lost = health.lost(view, spec)
    failed = _user_failure(here, lost)
    if failed:
        return _after_failure(view, spec, *failed)
    if lost:
        kinds = "+".join(dict.fromkeys(lost.values()))
        return (_regroup(view, spec, Cause(kind=kinds, node=", ".join(lost))),)
    if job.draining:
        return _drain_on(view, spec, here, len(members))
    network = _network_failure(view, here)
    if network:
        return _after_failure(view, spec, *network)
    return _change(view, spec, here) or _checkpoint(view, spec, here) or _hang(view, spec, here)


def _after_failure(view: View, spec: JobSpec, failure: Failure, node: Node) -> tuple[Action, ...]:
    """Count it; again from the newest snapshot, or the end."""
    fail = Fail(failure, node.name, node.report.stacks)
    cause = Cause(kind="hang" if failure.kind == "hang" else "crash", node=node.name)
    if view.job.restarts + 1 > spec.max_restarts:
        return (fail, Hold(cause=None, ending=None), Finish("failed", failure.message))
    return (fail, _regroup(view, spec, cause))


def _regroup(view: View, spec: JobSpec, cause: Cause) -> Action:
    """The next generation at once if there are nodes enough; else wait for machines."""
    ready = view.eligible(spec)
    if view.job.stopping or len(ready) < spec.nodes.min:
        return Hold(cause=cause)
    return _start(view.job, ready, spec, cause)


def _drain_on(view: View, spec: JobSpec, here: list[Node], size: int) -> tuple[Action, ...]:
    """Wait until all have stopped; choose a later step if one had passed it."""
    job = view.job
    assert job.draining is not None
    settled = [node for node in here if node.report.phase in ("drained", "failed", "succeeded")]
    if len(settled) == size or view.now > job.draining.deadline:
        return (_regroup(view, spec, job.draining.cause),)
    if any(node.report.late == job.draining.step for node in here):
        step = _ahead(view, here, 4 * DRAIN_AHEAD)
        if step > job.draining.step:
            return (Drain(step, job.draining.cause, job.draining.deadline),)
    return ()


def _change(view: View, spec: JobSpec, here: list[Node]) -> tuple[Action, ...]:
    """Reasons to end a healthy generation: a notice, the operator's stop, more nodes."""
    job = view.job
    noticed = [node for node in here if node.noticed]
    stepping = job.progress.step >= 0 and job.progress.step > job.progress.base
    if noticed:
        cause = Cause(kind="preempt", node=", ".join(n.name for n in noticed))
        deadline = min(n.report.notice.deadline for n in noticed if n.report.notice) - MARGIN_BEFORE_DEADLINE
    elif job.stopping:
        cause, deadline = Cause(kind="stop"), view.now + DRAIN_PATIENCE
    elif _worth_growing(view, spec):
        cause, deadline = Cause(kind="grow"), view.now + DRAIN_PATIENCE
    else:
        return ()
    if stepping:
        return (Drain(_ahead(view, here, DRAIN_AHEAD), cause, deadline),)
    # Nothing was done yet that could be lost; but growing can wait for the first step.
    return () if cause.kind == "grow" else (_regroup(view, spec, cause),)


def _worth_growing(view: View, spec: JobSpec) -> bool:
    """More nodes are ready, and the last change is long enough ago to have paid for itself."""
    job = view.job
    size = len(job.current.members) if job.current else 0
    if size >= spec.nodes.max or view.now - job.ordered_at < spec.grow_interval:
        return False
    left = (job.progress.total_steps - job.progress.step) * job.progress.pace
    if job.progress.total_steps and left < spec.grow_interval / 3:
        return False  # the job is over before the pause is made good
    names = {member.node for member in job.current.members} if job.current else set()
    return any(node.name not in names for node in view.eligible(spec))


def _checkpoint(view: View, spec: JobSpec, here: list[Node]) -> tuple[Action, ...]:
    """A checkpoint by the interval; one that does not come about is given up."""
    job = view.job
    if job.saving:
        if any(node.report.late == job.saving.ref.step for node in here):
            return (Unsave("a worker was past the step already"),)
        if view.now - job.saving.since > SAVE_PATIENCE:
            return (Unsave(f"not complete after {SAVE_PATIENCE:.0f} s"),)
        return ()
    since = max(job.saved_at, job.started or view.now)
    if job.progress.step <= job.progress.base or view.now - since < spec.checkpoint_interval:
        return ()
    step = _ahead(view, here, DRAIN_AHEAD)
    if job.progress.total_steps and step >= job.progress.total_steps:
        return ()  # the end of the job saves the last state anyway
    holders = tuple(member.node for member in job.current.members) if job.current else ()
    return (Save(StateRef(generation=job.generation, step=step), holders),)


def _hang(view: View, spec: JobSpec, here: list[Node]) -> tuple[Action, ...]:
    """All alive, none stepping for too long: keep the stacks and end it. The agents then report kind hang."""
    job = view.job
    if job.dumping or any(n.report.phase not in ("starting", "running") for n in here) or not here:
        return ()
    if job.progress.step <= job.progress.base:
        since, patience = job.ordered_at, spec.start_timeout
    else:
        since, patience = job.progress.stepped_at, spec.hang_timeout
    # The head itself may have been away: give reports time to arrive before judging by them.
    since = max(since, view.awake_since)
    return (Dump(),) if view.now - since > patience else ()


def _user_failure(here: list[Node], lost: dict[str, str]) -> tuple[Failure, Node] | None:
    """The earliest failure that was not somebody else's death; those on a node being taken do not count."""
    found = [
        (node.report.failure, node)
        for node in here
        if node.report.phase == "failed" and node.report.failure and node.report.failure.kind != "peer"
        if not node.noticed and not node.gone and node.name not in lost
    ]
    return min(found, key=lambda item: item[0].at) if found else None


def _network_failure(view: View, here: list[Node]) -> tuple[Failure, Node] | None:
    """Collectives failed though every member is well: after a while that is a failure of its own."""
    found = [(n.report.failure, n) for n in here if n.report.phase == "failed" and n.report.failure]
    if not found:
        return None
    failure, node = min(found, key=lambda item: item[0].at)
    # First let every other member be heard after the failure: the dead one will not be.
    if view.now - failure.at < SETTLE or any(n.heard < failure.at + SETTLE for n in here):
        return None
    return failure, node


def _enough(view: View, spec: JobSpec, ready: list[Node]) -> bool:
    """Whether to begin with these: all that may be, or at least `min` and no more to be expected soon."""
    if len(ready) >= spec.nodes.max:
        return True
    if len(ready) < spec.nodes.min:
        return False
    return view.job.generation > 0 or view.expected <= len(ready) or view.now - view.waiting_since > GATHER


def _start(job: JobState, ready: list[Node], spec: JobSpec, cause: Cause | None) -> Start:
    """Survivors first, in the order of their ranks: the first one's store serves the others."""
    ranks = {(member.node, member.boot): rank for rank, member in enumerate(job.last)}
    chosen = sorted(ready, key=lambda n: (ranks.get((n.name, n.report.boot), len(ranks)), n.name))[: spec.nodes.max]
    members = tuple(Member(node=n.name, boot=n.report.boot, address=n.report.address) for n in chosen)
    return Start(members, chosen[0].report.store, cause)


def _replacements(view: View, spec: JobSpec) -> tuple[Action, ...]:
    """Machines that the cloud still counts but that do not answer: at once if the job waits for machines."""
    short = len(view.eligible(spec)) < spec.nodes.min
    dead = [n for n in view.nodes if health.silent(view, n, spec) and n.cloud == "running" and n.expendable(view)]
    patience = 0.0 if short else RECREATE_AFTER
    return tuple(Recreate(n.name) for n in dead if view.now - max(n.heard, view.awake_since) > patience)


def _ahead(view: View, here: list[Node], seconds: float) -> int:
    """A step that no worker has reached when the order arrives: `seconds` ahead at the present pace, and two more."""
    pace = view.job.progress.pace or 1.0
    newest = max((w.step for n in here for w in n.report.workers), default=0)
    stepped_at = max((w.stepped_at for n in here for w in n.report.workers), default=view.now)
    since = max(0.0, view.now - stepped_at)
    return newest + math.ceil((since + seconds) / max(pace, 1e-4)) + 2


def _order(ref: StateRef) -> tuple[int, int]:
    return (ref.generation, ref.step)


def _reason(job: JobState) -> str:
    return job.failure.message if job.failure else ""
