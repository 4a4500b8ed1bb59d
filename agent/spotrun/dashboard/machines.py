"""What the machines of a run did: the readings of its nodes from the bucket, and which rank is slow.

Of a long run, only some blocks are read: the newest ones, and others at equal distances. So answers and memory are
bounded. `Machines.read` waits for the bucket: callers in an event loop use a thread.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median
from typing import Any

import zstandard

from spotrun.dashboard.records import AT_ONCE, Records
from spotrun.errors import NotFound, TooLargeError
from spotrun.store import system_folder

FORMAT = 1
NODES = 64  # nodes in one answer: those that were measured last
BLOCKS = 120  # blocks of each node that are read
NEWEST = 4  # how many of these are the newest ones
KEPT = 8192  # blocks in memory, about 2 KB each
LARGEST = 4 << 20  # bytes of a block
RECENT = 60.0  # seconds of the newest readings that tell which rank is slow
COLUMNS = ("cpu", "memory", "tmpfs", "disk", "disk_read", "disk_write", "net_in", "net_out")
OF_GPU = ("use", "memory", "temperature", "power", "sm_clock", "memory_clock", "ecc")

Reading = dict[str, Any]
Block = tuple[Reading, ...]  # the header, then the readings


class Machines:
    """The blocks that pages have asked for lately."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._blocks: OrderedDict[str, Block] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, job: str, _: Mapping[str, str]) -> dict[str, Any]:
        """The nodes of a run, each with lists of times and values; the ranks; and how many blocks were left out."""
        self._records.state(job)
        keys: dict[str, list[str]] = {}
        for key in filter(_is_block, self._records.store.list(system_folder(job))):
            keys.setdefault(key.split("/")[-2], []).append(key)
        newest = sorted(keys, key=lambda node: keys[node][-1].rpartition("/")[2])[-NODES:]
        chosen = {node: spread(keys[node]) for node in sorted(newest)}
        blocks = self._get([key for each in chosen.values() for key in each])
        nodes = [_node(node, [blocks[key] for key in each if blocks[key]]) for node, each in chosen.items()]
        left = sum(len(each) for each in keys.values()) - len(blocks)
        return {"nodes": nodes, "ranks": ranks(nodes), "left_out": left, "nodes_left_out": len(keys) - len(chosen)}

    def _get(self, keys: list[str]) -> dict[str, Block]:
        with self._lock:
            known = {key: self._blocks[key] for key in keys if key in self._blocks}
        missing = [key for key in keys if key not in known]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = dict(zip(missing, pool.map(self._fetch, missing), strict=True))
        with self._lock:
            self._blocks |= found
            while len(self._blocks) > KEPT:
                self._blocks.popitem(last=False)
        return known | found

    def _fetch(self, key: str) -> Block:
        """A block; empty if it cannot be read. Raises `StoreError` if the bucket does not answer: it may later."""
        try:
            text = zstandard.ZstdDecompressor().stream_reader(self._records.store.get(key, LARGEST)).read(LARGEST)
            found = [json.loads(line) for line in text.splitlines()]
        except (TooLargeError, NotFound, zstandard.ZstdError, ValueError, RecursionError):
            return ()
        good = [each for each in found if isinstance(each, dict)]
        if not good or not isinstance(good[0].get("format"), int) or good[0]["format"] > FORMAT:
            return ()
        return tuple(each for number, each in enumerate(good) if number == 0 or _is_number(each.get("time")))


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


def ranks(nodes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each rank of the newest readings: its seconds a step, its seconds before it waits for others, and its factor.

    The factor says how slow the rank is: its seconds before it waits, divided by the median of all ranks; None: not
    known.
    """
    found = [each for node in nodes for each in node["ranks"]]
    until = max((each["at"] for each in found), default=0.0)
    present = {each["rank"]: each for each in sorted(found, key=lambda each: float(each["at"]))}
    here = [each for each in present.values() if each["at"] > until - RECENT]
    middle = median([each["alone"] for each in here]) if here else 0.0
    return [each | {"factor": each["alone"] / middle if middle > 0 else None} for each in sorted(here, key=_rank)]


def _rank(each: Mapping[str, Any]) -> int:
    return int(each["rank"])


def _node(name: str, blocks: list[Block]) -> dict[str, Any]:
    header = blocks[-1][0] if blocks else {}
    readings = [reading for block in blocks for reading in block[1:]]
    gpus = max((len(reading["gpus"]) for reading in readings if isinstance(reading.get("gpus"), list)), default=0)
    series = {name: [_number(reading.get(name)) for reading in readings] for name in COLUMNS}
    for index in range(gpus):
        for column in OF_GPU:
            series[f"gpu{index}.{column}"] = [_number(_gpu(reading, index).get(column)) for reading in readings]
    last = readings[-1] if readings else {}
    return {
        "node": name,
        "pool": str(header.get("pool", "")),
        "gpus": _texts(header.get("gpus")),
        "times": [reading["time"] for reading in readings],
        "series": {name: values for name, values in series.items() if any(value is not None for value in values)},
        "totals": {name: _number(last.get(f"{name}_total")) for name in ("memory", "tmpfs", "disk")},
        "throttle": [_texts(_gpu(last, index).get("throttle")) for index in range(gpus)],
        "ranks": _ranks(name, readings),
    }


def _ranks(node: str, readings: list[Reading]) -> list[dict[str, Any]]:
    """The ranks of a node, from the steps of the last minute in which the number of steps has only grown."""
    until = readings[-1]["time"] if readings else 0.0
    sums: dict[int, list[float]] = {}
    recent = [reading for reading in readings if reading["time"] > until - RECENT - 10]
    for before, after in pairwise(recent):
        for rank, (steps, whole, alone) in _counts(after).items():
            old = _counts(before).get(rank)
            if old is not None and steps > old[0]:
                total = sums.setdefault(rank, [0.0, 0.0, 0.0])
                for index, value in enumerate((steps - old[0], whole - old[1], alone - old[2])):
                    total[index] += value
    found = sums.items()
    rows = [{"rank": rank, "step": whole / steps, "alone": alone / steps} for rank, (steps, whole, alone) in found]
    return [{"node": node, "at": until, **row} for row in rows]


def _counts(reading: Reading) -> dict[int, tuple[float, float, float]]:
    rows = reading.get("ranks")
    good = rows.items() if isinstance(rows, dict) else ()
    return {int(rank): (row[0], row[1], row[2]) for rank, row in good if _is_row(rank, row)}


def _is_row(rank: object, row: object) -> bool:
    return str(rank).isdecimal() and isinstance(row, list) and len(row) == 3 and all(map(_is_number, row))


def _gpu(reading: Reading, index: int) -> Mapping[str, Any]:
    gpus = reading.get("gpus")
    found = gpus[index] if isinstance(gpus, list) and index < len(gpus) else None
    return found if isinstance(found, dict) else {}


def _texts(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []


def _number(value: object) -> float | None:
    return value if _is_number(value) else None  # type: ignore[return-value]


def _is_number(value: object) -> bool:
    """Whether to calculate with the value: JSON allows integers that are larger than any float."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 1000)
