"""Lower bounds that no policy can beat: the least cost, and the earliest end, of a job that knows the whole trace.

`cheapest` is for one node: dynamic programming over time and work done. It is exact, but for two simplifications, which
can only lower the cost. Time is in steps, and a step counts as whole if the zone gives a machine for a part of it. A
job that leaves a machine for another one loses no work, and pays both only while the new one boots.

`relaxed` is for jobs of several nodes: changes of machines cost nothing, and a job may divide time between zones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from spotrun.simulate.costs import Costs
from spotrun.simulate.traces import Changes, Trace, at

Least = npt.NDArray[np.float64]  # the least cost, by steps of work done


@dataclass(frozen=True)
class Single:
    """A problem of one node."""

    counts: Changes  # of spot machines
    length: float  # seconds until the deadline
    spot: float  # USD an hour
    on_demand: float  # USD an hour; infinite: there are none
    change: float  # seconds from the order of a machine to its first step
    boot: float  # the part of `change` during which another machine can train
    overlap: bool = True  # whether there may be two machines at a time


def cheapest(problem: Single, works: Sequence[float], step: float = 30.0) -> list[float]:
    """USD to do each amount of work (seconds of one node) by the deadline; infinite if that is not possible."""
    available = _steps(problem.counts, problem.length, step)
    most = max(math.ceil(work / step - 1e-9) for work in works)
    cold, warm = math.floor(problem.change / step), math.floor(problem.boot / step)
    spot, sure = problem.spot * step / 3600, problem.on_demand * step / 3600
    idle, on_spot, on_sure = np.full((3, most + 1), np.inf)
    idle[0] = 0.0
    # Machines that are being made: by market, and by when they are ready.
    starts = np.full((2, cold + 1, most + 1), np.inf)
    run = 0  # steps for which there have been spot machines without a break
    for time, there in enumerate(available):
        slot = time % (cold + 1)
        on_spot = np.minimum(on_spot, starts[0, slot])
        on_sure = np.minimum(on_sure, starts[1, slot])
        if problem.overlap:
            before = on_sure
            on_sure = np.minimum(on_sure, on_spot + warm * sure)
            if there and run >= warm:
                on_spot = np.minimum(on_spot, before + warm * spot)
        idle = np.minimum(idle, np.minimum(on_spot, on_sure))
        # Ordered now, ready after `cold` steps, if the zone gives a machine all the while.
        later, ahead = (time + cold) % (cold + 1), available[time : time + cold]
        starts[0, later] = idle + cold * spot if all(ahead) and len(ahead) == cold else np.inf
        starts[1, later] = idle + cold * sure
        on_spot = _work(on_spot, spot) if there else np.full(most + 1, np.inf)
        on_sure = _work(on_sure, sure)
        run = run + 1 if there else 0
    final = np.minimum(idle, np.minimum(on_spot, on_sure))
    return [float(final[math.ceil(work / step - 1e-9)]) for work in works]


def relaxed(trace: Trace, work: float, least: int, most: int, costs: Costs, length: float) -> tuple[float, float]:
    """The least cost in USD to do the work within `length` seconds, and the earliest end in seconds.

    The two need not be of the same plan. Both are infinite if the work cannot be done.
    """
    pieces: list[tuple[float, float]] = []  # (USD for each unit of work, how much of it there is)
    done, end = 0.0, math.inf
    for begin, until in _intervals(trace, length):
        options = [(0.0, 0.0)]
        for zone in trace.zones:
            count = min(most, int(at(zone.counts, begin)))
            price = at(zone.prices, begin) if zone.prices else trace.price
            options += [(costs.rate(n), n * price / 3600) for n in range(least, count + 1)]
        best = max(rate for rate, _ in options)
        if best * (until - begin) >= work - done and end == math.inf:
            end = begin + (work - done) / best
        done += best * (until - begin)
        pieces += [(slope, amount * (until - begin)) for slope, amount in _hull(options)]
    return _fill(pieces, work), end


def _work(before: Least, price: float) -> Least:
    """The least costs after one more step of work. The last entry also stands for more work."""
    after = np.empty_like(before)
    after[0] = np.inf
    after[1:] = before[:-1] + price
    after[-1] = min(after[-1], before[-1] + price)
    return after


def _steps(counts: Changes, length: float, step: float) -> list[bool]:
    """In which steps there is a machine for any part of the step."""
    found = [False] * math.ceil(length / step - 1e-9)
    for index, (begin, count) in enumerate(counts):
        end = counts[index + 1][0] if index + 1 < len(counts) else length
        if count >= 1:
            last = min(len(found), math.ceil(end / step - 1e-9))
            found[math.floor(begin / step) : last] = [True] * (last - math.floor(begin / step))
    return found


def _intervals(trace: Trace, length: float) -> Iterable[tuple[float, float]]:
    times = {time for zone in trace.zones for series in (zone.counts, zone.prices) for time, _ in series}
    ordered = sorted({0.0, length, *(time for time in times if 0 < time < length)})
    return pairwise(ordered)


def _hull(options: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The cheapest way to each rate, if time may be divided: (USD for each unit of work, units of work a second)."""
    hull: list[tuple[float, float]] = []
    for rate, cost in sorted(options):
        while len(hull) > 1 and _above(hull[-2], hull[-1], (rate, cost)):
            hull.pop()
        if hull and hull[-1][0] == rate:
            continue
        hull.append((rate, cost))
    pairs = pairwise(hull)
    return [((after[1] - before[1]) / (after[0] - before[0]), after[0] - before[0]) for before, after in pairs]


def _above(first: tuple[float, float], middle: tuple[float, float], last: tuple[float, float]) -> bool:
    """Whether the middle is not below the line from the first to the last."""
    slope = (last[1] - first[1]) * (middle[0] - first[0])
    return (middle[1] - first[1]) * (last[0] - first[0]) >= slope - 1e-12


def _fill(pieces: list[tuple[float, float]], work: float) -> float:
    """The cheapest pieces that add up to the work."""
    total, left = 0.0, work
    for price, amount in sorted(pieces):
        taken = min(left, amount)
        total, left = total + taken * price, left - taken
        if left <= 1e-9:
            return total
    return math.inf
