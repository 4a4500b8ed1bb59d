"""From a run's events to the phases of its recovery. Pure: the same function judges every system."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from statistics import median


@dataclass(frozen=True, order=True)
class Event:
    """Something that a worker said, or that was seen of it, at `time` (epoch seconds).

    name: created (forked), entered (imports done, about to form the group), grouped, restored, step, failed (a
    collective raised), ended (the process is gone; seen from outside). step: steps completed; -1: it does not apply.
    """

    time: float
    name: str
    pid: int
    node: str
    step: int = -1


@dataclass(frozen=True)
class Phases:
    """Where the seconds between a fault and the next step went; they add up to `total`.

    detection: until the first survivor's worker left the old group (its collective raised, or it ended).
    rendezvous: until the last process of the new group was created. process_start: until the last of them had done its
    imports. process_group: until all were in the group. state_restored: until all had model, optimizer and state.
    first_step: until the first new step was complete. pause: from the last old step to the first new one.
    """

    detection: float
    rendezvous: float
    process_start: float
    process_group: float
    state_restored: float
    first_step: float
    total: float
    pause: float
    steps_lost: float


PARTS = ("detection", "rendezvous", "process_start", "process_group", "state_restored", "first_step")
_MARKS = ("created", "entered", "grouped", "restored")


def parse(text: str) -> list[Event]:
    """The events of complete lines. A line that is still being written is left out."""
    lines = text.splitlines(keepends=True)
    return [Event(**json.loads(line)) for line in lines if line.endswith("\n")]


def phases(events: Iterable[Event], fault_time: float, victim: str) -> Phases | None:
    """The recovery from the fault that hit node `victim` at `fault_time`; None if no step has followed yet.

    The workers of the new group have formed a group after the fault, in new processes or in the old ones. Groups that
    ended before they made a step are part of the recovery.
    """
    ordered = sorted(events)
    first, grouped = _first_step(ordered, fault_time)
    if first is None:
        return None
    ended = {event.pid: event.time for event in ordered if event.name == "ended"}
    members = {pid for pid in grouped if ended.get(pid, first.time) >= first.time}
    marks = [max(_last(ordered, name, members, first.time), default=fault_time) for name in _MARKS]
    left = _left(ordered, fault_time, victim, first.time)
    if left is None:  # no worker was seen to leave, so the first sign of the new group counts
        left = min((mark for mark in marks if mark > fault_time), default=first.time)
    bounds = list(accumulate([fault_time, left, *marks, first.time], max))
    parts = dict(zip(PARTS, (after - before for before, after in pairwise(bounds)), strict=True))
    old = [
        event
        for event in ordered
        if event.name == "step" and event.time < min(first.time, grouped.get(event.pid, first.time))
    ]
    restored = [
        event.step for event in ordered if event.name == "restored" and event.pid in members and event.time > fault_time
    ]
    return Phases(
        **parts,
        total=first.time - fault_time,
        pause=first.time - max((event.time for event in old), default=fault_time),
        steps_lost=max(0, max((event.step for event in old), default=0) - max(restored, default=first.step - 1)),
    )


def usual_step(events: Iterable[Event], fault_time: float) -> float | None:
    """Median seconds between two steps of a worker in the last 20 steps before the fault; None: there were too few."""
    times: dict[int, list[float]] = {}
    for event in sorted(events):
        if event.name == "step" and event.time <= fault_time:
            times.setdefault(event.pid, []).append(event.time)
    gaps = [after - before for own in times.values() for before, after in pairwise(own[-21:])]
    return median(gaps) if gaps else None


def joining(events: Iterable[Event], began: float, after: float) -> Phases | None:
    """What a node's joining costs the others; None until they have trained for `after` seconds with it.

    total: until the newcomer's first step. pause: the longest time between two steps of one of the others.
    """
    steps = [event for event in sorted(events) if event.name == "step"]
    others = {event.pid for event in steps if event.time < began}
    first = next((event.time for event in steps if event.pid not in others and event.time > began), None)
    if first is None or steps[-1].time < first + after:
        return None
    pause = 0.0
    for pid in others:
        own = [event.time for event in steps if event.pid == pid]
        pause = max([pause, *(b - a for a, b in pairwise(own) if b > began)])
    nothing = dict.fromkeys(PARTS, 0.0)
    return Phases(**nothing, total=first - began, pause=pause, steps_lost=0)


def steps_of_others(events: Iterable[Event], fault_time: float, victim: str) -> tuple[float, ...]:
    """When the nodes other than the victim completed steps, in seconds since the fault, from 10 s before it."""
    found = {(event.step, event.pid): event.time - fault_time for event in sorted(events) if _counts(event, victim)}
    return tuple(sorted(round(at, 3) for at in found.values() if at > -10))


def _counts(event: Event, victim: str) -> bool:
    return event.name == "step" and event.node != victim


def medians(runs: Sequence[Phases]) -> Phases:
    """The median of each number on its own, so the parts may not add up to the total."""
    return Phases(**{field.name: median(getattr(run, field.name) for run in runs) for field in fields(Phases)})


def _first_step(ordered: Sequence[Event], fault_time: float) -> tuple[Event | None, dict[int, float]]:
    """The first step made by a group formed after the fault, and when each of its processes joined."""
    grouped: dict[int, float] = {}
    for event in ordered:
        if event.time <= fault_time:
            continue
        if event.name == "grouped":
            grouped[event.pid] = event.time
        if event.name == "step" and event.pid in grouped:
            return event, grouped
    return None, grouped


def _left(ordered: Sequence[Event], fault_time: float, victim: str, until: float) -> float | None:
    """When the first worker that was running elsewhere than on the victim left its group."""
    running = {event.pid for event in ordered if event.name == "step" and event.time <= fault_time}
    running -= {event.pid for event in ordered if event.node == victim}
    running -= {event.pid for event in ordered if event.name == "ended" and event.time <= fault_time}
    leaving = [
        event.time
        for event in ordered
        if event.name in ("failed", "ended") and event.pid in running and fault_time < event.time <= until
    ]
    return min(leaving, default=None)


def _last(ordered: Sequence[Event], name: str, members: set[int], until: float) -> list[float]:
    """When each member last passed the mark."""
    found = {event.pid: event.time for event in ordered if event.name == name and event.pid in members}
    return [time for time in found.values() if time <= until]
