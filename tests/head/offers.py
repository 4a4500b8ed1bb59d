"""Offers of pools and the demand of one job, for tests of the policies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spotrun.head.capacity.situation import Demand, Offer
from spotrun.head.capacity.sizes import Pool

NOW = 1_000_000.0


def offer(name: str, zone: str = "a", market: str = "spot", there: int = 0, **changes: Any) -> Offer:
    """A pool of up to four machines. It has all it was asked for; `leaving` of them are under notice, others ready."""
    supply, size = changes.pop("supply", "open"), changes.pop("size", there)
    leaving = changes.pop("leaving", 0)
    states = {f"{name}-{i}": "leaving" if i < leaving else "ready" for i in range(there)}
    pool = Pool(name, changes.pop("most", 4), size, states, supply)
    return Offer(pool, zone, market, usable=there - leaving, **changes)  # type: ignore[arg-type]


def job(**changes: Any) -> Demand:
    """A job that trains on two to four nodes, and may use any of these pools."""
    return replace(Demand("j", frozenset({"s", "t", "o"}), min=2, max=4, restart=300.0, move=30.0), **changes)
