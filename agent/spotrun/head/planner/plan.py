"""Who trains with whom, and what happens next: `plan(view)` is pure, and its tests are data.

A generation never ends because the head cannot see: an interruption takes two independent signals (see `liveness`).
Every rule looks at the whole view, so a new head comes to the same decisions as the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

from spotrun.head.job_state import (
    Action,
    Cause,
    CountFailure,
    Drain,
    DumpStacks,
    EndGeneration,
    Ending,
    Finish,
    JobState,
    SetEnding,
    Start,
    Stop,
)
from spotrun.head.planner import checkpointing, idle, patience, silence, waiting
from spotrun.head.planner.checkpointing import DRAIN_AHEAD
from spotrun.head.planner.liveness import eligible, interrupted, reports, silent
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import Node, View
from spotrun.wire import Failure, Member


@dataclass(frozen=True)
class Plan:
    """What one job does now. The caller applies the actions in order, and plans again when anything changes."""

    actions: tuple[Action, ...]
    reason: str = ""  # what the job waits for; empty: for nothing


def plan(view: View) -> Plan:
    """The actions of the job, and what it waits for."""
    return Plan(_actions(view), waiting.reason(view))


def _actions(view: View) -> tuple[Action, ...]:
    job = view.job
    if job.ended_already:
        return ()
    budget = job.spec.budget
    if budget is not None and job.cost >= budget and not job.stopping and job.ending is None:
        return (Stop(f"the budget of ${budget:g} is spent"),)
    return _assemble(view) if job.current is None else _supervise(view)


def _assemble(view: View) -> tuple[Action, ...]:
    """No generation: begin one, or bring the state to safety meanwhile."""
    job = view.job
    if job.failure and job.restarts > job.spec.max_restarts:
        return (Finish("failed", job.failure.message),)
    if job.stopping and job.ending is None:
        return (SetEnding(Ending(phase="stopped", reason=job.stopping, state=patience.newest(patience.unsaved(view)))),)
    ready = eligible(view)
    if job.ending is None:
        mine = [node for node in view.nodes if node.connected and node.report.job == job.id]
        broken = [node for node in mine if node.setup_failure]
        if broken and len(broken) == len(mine) and job.generation == 0:
            failure = broken[0].report.failure
            return (Finish("failed", f"set-up failed on {broken[0].name}: {failure.message if failure else ''}"),)
        if _enough(view, ready) and not view.blind() and not _ahead_of(view, ready):
            return (_start(job, ready, None),)
    found = checkpointing.secure(view)
    if job.ending is None:
        return (*(found or ()), *idle.decide(view))
    if found is None or view.now > job.ending.deadline > 0 or patience.out_of_reach(view, TIMEOUTS.save):
        return (checkpointing.closing(view),)
    if job.ending.deadline == 0:
        return (SetEnding(job.ending.replace(deadline=view.now + TIMEOUTS.save)), *found)
    return found


def _ahead_of(view: View, ready: list[Node]) -> bool:
    """Whether only leaving nodes hold the last generation's state, so that it must get into the bucket first.

    Not if a ready node was in that generation: then a snapshot interval is the most that can be lost.
    """
    job = view.job
    if job.current is None and view.now - job.ordered_at > patience.patience(job, TIMEOUTS.save):
        return False
    here = [n for n in view.nodes if reports(view, n) and n.report.job == job.id]
    newest = max(map(patience.state, here), default=(-1, -1))
    return newest > job.newest and newest[0] > max((patience.state(n)[0] for n in ready), default=newest[0])


def _supervise(view: View) -> tuple[Action, ...]:
    """A generation is under way: has it ended, must it end, is a checkpoint due?"""
    job = view.job
    members = view.members()
    here = [node for node in members if node is not None and node.report.generation == job.generation]
    if len(here) == len(members) and all(n.report.phase == "succeeded" for n in here):
        return (EndGeneration(ending=Ending(phase="succeeded", state=patience.newest(here))),)
    gone = interrupted(view) or silence.interrupted(view)
    failed = _user_failure(here, gone)
    if failed:
        return _after_failure(view, *failed)
    if gone:
        kinds = "+".join(dict.fromkeys(gone.values()))
        return (_restart(view, Cause(kind=kinds, node=", ".join(gone))),)
    unable = [node for node in members if node is not None and _unable(view, node)]
    if unable:
        return (_restart(view, Cause(kind="start", node=", ".join(node.name for node in unable))),)
    if job.stopping and silence.given_up(view):
        return (EndGeneration(cause=Cause(kind="stop")),)
    if job.draining:
        return _drain_on(view, here, len(members))
    network = _network_failure(view, here)
    if network:
        return _after_failure(view, *network)
    return _change(view, here) or checkpointing.checkpoint(view, here) or _hang(view, here)


def _after_failure(view: View, failure: Failure, node: Node) -> tuple[Action, ...]:
    """Count the failure. Restart from the newest snapshot, or end the job after too many."""
    fail = CountFailure(failure, node.name, node.report.stacks)
    cause = Cause(kind="hang" if failure.kind == "hang" else "crash", node=node.name)
    if view.job.restarts + 1 > view.job.spec.max_restarts:
        return (fail, EndGeneration(), Finish("failed", failure.message))
    return (fail, _restart(view, cause))


def _restart(view: View, cause: Cause) -> Action:
    """The next generation at once if there are nodes enough; else wait for machines."""
    ready = eligible(view)
    if view.job.stopping or len(ready) < view.job.spec.nodes.min or _ahead_of(view, ready):
        return EndGeneration(cause=cause)
    return _start(view.job, ready, cause)


def _drain_on(view: View, here: list[Node], size: int) -> tuple[Action, ...]:
    """Wait until all workers have stopped. Choose a later step if one of them had passed the step already."""
    job = view.job
    assert job.draining is not None
    settled = [node for node in here if node.report.phase in ("drained", "failed", "succeeded")]
    if len(settled) == size or (view.now > job.draining.deadline and not view.blind()):
        return (_restart(view, job.draining.cause),)
    if any(node.report.late == job.draining.step for node in here):
        step = checkpointing.ahead(view, here, 4 * DRAIN_AHEAD)
        if step > job.draining.step:
            return (Drain(step, job.draining.cause, job.draining.deadline),)
    return ()


def _change(view: View, here: list[Node]) -> tuple[Action, ...]:
    """Reasons to end a healthy generation: a notice, a known end, the operator's stop, more nodes."""
    job = view.job
    noticed = [node for node in here if node.noticed]
    if noticed:
        told = [n.report.notice.deadline for n in noticed if n.report.notice and not n.due]
        known = [min(n.due, view.now + TIMEOUTS.drain) for n in noticed if n.due]
        cause = Cause(kind="preempt" if told else "end", node=", ".join(n.name for n in noticed))
        deadline = min(told + known) - TIMEOUTS.drain_margin
    elif job.stopping:
        cause, deadline = Cause(kind="stop"), view.now + TIMEOUTS.drain
    elif _worth_growing(view):
        cause, deadline = Cause(kind="grow"), view.now + TIMEOUTS.drain
    else:
        return ()
    if job.progress.step > max(job.progress.base, -1):
        return (Drain(checkpointing.ahead(view, here, DRAIN_AHEAD), cause, deadline),)
    # No work can be lost yet. Growth can wait for the first step.
    return () if cause.kind == "grow" else (_restart(view, cause),)


def _worth_growing(view: View) -> bool:
    """Whether more nodes are ready, and the last change is long enough ago to have paid for itself."""
    job, spec = view.job, view.job.spec
    if len(job.members) >= spec.nodes.max or view.now - job.ordered_at < spec.grow_interval:
        return False
    left = (job.progress.total_steps - job.progress.step) * job.progress.pace
    if job.progress.total_steps and left < spec.grow_interval / 3:
        return False  # the job ends before the growth pays for its pause
    names = {member.node for member in job.members}
    return any(node.name not in names for node in eligible(view))


def _hang(view: View, here: list[Node]) -> tuple[Action, ...]:
    """No worker steps for too long: keep the stacks and end the workers. The agents then report kind hang."""
    job = view.job
    # A node that has succeeded does not wait for the others, which may still hang.
    if job.dumping or any(n.report.phase not in ("starting", "running", "succeeded") for n in here) or not here:
        return ()
    if any(silent(view, node) for node in here):
        return ()  # what a silent node does is not known
    if job.progress.step <= job.progress.base:
        since, limit = job.ordered_at, job.spec.start_timeout
    else:
        since, limit = job.progress.stepped_at, job.spec.hang_timeout
    # The head itself may have been away: give reports time to arrive before judging by them.
    since = max(since, view.awake_since)
    return (DumpStacks(),) if view.now - since > limit else ()


def _unable(view: View, node: Node) -> bool:
    """Whether a member reports, but has not taken up the generation and will not."""
    if node.report.generation >= view.job.generation or not node.connected or silent(view, node):
        return False
    waited = view.now - max(view.job.ordered_at, view.awake_since)
    return (node.setup_failure and waited > TIMEOUTS.failure) or waited > view.job.spec.start_timeout


def _user_failure(here: list[Node], gone: dict[str, str]) -> tuple[Failure, Node] | None:
    """The earliest failure of the script itself. Failures on a node that leaves do not count.

    A worker's end by a signal does not count: NCCL ends survivors that way when a peer is gone (`_network_failure`).
    """
    found = [
        (node.report.failure, node)
        for node in here
        if node.report.phase == "failed" and node.report.failure and node.report.failure.kind not in ("peer", "signal")
        if not node.noticed and not node.gone and node.name not in gone
    ]
    return min(found, key=lambda item: item[0].at) if found else None


def _network_failure(view: View, here: list[Node]) -> tuple[Failure, Node] | None:
    """A worker was killed, or collectives failed, but every node is well: after a while, that counts as a failure."""
    found = [(n.report.failure, n) for n in here if n.report.phase == "failed" and n.report.failure]
    if not found:
        return None
    failure, node = min(found, key=lambda item: (item[0].kind == "peer", item[0].at))
    # First let every member report after the failure: a dead one will not.
    if view.now - failure.at < TIMEOUTS.failure or any(n.reported_at < failure.at + TIMEOUTS.failure for n in here):
        return None
    return failure, node


def _enough(view: View, ready: list[Node]) -> bool:
    """Whether to begin with these nodes: they are `max`, or at least `min` and no more are expected soon."""
    nodes = view.job.spec.nodes
    if not nodes.min <= len(ready) < nodes.max:
        return len(ready) >= nodes.max
    return view.job.generation > 0 or view.expected <= len(ready) or view.now - view.waiting_since > TIMEOUTS.gather


def _start(job: JobState, ready: list[Node], cause: Cause | None) -> Start:
    """Survivors first, in the order of their ranks: the first one's store serves the others."""
    ranks = {(member.node, member.boot): rank for rank, member in enumerate(job.last)}
    ready = sorted(ready, key=lambda n: (ranks.get((n.name, n.report.boot), len(ranks)), n.name))
    chosen = ready[: job.spec.nodes.max]
    members = tuple(Member(node=n.name, boot=n.report.boot, address=n.report.address) for n in chosen)
    return Start(members, chosen[0].report.store, cause)
