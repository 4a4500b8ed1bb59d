"""A simulated job: what the head and its workers say of it, and what operators do with it."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, cast

from aiohttp import web

from spotrun.head.job_state import JobState
from spotrun.head.server.control import ControlServer
from spotrun.wire import Report
from tests.head.puppets import Theatre
from tests.head.simulated_workers import START, Loss, Training

STEADY = 50  # steps of a generation after which the job trains
TYPING = 1.0  # seconds for an operator to type the next command; agents learn of the end of a job meanwhile
Coming = tuple[float, str, dict[str, Any]]  # when a job is submitted, its name, and keys of its file


def draw(random: Random, count: int) -> tuple[int, int, list[Coming]]:
    """How many machines there are, how many devices each has, and jobs that can all train on them at once."""
    least = [random.choice([1, 2, 2]) for _ in range(count)]
    if count == 1:
        nodes = {"min": least[0], "max": random.choice([2, 3, 4]), "spares": random.choice([0, 0, 1])}
        return 5, 1, [(0.0, "a", {"nodes": nodes})]
    machines, devices = random.choice([max(3, sum(least)), 5]), random.choice([1, 2])
    coming: list[Coming] = []
    for index, fewest in enumerate(least):
        most = random.randint(fewest, machines - sum(least) + fewest)
        nodes = {"min": fewest, "max": most, "spares": random.choice([0, 0, 1])}
        part = {"devices": 1} if devices == 2 and random.random() < 0.7 else {}
        coming.append((START + index * random.uniform(0, 20), "ab"[index], {"nodes": nodes, "priority": index, **part}))
    return machines, devices, coming


class SimulatedJob:
    """A job of the real head, with simulated workers."""

    def __init__(self, stage: Theatre, id: str, training: Training) -> None:
        self.id, self.training = id, training
        self._stage = stage
        self.unsaved: list[str] = []  # what a stop has not saved
        self._known: set[int] = set()  # generations of which the head has received a step before it ended them
        self._again_at: float | None = None  # when an operator resumes or relaunches it; None: it goes on
        self._ended = False  # whether it was found to have ended since the last stop
        self._before: set[int] = set()  # the newest generations before an operator resumed or relaunched it

    @property
    def state(self) -> JobState:
        """The job as the head has it."""
        return self._stage.state(self.id)

    @property
    def kinds(self) -> set[str]:
        """The kinds of all interruptions."""
        return {kind for each in self.state.interruptions for kind in each.kind.split("+")}

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
            if number in self._known:
                known = set() if number in self._before else members
        return found

    @property
    def trains(self) -> bool:
        """Whether the job's newest generation makes steps."""
        job, training = self.state, self.training
        done = training.steps.get(job.generation, 0) - training.bases.get(job.generation, 0)
        return job.phase == "running" and job.current is not None and done >= STEADY and self._again_at is None

    def note(self, report: Report) -> None:
        """The head has received a report."""
        current = self.state.current
        for each in report.jobs:
            stepped = any(worker.step > worker.base >= 0 for worker in each.workers)
            if each.job == self.id and stepped and current is not None and current.number == each.generation:
                self._known.add(each.generation)

    async def interrupt(self, how: str) -> None:
        """An operator pauses or stops the job, and lets it go on some seconds later. how: pause or stop."""
        random, job = self.training.random, self.state
        if self._again_at is None and not job.ended_already and job.ending is None and not job.stopping:
            self._again_at = self.training.clock.now + random.choice([random.uniform(0.0, 3.0), random.uniform(3, 30)])
            self._ended = how == "pause"
            self.training.tell(f"the operator asks for {how}")
            await self._ask(how)

    async def set_priority(self, to: int) -> None:
        """An operator changes the priority."""
        if not self.state.ended_already:
            self.training.tell(f"the operator sets priority {to}")
            await self._ask("priority", to=to)

    async def go_on(self, soon: bool) -> None:
        """The operator resumes or relaunches the job when it is time, and when a stop has ended. soon: not later."""
        if self._again_at is None:
            return
        job, now = self.state, self.training.clock.now
        if job.ended_already and not self._ended:
            self._ended = True
            self._note_end(job)
            self._again_at = max(self._again_at, now + TYPING)
        elif soon:
            self._again_at = min(self._again_at, now + TYPING)
        if self._ended and now >= self._again_at:
            self._again_at = None
            self._before.add(max(self._known, default=0))
            self.training.tell("the operator lets it go on")
            await self._ask("resume" if job.paused else "relaunch")

    async def _ask(self, verb: str, **more: Any) -> None:
        """Ask the head's control server. Time stands still until it has answered."""
        handler = getattr(ControlServer(self._stage.head), f"_{verb}")
        await self._stage.head.journal.read_queue()
        asked = asyncio.create_task(handler(cast(web.Request, Request({"job": self.id, **more}))))
        while not asked.done():
            await asyncio.sleep(0)
            await self._stage.turn()
        await asked

    def _note_end(self, job: JobState) -> None:
        """Note whether the newest state is in the bucket. The head ends a generation of which it knows no step."""
        reached = self.training.steps.get(max(self._known, default=0), 0)
        saved = job.checkpoints[0].step if job.checkpoints else 0
        self.training.tell(f"ended as {job.phase} ({job.reason}), with step {saved} of {reached}")
        if job.phase != "stopped" or saved < reached:
            self.unsaved.append(f"{job.phase} ({job.reason}): step {saved} of {reached}")


class Request:
    """A request to the control server."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body

    async def json(self) -> dict[str, Any]:
        return self._body
