"""A drain: whether all members can still stop after its step in time, and what happens if they cannot. Pure.

If steps take much longer than before, the step may come too late. Then the members stop after an earlier one.

An order can come too late for a member: its workers have passed the step, and go on. Then either all members have
passed the step, and stop after a later one, or another member stops after the ordered step. In this second case nobody
gets to any later step, because each step needs all members. So this generation ends at once.
"""

from __future__ import annotations

from spotrun.head.job_state import Action, Drain, Release
from spotrun.head.planner import checkpointing, patience, regroup
from spotrun.head.planner.checkpointing import DRAIN_AHEAD
from spotrun.head.view import Node, View

LONGER = 2.0  # how many times longer than so far the step under way may take


def settled(view: View, reporting: list[Node]) -> list[Node]:
    """The members that have stopped, or ended, or have already joined the generation after the drain."""
    return [node for node in reporting if node.phase in ("drained", "failed", "succeeded")] + _joined(view)


def split(view: View, reporting: list[Node]) -> bool:
    """Whether some members have passed the step, others stop after it, and the state after it is safe.

    An agent of an older version does not say that its workers will stop. Then they have stopped when they are drained.
    """
    late, stopped = _late(view, reporting), _stopped(view, reporting)
    return bool(late) and bool(stopped or _joined(view)) and all(_has_state(view, node) for node in stopped)


def release(view: View, reporting: list[Node]) -> tuple[Release, ...]:
    """Free the workers of a drain that is `split`, as they wait for each other. (): none of them could go on."""
    job = view.job
    assert job.draining is not None
    if not regroup.could_leave(view):
        return ()
    names = ", ".join(node.name for node in _late(view, reporting))
    cause = job.draining.cause
    return (Release(cause.node, cause.kind, f"the stop after step {job.draining.step} came too late for {names}"),)


def later(view: View, reporting: list[Node]) -> tuple[Action, ...]:
    """Choose a later step if all members have passed this one."""
    job = view.job
    assert job.draining is not None
    late = _late(view, reporting)
    if any(node.work.stops is not None and node.work.stops > job.draining.step for node in reporting):
        return ()  # the order of an earlier step came too late: this member stops after the step ordered before
    newest = max((worker.step for node in reporting for worker in node.work.workers), default=-1)
    # No worker completes the step after this one if another worker has stopped before it.
    passed = len(late) == len(job.members) or newest > job.draining.step
    if not late or not passed or _stopped(view, reporting) or _joined(view):
        return ()
    step = checkpointing.ahead(view, reporting, 4 * DRAIN_AHEAD)
    return (Drain(step, job.draining.cause, job.draining.deadline),) if step > job.draining.step else ()


def sooner(view: View, reporting: list[Node]) -> tuple[Action, ...]:
    """Choose an earlier step if the ordered one may come after the deadline: the step under way takes very long.

    The earlier step leaves at most half of the steps that are left now. A short delay changes nothing.
    """
    job = view.job
    assert job.draining is not None
    if view.blind() or len(reporting) < len(job.members) or settled(view, reporting) or _late(view, reporting):
        return ()
    # The nodes of `spotrun.simulate` have reports that are later than now.
    reported_at = min(view.now, *(node.reported_at for node in reporting))
    newest, taken = job.progress.step, reported_at - job.progress.seen_at
    left = job.draining.step - newest
    if not job.progress.seen_at or LONGER * taken * left <= job.draining.deadline - view.now:
        return ()
    step = checkpointing.ahead(view, reporting, 4 * DRAIN_AHEAD, taken)
    return (Drain(step, job.draining.cause, job.draining.deadline),) if 2 * (step - newest) <= left else ()


def _joined(view: View) -> list[Node]:
    """The members that have already joined the generation after the drain. It may have newcomers too."""
    return [node for node in regroup.gone_on(view) if node in view.members()]


def _late(view: View, reporting: list[Node]) -> list[Node]:
    """The members for which the order came too late."""
    assert view.job.draining is not None
    return [node for node in reporting if node.work.late == view.job.draining.step]


def _stopped(view: View, reporting: list[Node]) -> list[Node]:
    """The members of this generation whose workers have stopped after the step, or will."""
    assert view.job.draining is not None
    step = view.job.draining.step
    return [node for node in reporting if node.work.stops == step or node.phase == "drained"]


def _has_state(view: View, node: Node) -> bool:
    """Whether the node holds the state after the step."""
    assert view.job.draining is not None
    return node.phase == "drained" or patience.state(node) >= (view.job.generation, view.job.draining.step)
