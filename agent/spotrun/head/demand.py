"""How many machines the jobs want: `needed` is pure."""

from __future__ import annotations

from collections.abc import Sequence

from spotrun.head.job_state import JobState
from spotrun.head.planner import idle
from spotrun.head.timeouts import TIMEOUTS


def needed(queue: Sequence[str] | None, job: JobState | None, busy: bool, now: float) -> int | None:
    """Machines wanted now; None: change nothing yet (the queue is not read, or logs or state are still uploaded).

    queue: ids of the jobs not yet ended; None if it is not read yet. job: the active one, or the one that ended last.
    busy: whether an agent still holds a job.
    """
    if queue is None or (job is not None and job.ending is not None):
        return None
    if idle.resting(job):
        return 0
    if job is not None and not job.ended_already:
        nodes = job.spec.nodes
        return nodes.max + nodes.spares
    if queue and (job is None or queue[0] != job.id):
        return None
    ended = job.ended if job and job.ended else 0.0
    return None if busy and now - ended < TIMEOUTS.last_logs else 0
