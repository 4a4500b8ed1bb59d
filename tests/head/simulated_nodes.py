"""Simulated nodes: the real agent's decisions, with simulated workers (`simulated_workers`).

The code of an agent, its runners, their generations, worker groups and jobs is the real one. Simulated are the
processes, the launcher and its store, uploads, the commit of snapshots, and the moments of turns and reports. Not
simulated: a script that fails, stores that are lost while their machine is there, and the state that a GPU loses by an
abort without exact mode.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spotrun.machine.metadata import Identity
from spotrun.machine.systemd import Systemd
from spotrun.node.agent import Agent, Settings
from spotrun.node.generations import drop_group
from spotrun.node.job import Job
from spotrun.node.launch.client import Launcher
from spotrun.node.launch.worker import Task
from spotrun.node.part_uploader import PartUploader, WantedPart
from spotrun.node.runner import Runner
from spotrun.node.workers import LocalWorker, WorkerGroup
from spotrun.spec import JobSpec, names
from spotrun.store import Store
from spotrun.wire import JobOrder, Notice, Order, Part, Report
from tests.head.simulated_workers import Place, Simulation, Training, WorkerProcess

UPLOAD = 1.0  # seconds of an upload, at most
BEGIN = (0.5, 3.0)  # seconds until systemd has started another agent that connects
CHECKS = (0.1, 3.0)  # seconds until such an agent knows that the machine is fit


class SimulatedNode:
    """A machine, its agent, and its connection with the head. number: of this machine; no other one has it."""

    def __init__(self, simulation: Simulation, name: str, number: int, root: Path, store: Store, devices: int) -> None:
        self.name, self.simulation, self.devices = name, simulation, devices
        self.boot = f"boot {number} of {name}"
        self.places: dict[str, Place] = {}  # by job
        self.notice: Notice | None = None  # that the machine will be taken
        self.inbox: list[Order]  # what the head has sent, and the agent has not received yet
        self.send: Callable[[Order], None]  # always the same object: it stands for the connection
        self.connect()
        self.woken = False
        self.turned_at = self.reported_at = self.frozen_until = self.cut_until = 0.0
        self.agent: SimulatedAgent | None = None  # None: it does not run
        self._root, self._store = root / f"{name} {number}", store
        self._begins_at = self._fit_at = 0.0  # of the agent
        self.begin()
        self.become_fit()

    def place(self, job: str) -> Place:
        """What this machine has of a job."""
        if job not in self.places:
            self.places[job] = self.simulation.trainings[job].places[self.name] = Place(self)
        return self.places[job]

    def begin(self) -> None:
        """An agent begins."""
        self.agent = SimulatedAgent(self, self._root, self._store)
        self.agent._publish()

    def become_fit(self) -> None:
        """The agent's checks have ended. It takes jobs, and knows of a notice."""
        assert self.agent is not None
        self.agent.unfit, self.agent._node.fit, self.agent._node.devices = (), True, self.devices
        self.take_notice(self.notice)
        self.woken = True

    def take_notice(self, notice: Notice | None) -> None:
        """The cloud says that it will take the machine."""
        self.notice = notice
        if self.agent is not None and notice is not None:
            self.agent.notify(notice)

    def restart_agent(self) -> None:
        """The agent and all workers end. systemd starts another agent, which has another boot."""
        random, clock = self.simulation.random, self.simulation.clock
        self.lose()
        self.agent, self.inbox = None, []
        self.boot = ""
        self._begins_at = clock.now + random.uniform(*BEGIN)
        self._fit_at = self._begins_at + random.uniform(*CHECKS)

    def wait(self) -> None:
        """Time has passed for a new agent."""
        now = self.simulation.clock.now
        if self.agent is None and now >= self._begins_at:
            self.boot = f"boot {self.simulation.count()} of {self.name}"
            self.connect()
            self.begin()
            self.simulation.tell(f"{self.name} has another agent")
        if self.agent is not None and not self.agent._node.fit and now >= self._fit_at:
            self.become_fit()
            self.simulation.tell(f"{self.name} is fit again")

    def receive(self, newest: bool) -> None:
        """Get the oldest order that is on its way; newest: get all of them, of which only the last counts."""
        assert self.agent is not None
        self.agent.obey(self.inbox[-1 if newest else 0])
        del self.inbox[: len(self.inbox) if newest else 1]
        self.woken = True

    def connect(self) -> None:
        """Begin another connection: what was under way is lost."""
        self.inbox = []
        self.send = self.simulation.fuse.send(self.inbox.append)

    def work(self) -> None:
        """The workers go on."""
        for process in [each for place in self.places.values() for each in place.processes]:
            process.act()

    async def turn(self) -> None:
        """A turn of the agent and its runners, without the report on it."""
        assert self.agent is not None
        self.turned_at, self.woken = self.simulation.clock.now, False
        if self.agent._order is not None:
            await self.agent._apply(self.agent._order)
        for runner in self.agent.runners:
            await runner.turn()

    def publish(self) -> None:
        """What the agent will report. Workers may have gone on since its turn."""
        assert self.agent is not None
        for runner in self.agent.runners:
            if not runner.leaves:
                runner._publish()
        self.agent._publish()

    def report(self) -> Report:
        """What the agent has published."""
        assert self.agent is not None
        self.reported_at = self.simulation.clock.now
        found = self.agent.connection.newest_report
        assert found is not None
        return found

    def lose(self) -> None:
        """All processes have ended. Snapshots stay, as long as the machine is there."""
        for process in [each for place in self.places.values() for each in place.processes]:
            process.alive = False
        for runner in self.agent.runners if self.agent is not None else ():
            runner.close()


class SimulatedAgent(Agent):
    """The real agent without a task of its own. Its node says when a turn is taken."""

    def __init__(self, node: SimulatedNode, root: Path, store: Store) -> None:
        self._simulated = node
        settings = Settings(tmpfs=root / "memory", scratch=root / "disk", ssh_port=22, name=node.name)
        identity = Identity(name=node.name, zone="z", address="127.0.0.1", machine=node.name)
        super().__init__(settings, identity, {names.CLUSTER: "c", names.POOL: "p"}, store, Systemd())
        self.boot = self._node.boot = node.boot
        self._runners = {job: self._runner(job) for job, place in node.places.items() if place.snapshots}

    @property
    def runners(self) -> list[SimulatedRunner]:
        """Those of all jobs."""
        return [each for each in self._runners.values() if isinstance(each, SimulatedRunner)]

    def _runner(self, job: str) -> Runner:
        return SimulatedRunner(job, self._simulated, self)

    async def _clean(self, order: Order) -> None:
        if order.jobs and not self._cleaned:
            self._cleaned = True
            for job, place in self._simulated.places.items():
                if job not in order.parked and order.job(job) is None:
                    place.snapshots = []


class SimulatedRunner(Runner):
    """The real runner without a task of its own. Its node says when a turn is taken."""

    def __init__(self, id: str, node: SimulatedNode, agent: Agent) -> None:
        self._simulated, self._place = node, node.place(id)
        self._training = node.simulation.trainings[id]
        super().__init__(id, agent._node, lambda: None)
        self._part_uploader = SimulatedUploader(node.simulation, self._place)
        self._gone_at = 0.0  # when it has left; 0: it does not leave
        self._find_snapshot(None)
        self._publish()

    def obey(self, order: JobOrder) -> None:
        self._order = order

    def leave(self) -> None:
        self._leaving.set()
        self.ended = self._order is None

    def hurry(self) -> None:
        pass

    @property
    def leaves(self) -> bool:
        """Whether it ends its processes, and reports nothing new."""
        return self._gone_at > 0

    async def turn(self) -> None:
        """Do what is ordered."""
        if self._leaving.is_set():
            await self._leave()
        elif self._order is not None:
            await self._turn(self._order)

    async def _turn(self, order: JobOrder) -> None:
        before = self._group
        await super()._turn(order)
        group = self._group
        if group is not None and group is not before and group.number:
            self._training.generations[group.number] = group.generation
            does = "joins" if group.origin else "starts new workers for"
            self._training.tell(f"{self._simulated.name} {does} {group.number}")

    @property
    def _group(self) -> WorkerGroup | None:
        return self._job.group if self._job is not None else None

    async def _leave(self) -> None:
        """End the job here and forget its state."""
        simulation = self._simulated.simulation
        if not self.leaves:
            self._gone_at = simulation.clock.now
            if simulation.leaving:
                self._gone_at += simulation.random.uniform(0.0, simulation.leaving)
        if self._group is not None:
            await self._group.end()
        if simulation.clock.now < self._gone_at:
            return
        self.close()
        self._job, self._place.snapshots, self._place.processes = None, [], []
        self._snapshot, self.ended = None, True
        self._simulated.woken = True

    def close(self) -> None:
        """Remove the control blocks."""
        if self._job is not None:
            drop_group(self._job)

    async def _apply_bundle(self, order: JobOrder) -> Job:
        if self._job is None:
            self._job = Job(order.bundle, self._node, order.devices, lambda: None)
            self._job._spec = JobSpec.kept(order.bundle.job)
            self._job._launcher = SimulatedLauncher(self._training, self._simulated.name, self._place, self._job)
        self._job.bundle, self._job.devices = order.bundle, order.devices
        return self._job

    async def _upload_logs(self) -> None:
        pass

    async def _write_about(self, job: Job) -> None:
        pass

    def _find_snapshot(self, group: WorkerGroup | None) -> None:
        self._snapshot = next(reversed(self._place.snapshots), None)


class SimulatedLauncher(Launcher):
    """It starts simulated workers, and always has a free store."""

    def __init__(self, training: Training, node: str, place: Place, job: Job) -> None:
        self._training, self._node, self._place, self._its_job = training, node, place, job
        self._taken = ""
        self._next_store()

    def start_workers(self, generation: int, rank: int, nodes: int, store: str, tasks: Sequence[Task]) -> None:
        group = self._its_job.group
        assert group is not None
        if generation < 0:
            self._training.tell(f"{self._node} warms up")
        if store == self.store:
            self._next_store()
        begin, count = max(0, generation), len(group.workers)
        self._place.processes = [WorkerProcess(self._training, self._place, group, begin, i) for i in range(count)]

    def take_store(self, generation: int, store: str) -> None:
        self._next_store()

    def _next_store(self) -> None:
        self.store = f"{self._node}:{self._training.simulation.count()}"


class SimulatedUploader(PartUploader):
    """An upload of a snapshot takes a while, and always succeeds."""

    def __init__(self, simulation: Simulation, place: Place) -> None:
        self.trouble = None
        self._simulation, self._place = simulation, place
        self._wanted: WantedPart | None = None
        self._ends_at: float | None = None  # None: the snapshot is not there yet
        self._missing = False  # whether no slot has the snapshot

    @property
    def part(self) -> Part | None:
        if self._wanted is None or self._ends_at is None or self._simulation.clock.now < self._ends_at:
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
        if wanted.ref in self._place.snapshots:
            self._ends_at = self._simulation.clock.now + self._simulation.random.uniform(0.0, UPLOAD)
        else:
            self._missing = True

    def stop(self) -> None:
        self._wanted = None


def looking(simulation: Simulation) -> property:
    """What takes the place of `LocalWorker.left`: the worker may go on before its agent looks at it."""
    look: Any = LocalWorker.left

    def left(worker: LocalWorker) -> int | None:
        lives = worker.code is None and worker.control.able > 0
        if simulation.between and lives and simulation.random.random() < simulation.between:
            simulation.processes[worker.path].act()
        found: int | None = look.fget(worker)
        return found

    return property(left)


def ending(simulation: Simulation) -> Callable[[WorkerGroup], Any]:
    """What takes the place of `WorkerGroup.end`: it ends simulated workers at once."""

    async def end(group: WorkerGroup) -> None:
        for local_rank, each in enumerate(group.workers):
            if each.code is None:
                simulation.tell(f"workers of generation {group.number} are ended; left: {each.left}")
                simulation.processes[each.path].alive = False
                each.killed = True
                group.exited(local_rank, -signal.SIGKILL)

    return end
