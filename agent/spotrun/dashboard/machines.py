"""What the machines of a run did: the readings of its nodes from the bucket.

Of a long run, only some blocks are read: the newest ones, and others at equal distances. A job's code can write any
block. So time, answers and memory are bounded. `Machines.read` waits for the bucket: callers in an event loop use a
thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

from spotrun.dashboard import readings
from spotrun.dashboard.readings import COLUMNS, LARGEST, OF_GPU, TOTALS, Block
from spotrun.dashboard.records import AT_ONCE, Records
from spotrun.dashboard.stragglers import of_node, ranks
from spotrun.errors import NotFound, TooLargeError
from spotrun.store import system_folder

NODES = 64  # nodes in one answer: those that were measured last
BLOCKS = 120  # blocks of each node that are read
NEWEST = 4  # how many of these are the newest ones
KEPT = 192 << 20  # bytes of blocks in memory, and in one answer; a block of a node with 8 GPUs has about 20 KB
PATIENCE = 4.0  # seconds of reading before an answer. The next answer goes on


class Machines:
    """The blocks that pages have asked for lately."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._blocks: OrderedDict[str, Block | None] = OrderedDict()  # None: not readable
        self._size = 0
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # held while a block is read: it needs more memory then than later

    def read(self, job: str, _: Mapping[str, str]) -> dict[str, Any]:
        """The nodes of a run, each with lists of times and values; the ranks; and how many blocks were left out."""
        self._records.state(job)
        keys: dict[str, list[str]] = {}
        for key in filter(_is_block, self._records.store.list(system_folder(job))):
            keys.setdefault(key.split("/")[-2], []).append(key)
        newest = sorted(keys, key=lambda node: keys[node][-1].rpartition("/")[2])[-NODES:]
        chosen = {node: spread(keys[node]) for node in sorted(newest)}
        blocks = self._get(list(_newest_first(chosen.values())))
        nodes = [_node(node, [found for key in each if (found := blocks.get(key))]) for node, each in chosen.items()]
        left = sum(len(each) for each in keys.values()) - len(blocks)
        return {"nodes": nodes, "ranks": ranks(nodes), "left_out": left, "nodes_left_out": len(keys) - len(chosen)}

    def _get(self, keys: list[str]) -> dict[str, Block | None]:
        """The blocks that are in memory, and others as far as time and memory allow. keys: the most important first."""
        began = time.monotonic()
        with self._lock:
            found = {key: self._blocks[key] for key in keys if key in self._blocks}
            for key in reversed(found):  # the least important block is dropped first
                self._blocks.move_to_end(key)
        size = sum(map(_size, found.values()))
        missing = [key for key in keys if key not in found]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for start in range(0, len(missing), AT_ONCE):
                part = missing[start : start + AT_ONCE]
                new = dict(zip(part, pool.map(self._fetch, part), strict=True))
                self._keep(new)
                found |= new
                size += sum(map(_size, new.values()))
                if size > KEPT or time.monotonic() - began >= PATIENCE:
                    break
        return found

    def _fetch(self, key: str) -> Block | None:
        """A block; None if it cannot be read. Raises `StoreError` if the bucket does not answer: it may later."""
        try:
            data = self._records.store.get(key, LARGEST)
        except (TooLargeError, NotFound):
            return None
        with self._reading:
            return readings.read(data)

    def _keep(self, new: Mapping[str, Block | None]) -> None:
        with self._lock:
            for key, block in new.items():
                if key not in self._blocks:
                    self._blocks[key] = block
                    self._size += _size(block)
            while self._size > KEPT:
                self._size -= _size(self._blocks.popitem(last=False)[1])


def _size(block: Block | None) -> int:
    return 300 + (block.size if block else 0)


def _newest_first(keys: Iterable[list[str]]) -> Iterator[str]:
    """The newest key of each node, then the second newest ones, and so on."""
    for each in zip_longest(*map(reversed, keys)):
        yield from (key for key in each if key is not None)


def _is_block(key: str) -> bool:
    """Whether the object is a block. The record of what a node has (`history.provenance.NodeRecord`) lies beside it."""
    return key.endswith(".jsonl.zst")


def spread(keys: list[str]) -> list[str]:
    """At most `BLOCKS` of the keys, at equal distances, with the newest ones."""
    if len(keys) <= BLOCKS:
        return keys
    older, newest = keys[:-NEWEST], keys[-NEWEST:]
    count = BLOCKS - NEWEST
    return [older[len(older) * index // count] for index in range(count)] + newest


def _node(name: str, blocks: list[Block]) -> dict[str, Any]:
    last = blocks[-1] if blocks else None
    series = readings.joined(blocks)
    gpus = max((len(block.throttle) for block in blocks), default=0)
    order = [*COLUMNS, *(f"gpu{index}.{column}" for index in range(gpus) for column in OF_GPU)]
    throttle = [list(each) for each in last.throttle] if last else []
    return {
        "node": name,
        "pool": last.pool if last else "",
        "gpus": list(last.gpus) if last else [],
        "times": [at for block in blocks for at in block.times],
        "series": {column: series[column] for column in order if column in series},
        "totals": {column: last.totals.get(column) if last else None for column in TOTALS},
        "throttle": throttle + [[]] * (gpus - len(throttle)),
        "ranks": of_node(name, [reading for block in blocks for reading in block.readings()]),
    }
