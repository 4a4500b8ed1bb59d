"""Traces of spot markets: how many machines each zone would have given, and at what price.

A folder is one trace. Its files, gzipped (`.gz`) or not:

- `*.csv`: the first column is the time, as a date of ISO 8601 or in seconds. The other columns are the zones. If there
  is only one, its zone is the file's name. A row holds until the next one. An empty cell: as in the row before.
- `*.json`: `{"metadata": {"gap_seconds": 600}, "data": [0, 16, …], "prices": […]}`. The zone is the file's name.
- `prices.csv`, in the same form: USD an hour for one machine. A JSON file such as `{"zone": [1.67, …], …}` does the
  same, with a price for each row of the zone.
- `traces.yaml` says what the numbers mean, see `About`. Sources differ in `polarity`, so it must be given.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import yaml

from spotrun.errors import SpecError

Polarity = Literal["available", "preempted"]
POLARITIES = "available (numbers of machines that the zone gives) or preempted (1: it gives none, 0: it gives one)"
Rows = list[tuple[float, float]]  # (time, value)
Changes = tuple[tuple[float, float], ...]  # (seconds, the value from then on), the first one at 0


@dataclass(frozen=True)
class Zone:
    """What one zone offered. Times are seconds from the trace's beginning."""

    name: str
    counts: Changes  # machines that it would give
    prices: Changes = ()  # USD an hour for one spot machine; (): not known

    def window(self, begin: float, length: float) -> Zone:
        """The part from `begin` on, whose times begin at 0."""
        return Zone(self.name, _cut(self.counts, begin, length), _cut(self.prices, begin, length))

    @property
    def most(self) -> int:
        """The most machines that it ever gave."""
        return int(max(value for _, value in self.counts))


@dataclass(frozen=True)
class Trace:
    """What the zones of one market offered."""

    name: str
    length: float  # seconds
    zones: tuple[Zone, ...]
    on_demand: float = 0.0  # USD an hour for one on-demand machine; 0: not known
    price: float = 0.0  # USD an hour for one spot machine, where a zone has no prices of its own

    def window(self, begin: float, length: float) -> Trace:
        """The part from `begin` on, as a trace of its own."""
        zones = tuple(zone.window(begin, length) for zone in self.zones)
        return Trace(f"{self.name}@{begin:.0f}", length, zones, self.on_demand, self.price)

    def only(self, *names: str) -> Trace:
        """The same trace with these zones alone."""
        found = tuple(zone for zone in self.zones if zone.name in names)
        return Trace(self.name, self.length, found, self.on_demand, self.price)


@dataclass(frozen=True)
class About:
    """`traces.yaml`: what the numbers of a folder mean."""

    polarity: Polarity
    on_demand: float = 0.0  # USD an hour for one on-demand machine
    price: float = 0.0  # USD an hour for one spot machine, where there is no `prices.csv`
    zone_prices: Mapping[str, float] = field(default_factory=dict)  # the same by zone
    tick: float = 0.0  # seconds for which the last row holds; 0: as long as the median row


def load(folder: Path | str, polarity: str = "") -> Trace:
    """The trace in a folder. polarity: instead of `traces.yaml`. Raises `SpecError`."""
    folder = Path(folder)
    if not folder.is_dir():
        raise SpecError(f"{folder}: is not a folder; name a folder with traces")
    about = _about(folder, polarity)
    found: dict[str, Rows] = {}
    prices: dict[str, Rows] = {}
    listed: dict[str, list[float]] = {}
    for path in sorted(each for each in folder.iterdir() if each.is_file()):
        name = path.name.removesuffix(".gz")
        if name.endswith(".csv"):
            (prices if name == "prices.csv" else found).update(_csv(path, name.removesuffix(".csv")))
        elif name.endswith(".json"):
            _json(path, name.removesuffix(".json"), found, prices, listed)
    for zone, rows in found.items():
        if not rows:
            raise SpecError(f"{folder}: zone {zone}: has no number of machines; give it one, or leave it out")
        if zone in listed:
            prices[zone] = [(time, price) for (time, _), price in zip(rows, listed[zone], strict=False)]
    if not found:
        raise SpecError(f"{folder}: no *.csv or *.json file there has numbers of machines")
    return _trace(folder.name, found, prices, about)


def at(changes: Changes, time: float) -> float:
    """The value at a time."""
    return changes[max(0, bisect_right(changes, (time, math.inf)) - 1)][1]


def compress(rows: Iterable[tuple[float, float]]) -> Changes:
    """Only the rows in which the value changes."""
    found: list[tuple[float, float]] = []
    for time, value in rows:
        if not found or found[-1][1] != value:
            found.append((time, value))
    return tuple(found)


def _cut(changes: Changes, begin: float, length: float) -> Changes:
    if not changes:
        return ()
    inside = [(time - begin, value) for time, value in changes if begin < time < begin + length]
    return ((0.0, at(changes, begin)), *inside)


def _about(folder: Path, polarity: str) -> About:
    path = folder / "traces.yaml"
    try:
        values = yaml.safe_load(path.read_text()) if path.exists() else {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: is not YAML: {error}") from None
    if not isinstance(values, dict | None):
        raise SpecError(f"{path}: allowed: keys with values, such as polarity: available")
    values = dict(values or {})
    if unknown := [key for key in values if key not in About.__dataclass_fields__]:
        allowed = ", ".join(About.__dataclass_fields__)
        raise SpecError(f"{path}: {unknown[0]!r}: there is no such key; allowed: {allowed}")
    if polarity and polarity not in get_args(Polarity):
        raise SpecError(f"POLARITY: {polarity!r}: allowed: {POLARITIES}")
    given = polarity or values.get("polarity")
    if given not in ("available", "preempted"):
        what = f"polarity: {given!r}" if "polarity" in values else "polarity is missing"
        raise SpecError(f"{path}: {what}; allowed: {POLARITIES}. Sources differ, so there is no default")
    numbers = {key: _positive(path, key, values.get(key, 0.0)) for key in ("on_demand", "price", "tick")}
    zone_prices = values.get("zone_prices") or {}
    if not isinstance(zone_prices, dict):
        raise SpecError(f"{path}: zone_prices: allowed: the zones' names, with a price each, such as us-east-1a: 0.9")
    prices = {str(zone): _positive(path, f"zone_prices: {zone}", price) for zone, price in zone_prices.items()}
    means: Polarity = "preempted" if given == "preempted" else "available"
    return About(means, zone_prices=prices, **numbers)


def _positive(path: Path, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise SpecError(f"{path}: {key}: {value!r}: allowed: a number, 0 or more")
    return float(value)


def _csv(path: Path, stem: str) -> dict[str, Rows]:
    try:
        rows = list(csv.reader(_text(path).splitlines()))
    except (ValueError, csv.Error) as error:
        raise SpecError(f"{path}: is not a CSV file: {error}") from None
    if len(rows) < 2 or len(rows[0]) < 2:
        raise SpecError(f"{path}: has no row with a time and a number")
    zones = rows[0][1:] if len(rows[0]) > 2 else [stem]
    found: dict[str, Rows] = {zone: [] for zone in zones}
    for number, row in enumerate(rows[1:], 2):
        if not row:
            continue
        try:
            time = _time(row[0])
            cells = [(zone, _number(cell)) for zone, cell in zip(zones, row[1:], strict=True) if cell != ""]
        except ValueError as error:
            raise SpecError(f"{path}: line {number}: {','.join(row)[:80]!r}: {error}") from None
        for zone, value in cells:
            found[zone].append((time, value))
        if len(cells) < len(zones):  # so that the end of the trace is the same for all zones
            for zone, series in found.items():
                if series and series[-1][0] < time:
                    found[zone].append((time, series[-1][1]))
    return found


def _json(
    path: Path, stem: str, found: dict[str, Rows], prices: dict[str, Rows], listed: dict[str, list[float]]
) -> None:
    try:
        values = json.loads(_text(path))
        if "data" not in values and all(isinstance(each, list) for each in values.values()):
            listed.update({zone: [_number(price) for price in each] for zone, each in values.items()})
            return
        gap = _number(values["metadata"]["gap_seconds"])
        found[stem] = [(index * gap, _number(value)) for index, value in enumerate(values["data"])]
        if values.get("prices"):
            prices[stem] = [(index * gap, _number(value)) for index, value in enumerate(values["prices"])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecError(f"{path}: needs metadata.gap_seconds and data, a list of numbers: {error}") from None


def _trace(name: str, found: dict[str, Rows], prices: dict[str, Rows], about: About) -> Trace:
    begin = max(rows[0][0] for rows in found.values())  # where all zones are known
    zones, ends = [], []
    for zone, rows in sorted(found.items()):
        rows = sorted(rows)
        if about.polarity == "preempted":
            rows = [(time, 0.0 if value else 1.0) for time, value in rows]
        gaps = sorted(after - before for (before, _), (after, _) in pairwise(rows))
        ends.append(rows[-1][0] + (about.tick or (gaps[len(gaps) // 2] if gaps else 0.0)) - begin)
        flat = [(begin, about.zone_prices[zone])] if zone in about.zone_prices else []
        costs = sorted(prices.get(zone, flat))
        zones.append(Zone(zone, _from(rows, begin), _from(costs, begin)))
    return Trace(name, min(ends), tuple(zones), about.on_demand, about.price)


def _from(rows: Sequence[tuple[float, float]], begin: float) -> Changes:
    """Rows by time → changes, whose times begin at 0."""
    if not rows:
        return ()
    changes = compress(rows)
    later = [(time - begin, value) for time, value in changes if time > begin]
    return compress([(0.0, at(changes, begin)), *later])


def _number(value: object) -> float:
    """A number of machines, a price, or a time. Raises `ValueError`."""
    number = float(value) if isinstance(value, str | int | float) else math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{value!r}: allowed: a number, 0 or more")
    return number


def _time(text: str) -> float:
    try:
        return _number(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def _text(path: Path) -> str:
    """Raises `ValueError` if this is not text, or not gzipped although its name says so."""
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(str(error)) from None
