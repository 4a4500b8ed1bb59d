"""Who trains with whom, and what happens next: `plan(view)` is pure, and its tests are data.

A rule runs through it: a generation is never ended because the *head* cannot see. That a node is lost takes two
independent signals (see `health.lost`). Every rule looks at the whole view, so a head that has just been recreated
comes to the same decisions as the one before it.
"""

from __future__ import annotations

from spotrun.head import view as health
from spotrun.head.fleet import repair, retirement
from spotrun.head.job_state import (
    Action,
    Cause,
    Conclude,
    Drain,
    Dump,
    EndGeneration,
    Ending,
    Fail,
    Finish,
    JobState,
    Recreate,
    Start,
    Stop,
)
from spotrun.head.planner import absent, checkpointing, idle, silence
from spotrun.head.planner import patience as stake
from spotrun.head.planner.checkpointing import DRAIN_AHEAD, SAVE_PATIENCE
from spotrun.head.view import Node, View
from spotrun.spec import JobSpec
from spotrun.wire import Failure, Member

DRAIN_PATIENCE = 60.0  # seconds to wait for a drain nobody's machine depends on
MARGIN_BEFORE_DEADLINE = 3.0  # seconds before a noticed node goes at which its drain is given up
SETTLE = 1.2  # seconds: two heartbeats and a bit, for a node's fate to show after a collective failed
GATHER = 10.0  # seconds a first generation waits for more than `min` nodes
RECREATE_AFTER = 20.0  # seconds of silence before a machine that nobody waits for is replaced


def plan(view: View) -> tuple[Action, ...]:
    """What to do now; the caller applies the actions in order and plans again when anything changes."""
    job = view.job
    if job.ended_already:
        return ()
    spec = job.spec
    if spec.budget is not None and job.cost >= spec.budget and not job.stopping and job.ending is None:
        return (Stop(f"the budget of ${spec.budget:g} is spent"),)
    if idle.resting(job):
        return _assemble(view, spec)  # machines that are still listed are on their way out
    lost = (*(each for each in _dead(view, spec) if repair.may_ask(view, each)), *repair.replacements(view))
    if job.current is None:
        return (*_assemble(view, spec), *lost)
    return (*_supervise(view, spec), *lost)


def wanted(view: View, action: Recreate) -> bool:
    """Whether that machine should still be replaced: it may have been decided a while ago.

    It is not while the cloud cannot be asked, nor once the job ends: what is to be done then is decided anew.
    """
    if view.job.ended_already or idle.resting(view.job):
        return False
    found = (*_dead(view, view.job.spec), *repair.wanted(view))
    return (action.node, action.created) in {(each.node, each.created) for each in found}


def _assemble(view: View, spec: JobSpec) -> tuple[Action, ...]:
    """No generation: begin one, or bring the state to safety meanwhile."""
    job = view.job
    if job.failure and job.restarts > spec.max_restarts:
        return (Finish("failed", _reason(job)),)
    if job.stopping and job.ending is None:
        return (Conclude(Ending(phase="stopped", reason=job.stopping, state=stake.newest(stake.unsaved(view)))),)
    ready = view.eligible(spec)
    if job.ending is None:
        mine = [node for node in view.nodes if node.connected and node.report.job == job.id]
        broken = [node for node in mine if node.setup_failure]
        if broken and len(broken) == len(mine) and job.generation == 0:
            failure = broken[0].report.failure
            return (Finish("failed", f"set-up failed on {broken[0].name}: {failure.message if failure else ''}"),)
        if _enough(view, spec, ready) and not view.blind() and not _ahead_of(view, ready, spec):
            return (_start(job, ready, spec, None),)
    found = checkpointing.secure(view, spec)
    if job.ending is None:
        return (*(found or ()), *idle.decide(view, spec))
    if found is None or view.now > job.ending.deadline > 0 or stake.out_of_reach(view, spec, SAVE_PATIENCE):
        return (checkpointing.closing(view, spec),)
    if job.ending.deadline == 0:
        deadline = view.now + SAVE_PATIENCE
        return (Conclude(job.ending.model_copy(update={"deadline": deadline})), *found)
    return found


def _ahead_of(view: View, ready: list[Node], spec: JobSpec) -> bool:
    """Whether only nodes that are leaving hold what the last generation did: it must get into the bucket first.

    If one of these was in that generation it is not worth the wait: a snapshot interval is the most that is lost.
    """
    job = view.job
    if job.current is None and view.now - job.ordered_at > stake.patience(job, SAVE_PATIENCE):
        return False
    here = [n for n in view.nodes if n.connected and n.report.job == job.id and not health.silent(view, n, spec)]
    newest = max(map(stake.state, here), default=(-1, -1))
    return newest > job.newest and newest[0] > max((stake.state(n)[0] for n in ready), default=newest[0])


def _supervise(view: View, spec: JobSpec) -> tuple[Action, ...]:
    """A generation is under way: has it ended, must it end, is a checkpoint due?"""
    job = view.job
    members = view.members()
    here = [node for node in members if node is not None and node.report.generation == job.generation]
    if len(here) == len(members) and all(n.report.phase == "succeeded" for n in here):
        return (EndGeneration(ending=Ending(phase="succeeded", state=stake.newest(here))),)
    lost = health.lost(view, spec) or silence.lost(view, spec)
    failed = _user_failure(here, lost)
    if failed:
        return _after_failure(view, spec, *failed)
    if lost:
        kinds = "+".join(dict.fromkeys(lost.values()))
        return (_regroup(view, spec, Cause(kind=kinds, node=", ".join(lost))),)
    unable = [node for node in members if node is not None and _unable(view, spec, node)]
    if unable:
        return (_regroup(view, spec, Cause(kind="start", node=", ".join(node.name for node in unable))),)
    if job.stopping and silence.given_up(view, spec):
        return (EndGeneration(cause=Cause(kind="stop")),)
    if job.draining:
        return _drain_on(view, spec, here, len(members))
    network = _network_failure(view, here)
    if network:
        return _after_failure(view, spec, *network)
    return _change(view, spec, here) or checkpointing.checkpoint(view, spec, here) or _hang(view, spec, here)


def _after_failure(view: View, spec: JobSpec, failure: Failure, node: Node) -> tuple[Action, ...]:
    """Count it; again from the newest snapshot, or the end."""
    fail = Fail(failure, node.name, node.report.stacks)
    cause = Cause(kind="hang" if failure.kind == "hang" else "crash", node=node.name)
    if view.job.restarts + 1 > spec.max_restarts:
        return (fail, EndGeneration(cause=None, ending=None), Finish("failed", failure.message))
    return (fail, _regroup(view, spec, cause))


def _regroup(view: View, spec: JobSpec, cause: Cause) -> Action:
    """The next generation at once if there are nodes enough; else wait for machines."""
    ready = view.eligible(spec)
    if view.job.stopping or len(ready) < spec.nodes.min or _ahead_of(view, ready, spec):
        return EndGeneration(cause=cause)
    return _start(view.job, ready, spec, cause)


def _drain_on(view: View, spec: JobSpec, here: list[Node], size: int) -> tuple[Action, ...]:
    """Wait until all have stopped; choose a later step if one had passed it."""
    job = view.job
    assert job.draining is not None
    settled = [node for node in here if node.report.phase in ("drained", "failed", "succeeded")]
    if len(settled) == size or (view.now > job.draining.deadline and not view.blind()):
        return (_regroup(view, spec, job.draining.cause),)
    if any(node.report.late == job.draining.step for node in here):
        step = checkpointing.ahead(view, here, 4 * DRAIN_AHEAD)
        if step > job.draining.step:
            return (Drain(step, job.draining.cause, job.draining.deadline),)
    return ()


def _change(view: View, spec: JobSpec, here: list[Node]) -> tuple[Action, ...]:
    """Reasons to end a healthy generation: a notice, a known end, the operator's stop, more nodes."""
    job = view.job
    noticed = [node for node in here if node.noticed]
    stepping = job.progress.step >= 0 and job.progress.step > job.progress.base
    if noticed:
        told = [n.report.notice.deadline for n in noticed if n.report.notice and not n.due]
        known = [min(n.due, view.now + DRAIN_PATIENCE) for n in noticed if n.due]
        cause = Cause(kind="preempt" if told else "end", node=", ".join(n.name for n in noticed))
        deadline = min(told + known) - MARGIN_BEFORE_DEADLINE
    elif job.stopping:
        cause, deadline = Cause(kind="stop"), view.now + DRAIN_PATIENCE
    elif _worth_growing(view, spec):
        cause, deadline = Cause(kind="grow"), view.now + DRAIN_PATIENCE
    else:
        return ()
    if stepping:
        return (Drain(checkpointing.ahead(view, here, DRAIN_AHEAD), cause, deadline),)
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


def _hang(view: View, spec: JobSpec, here: list[Node]) -> tuple[Action, ...]:
    """All alive, none stepping for too long: keep the stacks and end it. The agents then report kind hang."""
    job = view.job
    # One that has succeeded waits for nobody; those it leaves behind may hang all the same.
    if job.dumping or any(n.report.phase not in ("starting", "running", "succeeded") for n in here) or not here:
        return ()
    if any(health.silent(view, node, spec) for node in here):
        return ()  # what a silent node does is not known
    if job.progress.step <= job.progress.base:
        since, patience = job.ordered_at, spec.start_timeout
    else:
        since, patience = job.progress.stepped_at, spec.hang_timeout
    # The head itself may have been away: give reports time to arrive before judging by them.
    since = max(since, view.awake_since)
    return (Dump(),) if view.now - since > patience else ()


def _unable(view: View, spec: JobSpec, node: Node) -> bool:
    """Whether a member, though it is heard, has not taken up the generation and will not."""
    if node.report.generation >= view.job.generation or not node.connected or health.silent(view, node, spec):
        return False
    waited = view.now - max(view.job.ordered_at, view.awake_since)
    return (node.setup_failure and waited > SETTLE) or waited > spec.start_timeout


def _user_failure(here: list[Node], lost: dict[str, str]) -> tuple[Failure, Node] | None:
    """The earliest failure of the script itself; those on a node being taken do not count.

    Not a worker's end by a signal: NCCL ends survivors so when a peer is gone. See `_network_failure`.
    """
    found = [
        (node.report.failure, node)
        for node in here
        if node.report.phase == "failed" and node.report.failure and node.report.failure.kind not in ("peer", "signal")
        if not node.noticed and not node.gone and node.name not in lost
    ]
    return min(found, key=lambda item: item[0].at) if found else None


def _network_failure(view: View, here: list[Node]) -> tuple[Failure, Node] | None:
    """A worker was killed, or collectives failed, though every node is well: after a while that counts as a failure."""
    found = [(n.report.failure, n) for n in here if n.report.phase == "failed" and n.report.failure]
    if not found:
        return None
    failure, node = min(found, key=lambda item: (item[0].kind == "peer", item[0].at))
    # First let every other member be heard after the failure: the dead one will not be.
    if view.now - failure.at < SETTLE or any(n.reported_at < failure.at + SETTLE for n in here):
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


def _dead(view: View, spec: JobSpec) -> tuple[Recreate, ...]:
    """Machines that the cloud still counts but that do not answer: at once if the job waits for machines."""
    if view.job.ending is not None:
        return ()
    short = len(view.eligible(spec)) < spec.nodes.min
    created = {each.name: each.created for each in view.machines}
    # Those that have never served are `repair`'s.
    others = {each.name for each in view.machines if not each.joined}
    served = [n for n in view.nodes if n.name not in others and n.report.phase != "unfit"]
    dead = [n for n in served if health.silent(view, n, spec) and n.cloud == "running" and n.expendable(view)]
    heard = [n for n in view.nodes if n.connected and not health.silent(view, n, spec)]
    safe = max([view.job.newest, *(stake.state(n) for n in heard if n.report.job == view.job.id)])

    def patience(node: Node) -> float:
        if not heard:
            return silence.alone(view, node.name, spec)
        only = node.report.job == view.job.id and stake.state(node) > safe
        return 0.0 if short and not only else RECREATE_AFTER

    waited = [n for n in dead if view.now - max(n.reported_at, view.awake_since) > patience(n)]
    found = tuple(Recreate(n.name, n.report.pool, created=created.get(n.name, 0.0)) for n in waited)
    return (*found, *absent.unheard(view, spec), *retirement.spent(view))


def _reason(job: JobState) -> str:
    return job.failure.message if job.failure else ""
