"""Following the jobs of a group to their ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from scripts import console, control, job_table
from scripts.control import ENDED, Status
from scripts.display import clock, understood
from scripts.job_table import job_id
from scripts.jobs import Absence
from scripts.make_command import make_command
from scripts.ssh import Access, Unreachable
from spotrun.errors import SpotrunError, StoreError
from spotrun.text import tidy

EVERY = 1.0  # seconds between two looks
_COUNTED = 10.0  # seconds between two lines that count the jobs


class Listener(Protocol):
    """Shows the jobs of a group to the person or program that follows them."""

    def show(self, jobs: list[Status]) -> None:
        """The jobs of the group."""

    def say(self, text: str) -> None:
        """A line that is about no job, for example that the head is away."""


def follow(access: Access, group: str, listener: Listener, look: Callable[[], object] = lambda: None) -> list[Status]:
    """Show the jobs of a group until all have ended. Returns them, each as it was at its end.

    A job of the group that is submitted meanwhile counts too. look: see `jobs.follow`. Raises `SpotrunError` if the
    group has no job that has not ended, `Unreachable` if the head stays away.
    """
    known: dict[str, Status] = {}
    absence = Absence(listener.say, look)
    while True:
        try:
            with control.open_head(access) as head:
                while True:
                    _update(known, head, group)
                    absence.over()
                    if not known:
                        lists = make_command(access.file, "jobs")
                        raise SpotrunError(f"group {group} has no job that has not ended; `{lists}` lists the groups")
                    listener.show(list(known.values()))
                    if all(job["phase"] in ENDED for job in known.values()):
                        return list(known.values())
                    time.sleep(EVERY)
        except (Unreachable, StoreError) as error:
            absence.endure(error)
            time.sleep(EVERY)


class Lines:
    """A line of JSON with all jobs, whenever one of them has changed."""

    def __init__(self) -> None:
        self._last: list[Status] = []

    def show(self, jobs: list[Status]) -> None:
        if jobs != self._last:
            self._last = jobs
            console.answer(jobs)

    def say(self, text: str) -> None:
        console.warn(text)


class Plain:
    """A line for each job whose phase has changed, and one that counts all jobs from time to time."""

    def __init__(self, group: str) -> None:
        self._group, self._phases, self._at = group, dict[str, str](), 0.0

    @understood
    def show(self, jobs: list[Status]) -> None:
        jobs = tidy(jobs)
        for job in jobs:
            phase, job_ = str(job["phase"]), job_id(job)
            if self._phases.get(job_) != phase:
                self._phases[job_] = phase
                why = f" ({job['reason']})" if job.get("reason") else ""
                self.say(f"{clock(time.time())} {phase:<11} {job_}{why}, step {job_table.steps(job)}")
        if time.monotonic() - self._at >= _COUNTED:
            self._at = time.monotonic()
            self.say(f"{clock(time.time())} {'group':<11} {self._group}: {job_table.phases(jobs)}")

    def say(self, text: str) -> None:
        console.say(text)


@understood
def _update(known: dict[str, Status], head: control.Head, group: str) -> None:
    """Update `known`. The head lists a job until the job has ended; after that, ask for the job by its id."""
    rows = [row for row in head.ask("status").get("jobs", ()) if row.get("group") == group]
    listed = {job_id(row): row for row in rows}
    for job in known.keys() - listed.keys():
        if known[job]["phase"] not in ENDED:
            known[job] = head.ask("status", "--job", job)["job"]
    known |= listed
