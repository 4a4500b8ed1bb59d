"""Simulated nodes: the real agent's decisions about one job, with simulated workers (`simulated_workers`).

The code of a runner, its generations, its worker groups and its job is the real one. Simulated are the processes, the
launcher and its store, uploads, the commit of snapshots, and the moments of turns and reports. Not simulated: an agent
that restarts, a script that fails, several workers on a node, stores that are lost while their machine is there, and
the state that a GPU loses by an abort without exact mode.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spotrun.machine.metadata import Identity
from spotrun.node.claims import Claims
from spotrun.node.generations import drop_group
from spotrun.node.job import Job, Node
from spotrun.node.launch.client import Launcher
from spotrun.node.launch.worker import Task
from spotrun.node.part_uploader import PartUploader, WantedPart
from spotrun.node.runner import Runner
from spotrun.node.workers import WorkerGroup
from spotrun.spec import JobSpec
from spotrun.store import Store
from spotrun.wire import JobOrder, Notice, Order, Part, Report, StateRef
from tests.head.simulated_workers import Training, WorkerProcess

UPLOAD = 1.0  # seconds of an upload, at most


class SimulatedNode:
    """A machine, its agent, and its connection with the head. boot: of this machine."""

    def __init__(self, training: Training, name: str, boot: str, root: Path, store: Store) -> None:
        self.name, self.boot, self.training = name, boot, training
        self.process: WorkerProcess | None = None
        self.snapshots: list[StateRef] = []
        self.notice: Notice | None = None  # that the machine will be taken
        self.inbox: list[Order] = []  # what the head has sent, and the agent has not received yet
        self.send: Callable[[Order], None] = self.inbox.append  # always the same object: it stands for the connection
        self.woken = False
        self.turned_at = self.reported_at = self.frozen_until = 0.0
        self._order: Order | None = None  # the newest that the agent has received
        self._mine: JobOrder | None = None  # what it said last about the job
        self._runner: SimulatedRunner | None = None
        self._node = Node(
            identity=Identity(name=name, zone="z", address="127.0.0.1", machine=name),
            boot=boot,
            store=store,
            tmpfs=root / boot / "memory",
            scratch=root / boot / "disk",
            claims=Claims(root),
            fit=True,
        )

    def receive(self, newest: bool) -> None:
        """Get the oldest order that is on its way; newest: get all of them, of which only the last counts."""
        self._order = order = self.inbox[-1 if newest else 0]
        if order.jobs or not order.parked:  # else the agent leaves the job as it is
            self._mine = next(iter(order.jobs), None)
        del self.inbox[: len(self.inbox) if newest else 1]
        self.woken = True

    def connect(self) -> None:
        """Begin another connection: what was under way is lost."""
        self.inbox = []
        self.send = self.inbox.append

    def work(self) -> None:
        """The worker goes on."""
        if self.process is not None:
            self.process.act()

    async def turn(self) -> None:
        """A turn of the agent, without the report on it."""
        self.turned_at, self.woken = self.training.clock.now, False
        order = self._order
        if order is None:
            return
        if self._runner is None and order.jobs:
            self._runner = SimulatedRunner(order.jobs[0].bundle.id, self, self._node)
        if self._runner is None:
            return
        if self._mine is not None:
            await self._runner._turn(self._mine)
        else:
            await self._runner.drop()
            self._runner, self.snapshots = None, []

    def publish(self) -> None:
        """What the agent will report. Workers may have gone on since its turn."""
        if self._runner is not None:
            self._runner._publish()

    def report(self) -> Report:
        """What the agent has published."""
        self.reported_at = self.training.clock.now
        found = self._runner.report if self._runner is not None else None
        return Report(
            node=self.name, boot=self.boot, pool="p", zone="z", address="127.0.0.1", devices=1,
            jobs=(found,) if found else (), notice=self.notice,
        )  # fmt: skip

    def lose(self) -> None:
        """The machine is gone."""
        if self.process is not None:
            self.process.alive = False
        if self._runner is not None:
            self._runner.close()


class SimulatedRunner(Runner):
    """The real runner without a task of its own. Its node says when a turn is taken."""

    def __init__(self, id: str, node: SimulatedNode, agent: Node) -> None:
        self._simulated = node
        super().__init__(id, agent, lambda: None)
        self._part_uploader = SimulatedUploader(node)

    async def _turn(self, order: JobOrder) -> None:
        self._order = order
        before = self._group
        await super()._turn(order)
        group, training = self._group, self._simulated.training
        if group is not None and group is not before and group.number:
            training.generations[group.number] = group.generation
            does = "joins" if group.origin else "starts new workers for"
            training.tell(f"{self._simulated.name} {does} {group.number}")

    @property
    def _group(self) -> WorkerGroup | None:
        return self._job.group if self._job is not None else None

    async def drop(self) -> None:
        """End the job here and forget its state."""
        if self._group is not None:
            await self._group.end()
        self.close()

    def close(self) -> None:
        """Remove the control blocks."""
        if self._job is not None:
            drop_group(self._job)

    async def _apply_bundle(self, order: JobOrder) -> Job:
        if self._job is None:
            self._job = Job(order.bundle, self._node, order.devices, lambda: None)
            self._job._spec = JobSpec.kept(order.bundle.job)
            self._job._launcher = SimulatedLauncher(self._simulated, self._job)
        self._job.bundle, self._job.devices = order.bundle, order.devices
        return self._job

    async def _upload_logs(self) -> None:
        pass

    async def _write_about(self, job: Job) -> None:
        pass

    def _find_snapshot(self, group: WorkerGroup | None) -> None:
        self._snapshot = next(reversed(self._simulated.snapshots), None)


class SimulatedLauncher(Launcher):
    """It starts simulated workers, and always has a free store."""

    def __init__(self, node: SimulatedNode, job: Job) -> None:
        self._simulated, self._its_job = node, job
        self._taken = ""
        self._next_store()

    def start_workers(self, generation: int, rank: int, nodes: int, store: str, tasks: Sequence[Task]) -> None:
        node, group = self._simulated, self._its_job.group
        if generation < 0:
            node.training.tell(f"{node.name} warms up")
        if store == self.store:
            self._next_store()
        node.process = WorkerProcess(node.training, node, group, max(0, generation))

    def take_store(self, generation: int, store: str) -> None:
        self._next_store()

    def _next_store(self) -> None:
        self.store = f"{self._simulated.name}:{self._simulated.training.count()}"


class SimulatedUploader(PartUploader):
    """An upload of a snapshot takes a while, and always succeeds."""

    def __init__(self, node: SimulatedNode) -> None:
        self.trouble = None
        self._simulated = node
        self._wanted: WantedPart | None = None
        self._ends_at: float | None = None  # None: the snapshot is not there yet
        self._missing = False  # whether no slot has the snapshot

    @property
    def part(self) -> Part | None:
        if self._wanted is None or self._ends_at is None or self._simulated.training.clock.now < self._ends_at:
            return None
        ref, wanted = self._wanted.ref, self._wanted
        return Part(
            step=ref.step, generation=ref.generation, index=wanted.index, parts=wanted.parts, files=(), whole="x"
        )

    @property
    def late(self) -> int | None:
        return self._wanted.ref.step if self._wanted is not None and self._missing else None

    def want(self, wanted: WantedPart | None, awaited: bool = False) -> None:
        if wanted != self._wanted:
            self._wanted, self._ends_at, self._missing = wanted, None, False
        if wanted is None or awaited or self._ends_at is not None or self._missing:
            return
        if wanted.ref in self._simulated.snapshots:
            training = self._simulated.training
            self._ends_at = training.clock.now + training.random.uniform(0.0, UPLOAD)
        else:
            self._missing = True

    def stop(self) -> None:
        self._wanted = None


def ending(training: Training) -> Callable[[WorkerGroup], Any]:
    """What takes the place of `WorkerGroup.end`: it ends simulated workers at once."""

    async def end(group: WorkerGroup) -> None:
        for local_rank, each in enumerate(group.workers):
            if each.code is None:
                training.tell(f"workers of generation {group.number} are ended; left: {each.left}")
                training.processes[each.path].alive = False
                each.killed = True
                group.exited(local_rank, -signal.SIGKILL)

    return end
