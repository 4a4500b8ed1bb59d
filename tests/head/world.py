"""The real head on a bucket in a folder, with a cloud in memory; nodes are reports, orders are what it sends back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import ClientSession, UnixConnector, web

from spotrun.cloud.base import Advice, Ended, Instance, Problem
from spotrun.errors import CloudError, PartialError, SpotrunError
from spotrun.head.clock import Clock
from spotrun.head.events import Event
from spotrun.head.fleet.record import Replacement
from spotrun.head.fleet.replacements import Record
from spotrun.head.head import Head
from spotrun.head.job_state import JobState
from spotrun.head.server.control import ControlServer
from spotrun.head.timeouts import TIMEOUTS
from spotrun.spec import ClusterSpec
from spotrun.store import Store, job_key, queue_key, replaced_key
from spotrun.wire import Order, Report, Worker, read_queue

T = TypeVar("T")

CODE = "0" * 64
JOB: dict[str, Any] = {"name": "toy", "script": "train.py", "nodes": {"min": 2, "max": 2}}


class MemoryCloud:
    """Two pools; a resize is carried out at once, a recreate never is. refuse: pools that cannot be resized. out:
    pools whose zone does not answer: why. made, ends: when machines were made again, and when they end.
    loose: machines that run although their pool does not count them, with their pools."""

    def __init__(self) -> None:
        self.size = {"p": 0, "q": 0}
        self.refuse: set[str] = set()
        self.out: dict[str, str] = {}
        self.made: dict[str, float] = {}
        self.ends: dict[str, float] = {}
        self.loose: dict[str, str] = {}
        self.room: dict[str, int] = {}  # machines that a pool can have at the most, whatever its size
        self.silent: set[str] = set()  # what cannot be asked: prices, problems, advice, ended
        self.price: dict[str, float] = {"p": 1.0, "q": 2.0}
        self.said: dict[str, Advice] = {}
        self.lacks: list[Problem] = []  # what keeps pools from their sizes
        self.refusal: str | Exception = ""  # what a recreate is refused with
        self.over: list[Ended] = []  # machines of which the cloud says when they ended
        self.hold = asyncio.Event()  # a recreate waits for it
        self.hold.set()
        self.calls: list[tuple[str, Any]] = []

    async def nodes(self) -> list[Instance]:
        there = {pool: min(size, self.room.get(pool, size)) for pool, size in self.size.items()}
        names = [(pool, f"{pool}-{i}") for pool, size in there.items() for i in range(size)]
        names += [(pool, name) for name, pool in self.loose.items()]
        found = [
            Instance(n, p, "z", "127.0.0.1", "running", "spot", self.made.get(n, 1.0), n, self.ends.get(n, 0.0))
            for p, n in names
        ]
        return self.told([each for each in found if each.pool not in self.out])

    async def ended(self) -> list[Ended]:
        self.throttle("ended")
        return list(self.over)

    async def sizes(self) -> dict[str, int]:
        return self.told({pool: size for pool, size in self.size.items() if pool not in self.out})

    def told(self, known: T) -> T:
        if self.out:
            raise PartialError(known, self.out)
        return known

    async def resize(self, pool: str, size: int) -> None:
        self.calls.append(("resize", (pool, size)))
        assert pool not in self.out
        if pool in self.refuse:
            raise CloudError(f"pool {pool}: no quota")
        self.size[pool] = size

    async def remove(self, names: Sequence[str]) -> None:
        self.calls.append(("remove", tuple(names)))

    async def recreate(self, names: Sequence[str]) -> None:
        self.calls.append(("recreate", tuple(names)))
        await self.hold.wait()
        if self.refusal:
            raise self.refusal if isinstance(self.refusal, Exception) else CloudError(self.refusal)

    async def preempt(self, name: str, notice: float | None = None) -> None:
        self.calls.append(("preempt", name))

    async def prices(self) -> dict[str, float]:
        self.throttle("prices")
        return dict(self.price)

    async def advice(self) -> Mapping[str, Advice]:
        self.throttle("advice")
        return self.said

    async def problems(self) -> list[Problem]:
        self.throttle("problems")
        return list(self.lacks)

    def throttle(self, what: str) -> None:
        if what in self.silent:
            raise CloudError(f"{what}: Rate exceeded")

    async def close(self) -> None:
        pass


class World:
    """A bucket, a cloud, and the head of the moment. Turns are made one by one: nothing here waits for a clock."""

    def __init__(self, root: Path) -> None:
        pools = [{"name": name, "zone": "local-a", "max": 4} for name in ("p", "q")]
        self.cluster = ClusterSpec.model_validate({"name": "c", "cloud": "local", "pools": pools})
        self.store = Store(str(root))
        self.cloud = MemoryCloud()
        self.root = root
        self.clock: Callable[[], float] = Clock()
        self.orders: dict[str, list[Order]] = {}
        self.sends: dict[str, Callable[[Order], None]] = {}
        self.head = self.new_head()

    def new_head(self, epoch: int = 1) -> Head:
        self.head = Head(self.cluster, self.store, self.cloud, epoch, clock=self.clock)
        self.head.presence.began = self.head.presence.awake_since = self.clock() - 100
        return self.head

    def receive(self, name: str, link: str = "", **values: Any) -> None:
        report: dict[str, Any] = {
            "node": name,
            "boot": "b",
            "pool": "p",
            "zone": "z",
            "address": "127.0.0.1",
        }
        report |= {"job": None, "store": f"{name}:1"}  # the keys of one job may be given beside those of the node
        received = self.orders.setdefault(name + link, [])
        send = self.sends.setdefault(name + link, received.append)
        self.head.receive(Report.model_validate({**report, "phase": "ready", **values}), send)

    def unfit(self, name: str, why: str = "no driver") -> None:
        """It has said for long enough that it is unfit."""
        self.receive(name, phase="unfit", unfit=[why], store="")
        self.head.agents.known[name].since -= TIMEOUTS.unfit

    @property
    def recreated(self) -> list[str]:
        """Machines about which the cloud was asked."""
        return [name for call, names in self.cloud.calls if call == "recreate" for name in names]

    def replaced(self) -> list[Replacement]:
        """What the bucket says of them."""
        data = self.store.find(replaced_key("c"))
        return list(Record.model_validate_json(data).machines) if data else []

    async def with_machines(self, **nodes: int) -> str:
        """A job whose machines are there, as the head knows; none has reported."""
        job = await self.head.submit({**JOB, **({"nodes": nodes} if nodes else {})}, CODE)
        await self.turn()
        await self.look()
        await self.look()
        await self.turn()
        return job

    def events(self) -> list[Event]:
        """Those that the status document would show."""
        return self.head.events.seen_from(self.head.job)

    async def turn(self, times: int = 1) -> None:
        for _ in range(times):
            await self.head._turn(self.clock())
            if tasks := self.head.completions.tasks:
                await asyncio.gather(*tasks.values())
                await self.head._turn(self.clock())
            await asyncio.gather(*self.head.progress_writes.tasks.values(), return_exceptions=True)

    async def look(self) -> None:
        """One look of the scaler."""
        await self.head.scaler.look()

    async def started(self) -> JobState:
        """A job whose first generation runs on a and b."""
        job = await self.head.submit(JOB, CODE)
        await self.turn()
        for name in ("a", "b"):
            self.receive(name, job=job)
        await self.turn()
        assert self.head.job is not None
        assert self.head.job.current is not None
        return self.head.job

    def queue(self) -> list[str]:
        """The queue as the bucket has it."""
        return list(read_queue(self.store.find(queue_key("c"))).jobs)

    def written(self, job: str) -> JobState:
        return JobState.model_validate_json(self.store.get(job_key(job, "state.json")))


def stepping(step: int) -> tuple[Worker, ...]:
    return (Worker(rank=0, pid=1, step=step, base=0, stepped_at=time.time()),)


def rewrite(world: World, key: str, change: Callable[[Any], Any]) -> None:
    world.store.put(key, json.dumps(change(json.loads(world.store.get(key)))).encode())


async def phases(world: World, head: Head) -> list[tuple[str, str]]:
    """The jobs that the head lists, with their phases."""
    return [(each["id"], each["phase"]) for each in await asked(world, head, "jobs")]


async def asked(world: World, head: Head, verb: str, job: str | None = None, **more: Any) -> Any:
    """The answer of the head's control socket. more: other keys of the request."""
    runner = web.AppRunner(ControlServer(head).app())
    await runner.setup()
    path = str(world.root / "s")
    try:
        await web.UnixSite(runner, path).start()
        async with ClientSession(connector=UnixConnector(path)) as session:
            posts = verb.partition("?")[0] not in ("jobs", "status", "metrics")
            call = session.post if posts else session.get
            async with call(f"http://head/{verb}", **({"json": {"job": job, **more}} if posts else {})) as response:
                if response.status != 200:
                    raise SpotrunError(await response.text())
                return await response.json()
    finally:
        await runner.cleanup()
        (world.root / "s").unlink(missing_ok=True)
