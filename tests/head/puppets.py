"""Nodes that obey the real head without processes: they step, drain, save and lose what they are not told to keep.

Time stands still between two rounds. A puppet has no guard of its own: a head that orders two jobs onto one device is
found out at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotrun.folders import FoldersRef, Keeping
from spotrun.head.job_state import JobState
from spotrun.spec import ClusterSpec
from spotrun.wire import Failure, JobOrder, JobReport, Order, Part, Place, Report, StateRef, Worker
from tests.head.world import CODE, World

ROUND = 0.3  # seconds between two rounds
SNAPSHOT_EVERY = 5  # steps


@dataclass
class Work:
    """One job on one puppet."""

    order: JobOrder
    generation: int = 0
    running: bool = False
    drained: bool = False
    done: bool = False
    base: int = 0
    step: int = 0
    began: float = 0.0
    devices: tuple[int, ...] = ()
    snapshot: StateRef | None = None
    trouble: str = ""  # why its folders do not get into the bucket yet
    problem: str = ""  # what is wrong with its folders
    failure: Failure | None = None  # of the script, in this generation
    parts: dict[int, Part] = field(default_factory=dict)


class Puppet:
    """A node."""

    def __init__(self, name: str, devices: int) -> None:
        self.name, self.devices = name, devices
        self.boot = f"boot of {name}"
        self.work: dict[str, Work] = {}
        self.misfits: set[str] = set()  # jobs that cannot be set up here
        self.lies: set[str] = set()  # jobs about which it reports a step with which nobody can calculate
        self.orders: list[Order] = []
        self.send: Callable[[Order], None] = self.orders.append  # always the same object: it stands for the connection

    def obey(self) -> None:
        """End what the newest order does not have, then begin what it has."""
        if not self.orders:
            return
        order = self.orders[-1]
        self.work = {job: work for job, work in self.work.items() if order.job(job) or job in order.parked}
        for each in order.jobs:
            work = self.work.setdefault(each.bundle.id, Work(each))
            work.order = each
            if each.generation is None or self._rank(each) is None or each.generation.number > work.generation:
                work.running = False
                work.devices = ()
        for work in self.work.values():
            self._begin(work)

    def _rank(self, order: JobOrder) -> int | None:
        assert order.generation is not None
        members = order.generation.members
        return next((i for i, each in enumerate(members) if (each.node, each.boot) == (self.name, self.boot)), None)

    def _begin(self, work: Work) -> None:
        generation = work.order.generation
        if generation is None or self._rank(work.order) is None or generation.number <= work.generation:
            return
        wanted = work.order.devices or tuple(range(self.devices))
        for job, other in self.work.items():
            lives = other.running and not (other.done or other.drained)
            if other is not work and lives and set(other.devices) & set(wanted):
                raise AssertionError(f"{self.name}: {work.order.bundle.id} starts on devices {wanted} of {job}")
        work.generation, work.running, work.drained, work.done = generation.number, True, False, False
        work.failure = None
        work.base, work.step, work.devices = -1, -1, wanted

    def report(self, now: float) -> Report:
        """What the node does."""
        jobs = [
            _misfit(job, now) if job in self.misfits else _job_report(self.name, job, work, now)
            for job, work in self.work.items()
        ]
        jobs = [_lie(each) if each.job in self.lies else each for each in jobs]
        return Report(
            node=self.name, boot=self.boot, pool=self.name.split("-")[0], zone="z", address="127.0.0.1",
            devices=self.devices, jobs=tuple(jobs),
        )  # fmt: skip


class Theatre(World):
    """A head, and a puppet for each machine of its cloud. total: steps of each job. eager: see `round`."""

    def __init__(
        self, root: Path, machines: int = 3, devices: int = 1, total: int = 10**6, eager: bool = False
    ) -> None:
        super().__init__(root)
        pools = [{"name": "p", "zone": "local-a", "max": machines, "devices": devices}]
        self.cluster = ClusterSpec.model_validate({"name": "c", "cloud": "local", "pools": pools})
        self.cloud.size, self.cloud.price = {"p": 0}, {"p": 3.6}
        self.now, self.total, self.devices, self.eager = 1000.0, total, devices, eager
        self.clock = lambda: self.now
        self.puppets: dict[str, Puppet] = {}
        self.made = 0  # machines that took the place of others
        self.head = self.new_head()

    async def queue_job(self, name: str, nodes: int | dict[str, int] = 1, **more: Any) -> str:
        """Submit a job; its id."""
        job = {"name": name, "script": "train.py", "nodes": nodes, "grow_interval": 0, **more}
        return await self.head.submit(job, CODE)

    async def round(self, times: int = 1, without: Collection[str] = ()) -> None:
        """The head looks at its cloud and takes a turn, then each node obeys, steps and reports.

        without: nodes whose reports do not get to the head. Of an `eager` head, each report is followed by a turn about
        the jobs of that node.
        """
        for _ in range(times):
            self.now += ROUND
            await self.look()
            await self.turn()
            for name in self._act(without):
                self.head.news.take()
                self.report(name)
                if self.eager and (nodes := self.head.news.take()):
                    await self.head._turn(self.now, nodes)

    def report(self, name: str) -> None:
        """A node reports to the head."""
        self.head.receive(self.puppets[name].report(self.now), self.puppets[name].send)

    def play(self, without: Collection[str] = ()) -> None:
        """Let the puppets do what they were told, and report."""
        for name in self._act(without):
            self.report(name)

    def _act(self, without: Collection[str]) -> list[str]:
        """Let the puppets do what they were told. Those that report next."""
        listed = {f"p-{index}" for index in range(self.cloud.size["p"])}
        for name in self.puppets.keys() - listed:
            self.head.disconnect(name, self.puppets.pop(name).send)
        for name in sorted(listed - self.puppets.keys()):
            self.puppets[name] = Puppet(name, self.devices)
        for puppet in self.puppets.values():
            puppet.obey()
        for job in {job for puppet in self.puppets.values() for job in puppet.work}:
            self._step(job)
        return [name for name in self.puppets if name not in without]

    def _step(self, job: str) -> None:
        """One step of a job, if its whole generation is there."""
        mine = {name: puppet.work[job] for name, puppet in self.puppets.items() if job in puppet.work}
        idle = [name for name, work in mine.items() if work.drained or work.done or work.failure]
        running = {name: work for name, work in mine.items() if work.running and name not in idle}
        for work in mine.values():
            _upload(work)
        if not running:
            return
        generation = max(work.generation for work in running.values())
        members = next(w.order.generation for w in running.values() if w.generation == generation).members  # type: ignore[union-attr]
        here = [running[each.node] for each in members if each.node in running]
        if len(here) < len(members) or any(work.generation != generation for work in here):
            return
        if here[0].base < 0:  # all restore the newest state that any of them or the bucket has
            refs = [work.snapshot for work in here if work.snapshot] + list(here[0].order.generation.checkpoints)  # type: ignore[union-attr]
            newest = max(refs, key=lambda ref: (ref.generation, ref.step), default=StateRef(generation=0, step=0))
            for work in here:
                work.base = work.step = newest.step
                work.began = self.now
            return
        for work in here:
            work.step += 1
            stop = work.order.stop_at
            work.drained = stop is not None and work.step >= stop
            work.done = work.step >= self.total
            if work.drained or work.done or work.step % SNAPSHOT_EVERY == 0:
                work.snapshot = StateRef(generation=generation, step=work.step)

    def fail(self, job: str, node: str) -> None:
        """The script of a job raises on a node."""
        self.puppets[node].work[job].failure = Failure(kind="user", rank=0, at=self.now, message="boom")

    def kill(self, name: str) -> None:
        """A machine dies, and the cloud makes another one of that name."""
        puppet = self.puppets.pop(name)
        self.head.disconnect(name, puppet.send)
        self.cloud.made[name] = self.now
        self.made += 1
        self.puppets[name] = Puppet(name, self.devices)
        self.puppets[name].boot = f"boot {self.made} of {name}"

    def restart_head(self) -> None:
        """The head dies, and another one starts. It has no report yet."""
        head = self.new_head()
        head._began = head._awake_since = head._ticked_at = self.now

    async def ask(self, change: Callable[[JobState, float], JobState], job: str) -> None:
        """Change a job as an operator's command does."""
        asked = asyncio.create_task(self.head.change(change, job))
        await asyncio.sleep(0)
        await self.round()
        await asked

    def state(self, job: str) -> JobState:
        """A job as the head has it, or as it ended."""
        return self.head.states.get(job) or self.written(job)

    def nodes(self, job: str) -> list[str]:
        """The nodes on which the job trains."""
        return [member.node for member in self.state(job).members]

    def lost(self, jobs: Sequence[str]) -> int:
        """Steps that the jobs lost by interruptions."""
        return sum(each.steps_lost or 0 for job in jobs for each in self.state(job).interruptions)


def _upload(work: Work) -> None:
    """The ordered part of the ordered snapshot, if it is there."""
    save, ref = work.order.save, work.order.upload
    if save is not None and work.order.generation is not None:
        ref = StateRef(generation=work.order.generation.number, step=save.step)
    if save is not None and ref is not None and work.snapshot == ref:
        part = Part(step=ref.step, generation=ref.generation, index=save.index, parts=save.parts, files=(), whole="x")
        work.parts = {ref.step: part}


def _keeping(job: str, work: Work) -> Keeping | None:
    """The ordered folders, in the bucket at once unless the node is told otherwise."""
    number = work.order.keep
    if not number:
        return None
    if work.trouble:
        return Keeping(generation=number, trouble=work.trouble)
    return Keeping(
        generation=number, problem=work.problem, ref=None if work.problem else FoldersRef(generation=number, sha256=job)
    )


def place_of(job: str) -> Place:
    """Where each puppet has the job's things: as on a node of a cloud."""
    folder = f"/var/lib/spotrun/work/{job}"
    return Place(folder=f"{folder}/code", env=f"{folder}/env.sh", logs=f"{folder}/logs")


def _misfit(job: str, now: float) -> JobReport:
    failure = Failure(kind="setup", rank=0, at=now, message="no such package")
    return JobReport(job=job, phase="failed", failure=failure)


def _lie(report: JobReport) -> JobReport:
    return report.replace(workers=tuple(worker.replace(step=10**400) for worker in report.workers))


def _job_report(node: str, job: str, work: Work, now: float) -> JobReport:
    phase, stepping = "ready", work.running and work.generation > 0
    if stepping:
        phase = "drained" if work.drained else "succeeded" if work.done else "running" if work.base >= 0 else "starting"
        phase = "failed" if work.failure else phase
    at = work.began or now
    worker = Worker(
        rank=0, pid=1, step=work.step, base=work.base, stepped_at=now if work.step > work.base else 0.0,
        phases=(at, at, at, at, at + ROUND if work.step > work.base else 0.0),
    )  # fmt: skip
    live = phase in ("starting", "running")
    return JobReport.model_validate(
        {
            "job": job,
            "phase": phase,
            "devices": work.devices if live else (),
            "generation": work.generation,
            "store": f"{node}:{work.generation + 1}",
            "workers": (worker,) if stepping else (),
            "snapshot": work.snapshot,
            "parts": tuple(work.parts.values()),
            "keeping": _keeping(job, work),
            "failure": work.failure if stepping else None,
            "place": place_of(job) if stepping else None,
        }
    )
