"""Who trains with whom, and what happens next. `plan(view)` is pure, so its tests are tables of data.

A member counts as lost only if two independent signals say so (see `liveness`). So a head that merely cannot see the
nodes does not interrupt training.
Every rule looks at the whole view, so a new head comes to the same decisions as the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from spotrun.head.job_state import (
    Action,
    Cause,
    CountFailure,
    Drain,
    DumpStacks,
    EndGeneration,
    Ending,
    Finish,
    Release,
    SetEnding,
    Stop,
    apply,
)
from spotrun.head.planner import (
    checkpointing,
    departure,
    drains,
    failures,
    idle,
    keeping,
    kept_node,
    patience,
    regroup,
    silence,
    spending,
    waiting,
)
from spotrun.head.planner.checkpointing import DRAIN_AHEAD
from spotrun.head.planner.departure import Departure
from spotrun.head.planner.liveness import eligible, interrupted, reports, silent
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import Node, View
from spotrun.wire import Failure


@dataclass(frozen=True)
class Plan:
    """What one job does now. The caller applies the actions in order, and plans again when anything changes.

    Each part is computed when it is read: a turn of the head reads only the actions, and the status only the reason.
    """

    view: View

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """What to do, in order."""
        return _actions(self.view)

    @cached_property
    def reason(self) -> str:
        """What the job waits for; empty if it waits for nothing."""
        return waiting.reason(self.view)


def plan(view: View) -> Plan:
    """The actions of the job, and what it waits for."""
    return Plan(view)


def _actions(view: View) -> tuple[Action, ...]:
    job = view.job
    if job.ended_already:
        return kept_node.let_go(view)
    if not job.stopping and job.ending is None and (why := spending.exhausted(view)):
        return (Stop(why),)
    return _assemble(view) if job.current is None else _supervise(view)


def _assemble(view: View) -> tuple[Action, ...]:
    """The job has no generation. Begin one, end the job, or save the newest snapshot in the bucket."""
    job = view.job
    if job.ending is None and (job.stopping or failures.final(job)):
        return (SetEnding(_ending(view)),)
    ready = eligible(view)
    if job.ending is None and (begun := regroup.catch_up(view)):
        return begun
    if job.ending is None:
        if broken := _cannot_be_set_up(view):
            return (Finish("failed", broken),)
        may = waiting.enough(view, ready) and not view.blind()
        if may and (started := _start(view, ready, None)):
            return started
    if job.ending is None and job.regroups and regroup.called_back(view, ready):
        return ()  # workers that are called back will soon wait
    found = checkpointing.secure(view)
    if job.ending is None:
        return (*(found or ()), *idle.decide(view))
    if job.keeper is not None and (kept := keeping.decide(view, job.keeper, found)) is not None:
        return kept
    if found is None or spending.over(job) or patience.overdue(view) or patience.out_of_reach(view, TIMEOUTS.save):
        end = checkpointing.closing(view)
        return (end, *kept_node.keep_last(view)) if job.ending.phase == "failed" else (end,)
    if job.ending.deadline == 0:
        return (SetEnding(job.ending.replace(deadline=view.now + TIMEOUTS.save)), *found)
    return found


def _cannot_be_set_up(view: View) -> str:
    """Why the job ends before it has begun: its set-up fails. Empty: it need not end.

    An error that does not repeat may be the fault of one machine. Then the job ends only if no other machine is coming,
    or if as many machines as it needs have failed, and not only once.
    """
    job = view.job
    mine = [node for node in view.nodes if node.connected and node.work.job == job.id]
    failures = [(node, node.work.failure) for node in mine if node.setup_failure and node.work.failure]
    if job.generation > 0 or not failures:
        return ""
    (node, failure), *_ = sorted(failures, key=lambda each: not each[1].repeats)
    coming = view.expected > sum(node.assigned for node, _ in failures) or view.now - view.awake_since < TIMEOUTS.rejoin
    all_fail = len(failures) == len(mine) and (failure.repeats or not coming)
    times = [each.times for each in view.misfits.values() if each.times]
    enough = len(times) >= job.spec.nodes.min and sum(times) > 1 and not eligible(view)
    return f"set-up failed on {node.name}: {failure.message}" if all_fail or enough else ""


def _ending(view: View) -> Ending:
    """What a job without a generation becomes that should stop, or whose script has failed for good."""
    job, state = view.job, patience.newest(patience.unsaved(view))
    if job.failure is not None and failures.final(job):
        return Ending(phase="failed", reason=job.failure.message, state=state)
    return Ending(phase="stopped", reason=job.stopping, state=state)


def _must_save_first(view: View, ready: list[Node]) -> bool:
    """Whether the newest snapshot must be in the bucket before the next generation begins.

    ready: the nodes of the next generation. That is so if the bucket does not have this snapshot, and none of these
    nodes has a state of the same generation. If one has, at most the work of one snapshot interval is lost. `patience`
    limits the wait. A silent node gets less time: see `patience.may_return`.
    """
    job = view.job
    since = max(job.ordered_at, view.awake_since)  # while no head ran, no node could be ready for long
    if job.current is None and view.now - since > patience.patience(job, TIMEOUTS.save):
        return False
    holders = [n for n in view.nodes if n.work.job == job.id and patience.may_return(view, n)]
    newest = max(map(patience.state, holders), default=(-1, -1))
    return newest > job.newest and newest[0] > max(map(_generation_of_state, ready), default=newest[0])


def _generation_of_state(node: Node) -> int:
    """The generation of the newest state that the node's snapshot or its waiting workers have; -1: they have none."""
    work = node.work
    lives = work.regroup == "waiting" and not work.needs_release and any(each.step >= 0 for each in work.workers)
    return max(patience.state(node)[0], work.generation if lives else -1)


def _supervise(view: View) -> tuple[Action, ...]:
    """A generation is under way: has it ended, must it end, is a checkpoint due?"""
    job = view.job
    if found := regroup.catch_up(view):
        return found
    members = view.members()
    reporting = [node for node in members if node is not None and node.work.generation == job.generation]
    if len(reporting) == len(members) and all(n.phase == "succeeded" for n in reporting):
        return (EndGeneration(ending=Ending(phase="succeeded", state=patience.newest(reporting))),)
    gone = interrupted(view) or silence.interrupted(view)
    # If all members that were silent are back, the others have left the generation, or will soon.
    lost = gone or (dict.fromkeys(job.released.node.split(", "), job.released.kind) if job.released else {})
    failed = failures.of_the_script(reporting, lost)
    if failed:
        return _after_failure(view, *failed)
    if lost:
        if regroup.must_release(view, gone):
            return (Release(", ".join(gone), "+".join(dict.fromkeys(gone.values()))),)
        if regroup.awaited(view, gone):
            return ()
        kinds = "+".join(dict.fromkeys(lost.values()))
        return _restart(view, Cause(kind=kinds, node=", ".join(lost)))
    unable = [node for node in members if node is not None and (_unable(view, node) or regroup.failed(view, node))]
    if unable:
        return _restart(view, Cause(kind="start", node=", ".join(node.name for node in unable)))
    if job.stopping and silence.given_up(view):
        return (EndGeneration(cause=Cause(kind="stop")),)
    if job.draining:
        return _drain_on(view, reporting, len(members))
    unexplained = failures.unexplained(view, reporting)
    if unexplained:
        return _after_failure(view, *unexplained)
    leaving = departure.decide(view)
    return (
        _reason_to_drain(view, reporting, leaving)
        or checkpointing.checkpoint(view, reporting, leaving is not None and leaving.save)
        or _hang(view, reporting)
    )


def _after_failure(view: View, failure: Failure, node: Node) -> tuple[Action, ...]:
    """Count the failure. Restart from the newest snapshot, or end the job with its last state saved.

    Soon after a regroup, the failure may come from the interruption: a worker that has become rank 0 may lack what only
    the first rank 0 has made at its start. New workers will show that. So it does not count, and may not repeat.
    """
    soon = view.now - view.job.ordered_at < TIMEOUTS.regrouped
    if regrouped := soon and view.job.current is not None and view.job.current.regroup:
        failure = failure.replace(repeats=False)
    fail = CountFailure(failure, node.name, node.work.stacks, counts=not regrouped)
    cause = Cause(kind="hang" if failure.kind == "hang" else "crash", node=node.name)
    if failures.final(apply(view.job, fail, view.now)):
        if newest := patience.newest(patience.unsaved(view)):
            return (fail, EndGeneration(ending=Ending(phase="failed", reason=failure.message, state=newest)))
        return (fail, EndGeneration(), Finish("failed", failure.message), *kept_node.keep(view, node))
    return (fail, *_restart(view, cause))


def _restart(view: View, cause: Cause) -> tuple[Action, ...]:
    """End this generation, and begin the next one at once.

    No other generation begins if the job stops, if too few nodes are ready, or if a snapshot must be saved first.
    """
    ready, least = eligible(view), view.job.spec.nodes.min
    if len(ready) < least:
        ready += departure.stays(view)[: least - len(ready)]
    if view.job.stopping or len(ready) < least:
        return (EndGeneration(cause=cause),)
    return _start(view, ready, cause) or (EndGeneration(cause=cause),)


def _drain_on(view: View, reporting: list[Node], size: int) -> tuple[Action, ...]:
    """Restart when every member has stopped, or at the deadline of the drain, or if not all can stop together.

    If the order came too late for all members, choose a later step. If the step is too far, choose an earlier one.
    """
    job = view.job
    assert job.draining is not None
    sees = any(node is not None and reports(view, node) for node in view.members())
    # The agents may not know of a drain that the last head has begun.
    late = view.now > max(job.draining.deadline, view.awake_since + TIMEOUTS.drain)
    if not view.blind() and (len(drains.settled(view, reporting)) == size or (late and sees)):
        return _restart(view, job.draining.cause)
    if drains.split(view, reporting):
        return drains.release(view, reporting) or _restart(view, job.draining.cause)
    return drains.later(view, reporting) or drains.sooner(view, reporting)


def _reason_to_drain(view: View, reporting: list[Node], leaving: Departure | None) -> tuple[Action, ...]:
    """End a healthy generation: members leave or go to another job, the job stops, or growth is worth a pause."""
    job, members, reason = view.job, view.members(), ""
    if leaving and leaving.stop:
        cause, deadline, reason = leaving.cause, leaving.deadline, leaving.reason
    elif taken := [node.name for node in members if node is not None and not node.assigned]:
        cause = Cause(kind="pause" if job.paused else "move", node=", ".join(taken))
        deadline = view.now + TIMEOUTS.drain
    elif job.stopping:
        cause, deadline = Cause(kind="stop"), view.now + TIMEOUTS.drain
    elif leaving is None and _worth_growing(view):
        cause, deadline = Cause(kind="grow"), view.now + TIMEOUTS.drain
    else:
        return ()
    regroups = cause.kind not in ("stop", "pause")
    if regroups and job.has_stepped and not _known_to_run(view) and (leaving is None or view.now < leaving.last):
        return ()  # a moment later, the head knows whether the workers can regroup
    if job.has_stepped:
        step = checkpointing.ahead(view, reporting, DRAIN_AHEAD)
        return (Drain(step, cause, deadline, regroup.following(view, cause), reason),)
    # This generation has completed no step, so a restart loses no work. Growth waits for the first step. So do workers
    # that have regrouped, if there is time. If a notice leaves no time, the others leave and regroup again. In other
    # cases, the next generation has new workers.
    two_steps = min(2 * (job.progress.pace or job.pace), job.spec.start_timeout)  # a node may lie about its pace
    limit = (regroup.time_to_join(job) if leaving else TIMEOUTS.regroup) + two_steps
    late = view.now - job.ordered_at > limit or (leaving is not None and view.now >= leaving.last)
    if cause.kind == "grow" or (job.no_step_since_regroup and cause.kind != "stop" and not late):
        return ()
    if job.no_step_since_regroup and cause.kind == "preempt" and regroup.could_leave(view, cause.node.split(", ")):
        return (Release(cause.node, cause.kind, reason),)  # then the others go on without it
    return _restart(view, cause)


def _known_to_run(view: View) -> bool:
    """Whether all members that report have said that they train, or have had time to. One has completed a step."""
    found = [node for node in view.members() if node is not None and reports(view, node)]
    sure = [n for n in found if n.work.generation == view.job.generation and n.phase != "starting"]
    first = min((n.since for n in sure), default=0.0)
    return len(sure) == len(found) or view.now - max(first, view.job.ordered_at, view.awake_since) > TIMEOUTS.regroup


def _worth_growing(view: View) -> bool:
    """Whether a larger generation is worth the pause that the change takes.

    Another node must be ready, this generation must be at least `grow_interval` old, and enough work must be left.
    """
    job, spec = view.job, view.job.spec
    if len(job.members) >= spec.nodes.max or view.now - job.ordered_at < spec.grow_interval:
        return False
    left = (job.progress.total_steps - job.progress.step) * job.progress.pace
    if job.progress.total_steps and left < spec.grow_interval / 3:
        return False  # the job ends before the growth pays for its pause
    names = {member.node for member in job.members}
    newcomers = [node for node in eligible(view) if node.name not in names]
    # With workers that can regroup, a newcomer first warms up: the others pause for the transfer of the state only.
    return any(not job.regroups or node.waits for node in newcomers)


def _hang(view: View, reporting: list[Node]) -> tuple[Action, ...]:
    """If no worker has completed a step for too long, order the agents to keep the stacks and to end the workers.

    The agents then report a failure of kind `hang`.
    """
    job = view.job
    # A node that has succeeded has no work left, and one that has drained waits. The other nodes may still hang.
    training = ("starting", "running", "succeeded", "drained")
    if not reporting or job.dumping or any(n.phase not in training for n in reporting):
        return ()
    if any(silent(view, node) for node in reporting):
        return ()  # nobody knows what a silent node does
    if not job.has_stepped:
        since, limit = job.ordered_at, job.spec.start_timeout
    else:
        since, limit = job.progress.stepped_at, job.spec.hang_timeout
    # A head that is suspended receives no reports. So count only from the time when the head began or woke up.
    since = max(since, view.awake_since)
    return (DumpStacks(),) if view.now - since > limit else ()


def _unable(view: View, node: Node) -> bool:
    """Whether a member reports, but cannot join the generation, or has not joined it in time.

    A node whose set-up has failed gets less time than others. A node is unfit if workers of an earlier generation
    cannot be ended.
    """
    work, failure = node.work, node.work.failure
    if not node.connected or silent(view, node):
        return False
    if work.generation >= view.job.generation:  # it has started workers, or says why it does not
        refused = work.phase == "failed" and failure is not None and failure.kind == "peer" and not work.workers
        return refused and not view.blind()
    if node.report.phase == "unfit":
        return True
    waited = view.now - max(view.job.ordered_at, view.awake_since)
    return (node.setup_failure and waited > TIMEOUTS.failure) or waited > view.job.spec.start_timeout


def _start(view: View, ready: list[Node], cause: Cause | None) -> tuple[Action, ...]:
    """Begin a generation. (): workers that it needs warm up, or leave another generation, or a snapshot comes first.

    Survivors get the first ranks, in their old order. If possible, new workers do not use the store of the current
    generation. Its rank 0 may still name this store: its newest report may be older than its order.
    """
    job = view.job
    if (members := regroup.members(view, ready, cause)) is not None:
        ready = members
        if len(ready) < job.spec.nodes.min:
            return ()
    ranks = {(member.node, member.boot): rank for rank, member in enumerate(job.last)}
    used = job.current.store if job.current and members is None else ""
    late = {n.name for n in ready if n.work.store == used and n.work.generation < job.generation}
    ready = sorted(ready, key=lambda n: (ranks.get((n.name, n.report.boot), len(ranks)), n.name))
    if _must_save_first(view, ready):
        return ()
    chosen = sorted(ready[: job.spec.nodes.max], key=lambda n: n.name in late)
    return (regroup.start(chosen, cause, regroup=members is not None),)
