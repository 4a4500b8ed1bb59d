"""Simulated workers: objects that read and write real control blocks, as the processes of a training job do.

They take their time, and each of them acts alone. They learn of each other only what a process group tells them. An
abort does not lose a worker's state: so it is on CPUs, and on GPUs in exact mode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal, Protocol

from spotrun.node.workers import WorkerGroup
from spotrun.state.control import ABLE, EXIT_DRAINED, EXIT_PEER, NEEDS_RELEASE, NONE
from spotrun.wire import Generation, Member, StateRef
from tests.head.fuse import Fuse

START = 1000.0  # when a simulation begins
SET_UPS = (0.2, 1.0, 5.0)  # seconds that the script's set-up takes, at most
STEP = 0.03  # seconds that a worker says a step took
SLOTS = 2  # snapshots that a machine has in memory
SNAPSHOT_EVERY = 20  # steps
EPOCH = 100  # steps
LONG_STEPS = (0.3, 1.0, 5.0)  # seconds of each of some steps, if steps are uneven


class Clock:
    """The time of the simulation, in place of the module `time`."""

    def __init__(self) -> None:
        self.now = START

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class Machine(Protocol):
    """What a worker needs of its machine."""

    boot: str  # of the agent; empty: it does not run
    woken: bool  # whether its agent should take a turn soon
    frozen_until: float  # when its processes go on


@dataclass
class Place:
    """What a machine has of one job."""

    machine: Machine
    processes: list[WorkerProcess] = field(default_factory=list)  # the workers that were started last
    snapshots: list[StateRef] = field(default_factory=list)  # in memory, the newest last


@dataclass(frozen=True)
class Loss:
    """A generation has restored an older step than the one before had made. survivors: members of both."""

    before: int  # the generation that had made the steps
    after: int  # the generation that does not have them
    steps: int
    survivors: tuple[str, ...]
    ignored: int  # steps after the restored one that the snapshot of a machine has


class Simulation:
    """What all jobs share. random: decides all that is left to chance.

    between: how probable it is that a worker goes on between two looks of its agent. Agents then also report at once.
    uneven: whether some steps take much longer than others. leaving: seconds that a job needs to leave a node, at most.
    """

    def __init__(self, random: Random, between: float = 0.0, uneven: bool = False, leaving: float = 0.0) -> None:
        self.fuse = Fuse()  # of the head
        self.random, self.between, self.uneven, self.leaving = random, between, uneven, leaving
        self.clock = Clock()
        self.able = random.choice([ABLE, ABLE, NEEDS_RELEASE])
        self.trainings: dict[str, Training] = {}  # by job id
        self.processes: dict[Path, WorkerProcess] = {}  # by control block
        self.story: list[str] = []
        self._count = 0

    def tell(self, text: str) -> None:
        """Add what has happened to the story."""
        self.story.append(f"{self.clock.now - START:8.3f} {text}")

    def count(self) -> int:
        """A number that nothing else has."""
        self._count += 1
        return self._count


class Training:
    """One job as its workers know it, on all machines."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation, self.random, self.clock = simulation, simulation.random, simulation.clock
        self.set_up = self.random.choice(SET_UPS)
        self.places: dict[str, Place] = {}  # by machine
        self.generations: dict[int, Generation] = {}  # those that a node has begun
        self.formed: set[int] = set()  # those whose process group has been formed
        self.bases: dict[int, int] = {}  # the step that each has restored
        self.steps: dict[int, int] = {}  # the newest step whose collective has ended, by generation
        self.losses: list[Loss] = []
        self.late: set[int] = set()  # generations that made steps after a later one had made some
        self._name = name
        self._long: list[float] = []  # seconds that each of the next steps takes
        self._busy_until = 0.0  # when the step under way is done at the earliest

    def tell(self, text: str) -> None:
        """Add what has happened to the story."""
        self.simulation.tell(f"{self._name}: {text}")

    def peers(self, generation: int) -> list[WorkerProcess | None]:
        """The living workers of all members; None in place of one whose machine or process is gone."""
        return [process for each in self.generations[generation].members for process in self._processes(each)]

    def has_lost_store(self, generation: int) -> bool:
        """Whether the machine with the generation's store is gone."""
        first = self.generations[generation].members[0]
        return first.node not in self.places or self.places[first.node].machine.boot != first.boot

    def restore(self, generation: int) -> int:
        """The step at which the generation begins: the newest that a member or the bucket has."""
        if generation in self.bases:
            return self.bases[generation]
        members, known = self.generations[generation].members, self.generations[generation].checkpoints
        refs = [ref for each in members for ref in self.places[each.node].snapshots]
        alive = [each.step for each in self.peers(generation) if each is not None]
        base = max([0, *alive, *(ref.step for ref in (*refs, *known))])
        self._note_loss(generation, base)
        self.bases[generation] = self.steps[generation] = base
        return base

    def _note_loss(self, generation: int, base: int) -> None:
        before = max(self.steps, default=0)
        lost = self.steps.get(before, 0) - base
        if lost > 0:
            members = self.generations[before].members
            survivors = tuple(each.node for each in self.generations[generation].members if each in members)
            refs = (ref for place in self.places.values() for ref in place.snapshots if ref.generation == before)
            ignored = max(0, max((ref.step for ref in refs), default=0) - base)
            self.losses.append(Loss(before, generation, lost, survivors, ignored))
            self.tell(f"generation {generation} restores step {base}: {lost} steps are lost")

    def computes(self) -> bool:
        """Whether the members still compute the next step, and have not begun its collective."""
        return self.simulation.uneven and self.clock.now < self._busy_until

    def complete_step(self, generation: int) -> None:
        """The collective of the next step has ended."""
        self.steps[generation] += 1
        if self.simulation.uneven:
            if not self._long and self.random.random() < 0.01:
                self._long = [self.random.choice(LONG_STEPS)] * self.random.randint(1, 30)
            self._busy_until = self.clock.now + (self._long.pop() if self._long else 0.0)
        if any(self.steps[later] > self.bases[later] for later in self.steps if later > generation):
            self.late.add(generation)

    def _processes(self, member: Member) -> list[WorkerProcess | None]:
        place = self.places.get(member.node)
        found = place.processes if place is not None and place.machine.boot == member.boot else []
        return [each if each.alive else None for each in found] or [None]


class WorkerProcess:
    """One worker. generation: for which it starts; 0: it warms up. local_rank: on its node; 0 writes the snapshots."""

    def __init__(
        self, training: Training, place: Place, group: WorkerGroup, generation: int, local_rank: int = 0
    ) -> None:
        self.alive = True
        self.generation = generation
        self.state: Literal["set-up", "waiting", "forming", "restoring", "training"] = "set-up"
        self.step = NONE
        worker, self._local_rank = group.workers[local_rank], local_rank
        self._training, self._place, self._group, self._control = training, place, group, worker.control
        self._ready_at = training.clock.now + training.random.uniform(0.1, training.set_up)
        worker.pid = training.simulation.count()
        training.simulation.processes[worker.path] = self

    @property
    def _released(self) -> bool:
        return self._control.released == self.generation

    def act(self) -> None:
        """Do the next thing, if it is time for it."""
        if not self.alive:
            return
        if self.state == "set-up":
            self._set_up()
        elif self.state == "waiting":
            self._join()
        elif self.state == "forming":
            self._form()
        elif self.state == "restoring":
            self._restore()
        else:
            self._train()

    def _set_up(self) -> None:
        now = self._training.clock.now
        if now < self._ready_at:
            return
        self._control.entered = now
        if self.generation:
            self.state = "forming"
        else:
            self._control.able = self._training.simulation.able
            self._leave(EXIT_DRAINED)

    def _leave(self, code: int) -> None:
        """Leave the generation and wait for another one; end, if this worker cannot join another one yet."""
        self._place.machine.woken = True
        if self._control.able > 0:
            self._control.left, self.state = code, "waiting"
        else:
            self.alive = False
            self._group.exited(self._local_rank, code)

    def _join(self) -> None:
        joins = self._control.joins  # its agent may still be in the turn in which it has begun this generation
        if joins > self.generation and joins in self._training.generations:
            self.generation, self.state = joins, "forming"
            self._control.entered = self._training.clock.now

    def _form(self) -> None:
        """Wait until all members are in the process group, the store is gone, or the agent calls this worker back."""
        training = self._training
        formed = self.generation in training.formed
        if self._released or (not self._is_whole() if formed else training.has_lost_store(self.generation)):
            self._leave(EXIT_PEER)
        elif formed:
            self._control.grouped, self._control.able = training.clock.now, training.simulation.able
            self.state = "restoring"
        elif all(self._is_with(each) and each.state == "forming" for each in self._peers()):
            training.formed.add(self.generation)

    def _restore(self) -> None:
        if self._released or not self._is_whole():
            self._leave(EXIT_PEER)
        elif all(each.state in ("restoring", "training") for each in self._peers()):
            base = self._training.restore(self.generation)
            if self.step != NONE and abs(base - self.step) > 1 and base // EPOCH != self.step // EPOCH:
                self._training.tell(f"step {base} is in another epoch than step {self.step}")
                self._leave(EXIT_PEER)
                return
            self.step = base
            self._control.base = self._control.step = self.step
            self._control.restored, self.state = self._training.clock.now, "training"

    def _train(self) -> None:
        """Wait for the other members in the collective of the next step, or end this step."""
        training = self._training
        newest = training.steps[self.generation]
        if self.step < newest:
            self._end_step()
        elif self._released or (not self._is_whole() and self._sees_failure()):
            self._leave(EXIT_PEER)
        elif (
            all(self._is_with(each) and each._is_at(newest) for each in self._peers())
            and not training.computes()
            and training.random.random() < 0.7
        ):
            training.complete_step(self.generation)

    def _sees_failure(self) -> bool:
        """Whether this worker notices that a peer is gone. A peer that has stopped at the stop step is not noticed."""
        if self._training.simulation.able == NEEDS_RELEASE:
            return False
        return any(not self._is_with(each) or each._control.left == EXIT_PEER for each in self._peers())

    def _end_step(self) -> None:
        training, control = self._training, self._control
        self.step += 1
        stepping = STEP * (self.step - control.base)
        stop, save, _ = control.end_step(self.step, training.clock.now, 0.0, stepping, 0.0)
        control.stepped_first = control.stepped_first or training.clock.now
        if self._local_rank == 0 and (self.step in (stop, save) or self.step % SNAPSHOT_EVERY == 0):
            control.begun = control.copied = control.committed = self.step
            ref = StateRef(generation=self.generation, step=self.step)
            self._place.snapshots = [*self._place.snapshots, ref][-SLOTS:]
        if self.step == stop:
            self._leave(EXIT_DRAINED)

    def _is_at(self, step: int) -> bool:
        """Whether this worker takes part in the collective after the step."""
        frozen = self._place.machine.frozen_until > self._training.clock.now
        return self.state == "training" and self.step == step and not frozen

    def _peers(self) -> list[WorkerProcess | None]:
        return self._training.peers(self.generation)

    def _is_with(self, peer: WorkerProcess | None) -> bool:
        """Whether the peer is there, and in no other generation."""
        return peer is not None and peer.generation == self.generation

    def _is_whole(self) -> bool:
        """Whether all members are in the process group."""
        return all(self._is_with(each) and each.state != "waiting" for each in self._peers())
