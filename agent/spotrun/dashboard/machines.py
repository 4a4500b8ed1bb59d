"""What the machines of a run did: the readings of its nodes from the bucket.

Of a long run, only some blocks are read: the newest ones, and others at equal distances. So answers and memory are
bounded. `Machines.read` waits for the bucket: callers in an event loop use a thread.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zstandard

from spotrun.dashboard.records import AT_ONCE, Records
from spotrun.dashboard.stragglers import Reading, is_number, of_node, ranks
from spotrun.errors import NotFound, TooLargeError
from spotrun.store import system_folder

FORMAT = 1
NODES = 64  # nodes in one answer: those that were measured last
BLOCKS = 120  # blocks of each node that are read
NEWEST = 4  # how many of these are the newest ones
KEPT = 8192  # blocks in memory, about 2 KB each
LARGEST = 4 << 20  # bytes of a block
COLUMNS = ("cpu", "memory", "tmpfs", "disk", "disk_read", "disk_write", "net_in", "net_out")
OF_GPU = ("use", "memory", "temperature", "power", "sm_clock", "memory_clock", "ecc")

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
        return tuple(each for number, each in enumerate(good) if number == 0 or is_number(each.get("time")))


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
        "ranks": of_node(name, readings),
    }


def _gpu(reading: Reading, index: int) -> Mapping[str, Any]:
    gpus = reading.get("gpus")
    found = gpus[index] if isinstance(gpus, list) and index < len(gpus) else None
    return found if isinstance(found, dict) else {}


def _texts(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []


def _number(value: object) -> float | None:
    return value if is_number(value) else None  # type: ignore[return-value]
