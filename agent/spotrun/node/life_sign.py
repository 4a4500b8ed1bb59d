"""A node's sign of life in the bucket. When no node reports to the head, the signs show which nodes are alive.

A separate task writes the sign as long as the agent has a job. The sign also has the newest step, so the head sees that
a job trains on although its connections to the head are cut.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from pydantic import ValidationError

from spotrun.errors import SpotrunError
from spotrun.node.agent import Agent
from spotrun.spec import JobSpec
from spotrun.store import alive_key
from spotrun.wire import AliveJob, AliveRecord, Bundle, JobReport

log = logging.getLogger(__name__)

LOOK = 0.5  # seconds between checks whether a sign is due
LAST = 3.0  # seconds that the bucket gets to remove the sign when the agent ends


class LifeSign:
    """The sign of life of one node."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._key = alive_key(agent.cluster, agent.identity.name)
        self._jobs: tuple[str, ...] = ()  # the jobs that the sign in the bucket names
        self._at = 0.0  # when the sign was written, by the event loop's clock
        self._intervals: dict[str, float | None] = {}  # by job id; None: the job file is malformed
        self._warned = ""
        self._lock, self._ended = threading.Lock(), False

    async def run(self) -> None:
        """Write the sign at the job's interval, until cancelled. If the bucket does not answer, log that."""
        now = asyncio.get_running_loop().time
        while True:
            record = self._record()
            if record is not None and (_jobs(record) != self._jobs or now() - self._at >= record.every):
                self._at = now()
                await self._try(self._write, record)
            elif record is None and self._jobs:
                await self._try(self._remove)
            await asyncio.sleep(LOOK)

    async def end(self) -> None:
        """Remove the sign, because the agent ends in an orderly way."""
        self._ended = True
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST):
                await self._try(self._remove)

    async def _try(self, work: Callable[..., None], *args: object) -> None:
        try:
            await asyncio.to_thread(work, *args)
        except SpotrunError as error:
            if str(error) != self._warned:
                log.warning("sign of life: %s", error)
            self._warned = str(error)

    def _write(self, record: AliveRecord) -> None:
        with self._lock:  # without the lock, a write that is under way could end after the last removal
            if not self._ended:
                self._agent.store.put(self._key, record.model_dump_json().encode())
                self._jobs = _jobs(record)

    def _remove(self) -> None:
        with self._lock:
            self._agent.store.delete([self._key])
            self._jobs = ()

    def _record(self) -> AliveRecord | None:
        """The sign that is due; None: no job has begun."""
        report, bundles = self._agent.connection.newest_report, self._agent.bundles
        self._intervals = {each.id: self._intervals.get(each.id) or _interval(each) for each in bundles}
        works = [work for work in report.jobs if self._intervals.get(work.job)] if report is not None else []
        if report is None or not works:
            return None
        jobs = tuple(_newest(work) for work in works)
        return AliveRecord(
            node=report.node,
            boot=report.boot,
            at=time.time(),
            every=min(self._intervals[each.job] or 0.0 for each in jobs),
            jobs=jobs,
            **jobs[0].model_dump(),
        )


def _newest(work: JobReport) -> AliveJob:
    step = max((worker.step for worker in work.workers), default=-1)
    return AliveJob(job=work.job, generation=work.generation, step=step)


def _interval(bundle: Bundle) -> float | None:
    """Seconds between two signs; None: the job file is malformed, so the job never begins here."""
    try:
        return JobSpec.kept(bundle.job).sign_interval
    except ValidationError:
        return None


def _jobs(record: AliveRecord) -> tuple[str, ...]:
    return tuple(each.job for each in record.jobs)
