"""Why a job has nothing or fewer nodes than its `max`, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spotrun.head.allocation.board import Board, Job
from spotrun.head.allocation.claims import pools, wanted
from spotrun.spec.fields import PRIORITY
from spotrun.text import count

NAMED = 2  # jobs in one reason


class Reasons:
    """The reasons of all jobs on a board. Jobs that ask for the same kind of machine share what is looked up."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.waiting = [job for job in board.jobs if not job.runs]
        self._having: dict[Any, list[Job]] = {}
        self._free: dict[Any, int] = {}

    def of(self, job: Job) -> str:
        """The reason of a job that has fewer nodes than its `max`."""
        if job.runs:
            others = self._having_what_it_could_use(job)
            rest = f"others are with {_names(others)}" if others else "there are no more machines"
            return self._shrunk(job) or f"has {job.count} of {count(job.most, 'node')}; {rest}"
        usable = self.board.usable(job)
        where = f" of {pools(job.claim.pools)}" if job.claim.pools else ""
        kept = f", keeps {job.count}" if job.count else ""
        need = f"waits for {wanted(job.claim)}{where}{kept}"
        if len(usable) < job.min:
            return f"{need}; {_are(len(usable))} there"
        key = (job.claim.devices, job.claim.pools, job.claim.avoids)
        if key not in self._free:
            self._free[key] = sum(place.free >= place.needed(job) for place in usable)
        ahead = [other for other in self.waiting if _waits_before(other, job)] or self._having_what_it_could_use(job)
        behind = f"; behind {_names(ahead)}" if ahead else ""
        return f"{need}; {_are(self._free[key])} free{behind}"

    def _shrunk(self, job: Job) -> str:
        """For which jobs the job has shrunk; empty if no job has its nodes."""
        gone = [self.board.places[name] for name in job.held.keys() - job.nodes.keys()]
        takers = {owner for place in gone for index in job.held[place.host.name] if (owner := place.owners[index])}
        own = "min" if job.count == job.min else "share"
        return f"shrunk to {count(job.count, 'node')}, its {own}, for {_names(takers)}" if takers else ""

    def _having_what_it_could_use(self, job: Job) -> list[Job]:
        """Other jobs on hosts that the job could use. Jobs of lower priority are left out."""
        key = (job.claim.devices, job.claim.pools, job.claim.avoids)
        if key not in self._having:
            self._having[key] = [*{other for place in self.board.usable(job) for other in place.jobs()}]
        return [other for other in self._having[key] if other.priority >= job.priority and other is not job]


def _waits_before(other: Job, job: Job) -> bool:
    """Whether the other job has the same priority, is served first, and may have machines that this job could use."""
    apart = other.claim.pools and job.claim.pools and other.claim.pools.isdisjoint(job.claim.pools)
    return other.priority == job.priority and other.rank < job.rank and not apart


def _are(number: int) -> str:
    return f"{number} {'is' if number == 1 else 'are'}"


def _weight(job: Job) -> str:
    return f"priority {job.priority}" if job.priority <= PRIORITY else "keeps what it has"


def _names(jobs: Iterable[Job]) -> str:
    first = sorted(jobs, key=lambda job: job.rank)
    named = [f"{job.id} ({_weight(job)})" for job in first[:NAMED]]
    more = len(first) - len(named)
    return ", ".join(named) + (f" and {count(more, 'other')}" if more else "")
