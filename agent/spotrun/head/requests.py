"""Changes of jobs that somebody waits for. Each is answered once it is in the bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from spotrun.errors import SpotrunError, StoreError
from spotrun.head.job_state import JobState

NAMED = 5  # jobs in a message

Change = Callable[[JobState, float], JobState]


class _Request(NamedTuple):
    change: Change
    job: str | None  # None: the only job that has not ended
    answer: asyncio.Future[JobState]
    kept: bool  # whether the job may be one that has ended and keeps a node


class Requests:
    """The changes that wait for a turn, and those that wait for the bucket."""

    def __init__(self) -> None:
        self._new: list[_Request] = []
        self._made: list[tuple[asyncio.Future[JobState], JobState]] = []

    def add(self, change: Change, job: str | None, kept: bool = False) -> asyncio.Future[JobState]:
        """Ask for a change of a job; None: of the only job that has not ended. Returns the job after the change.

        kept: a job that has ended and keeps a node can be changed too.
        """
        answer: asyncio.Future[JobState] = asyncio.get_running_loop().create_future()
        self._new.append(_Request(change, job, answer, kept))
        return answer

    def apply(self, states: dict[str, JobState], aside: Mapping[str, str], now: float) -> None:
        """Make the changes. aside: why jobs are missing in `states`."""
        new, self._new = self._new, []
        for change, name, answer, kept in new:
            if answer.done():
                continue  # the request was cancelled
            try:
                job = _find(name, states, aside, kept)
                states[job.id] = changed = change(job, now)
                self._made.append((answer, changed))
            except SpotrunError as error:
                answer.set_exception(error)

    def refuse(self, job: str, why: str) -> None:
        """Refuse the changes of a job: they do not get into the bucket."""
        for answer, _ in [each for each in self._made if each[1].id == job and not each[0].done()]:
            answer.set_exception(SpotrunError(why))

    def give_up(self, why: str) -> None:
        """Answer all: the bucket refuses the head's writes. A change that was made goes into the next write."""
        late = [(each.answer, "nothing was changed") for each in self._new]
        late += [(answer, "the change is made when the bucket takes it") for answer, _ in self._made]
        self._new, self._made = [], []
        for answer, so in late:
            if not answer.done():
                answer.set_exception(StoreError(f"{why}; {so}"))

    def answer(self) -> None:
        """Answer all changes that were made: they are in the bucket now."""
        made, self._made = self._made, []
        for answer, changed in made:
            if not answer.done():
                answer.set_result(changed)


def _find(name: str | None, states: Mapping[str, JobState], aside: Mapping[str, str], kept: bool) -> JobState:
    keeping = {job.id: job for job in states.values() if job.kept_node}
    if kept and name in keeping:
        return keeping[name]
    found = [job for job in states.values() if not job.ended_already and name in (None, job.id)]
    if len(found) == 1:
        return found[0]
    if name is not None:
        raise SpotrunError(aside.get(name) or _unknown(name, states.values()))
    if found:
        raise SpotrunError(f"{len(found)} jobs have not ended: {_ids(found)}; name one of them with ID=")
    raise SpotrunError("; ".join(["no job is active", *list(aside.values())[:NAMED], *map(_keeps, keeping.values())]))


def _unknown(name: str, states: Iterable[JobState]) -> str:
    same = [job for job in states if job.name == name and not job.ended_already]
    if same:
        return f"{name} is the name of a job; give the job's id: {_ids(same)}"
    return f"job {name} has ended, or is not a job of this cluster; `make jobs` lists the jobs"


def _ids(jobs: Sequence[JobState]) -> str:
    return ", ".join(job.id for job in jobs[:NAMED]) + (", …" if len(jobs) > NAMED else "")


def _keeps(job: JobState) -> str:
    assert job.kept_node is not None
    return f"{job.id} has failed and keeps {job.kept_node.member.node}, `make stop ID={job.id}` lets it go"
