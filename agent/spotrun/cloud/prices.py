"""What machines cost, from the shipped table `prices.csv`. prices.SOURCE.md has the sources of the table.

On AWS, the prices of spot machines come from EC2, and from this table only if EC2 gives none (`cloud/aws/prices.py`).
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, date, datetime
from typing import NamedTuple

DATE = "2026-11-21"  # when the table was taken
OLD = 30  # days after which a warning says that the prices are old
_LOCAL = 1.0  # the price of each on-demand machine of the local cloud; it is invented


class _Row(NamedTuple):
    region: str
    zone: str
    on_demand: float | None
    spot: float | None
    gpu: str
    gpus: int


def on_demand(cloud: str, place: str, machine: str, accelerator: str = "", count: int = 0) -> float | None:
    """Dollars an hour for one machine, at the list price; None if the table has none.

    place: a region or a zone. accelerator, count: the GPUs attached to a machine of Google's N1 family, as in a cluster
    file (`nvidia-tesla-t4`, 1). Other machine types have GPUs of their own.
    """
    if cloud == "local":
        return _LOCAL
    return _median(row.on_demand for row in _rows(cloud, place, machine, accelerator, count))


def spot(cloud: str, place: str, machine: str, accelerator: str = "", count: int = 0) -> float | None:
    """As `on_demand`, for a spot machine, at the table's date.

    The median of the region's zones, unless `place` is a zone in the table. The table has Google Cloud's zones by name,
    and AWS's by id.
    """
    return _median(row.spot for row in _rows(cloud, place, machine, accelerator, count))


def old(today: date) -> str:
    """A warning if the table is old; empty if it is not."""
    age = (today - date.fromisoformat(DATE)).days
    if age <= OLD:
        return ""
    return f"The shipped prices are from {DATE}, {age} days ago: look up the present ones, or update spotrun."


def warning(cloud: str) -> str:
    """As `old`, for today. The local cloud does not use the table."""
    return "" if cloud == "local" else old(datetime.now(UTC).date())


class Listed(NamedTuple):
    """One machine type of the table, in one region."""

    machine: str  # the machine type
    gpu: str  # the name of its GPUs, such as L4
    gpus: int  # how many of them
    on_demand: float | None  # USD an hour; None: not known
    spot: float | None  # the same, at the median of the region's zones


def listed(cloud: str, region: str) -> list[Listed]:
    """The machine types with GPUs of their own for which the table has a price in the region."""
    found = []
    for (where, machine, accelerator, _), rows in _table().items():
        mine = [row for row in rows if row.region == region]
        if where == cloud and mine and not accelerator and mine[0].gpus:
            prices = (_median(row.on_demand for row in mine), _median(row.spot for row in mine))
            found.append(Listed(machine, mine[0].gpu, mine[0].gpus, *prices))
    return sorted(found)


def _rows(cloud: str, place: str, machine: str, accelerator: str, count: int) -> list[_Row]:
    attached = (_short(accelerator), count) if accelerator else ("", 0)
    rows = _table().get((cloud, machine, *attached), [])
    # us-central1-a is in us-central1, us-east-1a in us-east-1.
    region = re.sub(r"(?<=\d)-?[a-z]$", "", place)
    return [row for row in rows if row.zone == place] or [row for row in rows if row.region == region]


def _short(accelerator: str) -> str:
    """T4 from Google's nvidia-tesla-t4."""
    return accelerator.rpartition("-")[2].upper()


def _median(prices: Iterable[float | None]) -> float | None:
    known = [price for price in prices if price is not None]
    return statistics.median(known) if known else None


@functools.cache
def _table() -> dict[tuple[str, str, str, int], list[_Row]]:
    """Rows by cloud, machine type and attached GPUs."""
    table: dict[tuple[str, str, str, int], list[_Row]] = defaultdict(list)
    file = importlib.resources.files("spotrun.cloud") / "prices.csv"
    for cells in csv.DictReader(file.read_text(encoding="utf-8").splitlines()):
        machine = cells["instance_type"]
        attached = ("", 0)
        if machine.startswith("n1-"):
            attached = (cells["accelerator"], int(cells["accelerator_count"]))
        prices = (_price(cells["on_demand_usd_per_hour"]), _price(cells["spot_usd_per_hour"]))
        gpus = (cells["accelerator"], int(cells["accelerator_count"]))
        table[cells["cloud"], machine, *attached].append(_Row(cells["region"], cells["zone"], *prices, *gpus))
    return dict(table)


def _price(cell: str) -> float | None:
    return float(cell) if cell else None
