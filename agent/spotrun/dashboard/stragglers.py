"""Which rank of a run is a straggler: slower than the others, so that they wait for it in each step. Pure.

The readings of each node have, for each rank: steps, the seconds in these steps, and the seconds in them before the
rank waits for others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

RECENT = 60.0  # seconds of the newest readings that count

Reading = dict[str, Any]


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


def of_node(node: str, readings: list[Reading]) -> list[dict[str, Any]]:
    """The ranks of a node, from the steps of the last minute in which the number of steps has only grown."""
    until = readings[-1]["time"] if readings else 0.0
    sums: dict[int, list[float]] = {}
    recent = [reading for reading in readings if reading["time"] > until - RECENT - 10]
    for before, after in pairwise(recent):
        for rank, (steps, whole, alone) in rows(after).items():
            old = rows(before).get(rank)
            if old is not None and steps > old[0]:
                total = sums.setdefault(rank, [0.0, 0.0, 0.0])
                for index, value in enumerate((steps - old[0], whole - old[1], alone - old[2])):
                    total[index] += value
    return [
        {"node": node, "at": until, "rank": rank, "step": whole / steps, "alone": alone / steps}
        for rank, (steps, whole, alone) in sums.items()
    ]


def is_number(value: object) -> bool:
    """Whether to calculate with the value: Python reads NaN, and integers that are larger than any float."""
    return (type(value) is float or type(value) is int) and abs(value) < 1e300


def rows(reading: Reading) -> dict[int, tuple[float, float, float]]:
    """Of each rank in a reading: steps, the seconds in these steps, and the seconds before the rank waits."""
    found = reading.get("ranks")
    good = found.items() if isinstance(found, dict) else ()
    return {int(rank): (row[0], row[1], row[2]) for rank, row in good if _is_row(rank, row)}


def _is_row(rank: object, row: object) -> bool:
    known = str(rank).isdecimal() and len(str(rank)) < 10
    return known and isinstance(row, list) and len(row) == 3 and all(map(is_number, row))


def _rank(each: Mapping[str, Any]) -> int:
    return int(each["rank"])
