"""How long the head waits for a state: at most as long as the work in it took, plus a small constant. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from spotrun.head.job_state import JobState
from spotrun.head.planner import silence
from spotrun.head.planner.liveness import reports
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import FleetView, Node, View
from spotrun.wire import JobReport, StateRef


def at_stake(job: JobState) -> float:
    """Seconds of work that the newest checkpoint does not hold. The job's state is enough to compute this."""
    reached = max(job.reached, job.progress.step)
    return max(0, reached - max(0, job.newest[1])) * (job.progress.pace or job.pace)


def patience(job: JobState, most: float) -> float:
    """Seconds to wait for the state of the newest generation. most: an upper limit."""
    return min(most, at_stake(job) + TIMEOUTS.state_margin)


def unsaved(view: View) -> list[Node]:
    """Nodes, silent ones too, that hold a newer state than the bucket."""
    mine = (node for node in view.nodes if node.work.job == view.job.id and not node.gone)
    return [node for node in mine if state(node) > view.job.newest]


def may_return(view: View, node: Node) -> bool:
    """Whether the node reports, or is silent and may still come back with its state.

    It has `TIMEOUTS.silent` for that, but no longer than the work in the state took.
    """
    quiet = view.now - max(node.reported_at, view.awake_since)
    return reports(view, node) or (not node.gone and quiet <= min(TIMEOUTS.silent, at_stake(view.job)))


def out_of_reach(view: View, most: float) -> bool:
    """Whether nodes that hold the newest state have been silent for longer than that state is worth."""
    holders = unsaved(view)
    if not holders or any(reports(view, node) for node in holders):
        return False
    if all(silence.stopped(view, node.name) for node in holders):
        return True
    since = max(view.awake_since, *(node.reported_at for node in holders))
    return view.now - since > patience(view.job, most)


def hopeless(view: View | FleetView, job: JobState, work: JobReport) -> bool:
    """Whether a node has failed to upload its state for longer than that state is worth, and not only in an outage."""
    limit, trouble = patience(job, TIMEOUTS.save), work.trouble
    return trouble is not None and trouble.at - trouble.since > limit and view.now - view.able_since > limit


def overdue(view: View) -> bool:
    """Whether the time for the end of the job is over. After an outage of the head or the bucket, it begins again."""
    ending = view.job.ending
    if ending is None or ending.deadline == 0 or view.blind():
        return False
    return view.now > max(ending.deadline, view.able_since + TIMEOUTS.save)


def unreported(view: View) -> str:
    """What may be lost with members of the newest generation that have not reported to this head; "" if nothing."""
    job, known = view.job, {node.name for node in view.nodes}
    names = ", ".join(member.node for member in job.last if member.node not in known)
    if not names or at_stake(job) <= 0:
        return ""
    kept = f"the newest checkpoint is of step {job.newest[1]}" if job.checkpoints else "there is no checkpoint"
    return f"the state after step {job.reached} is lost, because these nodes do not report: {names}; {kept}"


def state(node: Node) -> tuple[int, int]:
    """Generation and step of the newest snapshot that a node holds; (-1, -1) if it holds none."""
    return held(node.work)


def held(work: JobReport) -> tuple[int, int]:
    """As `state`, from a node's report about a job."""
    ref = work.snapshot
    return (ref.generation, ref.step) if ref else (-1, -1)


def newest(nodes: Iterable[Node]) -> StateRef | None:
    """The newest snapshot that one of these nodes holds."""
    found = max(map(state, nodes), default=(-1, -1))
    return StateRef(generation=found[0], step=found[1]) if found > (-1, -1) else None
