"""The head of `bench.scale`: the real head and its servers, on a folder as its bucket and a cloud in memory.

Commands come on stdin, a line each: `kill NODE`, `turns`. What is measured goes to stdout as JSON, a line each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles

from spotrun.cloud.base import Advice, Ended, Instance, Problem, Shortfall
from spotrun.head.agents import Send
from spotrun.head.fleet.classify import Condition
from spotrun.head.head import Head
from spotrun.head.server.serve import serve
from spotrun.head.view import FleetView
from spotrun.spec import ClusterSpec
from spotrun.store import Store

CLUSTER, POOL, ZONE, DEVICES = "scale", "p", "local-a", 8


class ScaleCloud:
    """One pool, whose machines are made at once. A killed one is not replaced."""

    def __init__(self) -> None:
        self._size = 0
        self._made: list[Instance] = []
        self._killed: set[str] = set()

    async def nodes(self) -> list[Instance]:
        return [each for each in self._made[: self._size] if each.name not in self._killed]

    async def ended(self) -> list[Ended]:
        return []

    async def sizes(self) -> dict[str, int]:
        return {POOL: self._size}

    async def resize(self, pool: str, size: int) -> None:
        self._size = size
        for index in range(len(self._made), size):
            name = node_name(index)
            self._made.append(Instance(name, POOL, ZONE, "127.0.0.1", "running", "spot", time.time(), name))

    async def remove(self, names: Sequence[str]) -> None:
        self._killed.update(names)

    async def recreate(self, names: Sequence[str]) -> None:
        pass

    async def preempt(self, name: str, notice: float | None = None) -> None:
        self.kill(name)

    def kill(self, name: str) -> None:
        """The machine is gone from now on."""
        self._killed.add(name)

    async def prices(self) -> dict[str, float]:
        return {POOL: 1.0}

    async def advice(self) -> dict[str, Advice]:
        return {}

    async def problems(self) -> list[Problem]:
        return []

    async def shortfalls(self) -> list[Shortfall]:
        return []

    async def close(self) -> None:
        pass


class MeasuredHead(Head):
    """A head that notes how long its turns take, and when it ends or begins a generation."""

    wall: list[float]
    cpu: list[float]
    generations: dict[str, tuple[int, int]]

    async def _turn(self, now: float, nodes: frozenset[str] | None = None) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        await super()._turn(now, nodes)
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.thread_time() - cpu)

    def _order(self, view: FleetView, conditions: Mapping[str, Condition]) -> None:
        super()._order(view, conditions)
        for job in self.states.values():
            found = (job.generation, len(job.interruptions))
            if self.generations.get(job.id) != found:
                self.generations[job.id] = found
                say(at=time.time(), job=job.id, generation=found[0], interruptions=found[1])

    def disconnect(self, node: str, send: Send) -> None:
        say(at=time.time(), lost=node)
        super().disconnect(node, send)

    def tell(self) -> None:
        """Say how long the turns took since the last time."""
        wall, cpu = self.wall, self.cpu
        self.wall, self.cpu = [], []
        say(turns=len(wall), wall=summary(wall), cpu=summary(cpu))


def summary(seconds: list[float]) -> tuple[float, float]:
    """Median and 95th percentile in milliseconds."""
    if len(seconds) < 2:
        return (0.0, 0.0)
    return 1000 * median(seconds), 1000 * quantiles(seconds, n=20)[-1]


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def node_name(index: int) -> str:
    return f"{POOL}-{index}"


def cluster(agents: int) -> ClusterSpec:
    """A cluster of one pool for so many agents."""
    pool = {"name": POOL, "zone": ZONE, "max": agents, "devices": DEVICES}
    return ClusterSpec.model_validate({"name": CLUSTER, "cloud": "local", "pools": [pool]})


async def run(folder: Path, agents: int, port: int) -> None:
    cloud = ScaleCloud()
    head = MeasuredHead(cluster(agents), Store(str(folder / "bucket")), cloud, epoch=1, poll_seconds=5.0)
    head.wall, head.cpu, head.generations = [], [], {}

    def obey(words: list[str]) -> None:
        if words == ["turns"]:
            head.tell()
        else:
            cloud.kill(words[1])

    obey_lines(obey)
    await serve(head, "127.0.0.1", folder / "control", port, on_serving=lambda where: say(serving=where))


def obey_lines(obey: Callable[[list[str]], None]) -> None:
    """Have the running loop call `obey` with the words of each line on stdin."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(obey, line.split())

    threading.Thread(target=read, daemon=True).start()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("agents", type=int)
    parser.add_argument("port", type=int)
    found = parser.parse_args()
    asyncio.run(run(found.folder, found.agents, found.port))
