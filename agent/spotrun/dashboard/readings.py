"""A block of readings of one node, as far as the dashboard knows its columns. A job's code can write anything there."""

from __future__ import annotations

import io
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import zstandard

from spotrun.dashboard.stragglers import RECENT, Reading, is_number, rows

FORMAT = 1
LARGEST = 4 << 20  # bytes of a block
LINE = 64 << 10  # bytes of a line: 64 GPUs and 1000 ranks need less
READINGS = 1000  # of a block; a node writes 720 at most
GPUS = 64  # of a node
TEXT = 80  # characters of a name
REASONS = 16  # why a GPU is slower
COLUMNS = ("cpu", "memory", "tmpfs", "disk", "disk_read", "disk_write", "net_in", "net_out")
TOTALS = ("memory", "tmpfs", "disk")
OF_GPU = ("use", "memory", "temperature", "power", "sm_clock", "memory_clock", "ecc")
Numbers = array
_NAMES = [{column: f"gpu{index}.{column}" for column in OF_GPU} for index in range(GPUS)]


@dataclass(frozen=True)
class _Reading:
    """What is known of a reading. Fields as in `Block`; ranks: rows of 4 numbers."""

    time: float
    values: dict[str, float]
    totals: dict[str, float | None]
    throttle: tuple[tuple[str, ...], ...]
    ranks: Numbers[float]


@dataclass(frozen=True)
class Block:
    """Readings. All columns have the length of `times`; NaN: not measured."""

    pool: str
    gpus: tuple[str, ...]  # product names
    times: Numbers[float]  # epoch seconds
    columns: Mapping[str, Numbers[float]]  # by name, such as "cpu" or "gpu0.use"
    totals: Mapping[str, float | None]  # of the last reading
    throttle: tuple[tuple[str, ...], ...]  # why each GPU was slower at the last reading
    ranks: tuple[tuple[float, Numbers[float]], ...]  # of each reading of the last minute: time, and rows of 4 numbers

    @property
    def size(self) -> int:
        """About how many bytes of memory the block needs."""
        arrays = [self.times, *self.columns.values(), *(each for _, each in self.ranks)]
        return 2000 + sum(8 * len(each) + 250 for each in arrays) + 200 * (len(self.gpus) + len(self.throttle))

    def readings(self) -> Iterator[Reading]:
        """The readings of the last minute, for `stragglers.of_node`."""
        for time, flat in self.ranks:
            of = zip(*[iter(flat)] * 4, strict=True)
            yield {"time": time, "ranks": {str(int(rank)): list(row) for rank, *row in of}}


def joined(blocks: Iterable[Block]) -> dict[str, list[float | None]]:
    """The columns of several blocks, one after the other. None: not measured."""
    found: dict[str, list[float | None]] = {}
    done = 0
    for block in blocks:
        for name, values in block.columns.items():
            column = found.setdefault(name, [])
            column += [None] * (done - len(column))
            column += [None if math.isnan(value) else value for value in values]
        done += len(block.times)
    for column in found.values():
        column += [None] * (done - len(column))
    return found


def read(data: bytes) -> Block | None:
    """A block from the bytes of its object; None: it is not readable."""
    try:
        lines = _lines(zstandard.ZstdDecompressor().stream_reader(data).read(LARGEST))
        header = next(lines, None)
        if header is None or not isinstance(header.get("format"), int) or header["format"] > FORMAT:
            return None
        good = (each for each in lines if is_number(each.get("time")))
        return _block(header, [_known(each) for each in islice(good, READINGS)])
    except (zstandard.ZstdError, ValueError, RecursionError):
        return None


def _lines(text: bytes) -> Iterator[dict[str, Any]]:
    """The lines, one in memory at a time: a line may become 50 times larger when it is read."""
    for line in io.BytesIO(text):
        if len(line) > LINE:
            raise ValueError("a line is too long")
        found = json.loads(line)
        if isinstance(found, dict):
            yield found


def _known(reading: Reading) -> _Reading:
    gpus = [each if isinstance(each, dict) else {} for each in _list(reading.get("gpus"))[:GPUS]]
    found = {name: reading.get(name) for name in COLUMNS}
    for names, gpu in zip(_NAMES, gpus, strict=False):
        found |= {name: gpu.get(column) for column, name in names.items()}
    return _Reading(
        float(reading["time"]),
        {name: float(value) for name, value in found.items() if is_number(value)},  # type: ignore[arg-type]
        {name: _number(reading.get(f"{name}_total")) for name in TOTALS},
        tuple(_texts(gpu.get("throttle"), REASONS) for gpu in gpus),
        array("d", [number for rank, row in rows(reading).items() for number in (rank, *row)]),
    )


def _block(header: Reading, readings: list[_Reading]) -> Block:
    last = readings[-1] if readings else _Reading(0.0, {}, {}, (), array("d"))
    gpus = max((len(each.throttle) for each in readings), default=0)
    names = dict.fromkeys(name for each in readings for name in each.values)
    return Block(
        pool=str(header.get("pool", ""))[:TEXT],
        gpus=_texts(header.get("gpus"), GPUS),
        times=array("d", [each.time for each in readings]),
        columns={name: array("d", [each.values.get(name, math.nan) for each in readings]) for name in names},
        totals=last.totals,
        throttle=(*last.throttle, *[()] * (gpus - len(last.throttle))),
        ranks=tuple((each.time, each.ranks) for each in readings if each.time > last.time - RECENT - 10),
    )


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _texts(value: object, most: int) -> tuple[str, ...]:
    return tuple(str(each)[:TEXT] for each in _list(value)[:most])


def _number(value: object) -> float | None:
    return float(value) if is_number(value) else None  # type: ignore[arg-type]
