"""What machine time costs, by month, pool and market. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache

from spotrun.document import Document

HOUR = 3600.0  # seconds
_Key = tuple[str, str, str]  # month, pool, market


class Line(Document):
    """Machine time of one pool in one month, and what it cost."""

    month: str  # of UTC: 2026-11
    pool: str  # the pool's name
    market: str  # the pool's market
    seconds: float = 0.0  # machine-seconds
    cost: float = 0.0  # USD, without the seconds of `unpriced`
    on_demand: float = 0.0  # USD for on-demand machines of the same type, without the seconds of `unlisted`
    unpriced: float = 0.0  # machine-seconds for which no price is known yet
    unlisted: float = 0.0  # machine-seconds for which no on-demand price is known yet


@dataclass(frozen=True)
class Rates:
    """What machines cost now, by pool."""

    prices: Mapping[str, float] = field(default_factory=dict)  # USD an hour; a price that is not known is absent
    on_demand: Mapping[str, float] = field(default_factory=dict)  # the same for an on-demand machine of the pool's type
    markets: Mapping[str, str] = field(default_factory=dict)  # the pools' markets
    devices: Mapping[str, int] = field(default_factory=dict)  # of each of their machines


@dataclass(frozen=True)
class Use:
    """Machine time that a job or the cluster pays. With `end` before `start`, it takes back time counted by mistake."""

    machine: str  # the machine's name
    pool: str  # the machine's pool
    start: float  # epoch seconds
    end: float  # epoch seconds
    share: float = 1.0  # the part of the machine: 1 is all of it
    price: float | None = None  # USD an hour; None: the pool's present price
    late: bool = False  # whether it only corrects what was counted before: the machine may have ended since

    @property
    def seconds(self) -> float:
        """Machine-seconds."""
        return (self.end - self.start) * self.share


def add(lines: Sequence[Line], uses: Iterable[Use], rates: Rates) -> tuple[Line, ...]:
    """The account with these uses, at present prices. Time without a known price gets one once the price is known."""
    found = {(line.month, line.pool, line.market): line for line in lines}
    due: dict[_Key, tuple[float, float, float]] = {}  # seconds, USD, seconds without a price
    for use in uses:
        for month, whole in _by_month(use.start, use.end):
            key, seconds = (month, use.pool, rates.markets.get(use.pool, "unknown")), whole * use.share
            cost, unpriced = (0.0, seconds) if use.price is None else (seconds * use.price / HOUR, 0.0)
            before = due.get(key, (0.0, 0.0, 0.0))
            due[key] = before[0] + seconds, before[1] + cost, before[2] + unpriced
    for key, (seconds, cost, unpriced) in due.items():
        line = found.get(key) or Line(month=key[0], pool=key[1], market=key[2])
        waiting = {"unpriced": line.unpriced + unpriced, "unlisted": line.unlisted + seconds}
        found[key] = line.replace(seconds=line.seconds + seconds, cost=line.cost + cost, **waiting)
    return tuple(_priced(line, rates) for line in found.values())


def total(lines: Iterable[Line]) -> float:
    """USD."""
    return sum(line.cost for line in lines)


def merged(lines: Iterable[Line]) -> tuple[Line, ...]:
    """One line for each month, pool and market."""
    found: dict[_Key, Line] = {}
    for line in lines:
        key = (line.month, line.pool, line.market)
        before = found.get(key)
        sums = ("seconds", "cost", "on_demand", "unpriced", "unlisted")
        found[key] = (
            line.replace(**{name: getattr(before, name) + getattr(line, name) for name in sums}) if before else line
        )
    return tuple(found.values())


def _priced(line: Line, rates: Rates) -> Line:
    price, listed = rates.prices.get(line.pool), rates.on_demand.get(line.pool)
    if price is not None and line.unpriced:
        line = line.replace(cost=line.cost + line.unpriced * price / HOUR, unpriced=0.0)
    if listed is not None and line.unlisted:
        line = line.replace(on_demand=line.on_demand + line.unlisted * listed / HOUR, unlisted=0.0)
    return line


@lru_cache(maxsize=8)  # the uses that the head counts in one turn have the same span
def _by_month(start: float, end: float) -> tuple[tuple[str, float], ...]:
    """The seconds of a span in each month of UTC. They are negative if the span ends before it starts."""
    sign, (first, last) = (1, (start, end)) if end >= start else (-1, (end, start))
    found = []
    while first < last:
        stop = min(last, _next_month(first))
        found.append((month_of(first), sign * (stop - first)))
        first = stop
    return tuple(found)


def month_of(at: float) -> str:
    """The month of UTC: 2026-11."""
    return time.strftime("%Y-%m", time.gmtime(at))


def _next_month(at: float) -> float:
    """When the month after that of `at` begins."""
    now = time.gmtime(at)
    year, month = (now.tm_year + 1, 1) if now.tm_mon == 12 else (now.tm_year, now.tm_mon + 1)
    return datetime(year, month, 1, tzinfo=UTC).timestamp()
