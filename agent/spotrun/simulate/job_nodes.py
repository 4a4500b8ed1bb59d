"""What the nodes of a simulated cluster do for one job: step, drain, save and report, at once and without errors.

Work is measured in seconds of one node. A step is a fixed amount of work, so it takes less time on more nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from spotrun.head.capacity.situation import Demand
from spotrun.head.job_state import JobState, saved
from spotrun.simulate.costs import Costs
from spotrun.simulate.market import Machine
from spotrun.wire import Failure, JobReport, Manifest, StateRef, Worker

NOTHING = StateRef(generation=0, step=0)


@dataclass
class JobNodes:
    """The nodes of one job."""

    job: str
    work: float  # of the whole job
    step: float  # work of one step
    costs: Costs
    speeds: Mapping[str, float]  # of a machine, by pool, relative to each other
    generation: int = 0
    base: int = 0  # step at which this generation began
    began: float = 0.0  # when it was ordered
    starts: float = 0.0  # when its first step begins
    rate: float = 0.0  # work in a second
    stalled: float = math.inf  # when it lost a member; infinite: it has lost none
    stop_at: int | None = None  # the step after which it stops
    save_at: int | None = None  # the step after which they save a checkpoint that the head has ordered
    machines: tuple[Machine, ...] = ()  # its members
    snapshots: dict[str, StateRef] = field(default_factory=dict)  # in the memory of each node
    restarts: int = 0  # how many generations began
    moved: int = 0  # how many of them began in other pools than the generation before
    lost: float = 0.0  # work that had to be done again
    good: dict[str, float] = field(default_factory=dict)  # seconds in steps, by pool and machine
    _members: dict[str, Machine] = field(default_factory=dict)  # `machines` by name
    _where: frozenset[str] = frozenset()  # pools of the last generation
    _reached: int = 0  # the newest step of ended generations
    _reports: dict[tuple[object, ...], JobReport] = field(default_factory=dict)  # those made a moment ago

    @property
    def total(self) -> int:
        """Steps of the whole job."""
        return math.ceil(self.work / self.step - 1e-9)

    def done(self, now: float) -> int:
        """Steps completed since the job began."""
        until = min(now, self.stalled)
        found = self.base + math.floor(max(0.0, until - self.starts) * self.rate / self.step + 1e-6)
        return min(found, self.total if self.stop_at is None else min(self.total, self.stop_at))

    def time_of(self, step: int) -> float:
        """When that step is completed, if nothing happens before."""
        return self.starts + (step - self.base) * self.step / self.rate if self.rate else math.inf

    @property
    def next(self) -> float:
        """When the workers stop by themselves."""
        if not self.generation or self.stalled < math.inf:
            return math.inf
        steps = [self.total, *(step for step in (self.stop_at, self.save_at) if step is not None)]
        return self.time_of(min(steps))

    def obey(self, job: JobState, known: Mapping[str, Machine], now: float) -> None:
        """Do what the head orders."""
        current = job.current
        if current is None:
            if self.generation:
                self._leave(now)
            return
        if current.number != self.generation:
            if self.generation:
                self._leave(now)
            self._join(job, known, now)
        self.stop_at = job.draining.step if job.draining else None
        saving = job.saving.ref.step if job.saving else None
        self.save_at = saving if saving is not None and saving > self.done(now) else None

    def look(self, now: float) -> None:
        """Notice that a member is gone: no step is completed without it."""
        if self.stalled == math.inf and any(machine.gone <= now for machine in self.machines):
            self.stalled = now

    def fill(self, demand: Demand) -> Demand:
        """The demand with the work that is done. Only baselines ask for that."""
        return demand if demand.left is None else replace(demand, done=max(0.0, self.work - demand.left))

    def save(self, job: JobState, now: float) -> JobState:
        """The job with the checkpoints that are in the bucket by now."""
        if job.saving is not None:
            if self._has(job.saving.ref, now):
                job = _complete(job, job.saving.ref, now)
        elif self.generation and job.current is not None:
            every = self.costs.checkpoint
            time = self.starts + math.floor((min(now, self.stalled) - self.starts) / every) * every
            ref = StateRef.model_construct(generation=self.generation, step=self.done(time))
            if time > self.starts and (ref.generation, ref.step) > job.newest:
                job = _complete(job, ref, now)
            job = job.replace(saved_at=max(time, self.starts))
        # The head then orders no checkpoint itself.
        return job.replace(saved_at=max(job.saved_at, now - self.costs.checkpoint + 1e-3))

    def _has(self, ref: StateRef, now: float) -> bool:
        if ref.generation == self.generation:
            return self.done(now) >= ref.step
        return any((each.generation, each.step) == (ref.generation, ref.step) for each in self.snapshots.values())

    def saves(self, now: float) -> float:
        """When the next checkpoint is in the bucket, if nothing happens before."""
        if not self.generation or self.stalled < math.inf:
            return math.inf
        every = self.costs.checkpoint
        return self.starts + max(1, math.floor((now - self.starts) / every) + 1) * every + 1e-3

    def report(self, machine: Machine, now: float) -> JobReport:
        """What a node reports about the job. Only the first member reports each step: the head needs no more."""
        snapshot = self.snapshots.get(machine.name)
        if not self.generation or self._members.get(machine.name) is not machine:
            return self._cached(("ready", snapshot), lambda: self._report("ready", 0, snapshot))
        phase = self._phase(now)
        if phase in ("drained", "succeeded") and (snapshot is None or snapshot.generation != self.generation):
            self._snap(StateRef.model_construct(generation=self.generation, step=self.done(now)))
            snapshot = self.snapshots[machine.name]
        step = self.done(now) if machine is self.machines[0] or phase != "running" else self.base
        key = (phase, snapshot, self.generation, step)
        return self._cached(key, lambda: self._report(phase, self.generation, snapshot, (self._worker(step, now),)))

    def _phase(self, now: float) -> str:
        if self.stalled < math.inf:
            return "failed"
        step = self.done(now)
        if step >= self.total:
            return "succeeded"
        if self.stop_at is not None and step >= self.stop_at:
            return "drained"
        return "running" if now >= self.starts else "starting"

    def _worker(self, step: int, now: float) -> Worker:
        stepped = self.time_of(step) if step > self.base else 0.0
        first = self.time_of(self.base + 1) if step > self.base else 0.0
        base = self.base if now >= self.starts else -1
        times = (self.began, self.began, self.began, self.starts, first)
        return Worker.model_construct(
            rank=0, pid=1, step=max(step, base) if base >= 0 else -1, base=base, stepped_at=stepped,
            total_steps=self.total, phases=times,
        )  # fmt: skip

    def _report(
        self, phase: str, generation: int, snapshot: StateRef | None, workers: tuple[Worker, ...] = ()
    ) -> JobReport:
        failure = None
        if phase == "failed":
            failure = Failure.model_construct(kind="peer", rank=0, at=self.stalled, message="")
        return JobReport.model_construct(
            job=self.job, phase=phase, generation=generation, store="store", workers=workers, failure=failure,
            snapshot=snapshot,
        )  # fmt: skip

    def _cached(self, key: tuple[object, ...], make: Callable[[], JobReport]) -> JobReport:
        found = self._reports.get(key)
        if found is None:
            if len(self._reports) > 64:
                self._reports.clear()
            found = self._reports[key] = make()
        return found

    @property
    def reached(self) -> int:
        """The newest step of all generations that have ended."""
        return self._reached

    def close(self, now: float) -> None:
        """End the last generation, because the replay has ended."""
        if self.generation:
            self._leave(now)

    def _join(self, job: JobState, known: Mapping[str, Machine], now: float) -> None:
        assert job.current is not None
        self.generation = job.current.number
        self.machines = tuple(known[member.node] for member in job.current.members)
        self._members = {machine.name: machine for machine in self.machines}
        refs = [self.snapshots[m.name] for m in self.machines if m.name in self.snapshots]
        newest = max(refs, key=lambda ref: (ref.generation, ref.step), default=None)
        bucket = job.checkpoints[0] if job.checkpoints else None
        from_memory = newest is not None and (newest.generation, newest.step) >= job.newest
        state = newest if from_memory else bucket
        base = state.step if state else 0
        self.lost += max(0, self._reached - base) * self.step
        self.base, self.began, self.stalled = base, now, math.inf
        self.stop_at = self.save_at = None
        self.starts = now + (self.costs.restart if from_memory else self.costs.restore)
        speed = min(self.speeds.get(machine.pool, 1.0) for machine in self.machines)
        self.rate = self.costs.rate(len(self.machines), speed)
        where = frozenset(machine.pool for machine in self.machines)
        self.restarts += 1
        self.moved += bool(self._where) and not where & self._where
        self._where = where

    def _leave(self, now: float) -> None:
        if all(self.snapshots.get(m.name, NOTHING).generation != self.generation for m in self.machines):
            self._snap(self._memory(min(now, self.stalled)))  # it has not stopped at an ordered step
        self._reached = max(self._reached, self.done(now))
        for machine in self.machines:
            span = max(0.0, min(now, self.stalled) - self.starts)
            self.good[machine.pool] = self.good.get(machine.pool, 0.0) + span
        self.generation, self.machines, self.rate = 0, (), 0.0

    def _memory(self, now: float) -> StateRef:
        """The newest snapshot in memory when an interruption comes without notice."""
        time = self.starts + math.floor(max(0.0, now - self.starts) / self.costs.snapshot) * self.costs.snapshot
        return StateRef.model_construct(generation=self.generation, step=self.done(time))

    def _snap(self, ref: StateRef) -> None:
        for machine in self.machines:
            self.snapshots[machine.name] = ref


def _complete(job: JobState, ref: StateRef, now: float) -> JobState:
    manifest = Manifest.model_construct(job=job.id, generation=ref.generation, step=ref.step, created=now, files=())
    return saved(job, (ref,), manifest, now)
