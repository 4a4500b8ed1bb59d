"""Many replays, on all processors: random windows of traces, by policy."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import TypeVar

from spotrun.head.capacity.policies.failover import failover
from spotrun.head.capacity.policies.static import static
from spotrun.head.capacity.policies.uniform_progress import greedy, uniform_progress
from spotrun.head.capacity.situation import Policy
from spotrun.simulate.costs import Costs
from spotrun.simulate.replay import Job, Outcome, replay
from spotrun.simulate.traces import Trace, Zone, load

POLICIES: Mapping[str, Policy | None] = {
    "own": None,  # the one that the job's keys choose, as in the real head: elastic, or deadline if it has one
    "failover": failover,
    "greedy": greedy,
    "uniform_progress": uniform_progress,
    "static": static,
}

Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Window:
    """A part of a trace."""

    folder: str  # of the trace
    zones: tuple[str, ...]  # the zones whose machines may be used
    begin: float  # seconds from the trace's beginning
    length: float  # seconds
    price: float | None = None  # USD an hour in all zones; None: as in the trace
    on_demand: float | None = None  # the same of on-demand machines
    polarity: str = ""  # as for `traces.load`

    def trace(self) -> Trace:
        """The machines and prices of the window."""
        found = _load(self.folder, self.polarity).only(*self.zones).window(self.begin, self.length)
        if self.price is not None:
            flat = tuple(Zone(zone.name, zone.counts) for zone in found.zones)
            found = replace(found, zones=flat, price=self.price)
        return found if self.on_demand is None else replace(found, on_demand=self.on_demand)


@dataclass(frozen=True)
class Case:
    """One replay."""

    window: Window
    job: Job
    policy: str  # a key of POLICIES
    costs: Costs
    on_demand: int = 0  # on-demand machines that there are
    seed: int = 0


def run(case: Case) -> Outcome:
    """The outcome, without its log."""
    found = replay(case.window.trace(), case.job, POLICIES[case.policy], case.costs, case.seed, case.on_demand)
    return replace(found, log=())


def run_all(cases: Sequence[Case], done: Callable[[int], None] = lambda _: None) -> list[Outcome]:
    """All outcomes, in order. done: called with the number of outcomes so far."""
    return spread(run, cases, done)


def spread(work: Callable[[Item], Found], items: Sequence[Item], done: Callable[[int], None]) -> list[Found]:
    """Apply a function to all items, on all processors. The function must be at the top of a module."""
    processors = min(os.cpu_count() or 1, len(items))
    if processors <= 1:
        return [work(item) for item in items]
    found: list[Found] = []
    with multiprocessing.get_context("spawn").Pool(processors) as pool:
        for each in pool.imap(work, items, chunksize=4):
            found.append(each)
            done(len(found))
    return found


def windows(
    folder: Path | str, zones: Iterable[Sequence[str]], length: float, count: int, seed: int, polarity: str = ""
) -> list[Window]:
    """`count` random windows for each group of zones."""
    random, trace = Random(seed), _load(str(folder), polarity)
    last = max(0.0, trace.length - length)
    return [
        Window(str(folder), tuple(group), random.uniform(0.0, last), min(length, trace.length), polarity=polarity)
        for group in zones
        for _ in range(count)
    ]


@cache
def _load(folder: str, polarity: str) -> Trace:
    return load(folder, polarity)
