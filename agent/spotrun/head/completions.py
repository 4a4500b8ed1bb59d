"""When a checkpoint is complete: all its parts are in the bucket (`manifests`, pure), and its manifest too.

Manifests are written beside the head's turns, so a slow bucket delays no other job.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable

from spotrun.errors import ConflictError, StoreError
from spotrun.head.job_state import JobState, saved
from spotrun.head.journal import Journal
from spotrun.wire import JobReport, Manifest, Part, StateRef

log = logging.getLogger(__name__)

AGAIN = 1.0  # seconds until the next try after the bucket has refused

Completed = tuple[Manifest, tuple[StateRef, ...]]  # with the checkpoints of the job that are complete then


class Completions:
    """The manifests that are being written, at most one of each job. done: called when one has been written."""

    def __init__(self, journal: Journal, done: Callable[[], None]) -> None:
        self.tasks: dict[str, asyncio.Task[Completed | None]] = {}  # by job
        self._journal, self._done = journal, done

    def advance(self, job: JobState, reports: Iterable[JobReport], now: float) -> tuple[JobState, Manifest | None]:
        """Begin to complete a checkpoint that has all its parts. Returns the job with one that is complete now."""
        task = self.tasks.get(job.id)
        if task is None:
            for manifest in manifests(job, reports, now)[:1]:
                self.tasks[job.id] = task = asyncio.create_task(self._complete(manifest, job.spec.keep_checkpoints))
                task.add_done_callback(lambda _: self._done())
            return job, None
        if not task.done():
            return job, None
        del self.tasks[job.id]
        if (found := task.result()) is None:
            return job, None
        manifest, complete = found
        mine = (part for each in reports for part in each.parts)
        took = (part.took for part in mine if (part.generation, part.step) == (manifest.generation, manifest.step))
        return saved(job, complete, manifest, now, max(took, default=0.0)), manifest

    def forget(self, job: str) -> None:
        """Forget a job. Its manifest is not awaited any more."""
        if task := self.tasks.pop(job, None):
            task.cancel()

    async def close(self) -> None:
        """End all tasks."""
        tasks, self.tasks = list(self.tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _complete(self, manifest: Manifest, keep: int) -> Completed | None:
        try:
            return manifest, tuple(await self._journal.complete(manifest, keep))
        except (StoreError, ConflictError) as error:
            log.warning("%s", error)
            await asyncio.sleep(AGAIN)
            return None


def manifests(job: JobState, reports: Iterable[JobReport], now: float) -> list[Manifest]:
    """A manifest for each checkpoint that has all its parts and is newer than every complete checkpoint.

    Older ones do not count: the last report of a disconnected node may name a checkpoint that has been removed.
    """
    found: dict[tuple[int, int, int], dict[int, Part]] = defaultdict(dict)
    for report in reports:
        for part in report.parts:
            found[(part.generation, part.step, part.parts)][part.index] = part
    return [
        Manifest(
            job=job.id,
            generation=generation,
            step=step,
            created=now,
            files=tuple(file for index in sorted(parts) for file in parts[index].files),
        )
        for (generation, step, count), parts in sorted(found.items())
        if len(parts) == count and set(parts) == set(range(count)) and (generation, step) > job.newest
        if len({part.whole for part in parts.values()}) == 1
    ]
