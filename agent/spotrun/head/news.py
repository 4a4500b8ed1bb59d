"""What is new since the head's last turn: why the next turn comes, and which jobs it is about."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from spotrun.head import turn_timing
from spotrun.head.allocation.assignment import Assignment
from spotrun.head.job_state import JobState
from spotrun.head.view import FleetView, View


class News:
    """Wakes the head's loop. Most news is of one node, so the turn after it plans only the jobs of that node."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()  # a turn is due now
        self._nodes: set[str] = set()  # see `of_nodes`
        self._all = True  # something is new that may be about any job
        self._gap = 0.0  # seconds that the loop is busy with other things before the next turn
        self._due = 0.0  # when all jobs are planned at the latest, by the loop's clock

    def of_nodes(self, *nodes: str) -> None:
        """A node has reported more than progress, its connection has closed, or the cloud has news of its machine."""
        self._nodes.update(nodes)
        self.changed.set()

    def of_all(self) -> None:
        """Something else is new."""
        self._all = True
        self.changed.set()

    async def wait(self) -> frozenset[str] | None:
        """Wait until a turn is due. Returns what `take` returns."""
        await asyncio.sleep(self._gap)
        with contextlib.suppress(TimeoutError):
            # wait_for may swallow a cancellation.
            async with asyncio.timeout_at(self._due):
                await self.changed.wait()
        if asyncio.get_running_loop().time() >= self._due:
            self._all = True
        return self.take()

    def take(self) -> frozenset[str] | None:
        """The nodes that have news, if the next turn is about the jobs of these nodes only; None: about all jobs."""
        nodes = None if self._all else frozenset(self._nodes)
        self._nodes.clear()
        self._all = False
        self.changed.clear()
        return nodes

    def planned(self, nodes: frozenset[str] | None, took: float, active: bool) -> None:
        """A turn has ended. nodes: what it was about. took: seconds of processor time. active: whether there is a job.

        Only turns about all jobs count for the time until the next one.
        """
        self._gap = turn_timing.gap(took)
        if nodes is None:
            self._due = asyncio.get_running_loop().time() + turn_timing.tick(active, took)


def concerned(
    view: FleetView, nodes: frozenset[str] | None, settled: Mapping[str, View], before: Assignment, now: Assignment
) -> list[JobState]:
    """The jobs that a turn plans: those whose state or devices are new, and those of nodes that have news. Pure.

    nodes: as from `News.take`. settled: by job, the view in which planning it last changed nothing. before, now: the
    assignment of the last turn, and of this one.
    """
    return [job for job in view.jobs if nodes is None or _concerns(view, job, nodes, settled.get(job.id), before, now)]


def _concerns(
    view: FleetView, job: JobState, nodes: frozenset[str], last: View | None, before: Assignment, now: Assignment
) -> bool:
    if last is None or last.job is not job or now.of(job.id) != before.of(job.id):
        return True
    mine = {node.name for node in last.nodes}.union(member.node for member in job.last)
    return not nodes.isdisjoint(mine.union(now.expected.get(job.id, ()), view.reporting.get(job.id, ())))
