"""The newest texts, images and histograms of a run. The page gets some of each name, and the memory is bounded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from spotrun.dashboard.records import Records
from spotrun.history import extras
from spotrun.history.curves import limits
from spotrun.history.extras import Found
from spotrun.history.reader import read_headers
from spotrun.state.points import Extra
from spotrun.store import metrics_folder

BLOCKS = 100  # newest blocks of a run that are read: what is older is not shown
EACH = 8  # newest values of a name that a page gets
NAMES = 50  # names that a page gets
BYTES = 16 << 20  # of texts and images that a page gets
KEPT = 64 << 20  # bytes of texts and images that are kept in memory
BINS = 256  # of a histogram; run.log_histogram makes 64
AT_ONCE = 8  # blocks that are downloaded at once


class Logged:
    """What pages have asked for lately. A block is never rewritten, so it is read once."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._blocks: OrderedDict[str, list[Extra]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def read(self, job: str, query: Mapping[str, str]) -> dict[str, Any]:
        """The newest values, the newest first. Query: `have`: the stamp of what the page has already.

        stamp: changes with what there is. items: null if the page has them. left_out: how many older blocks there are.
        """
        self._records.state(job)
        listed = self._records.store.sizes(metrics_folder(job))
        keys = extras.keys(listed)
        stamp = f"{len(keys)} {max(listed, default='').rpartition('/')[0]}"  # a new generation makes values void
        if stamp == query.get("have"):
            return {"stamp": stamp, "items": None, "left_out": 0}
        bounds = limits(read_headers(self._records.store, job).values())
        newest, total = list[str](), 0
        for key in reversed(keys[-BLOCKS:]):
            total += listed[key]
            if newest and total > KEPT // 2:
                break
            newest.insert(0, key)
        found = [each for key, calls in self._get(newest) for each in extras.marked(key, calls, bounds)]
        items = [_plain(each) for each in chosen(reversed(found))]
        return {"stamp": stamp, "items": items, "left_out": len(keys) - len(newest)}

    def _get(self, keys: list[str]) -> list[tuple[str, list[Extra]]]:
        with self._lock:
            known = {key: self._blocks[key] for key in keys if key in self._blocks}
        missing = [key for key in keys if key not in known]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            read = pool.map(lambda key: extras.read_block(self._records.store, key), missing)
            found = {key: trimmed(calls) for key, calls in zip(missing, read, strict=True)}
        with self._lock:
            for key, calls in found.items():
                if key not in self._blocks:
                    self._blocks[key] = calls
                    self._size += _size(calls)
            while self._size > KEPT:
                self._size -= _size(self._blocks.popitem(last=False)[1])
        known |= found
        return [(key, known[key]) for key in keys]


def trimmed(calls: list[Extra]) -> list[Extra]:
    """The newest values of each name of a block: a page never gets more."""
    counts: dict[tuple[str, str], int] = {}
    kept = []
    for each in reversed(calls):
        name = (each.kind, each.name)
        counts[name] = counts.get(name, 0) + 1
        if counts[name] <= EACH:
            kept.append(each)
    return kept[::-1]


def chosen(found: Iterable[Found]) -> list[Found]:
    """The newest values of each name, as far as they are not too many. found: the newest first."""
    counts: dict[tuple[str, str], int] = {}
    kept, size = list[Found](), 0
    for each in found:
        name = (each.extra.kind, each.extra.name)
        more = len(each.extra.text)
        if counts.get(name, 0) < EACH and (name in counts or len(counts) < NAMES) and size + more <= BYTES:
            size += more
            counts[name] = counts.get(name, 0) + 1
            kept.append(each)
    return kept


def _plain(found: Found) -> dict[str, Any]:
    each = found.extra
    values = {key: getattr(each, key) for key in ("step", "epoch", "time", "kind", "name", "text")}
    bins = {"edges": each.edges[: BINS + 1], "counts": each.counts[:BINS]}
    return values | bins | {"generation": found.generation, "void": found.void}


def _size(calls: Iterable[Extra]) -> int:
    return sum(len(each.text) + 16 * len(each.edges) + 100 for each in calls)
