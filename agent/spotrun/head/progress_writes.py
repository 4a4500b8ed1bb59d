"""Writing the progress of jobs beside the head's turns. So a bucket that is slow for one job delays no other job.

No order follows from progress, so no order has to wait until progress is in the bucket.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from spotrun.errors import ConflictError, SpotrunError
from spotrun.head.events import Events
from spotrun.head.job_state import JobState
from spotrun.head.journal import Journal

log = logging.getLogger(__name__)

AT_ONCE = 4  # writes at the same time: other parts of the head need the bucket too


class ProgressWrites:
    """The writes that are under way, at most one for each job. states: the jobs as they are, by id."""

    def __init__(self, journal: Journal, events: Events, states: Callable[[], Mapping[str, JobState]]) -> None:
        self.tasks: dict[str, asyncio.Task[None]] = {}  # by job
        self._journal, self._events, self._states = journal, events, states
        self._turn = asyncio.Semaphore(AT_ONCE)

    def begin(self, job: JobState, now: float) -> None:
        """Write the job's state, if only its progress is new and was not written for some time."""
        if job.id not in self.tasks and self._journal.due(job, now) and not self._journal.urgent(job):
            self.tasks[job.id] = asyncio.create_task(self._write(job.id, now))

    def failures(self) -> list[tuple[str, Exception]]:
        """The jobs whose writes had an unexpected error. Raises `ConflictError` if another head has written."""
        found = []
        for job in [job for job, task in self.tasks.items() if task.done()]:
            try:
                self.tasks.pop(job).result()
            except ConflictError:
                raise
            except SpotrunError as error:  # the bucket does not answer; the next turn tries again
                log.warning("%s", error)
            except Exception as error:
                found.append((job, error))
        return found

    async def close(self) -> None:
        """End all writes."""
        tasks, self.tasks = list(self.tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, job: str, now: float) -> None:
        async with self._turn:
            await self._journal.write_progress(lambda: self._states().get(job), job, self._events.of(job), now)
