"""When a generation stops because the cloud takes members. Pure.

If enough nodes remain for the job, the generation stops at once, and the next one goes on with these nodes. If not,
training goes on until enough other nodes are ready, at the latest until the last safe moment. After that moment, the
rest of the notice would be too short for a stop and the upload of the state to the bucket, as measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from spotrun.head.job_state import Cause
from spotrun.head.planner.checkpointing import DRAIN_AHEAD
from spotrun.head.planner.liveness import eligible, reports
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import Node, View

SAFETY = 1.5  # how many times longer than measured a stop or an upload may take
SNAPSHOT = 2.0  # seconds that a snapshot takes, until one has been measured
EARLY = 5.0  # seconds between two checkpoints at least, while all members leave
STAY = 10.0  # seconds that a member must have until its own stop, to be in one more generation


@dataclass(frozen=True)
class Departure:
    """Members leave. What the job does about it."""

    names: str  # of the members that leave
    kind: str  # as in `Cause`: preempt or end
    stop: bool  # whether the generation stops now
    last: float  # the last safe moment to order the stop, epoch seconds
    deadline: float  # when the head gives up the drain, if it is ordered now; epoch seconds
    save: bool  # whether a checkpoint should be taken now although training goes on
    reason: str  # why it stops, or what it trains on for

    @property
    def cause(self) -> Cause:
        """Why the generation ends, if it ends for this."""
        return Cause(kind=self.kind, node=self.names)


def decide(view: View) -> Departure | None:
    """What the job does about members that leave; None: no member leaves."""
    reporting = _reporting(view)
    leaving = [node for node in reporting if node.leaving]
    if not leaving:
        return None
    members = {member.node for member in view.job.members}
    others = [node for node in eligible(view) if node.name not in members]
    ready = [node for node in others if not view.job.regroups or node.waits]
    left = sum(not node.leaving and reports(view, node) for node in reporting) + len(ready)
    took = _stop(view)
    last = min(_last_moment(view, node, took) for node in leaving)
    noticed = any(node.under_notice for node in leaving)
    names = ", ".join(node.name for node in leaving)
    if left >= view.job.spec.nodes.min:
        stop, reason = True, f"{left} {'node is' if left == 1 else 'nodes are'} ready without {names}"
    elif any(node.phase == "failed" for node in reporting):
        stop, reason = True, f"{names} leaves, and training has stopped"
    elif not noticed:
        stop, reason = True, f"{names} retires"  # no successor is asked for while the machine is a member
    elif view.now >= last:
        stop, reason = True, f"{names} leaves, and the rest of the notice is just enough to stop and save"
    else:
        stop, reason = False, f"{names} leaves; {_waits(view, members, ready, last)}"
    return Departure(
        names=names,
        kind="preempt" if noticed else "end",
        stop=stop,
        last=last,
        deadline=_give_up(view, leaving),
        save=not stop and view.job.has_stepped and _worth_saving(view, len(leaving) == len(members)),
        reason=reason,
    )


def stays(view: View) -> list[Node]:
    """Members that leave, but not soon: they can be in one more generation, if too few others are there."""
    leaving = [node for node in _reporting(view) if node.under_notice and node.assigned and node.work.store]
    took = _stop(view) if leaving else (0.0, 0.0)
    return [node for node in leaving if reports(view, node) and _last_moment(view, node, took) - view.now > STAY]


def last_moment(end: float, step: float, snapshot: float, upload: float) -> float:
    """When a stop must be ordered at the latest, epoch seconds.

    end: when the machine ends, epoch seconds. step, snapshot, upload: the seconds that each takes, as measured.
    """
    return end - TIMEOUTS.drain_margin - SAFETY * (stop_time(step, snapshot) + upload)


def stop_time(step: float, snapshot: float) -> float:
    """Seconds from the order of a stop until all snapshots are committed: see `checkpointing.ahead` for the steps."""
    return DRAIN_AHEAD + min(2.0 * step, 1.0) + step + snapshot


def _reporting(view: View) -> list[Node]:
    return [node for node in view.members() if node is not None and node.work.generation == view.job.generation]


def _last_moment(view: View, node: Node, took: tuple[float, float]) -> float:
    """The last moment to order a stop for one member that leaves. took: seconds, as from `_stop`."""
    job, (step, snapshot) = view.job, took
    # An upload under way takes at least as long as it has taken so far. Jobs of one machine upload at the same time.
    upload = max(job.upload, view.now - job.saving.since if job.saving else 0.0) * max(1, len(node.report.jobs))
    return last_moment(_end(node), step, snapshot, upload)


def _stop(view: View) -> tuple[float, float]:
    """Seconds of a step and of a snapshot, as measured."""
    took = max((worker.took for node in _reporting(view) for worker in node.work.workers), default=0.0)
    return view.job.progress.pace or view.job.pace, took or SNAPSHOT


def _end(node: Node) -> float:
    """When the machine of a node that leaves ends."""
    notice = node.report.notice.deadline if node.under_notice and node.report.notice else None
    return min(end for end in (notice, node.due or None) if end is not None)


def _give_up(view: View, leaving: list[Node]) -> float:
    """When a drain that is ordered now is given up. After the machine's end, the drain gets the time of a stop."""
    ends = [_end(n) if n.under_notice else min(n.due, view.now + TIMEOUTS.drain) for n in leaving]
    found = min(ends) - TIMEOUTS.drain_margin
    return found if found > view.now else view.now + SAFETY * stop_time(*_stop(view))


def _worth_saving(view: View, all_leave: bool) -> bool:
    """Whether to take a checkpoint now: nobody knows yet how long one takes, or all members may go early."""
    job = view.job
    pause = max(EARLY, 4 * job.upload)
    return job.saving is None and (not job.upload or (all_leave and view.now - job.saved_at > pause))


def _waits(view: View, members: set[str], ready: list[Node], last: float) -> str:
    known = {node.name: node for node in view.nodes}
    there = {node.name for node in ready} | members
    coming = [name for name in view.conditions if name not in there and not (name in known and known[name].leaving)]
    what = "has warmed up" if view.job.regroups else "is ready"
    others = ", ".join(sorted(coming)) or "another node"
    what = what.replace("has", "have").replace("is", "are") if len(coming) > 1 else what
    return f"training goes on until {others} {what}, for at most {max(1.0, last - view.now):.0f} s"
