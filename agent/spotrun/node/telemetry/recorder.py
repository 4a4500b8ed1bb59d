"""Measures the machine every few seconds, and puts the values into the bucket of each job that is here.

A block (jobs/<id>/system/<node>/<milliseconds>.jsonl.zst) is JSON lines: a header, then a line for each reading. Blocks
are never rewritten. A block is short while a job is young, so that a page soon has something to show. If the agent is
killed, the readings of the last block are lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import zstandard

from spotrun.errors import StoreError
from spotrun.node.agent import Agent
from spotrun.node.telemetry.sensors import Sensors
from spotrun.store import Store, system_key

log = logging.getLogger(__name__)

FORMAT = 1
EVERY = 5.0  # seconds between two readings
SHORTEST, LONGEST = 5.0, 60.0  # seconds between two blocks: at the beginning of a job, and in the long run
SLOWER = 10.0  # the length of a block is the time since the job came, divided by this
WAITING = 720  # readings that wait for the bucket: an hour. Beyond that the oldest ones are dropped
LAST = 3.0  # seconds that the last blocks get when the agent ends


class Recorder:
    """The telemetry of one node."""

    def __init__(self, agent: Agent, sensors: Sensors) -> None:
        self._agent, self._sensors = agent, sensors
        self._logs: dict[str, Readings] = {}  # by job
        self._warned = ""

    async def run(self) -> None:
        """Read and upload until cancelled. A bucket that does not answer delays no reading."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read())
            tasks.create_task(self._upload())

    async def end(self) -> None:
        """Upload what there is, because the agent ends in an orderly way."""
        try:
            async with asyncio.timeout(LAST):
                await asyncio.gather(*map(self._try, self._logs.values()))
        except TimeoutError:
            log.warning("telemetry: the last readings were not uploaded")

    async def _read(self) -> None:
        began = asyncio.get_running_loop().time()
        for number in range(1, 1 << 62):
            jobs = self._agent.ranks()
            if not jobs:  # nobody would look at the values
                self._agent.measured({})
            else:
                try:
                    values = await asyncio.to_thread(self._sensors.read)
                except Exception as error:  # a sensor must not end the agent
                    self._complain(f"this machine is not measured: {error!r}")
                    values = {}
                self._agent.measured(values)
                for job, ranks in jobs.items() if values else ():
                    self._readings(job).add(values, ranks)
            due = began + number * EVERY
            await asyncio.sleep(max(0.5, due - asyncio.get_running_loop().time()))

    async def _upload(self) -> None:
        while True:
            jobs = self._agent.ranks()
            for job, readings in list(self._logs.items()):
                gone = job not in jobs
                if gone or self._agent.under_notice or readings.due(time.monotonic()):
                    await self._try(readings)
                if gone and not readings.waiting:
                    del self._logs[job]
            await asyncio.sleep(1.0)

    async def _try(self, readings: Readings) -> None:
        """Upload the readings. If the upload fails, the readings wait for the next try."""
        readings.sent = time.monotonic()
        lines = readings.begin()
        if not lines:
            return
        try:
            await asyncio.to_thread(readings.put, self._agent.store, lines)
        except StoreError as error:
            self._complain(str(error))
        else:
            self._warned = ""
            readings.drop()

    def _complain(self, problem: str) -> None:
        if problem != self._warned:
            log.warning("telemetry: %s", problem)
        self._warned = problem

    def _readings(self, job: str) -> Readings:
        if job not in self._logs:
            identity = self._agent.identity
            where = {"node": identity.name, "boot": self._agent.boot, "pool": self._agent.pool, "zone": identity.zone}
            gpus = self._sensors.gpus.names()
            self._logs[job] = Readings({"format": FORMAT, "job": job, **where, "gpus": gpus, "every": EVERY})
        return self._logs[job]


class Readings:
    """The readings for one job that are not in the bucket yet. header: the first line of each block."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        self.waiting: list[bytes] = []  # lines
        self._block: list[bytes] = []  # the lines of the block that is on its way
        self._header = header
        self._began = self.sent = time.monotonic()

    def add(self, values: Mapping[str, Any], ranks: Mapping[int, tuple[int, float, float]]) -> None:
        """Add a reading. ranks: as in `WorkerGroup.ranks`."""
        own = {str(rank): [steps, round(whole, 4), round(alone, 4)] for rank, (steps, whole, alone) in ranks.items()}
        self.waiting.append(json.dumps({**values, "ranks": own} if own else values, separators=(",", ":")).encode())
        del self.waiting[:-WAITING]

    def due(self, now: float) -> bool:
        """Whether a block is long enough. now: monotonic."""
        interval = min(LONGEST, max(SHORTEST, (now - self._began) / SLOWER))
        return bool(self.waiting) and now - self.sent >= interval

    def begin(self) -> list[bytes]:
        """The lines of the next block. After an upload that failed they are the same: it may have succeeded."""
        self._block = self._block or list(self.waiting)
        return self._block

    def put(self, store: Store, lines: Sequence[bytes]) -> None:
        """Put lines into the bucket, as a block. Waits for the bucket. Raises `StoreError`."""
        first = int(json.loads(lines[0])["time"] * 1000)
        text = b"\n".join([json.dumps(self._header).encode(), *lines, b""])
        # Created, not replaced: after an answer that got lost, the block is there already.
        store.create(system_key(self._header["job"], self._header["node"], first), zstandard.compress(text))

    def drop(self) -> None:
        """Forget the lines of the block: it is in the bucket."""
        done = set(self._block)
        self.waiting, self._block = [line for line in self.waiting if line not in done], []
