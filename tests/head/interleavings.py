"""The real head and the real code of agents, in random order, on simulated workers and in simulated time.

Each moment, chance decides which orders and reports arrive, who takes a turn, which workers go on, and which machine is
lost. All follows from the seed. The story says what happened when.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random

from spotrun.state.control import NEEDS_RELEASE
from spotrun.wire import Notice
from tests.head.fuse import Killed
from tests.head.puppets import Theatre
from tests.head.simulated_jobs import SimulatedJob, draw
from tests.head.simulated_nodes import SimulatedNode
from tests.head.simulated_workers import Simulation, Training, WorkerProcess

MOMENTS = (0.002, 0.005, 0.02, 0.05)  # seconds from one moment to the next
LOOK = 0.5  # seconds between two looks of the scaler
TURN, REPORT = 0.1, 0.45  # seconds between two turns of an agent, and between two of its reports, at most
FIND = 8.0  # seconds for an agent to find a new head, at most
FROZEN = 30.0  # seconds for which a machine stands still, at most
CALM = 120.0  # seconds without faults until the job must train, at most


class Interleaving:
    """One run. faults: "notice", "kill", "freeze", "agent" and "head" of machines, agents and heads, "pause" and "stop"
    and "priority" by an operator. Chance chooses one of them each time. jobs: 1 or 2; the second one has a higher
    priority at first. between, uneven, leaving: as in `Simulation`. procs: workers on each node.

    More faults: "slip": a machine is lost, and the head learns this only from the next machine of the same name. "cut":
    a node's connection ends; with this fault, some agents also need a while to find a new head. "die": the head dies in
    the middle of a turn.
    """

    def __init__(
        self,
        seed: int,
        faults: Sequence[str],
        root: Path,
        jobs: int = 1,
        between: float = 0.0,
        uneven: bool = False,
        procs: int = 1,
        leaving: float = 0.0,
    ) -> None:
        self.random = Random(seed)
        self.simulation = Simulation(self.random, between, uneven, leaving)
        self.jobs: list[SimulatedJob] = []
        self.nodes: dict[str, SimulatedNode] = {}
        self._faults, self._root, self._procs = faults, root, procs
        machines, devices, self._coming = draw(self.random, jobs)
        self.wrong: list[str] = []  # devices that two jobs had at the same time
        self._stage = Theatre(root / "bucket", machines, devices)
        self._comes_at: dict[str, float] = {}  # when the machine of that name comes
        self._fault_at = self._calm_from = 0.0
        self._looked_at = 0.0
        self._begun = f"seed {seed}, faults {', '.join(faults)}"

    @property
    def story(self) -> str:
        """What happened when."""
        return "\n".join(self.simulation.story)

    @property
    def job(self) -> SimulatedJob:
        """The job of a run with one job."""
        (job,) = self.jobs
        return job

    @property
    def errors(self) -> list[str]:
        """What the head could not do because of unexpected errors."""
        head = self._stage.head
        return [*head.troubles.texts, *(each.text for each in head.parked.values())]

    @property
    def trains(self) -> bool:
        """Whether all jobs train, and no change will follow soon."""
        return not self._coming and all(job.trains for job in self.jobs) and not any(self._notices())

    @property
    def replaced(self) -> list[str]:
        """Machines in whose place the head has asked the cloud for others. Here, the cloud does not make these."""
        calls = self._stage.cloud.calls
        return [name for call, names in calls if call == "recreate" for name in names]

    async def run(self, seconds: float) -> None:
        """Submit a job, cause faults for so many seconds, then wait until it trains."""
        self.simulation.tell(self._begun + (", as on GPUs" if self.simulation.able == NEEDS_RELEASE else ""))
        self.simulation.tell(f"{self._stage.cluster.pools[0].max} machines with {self._stage.devices} devices")
        self._fault_at = self._now + self.random.uniform(3, 8)
        self._calm_from = self._now + seconds
        await self.go_on()

    async def _submit(self) -> None:
        for at, name, more in [each for each in self._coming if each[0] <= self._now]:
            self._coming.remove((at, name, more))
            id = await self._stage.queue_job(
                name, heartbeat_timeout=10, hang_timeout=60, procs_per_node=self._procs, **more
            )
            training = self.simulation.trainings[id] = Training(self.simulation, name)
            self.jobs.append(SimulatedJob(self._stage, id, training))
            training.tell(f"{more}, set-up {training.set_up} s")

    async def go_on(self) -> None:
        """Wait until faults are over and the job trains."""
        while self._now < self._calm_from or (not self.trains and self._now < self._calm_from + CALM):
            await self._moment()

    async def stand_still(self, seconds: float) -> None:
        """The member with rank 1 stands still. Wait until that is over, and the job trains."""
        self._stop(self._members()[1], seconds)
        self._fault_at, self._calm_from = math.inf, self._now + seconds
        await self.go_on()

    async def move_to_and_fro(self, times: int) -> None:
        """The priority of the second job changes again and again: machines that have just moved to a job move back."""
        self._fault_at, second = math.inf, self.jobs[1]
        for index in range(times):
            await second.set_priority(1 if index % 2 else -1)
            self._calm_from = until = self._now + self.random.uniform(0.5, 3.0)
            while self._now < until:
                await self._moment()
        await self.go_on()

    @property
    def processes(self) -> list[WorkerProcess]:
        """The workers of all members."""
        return [process for node in self._members() for process in node.places[self.job.id].processes]

    @property
    def _now(self) -> float:
        return self.simulation.clock.now

    def _notices(self) -> list[SimulatedNode]:
        return [node for node in self.nodes.values() if node.notice is not None]

    async def _moment(self) -> None:
        """Let some of the things happen that can happen now, in any order."""
        self._stage.now = self.simulation.clock.now = self._now + self.random.choice(MOMENTS)
        if self._now - self._looked_at > LOOK:
            self._looked_at = self._now
            await self._stage.look()
        self._start_machines()
        todo = [act for node in self.nodes.values() for act in self._possible(node)]
        if self.random.random() < 0.4:
            todo.append(self._turn)
        self.random.shuffle(todo)
        for act in todo:
            await act()
        self._take_machines()
        self._check_devices()
        await self._submit()
        for job in self.jobs:
            await job.go_on(self._now >= self._calm_from)
        self.simulation.uneven &= self._now < self._calm_from
        if self._fault_at <= self._now < self._calm_from:
            await self._cause_fault()

    async def _turn(self) -> None:
        """The head takes a turn. It may die meanwhile."""
        self.simulation.fuse.lit = self.simulation.fuse.left > 0
        with contextlib.suppress(Killed):
            await self._stage.turn()
        if self.simulation.fuse.lit and self.simulation.fuse.left <= 0:
            self._begin_head()
        self.simulation.fuse.lit = False

    def _begin_head(self) -> None:
        """A new head begins. Some agents may need a while to find it."""
        self.simulation.tell("a new head starts")
        self._stage.restart_head()
        for node in self.nodes.values():
            node.connect()
            if "cut" in self._faults and self.random.random() < 0.3:
                node.cut_until = self._now + self.random.uniform(0, FIND)

    def _cut(self, node: SimulatedNode, seconds: float) -> None:
        """The connection of a node ends. The head may learn of that."""
        send = node.send
        node.cut_until = self._now + seconds
        node.connect()
        if told := self.random.random() < 0.5:
            self._stage.head.disconnect(node.name, send)
        self.simulation.tell(f"{node.name} is cut off for {seconds:.1f} s{', as the head knows' if told else ''}")

    def _possible(self, node: SimulatedNode) -> list[Callable[[], Awaitable[None]]]:
        """What happens on a node at this moment."""
        chance = self.random.random
        if self._now < node.frozen_until:
            return []
        node.wait()
        if node.agent is None:
            return []

        cut = self._now < node.cut_until

        async def receive() -> None:
            node.receive(newest=chance() < 0.5)

        async def turn() -> None:
            if chance() < 0.7:  # else the workers have gone on, and the agent only looks at them
                await node.turn()
            if chance() < 0.3:
                node.work()
            node.publish()
            if self.simulation.between and chance() < 0.3 and not cut:
                self._report(node)

        async def report() -> None:
            self._report(node)

        async def work() -> None:
            node.work()

        happens = {
            receive: not cut and bool(node.inbox) and chance() < 0.6,
            turn: chance() < 0.4 or node.woken or self._now - node.turned_at > TURN,
            report: not cut and (chance() < 0.3 or self._now - node.reported_at > REPORT),
            work: chance() < 0.6,
        }
        return [act for act, now in happens.items() if now]

    def _report(self, node: SimulatedNode) -> None:
        found = node.report()
        self._stage.head.receive(found, node.send)
        for job in self.jobs:
            job.note(found)

    def _start_machines(self) -> None:
        """Remove the machines that the head has given back. Start those that it has asked for, after a while."""
        listed = {f"p-{index}" for index in range(self._stage.cloud.size["p"])}
        for name in sorted(self.nodes.keys() - listed):
            self._lose(name)
        self._comes_at = {name: at for name, at in self._comes_at.items() if name in listed}
        for name in sorted(listed - self.nodes.keys()):
            if self._now >= self._comes_at.setdefault(name, self._now + self.random.uniform(0.3, 3.0)):
                number, devices = self.simulation.count(), self._stage.devices
                self.nodes[name] = SimulatedNode(self.simulation, name, number, self._root, self._stage.store, devices)

    def _take_machines(self) -> None:
        """Lose machines that had a notice: at its deadline, or a while after the job trains without them."""
        members = self._members()
        trains = all(job.state.current and job.state.generation in job.training.bases for job in self.jobs)
        for node in self._notices():
            left = trains and node not in members and self.random.random() < 0.05
            if left or self._now > node.notice.deadline:
                self._lose(node.name)

    def _members(self) -> list[SimulatedNode]:
        names = dict.fromkeys(each.node for job in self.jobs for each in job.state.members)
        return [self.nodes[name] for name in names if name in self.nodes]

    def _lose(self, name: str, told: bool = True) -> None:
        """A machine is gone. The cloud makes another one of that name. told: whether its connection ends, too."""
        node = self.nodes.pop(name)
        node.lose()
        for training in self.simulation.trainings.values():
            training.places.pop(name, None)
        self._stage.cloud.made[name] = self._now
        if told:
            self._stage.head.disconnect(name, node.send)
        self.simulation.tell(f"{name} is gone")

    def _stop(self, node: SimulatedNode, seconds: float) -> None:
        node.frozen_until = self._now + seconds
        self.simulation.tell(f"{node.name} stands still for {seconds:.1f} s")

    def _check_devices(self) -> None:
        """Note it if the generations of two jobs have the same device."""
        held: dict[tuple[str, int], str] = {}
        for job in self._stage.head.states.values():
            for member in job.members:
                for device in member.devices or range(self._stage.devices):
                    other = held.setdefault((member.boot, device), job.name)
                    if other != job.name:
                        self.wrong.append(
                            f"{self._now:.3f}: {other} and {job.name} have device {device} of {member.node}"
                        )

    def _restart_agent(self, node: SimulatedNode) -> None:
        send = node.send
        node.restart_agent()
        self._stage.head.disconnect(node.name, send)
        self.simulation.tell(f"the agent of {node.name} ends")

    async def _cause_fault(self) -> None:
        soon = self.random.random() < 0.2  # while the job still recovers from this one
        self._fault_at = self._now + (self.random.uniform(0.05, 1.0) if soon else self.random.uniform(2, 15))
        fault, members = self.random.choice(self._faults), self._members()
        if fault == "head":
            self._begin_head()
        elif fault == "die":
            self.simulation.fuse.left = self.random.randint(1, 6)
            self.simulation.tell(f"the head dies before write or order {self.simulation.fuse.left}")
        elif fault in ("pause", "stop") and self.jobs:
            await self.random.choice(self.jobs).interrupt(fault)
        elif fault == "priority" and self.jobs:
            await self.random.choice(self.jobs).set_priority(self.random.choice([-1, 0, 1]))
        elif members:
            node = self.random.choice(members)
            if fault == "kill":
                self._lose(node.name)
            elif fault == "slip":
                self._lose(node.name, told=False)
            elif fault == "cut":
                self._cut(node, self.random.uniform(0.5, FROZEN))
            elif fault == "agent":
                self._restart_agent(node)
            elif fault == "freeze":
                self._stop(node, self.random.uniform(0.5, FROZEN))
            elif node.notice is None:
                node.take_notice(Notice(kind="preempt", deadline=self._now + self.random.uniform(15, 40)))
                self.simulation.tell(f"{node.name} gets a notice")
