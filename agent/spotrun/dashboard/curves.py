"""The curves of runs, thinned for a chart. Memory is bounded: a few runs, and a few thousand points of each name."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from spotrun.dashboard.records import Records
from spotrun.history.curves import Curve, Points, thin_curve
from spotrun.history.reader import Reader

RUNS = 24  # runs whose points are in memory
KEPT = 4000  # points of each name and generation in memory; with many generations, fewer (see `Reader`)
DRAWN = 1500  # points of each curve that a page gets: about one for each pixel
NAMES = 12  # curves in one answer, unless the page asks for others
PATIENCE = 0.5  # seconds of reading before an answer. The page shows what there is, and asks again


class Shelf:
    """The readers of the runs that pages have asked for lately."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._readers: OrderedDict[str, tuple[threading.Lock, Reader]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, job: str, query: Mapping[str, str]) -> dict[str, Any]:
        """The names that the run has logged, those of losses first, and some curves.

        Query: `names`, one in each line, with `%0A` for a line break in a name, and `%25` for %; default: the first
        ones. Waits for the bucket. Raises `JobNotFound`, `StoreError`.
        Each curve: the points that count, and the void ones, as lists of steps, times (epoch seconds), samples, values.
        `unread`: blocks that are not in the curves yet. The next call goes on with them.
        """
        self._records.state(job)
        lock, reader = self._reader(job)
        with lock:
            reader.update(seconds=PATIENCE)
            names = sorted(reader.names, key=lambda name: ("loss" not in name.lower(), name))
            asked = [unquote(name) for name in query.get("names", "").split("\n") if name][: 4 * NAMES]
            chosen = [name for name in asked if name in names] if asked else names[:NAMES]
            curves = [_drawn(thin_curve(reader.curve(name), DRAWN)) for name in chosen]
            bases = [[each.generation, each.base] for each in reader.headers.values()]
            return {
                "names": names,
                "curves": curves,
                "bases": sorted(bases),
                "problems": reader.problems,
                "unread": reader.unread,
            }

    def _reader(self, job: str) -> tuple[threading.Lock, Reader]:
        with self._lock:
            if job not in self._readers:
                self._readers[job] = threading.Lock(), Reader(self._records.store, job, most=KEPT)
                while len(self._readers) > RUNS:
                    self._readers.popitem(last=False)
            self._readers.move_to_end(job)
            return self._readers[job]


def _drawn(curve: Curve) -> dict[str, Any]:
    count = [row for row, void in enumerate(curve.void) if not void]
    void = [row for row, void in enumerate(curve.void) if void]
    return {"name": curve.name, "count": _lists(curve.points.pick(count)), "void": _lists(curve.points.pick(void))}


def _lists(points: Points) -> dict[str, Any]:
    return {
        "steps": list(points.steps),
        "times": list(points.times),
        "samples": list(points.samples),
        "values": list(points.values),
    }
