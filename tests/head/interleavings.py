"""The real head and the real code of agents, in random order, on simulated workers and in simulated time.

Each moment, chance decides which orders and reports arrive, who takes a turn, which workers go on, and which machine is
lost. All follows from the seed. The story says what happened when.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random

from spotrun.head.job_state import JobState
from spotrun.state.control import NEEDS_RELEASE
from spotrun.wire import Notice
from tests.head.puppets import Theatre
from tests.head.simulated_nodes import SimulatedNode
from tests.head.simulated_workers import Loss, Training, WorkerProcess

MOMENTS = (0.002, 0.005, 0.02, 0.05)  # seconds from one moment to the next
LOOK = 0.5  # seconds between two looks of the scaler
TURN, REPORT = 0.1, 0.45  # seconds between two turns of an agent, and between two of its reports, at most
FROZEN = 30.0  # seconds for which a machine stands still, at most
CALM = 120.0  # seconds without faults until the job must train, at most
STEADY = 50  # steps of a generation after which the job trains


class Interleaving:
    """One run. faults: "notice", "kill", "freeze" and "head"; chance chooses one of them each time."""

    def __init__(self, seed: int, faults: Sequence[str], root: Path) -> None:
        self.random = Random(seed)
        self.training = Training(self.random)
        self.nodes: dict[str, SimulatedNode] = {}
        self._faults, self._root = faults, root
        self._stage = Theatre(root / "bucket", machines=5)
        self._comes_at: dict[str, float] = {}  # when the machine of that name comes
        self._fault_at = self._calm_from = 0.0
        self._looked_at = 0.0
        self._job = ""
        self._known: set[int] = set()  # generations of which the head has received a step before it ended them
        self._begun = f"seed {seed}, faults {', '.join(faults)}"

    @property
    def story(self) -> str:
        """What happened when."""
        return "\n".join(self.training.story)

    @property
    def job(self) -> JobState:
        """The job as the head has it."""
        return self._stage.state(self._job)

    @property
    def kinds(self) -> set[str]:
        """The kinds of all interruptions."""
        return {kind for each in self.job.interruptions for kind in each.kind.split("+")}

    @property
    def losses(self) -> list[Loss]:
        """The losses, without those of generations of which the head knew no step: it ends these at once."""
        return [each for each in self.training.losses if each.before in self._known]

    @property
    def fresh(self) -> list[int]:
        """Generations with new workers after the first one of which the head knew a step."""
        first = min(self._known, default=0)
        return [
            number
            for number, each in sorted(self.training.generations.items())
            if number > first > 0 and not each.regroup
        ]

    @property
    def restarted(self) -> list[int]:
        """Generations with new workers that have a member of the last one before of which the head knew a step."""
        found, known = [], set[tuple[str, str]]()
        for number, each in sorted(self.training.generations.items()):
            members = {(member.node, member.boot) for member in each.members}
            if known & members and not each.regroup:
                found.append(number)
            known = members if number in self._known else known
        return found

    @property
    def trains(self) -> bool:
        """Whether the job's newest generation makes steps, and none will follow soon."""
        job, training = self.job, self.training
        done = training.steps.get(job.generation, 0) - training.bases.get(job.generation, 0)
        return job.phase == "running" and job.current is not None and done >= STEADY and not any(self._notices())

    async def run(self, seconds: float) -> None:
        """Submit a job, cause faults for so many seconds, then wait until it trains."""
        least = self.random.choice([1, 2, 2])
        nodes = {"min": least, "max": self.random.choice([2, 3, 4]), "spares": self.random.choice([0, 0, 1])}
        self._job = await self._stage.queue_job("a", nodes, heartbeat_timeout=10, hang_timeout=60)
        like = "as on GPUs" if self.training.able == NEEDS_RELEASE else "as on CPUs"
        self.training.tell(f"{self._begun}: {nodes}, set-up {self.training.set_up} s, {like}")
        self._fault_at = self._now + self.random.uniform(3, 8)
        self._calm_from = self._now + seconds
        await self.go_on()

    async def go_on(self) -> None:
        """Wait until faults are over and the job trains."""
        while self._now < self._calm_from or (not self.trains and self._now < self._calm_from + CALM):
            await self._moment()

    async def stand_still(self, seconds: float) -> None:
        """The member with rank 1 stands still. Wait until that is over, and the job trains."""
        self._stop(self._members()[1], seconds)
        self._fault_at, self._calm_from = math.inf, self._now + seconds
        await self.go_on()

    @property
    def processes(self) -> list[WorkerProcess | None]:
        """The workers of all members."""
        return [node.process for node in self._members()]

    @property
    def _now(self) -> float:
        return self.training.clock.now

    def _notices(self) -> list[SimulatedNode]:
        return [node for node in self.nodes.values() if node.notice is not None]

    async def _moment(self) -> None:
        """Let some of the things happen that can happen now, in any order."""
        self._stage.now = self.training.clock.now = self._now + self.random.choice(MOMENTS)
        if self._now - self._looked_at > LOOK:
            self._looked_at = self._now
            await self._stage.look()
        self._start_machines()
        todo = [act for node in self.nodes.values() for act in self._possible(node)]
        if self.random.random() < 0.4:
            todo.append(self._stage.turn)
        self.random.shuffle(todo)
        for act in todo:
            await act()
        self._take_machines()
        if self._fault_at <= self._now < self._calm_from:
            self._cause_fault()

    def _possible(self, node: SimulatedNode) -> list[Callable[[], Awaitable[None]]]:
        """What happens on a node at this moment."""
        chance = self.random.random
        if self._now < node.frozen_until:
            return []

        async def receive() -> None:
            node.receive(newest=chance() < 0.5)

        async def turn() -> None:
            if chance() < 0.7:  # else the workers have gone on, and the agent only looks at them
                await node.turn()
            if chance() < 0.3:
                node.work()
            node.publish()

        async def report() -> None:
            self._report(node)

        async def work() -> None:
            node.work()

        happens = {
            receive: bool(node.inbox) and chance() < 0.6,
            turn: chance() < 0.4 or node.woken or self._now - node.turned_at > TURN,
            report: chance() < 0.3 or self._now - node.reported_at > REPORT,
            work: chance() < 0.6,
        }
        return [act for act, now in happens.items() if now]

    def _report(self, node: SimulatedNode) -> None:
        found = node.report()
        self._stage.head.receive(found, node.send)
        current = self.job.current
        for each in found.jobs:
            stepped = any(worker.step > worker.base >= 0 for worker in each.workers)
            if stepped and current is not None and current.number == each.generation:
                self._known.add(each.generation)

    def _start_machines(self) -> None:
        """Remove the machines that the head has given back. Start those that it has asked for, after a while."""
        listed = {f"p-{index}" for index in range(self._stage.cloud.size["p"])}
        for name in sorted(self.nodes.keys() - listed):
            self._lose(name)
        self._comes_at = {name: at for name, at in self._comes_at.items() if name in listed}
        for name in sorted(listed - self.nodes.keys()):
            if self._now >= self._comes_at.setdefault(name, self._now + self.random.uniform(0.3, 3.0)):
                boot = f"boot {self.training.count()} of {name}"
                node = SimulatedNode(self.training, name, boot, self._root, self._stage.store)
                self.nodes[name] = self.training.machines[name] = node

    def _take_machines(self) -> None:
        """Lose machines that had a notice: at its deadline, or a while after the job trains without them."""
        job, members = self.job, self._members()
        trains = job.current is not None and job.generation in self.training.bases
        for node in self._notices():
            left = trains and node not in members and self.random.random() < 0.05
            if left or self._now > node.notice.deadline:
                self._lose(node.name)

    def _members(self) -> list[SimulatedNode]:
        return [self.nodes[each.node] for each in self.job.members if each.node in self.nodes]

    def _lose(self, name: str) -> None:
        """A machine is gone. The cloud makes another one of that name."""
        node = self.nodes.pop(name)
        del self.training.machines[name]
        node.lose()
        self._stage.cloud.made[name] = self._now
        self._stage.head.disconnect(name, node.send)
        self.training.tell(f"{name} is gone")

    def _stop(self, node: SimulatedNode, seconds: float) -> None:
        node.frozen_until = self._now + seconds
        self.training.tell(f"{node.name} stands still for {seconds:.1f} s")

    def _cause_fault(self) -> None:
        soon = self.random.random() < 0.2  # while the job still recovers from this one
        self._fault_at = self._now + (self.random.uniform(0.05, 1.0) if soon else self.random.uniform(2, 15))
        fault, members = self.random.choice(self._faults), self._members()
        if fault == "head":
            self.training.tell("a new head starts")
            self._stage.restart_head()
            for node in self.nodes.values():
                node.connect()
        elif members:
            node = self.random.choice(members)
            if fault == "kill":
                self._lose(node.name)
            elif fault == "freeze":
                self._stop(node, self.random.uniform(0.5, FROZEN))
            elif node.notice is None:
                node.notice = Notice(kind="preempt", deadline=self._now + self.random.uniform(15, 40))
                self.training.tell(f"{node.name} gets a notice")
