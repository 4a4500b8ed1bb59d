"""The points that a job has logged, and which of them count. Pure.

After an interruption, training goes on from a saved state, the base. The steps after the base are done again. So a
point of an older generation that is after the base of a newer one is void: the point stays, with a mark.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from spotrun.state.points import Block, Call, Header, from_json

COLUMNS = ("steps", "epochs", "samples", "times", "values")
_CODES = dict(zip(COLUMNS, "qqddd", strict=True))
Place = tuple[int, int]  # epoch, and steps completed: where in a job something happened


@dataclass
class Points:
    """Points of one name and one generation, in the order in which they were logged. All columns have one length."""

    steps: array[int] = field(default_factory=lambda: array("q"))  # see `Call.step`
    epochs: array[int] = field(default_factory=lambda: array("q"))
    samples: array[float] = field(default_factory=lambda: array("d"))  # NaN: not known
    times: array[float] = field(default_factory=lambda: array("d"))  # epoch seconds
    values: array[float] = field(default_factory=lambda: array("d"))
    between: bytearray = field(default_factory=bytearray)  # 1: logged while no step was under way

    def __len__(self) -> int:
        return len(self.steps)

    def extend(self, other: Points) -> None:
        """Append the points of another piece."""
        for name in (*COLUMNS, "between"):
            getattr(self, name).extend(getattr(other, name))

    def pick(self, rows: Sequence[int]) -> Points:
        """The points at these places."""
        found = {name: array(_CODES[name], [getattr(self, name)[row] for row in rows]) for name in COLUMNS}
        return Points(**found, between=bytearray([self.between[row] for row in rows]))

    def part(self, start: int, stop: int) -> Points:
        """A copy of the points from row `start` to before `stop`."""
        return Points(**{name: getattr(self, name)[start:stop] for name in COLUMNS}, between=self.between[start:stop])

    def place(self, row: int) -> Place:
        """Where in the job a point was logged."""
        return (self.epochs[row], self.steps[row] - (0 if self.between[row] else 1))

    def valid(self, limit: Place | None) -> int:
        """How many points come before a place; None: all. What is logged later is at a later place."""
        count = len(self)
        while limit is not None and count and self.place(count - 1) >= limit:
            count -= 1
        return count


@dataclass(frozen=True)
class Curve:
    """All points of one name, by generation. The points that count have rising steps."""

    name: str
    points: Points
    generations: array[int]
    void: bytearray  # 1: the point does not count, because a newer generation has gone on from before it

    def counting(self) -> Points:
        """The points that count."""
        return self.points.pick([row for row, void in enumerate(self.void) if not void])


def pieces(block: Block[Call], names: Iterable[str] | None = None) -> dict[str, Points]:
    """The points of a block by name; names: only these."""
    calls, wanted = block.calls, None if names is None else set(names)
    found: dict[str, list[int]] = {}
    for row, call in enumerate(calls):
        for name in call.values:
            if wanted is None or name in wanted:
                found.setdefault(name, []).append(row)
    shared = _shared(block)
    result = {}
    for name, rows in found.items():
        piece = shared if len(rows) == len(calls) else shared.pick(rows)
        values = [calls[row].values[name] for row in rows]
        numbers = [value if type(value) is float else from_json(value) for value in values]
        result[name] = Points(piece.steps, piece.epochs, piece.samples, piece.times, array("d", numbers), piece.between)
    return result


def _shared(block: Block[Call]) -> Points:
    """The columns that all names of a block have in common. Its values are zeros."""
    calls = block.calls
    return Points(
        array("q", [call.step for call in calls]),
        array("q", [call.epoch for call in calls]),
        array("d", [math.nan if call.samples is None else call.samples for call in calls]),
        array("d", [call.time for call in calls]),
        array("d", bytes(8 * len(calls))),
        bytearray([call.between for call in calls]),
    )


def continued(mine: Points, others: Sequence[Points]) -> Points:
    """The points, and what others have after them: rank 0's last numbers may be lost, those of its substitutes are not.

    mine: rank 0's. others: only points that are later than rank 0's last number of any name.
    """
    found = mine.part(0, len(mine))
    found.extend(max(others, key=len))
    return found


def limits(headers: Iterable[Header]) -> dict[int, Place | None]:
    """For each generation, the place at which its void points begin; None: all of its points count."""
    found: dict[int, Place | None] = {}
    least: Place | None = None
    for header in sorted(headers, key=lambda header: -header.generation):
        found[header.generation] = least
        base = (header.base_epoch, header.base)
        least = base if least is None else min(least, base)
    return found


def merge(name: str, by_generation: dict[int, Points], headers: Iterable[Header]) -> Curve:
    """One curve from the points of each generation. headers: of all generations, also of those without points."""
    bounds = limits(headers)
    points, generations, void = Points(), array("q"), bytearray()
    for generation in sorted(by_generation):
        each = by_generation[generation]
        count = each.valid(bounds.get(generation))
        points.extend(each)
        generations.extend(array("q", [generation]) * len(each))
        void.extend(bytes(count) + b"\1" * (len(each) - count))
    return Curve(name, points, generations, void)


def thin(points: Points, most: int) -> Points:
    """At most about `most` points: enough to draw the curve without a visible difference.

    The steps are cut into ranges of equal width, a power of two. Each range keeps its least and its greatest value, and
    its first NaN or infinity. So points that were thinned before can be thinned again with others.
    """
    if len(points) <= most:
        return points
    width = 1
    span = points.steps[-1] - points.steps[0] + 1
    while 2 * span / width > most:
        width *= 2
    rows: list[int] = []
    start, end = 0, len(points)
    while start < end:
        edge = (points.steps[start] // width + 1) * width
        stop = bisect_left(points.steps, edge, start + 1, end)
        rows.extend(_extremes(points.values, start, stop))
        start = stop
    return points.pick(rows)


def thin_curve(curve: Curve, most: int) -> Curve:
    """The curve with at most about `most` points that count, and as many void ones, for a chart."""
    if len(curve.points) <= most:
        return curve
    points, generations, void = Points(), array("q"), bytearray()
    total = len(curve.points)
    for start, stop in _runs(curve):
        share = max(2, most * (stop - start) // total)
        piece = thin(curve.points.part(start, stop), share)
        points.extend(piece)
        generations.extend(array("q", [curve.generations[start]]) * len(piece))
        void.extend(bytes([curve.void[start]]) * len(piece))
    return Curve(curve.name, points, generations, void)


def _runs(curve: Curve) -> list[tuple[int, int]]:
    """The stretches of points of one generation that all count, or that are all void."""
    found, start, end = [], 0, len(curve.points)
    while start < end:
        stop = bisect_left(curve.generations, curve.generations[start] + 1, start, end)
        if curve.void[start] == 0:
            first_void = curve.void.find(1, start, stop)
            stop = first_void if first_void >= 0 else stop
        found.append((start, stop))
        start = stop
    return found


def _extremes(values: array[float], start: int, stop: int) -> list[int]:
    """The rows of the least and the greatest value of a range, and of its first number that is not finite."""
    if stop - start <= 2:
        return list(range(start, stop))
    part = values[start:stop]
    if not math.isfinite(sum(part)):
        return _odd_extremes(part, start)
    return sorted({start + part.index(min(part)), start + part.index(max(part))})


def _odd_extremes(part: array[float], start: int) -> list[int]:
    finite = [row for row, value in enumerate(part) if math.isfinite(value)]
    odd = [row for row, value in enumerate(part) if not math.isfinite(value)][:1]
    ends = [min(finite, key=part.__getitem__), max(finite, key=part.__getitem__)] if finite else []
    return sorted({start + row for row in (*ends, *odd)})
