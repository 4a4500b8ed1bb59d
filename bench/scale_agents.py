"""Simulated agents of `bench.scale`: each has the real connection to the head, and workers that only count steps.

Commands come on stdin, a line each: `lose NODE` (its connection closes), `fail NODE JOB` (a collective fails there).
Each new order is a JSON line on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from asyncio import sslproto
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bench.scale_head import CLUSTER, DEVICES, POOL, ZONE, node_name, obey_lines, say
from spotrun.changes import Inbox, OrderChange
from spotrun.machine.metadata import Identity
from spotrun.node.connection import Connection
from spotrun.store import Store
from spotrun.wire import Failure, JobOrder, JobReport, Order, Report, Worker

PUBLISH_EVERY = 0.5  # seconds between two reports of progress, as a real agent's heartbeats
PACE = 0.1  # seconds a step


class SharedInbox(Inbox):
    """Parses a message once for all agents of this process that get it: a real agent has a processor of its own."""

    _shared = staticmethod(lru_cache(maxsize=64)(Inbox()._parse))

    def _parse(self, text: str) -> Order | OrderChange:
        return self._shared(text)


class SharedConnection(Connection):
    """A connection whose messages others may have parsed."""

    make_inbox = SharedInbox


@dataclass
class Work:
    """One job on one node."""

    order: JobOrder
    ranks: tuple[int, ...] = ()
    began: float = 0.0  # when the workers of the newest generation began
    failed: bool = False


class Agent:
    """A node that carries out each order at once."""

    def __init__(self, name: str, store: Store) -> None:
        self.name, self.work = name, dict[str, Work]()
        identity = Identity(name, ZONE, "127.0.0.1", name)
        self.connection = SharedConnection(store, CLUSTER, identity, self.obey)
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, delay: float) -> None:
        """Connect after `delay` seconds, and report until the connection is lost on purpose."""
        await asyncio.sleep(delay)
        self.connection.publish(self.report())
        self._tasks = [asyncio.create_task(work) for work in (self.connection.run(), self._step())]
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(PUBLISH_EVERY)
            self.connection.publish(self.report())

    def lose(self) -> None:
        """Close the connection, and never connect again."""
        for task in self._tasks:
            task.cancel()

    def fail(self, job: str) -> None:
        """A collective of this job fails here."""
        self.work[job].failed = True
        self.connection.publish(self.report())

    def obey(self, order: Order) -> None:
        """Take an order."""
        at, before = time.time(), self.work
        self.work = {}
        for each in order.jobs:
            work = before.get(each.bundle.id) or Work(each)
            old, new = work.order.generation if work.ranks else None, each.generation
            work.order = each
            if new is None:
                work.ranks = ()
            elif old is None or new.number > old.number:
                place = next((i for i, member in enumerate(new.members) if member.node == self.name), None)
                count = len(each.devices) or DEVICES
                work.ranks = () if place is None else tuple(range(place * count, (place + 1) * count))
                work.began, work.failed = time.time(), False
            self.work[each.bundle.id] = work
        jobs = {
            j: [w.order.generation.number if w.order.generation else 0, w.order.stop_at] for j, w in self.work.items()
        }
        say(at=at, node=self.name, jobs=jobs)
        self.connection.publish(self.report())

    def report(self) -> Report:
        """What the node does."""
        return Report(
            node=self.name, boot="b", pool=POOL, zone=ZONE, address="127.0.0.1", devices=DEVICES,
            jobs=tuple(self._job(job, work) for job, work in self.work.items()),
        )  # fmt: skip

    def _job(self, job: str, work: Work) -> JobReport:
        store, generation = f"{self.name}:1", work.order.generation
        if not work.ranks or generation is None:
            return JobReport(job=job, phase="ready", store=store)
        now, stop_at = time.time(), work.order.stop_at
        if work.failed:
            failure = Failure(kind="peer", rank=work.ranks[0], at=now, message="a peer is gone")
            return JobReport(job=job, phase="failed", store=store, generation=generation.number, failure=failure)
        step = int((now - work.began) / PACE)
        if stop_at is not None and step >= stop_at:
            return JobReport(job=job, phase="drained", store=store, generation=generation.number)
        return JobReport(
            job=job,
            phase="running",
            devices=work.order.devices or tuple(range(DEVICES)),
            generation=generation.number,
            store=store,
            workers=tuple(self._worker(rank, step, now, work.began) for rank in work.ranks),
        )

    def _worker(self, rank: int, step: int, now: float, began: float) -> Worker:
        first = began + PACE if step > 0 else 0.0
        return Worker(
            rank=rank, pid=1000 + rank, step=step, base=0, stepped_at=now if step else 0.0, samples=64.0 * step,
            total_steps=10**7, metrics={"loss": 1 / (1 + step)}, phases=(began, began, began, began, first),
            stall=0.001 * step, stepping=now - began, took=0.05,
        )  # fmt: skip


async def run(folder: Path, first: int, count: int) -> None:
    sslproto.SSLProtocol.max_size = 16 * 1024  # as in the head, because this process has hundreds of connections
    gc.set_threshold(200_000, 20, 20)
    store = Store(str(folder / "bucket"))
    agents = {name: Agent(name, store) for name in map(node_name, range(first, first + count))}

    def obey(words: list[str]) -> None:
        if words[0] == "lose":
            agents[words[1]].lose()
        else:
            agents[words[1]].fail(words[2])

    obey_lines(obey)
    await asyncio.gather(*(agent.run(index * 0.02) for index, agent in enumerate(agents.values())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    found = parser.parse_args()
    asyncio.run(run(found.folder, found.first, found.count))
