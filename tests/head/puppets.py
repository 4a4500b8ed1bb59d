"""Nodes that obey the real head without processes: they step, drain, save and lose what they are not told to keep.

Time stands still between two rounds. A puppet has no guard of its own: a head that orders two jobs onto one device is
found out at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotrun.folders import FoldersRef, Keeping
from spotrun.head.job_state import JobState
from spotrun.spec import ClusterSpec
from spotrun.wire import Failure, Generation, JobOrder, JobReport, Member, Order, Part, Place, Report, StateRef, Worker
from tests.head.world import CODE, World

ROUND = 0.3  # seconds between two rounds
SNAPSHOT_EVERY = 5  # steps


@dataclass
class Work:
    """One job on one puppet."""

    order: JobOrder
    generation: int = 0
    begun: Generation | None = None  # the generation with this number
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
    failure: Failure | None = None  # of the script, or because a peer is gone, in this generation
    before: tuple[Worker, ...] = ()  # as in `JobReport`
    parts: dict[int, Part] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        """Whether its workers, if they can regroup, have left their generation or have warmed up."""
        peer = self.failure is not None and self.failure.kind == "peer"
        return self.drained or peer if self.running else self.order.stand_by

    @property
    def wanted(self) -> Generation | None:
        """The generation in which the node should be now."""
        ordered, following = self.order.generation, self.order.next
        if following is None or self.generation == following.number:
            return following or ordered
        stopped = ordered is None or (self.drained and self.generation == ordered.number)
        return following if stopped and self.waits else ordered


class Puppet:
    """A node. regroups: whether its workers go on in another generation without a restart."""

    def __init__(self, name: str, devices: int, regroups: bool = False) -> None:
        self.name, self.devices, self.regroups = name, devices, regroups
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
            wanted = work.wanted
            if (wanted is None or not self._is_in(wanted)) and self.regroups and work.waits and each.stand_by:
                continue
            if wanted is None or not self._is_in(wanted) or wanted.number > work.generation:
                work.before = (_worker(work, 0.0),) if self.regroups and work.running and work.generation else ()
                work.running = False
                work.devices = ()
        for work in self.work.values():
            self._begin(work)

    def _is_in(self, generation: Generation) -> bool:
        return any((each.node, each.boot) == (self.name, self.boot) for each in generation.members)

    def _begin(self, work: Work) -> None:
        generation = work.wanted
        if generation is None or not self._is_in(generation) or generation.number <= work.generation:
            return
        wanted = work.order.devices or tuple(range(self.devices))
        for job, other in self.work.items():
            lives = other.running and not (other.done or other.drained)
            if other is not work and lives and set(other.devices) & set(wanted):
                raise AssertionError(f"{self.name}: {work.order.bundle.id} starts on devices {wanted} of {job}")
        work.generation, work.running, work.drained, work.done = generation.number, True, False, False
        work.begun = generation
        work.failure = None
        work.base, work.step, work.devices = -1, -1, wanted

    def report(self, now: float) -> Report:
        """What the node does."""
        jobs = [
            _misfit(job, now) if job in self.misfits else _job_report(self, job, work, now)
            for job, work in self.work.items()
        ]
        jobs = [_lie(each) if each.job in self.lies else each for each in jobs]
        return Report(
            node=self.name, boot=self.boot, pool=self.name.split("-")[0], zone="z", address="127.0.0.1",
            devices=self.devices, jobs=tuple(jobs),
        )  # fmt: skip


class Theatre(World):
    """A head, and a puppet for each machine of its cloud.

    total: steps of each job. eager: see `round`. regroups: as in `Puppet`.
    """

    def __init__(
        self,
        root: Path,
        machines: int = 3,
        devices: int = 1,
        total: int = 10**6,
        eager: bool = False,
        regroups: bool = False,
    ) -> None:
        super().__init__(root)
        pools = [{"name": "p", "zone": "local-a", "max": machines, "devices": devices}]
        self.cluster = ClusterSpec.model_validate({"name": "c", "cloud": "local", "pools": pools})
        self.cloud.size, self.cloud.price = {"p": 0}, {"p": 3.6}
        self.now, self.total, self.devices, self.eager, self.regroups = 1000.0, total, devices, eager, regroups
        self.begun: dict[tuple[str, int], tuple[Member, ...]] = {}  # the members of each generation that has begun
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
            self.puppets[name] = Puppet(name, self.devices, self.regroups)
        for puppet in self.puppets.values():
            puppet.obey()
        for job in {job for puppet in self.puppets.values() for job in puppet.work}:
            self._step(job)
        return [name for name in self.puppets if name not in without]

    def _step(self, job: str) -> None:
        """For each generation of the job: one step, if all its members are there."""
        mine = {name: puppet.work[job] for name, puppet in self.puppets.items() if job in puppet.work}
        idle = [name for name, work in mine.items() if work.drained or work.done or work.failure]
        running = {name: work for name, work in mine.items() if work.running and name not in idle}
        for work in mine.values():
            _upload(work)
        if self.regroups:
            self._lose_peers(running)
        for begun in {work.generation: work.begun for work in running.values() if work.begun}.values():
            same = self.begun.setdefault((job, begun.number), begun.members)
            assert same == begun.members, f"generation {begun.number} of {job} has other members than {same}"
            here = [running[each.node] for each in begun.members if each.node in running]
            if len(here) == len(begun.members) and all(work.generation == begun.number for work in here):
                self._step_together(begun, here)

    def _step_together(self, begun: Generation, here: Sequence[Work]) -> None:
        """One step of a generation, or the restore before its first step."""
        if here[0].base < 0:  # all restore the newest state that any of them or the bucket has
            refs = [work.snapshot for work in here if work.snapshot] + list(begun.checkpoints)
            newest = max(refs, key=lambda ref: (ref.generation, ref.step), default=StateRef(generation=0, step=0))
            for work in here:
                work.base = work.step = newest.step
                work.began = self.now
            return
        for work in here:
            ordered = work.order.generation
            work.step += 1
            stop = work.order.stop_at if ordered is not None and ordered.number == begun.number else None
            work.drained = stop is not None and work.step >= stop
            work.done = work.step >= self.total
            if work.drained or work.done or work.step % SNAPSHOT_EVERY == 0:
                work.snapshot = StateRef(generation=begun.number, step=work.step)

    def _lose_peers(self, running: Mapping[str, Work]) -> None:
        """Workers notice that the machine of a peer is gone."""
        boots = {puppet.boot for puppet in self.puppets.values()}
        for work in running.values():
            if work.begun and any(member.boot not in boots for member in work.begun.members):
                work.failure = Failure(kind="peer", rank=0, at=self.now, message="a peer is gone")

    def fail(self, job: str, node: str) -> None:
        """The script of a job raises on a node."""
        self.puppets[node].work[job].failure = Failure(kind="user", rank=0, at=self.now, message="boom")

    def kill(self, name: str) -> None:
        """A machine dies, and the cloud makes another one of that name."""
        puppet = self.puppets.pop(name)
        self.head.disconnect(name, puppet.send)
        self.cloud.made[name] = self.now
        self.made += 1
        self.puppets[name] = Puppet(name, self.devices, self.regroups)
        self.puppets[name].boot = f"boot {self.made} of {name}"

    def restart_head(self) -> None:
        """The head dies, and another one starts. It has no report yet."""
        head = self.new_head()
        head.presence.began = head.presence.awake_since = head.presence._ticked_at = self.now

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


def _worker(work: Work, now: float) -> Worker:
    at = (work.began or now) if work.base >= 0 else 0.0
    return Worker(
        rank=0, pid=1, step=work.step, base=work.base, stepped_at=now if work.step > work.base else 0.0,
        phases=(at, at, at, at, at + ROUND if work.step > work.base else 0.0),
    )  # fmt: skip


def _job_report(puppet: Puppet, job: str, work: Work, now: float) -> JobReport:
    phase, stepping = "ready", work.running and work.generation > 0
    if stepping:
        phase = "drained" if work.drained else "succeeded" if work.done else "running" if work.base >= 0 else "starting"
        phase = "failed" if work.failure else phase
    live = phase in ("starting", "running") or (puppet.regroups and stepping and work.waits)
    return JobReport.model_validate(
        {
            "job": job,
            "phase": phase,
            "devices": work.devices if live else (),
            "generation": work.generation,
            "store": f"{puppet.name}:{work.generation + 1}",
            "workers": (_worker(work, now),) if stepping else (),
            "before": work.before if work.order.generation and work.order.generation.number < work.generation else (),
            "regroup": ("waiting" if work.waits else "able" if stepping else "no") if puppet.regroups else "unknown",
            "snapshot": work.snapshot,
            "parts": tuple(work.parts.values()),
            "keeping": _keeping(job, work),
            "failure": work.failure if stepping else None,
            "place": place_of(job) if work.generation > 0 else None,
        }
    )
