"""What operators read: events of the cluster, and of each job that has not ended."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from spotrun.head.job_state import JobState

log = logging.getLogger(__name__)

BEGUN = "generation"  # the kind of the events that say which generation has begun
MOST = 1000  # newest ones of the cluster, and of each job, that are kept
LONGEST = 20_000  # characters of a text, which may have the names of all members; a node could send more


class Event(dict[str, Any]):
    """Keys at (epoch seconds), kind, text. An event is not changed: one of the cluster is in the lists of all jobs."""

    @cached_property
    def line(self) -> str:
        """The event as a line of JSON. It is made once: with many jobs and nodes, that takes longer than a turn."""
        return json.dumps(self) + "\n"


class Events:
    """The events that this head knows. The journal keeps those of jobs in the bucket."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._cluster: list[Event] = []
        self._jobs: dict[str, list[Event]] = {}

    def add(self, kind: str, text: str, job: str | None = None) -> None:
        """Add to the events of a job; None: to those of the cluster, and of each job that has not ended."""
        event = Event(at=self._clock(), kind=kind, text=text[:LONGEST])
        for events in [self._jobs.setdefault(job, [])] if job else [self._cluster, *self._jobs.values()]:
            events.append(event)
            del events[:-MOST]
        log.info("%s%s: %s", f"{job}: " if job else "", kind, event["text"])

    def has(self, text: str) -> bool:
        """Whether an event of the cluster has exactly this text."""
        return any(event["text"] == text for event in self._cluster)

    def of(self, job: str) -> list[Event]:
        """The events of a job."""
        return self._jobs.get(job, [])

    def seen_from(self, job: JobState | None) -> list[Event]:
        """The events of a job, and those of the cluster since the job was submitted, in order."""
        events = {id(each): each for each in self._cluster if job is None or each["at"] >= job.submitted}
        events |= {id(each): each for each in (self.of(job.id) if job else [])}
        return sorted(events.values(), key=lambda each: float(each["at"]))

    def newest(self, most: int) -> list[dict[str, Any]]:
        """The newest events of the cluster and of all jobs, as `merged`."""
        return merged({job: events[-most:] for job, events in self._jobs.items()}, self._cluster[-most:])[-most:]

    def load(self, job: str, events: list[Event]) -> None:
        """Begin with the events that the bucket has of a job."""
        self._jobs[job] = events

    def forget(self, job: str) -> None:
        """Drop the events of a job that has ended."""
        self._jobs.pop(job, None)


def read_events(lines: bytes | None) -> list[Event]:
    """The events of an `events.jsonl`, without junk."""
    return [event for line in (lines or b"").splitlines() if (event := _event(line))]


def merged(jobs: Mapping[str, Iterable[Event]], cluster: Iterable[Event] = ()) -> list[dict[str, Any]]:
    """Events of several jobs, and of the cluster, in order. A job's event has the job's id under `job`.

    An event of the cluster is in the lists of all jobs, and those of an earlier head are only there. It comes once.
    """
    found = {each.line: dict(each) for each in cluster}
    for job, events in jobs.items():
        for each in events:
            if found.setdefault(each.line, {**each, "job": job}).get("job") != job:
                found[each.line].pop("job", None)
    return sorted(found.values(), key=lambda each: float(each["at"]))


def begun(number: int, members: Sequence[str]) -> str:
    """The text of the event that a generation has begun. members: names of its nodes, in rank order."""
    nodes = "1 node" if len(members) == 1 else f"{len(members)} nodes"
    return f"{number}: {nodes} ({', '.join(members)})"


def members(events: Iterable[Event]) -> dict[int, list[str]]:
    """The nodes of each generation that has begun, by its number. It reads the texts of `begun`."""
    texts = (event["text"] for event in events if event["kind"] == BEGUN)
    found = (re.match(r"([0-9]{1,9}): [0-9]+ nodes? \(([^()]*)\)", text) for text in texts)
    return {int(each[1]): each[2].split(", ") for each in found if each}


def _event(line: bytes) -> Event | None:
    """The event on a line; None if it is junk."""
    try:
        event = json.loads(line)
        return Event(at=float(event["at"]), kind=str(event["kind"]), text=str(event["text"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
