"""The market of the local cloud: prices, capacity and advice, which change as the cluster file says. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spotrun.cloud.base import Advice, Market, Said
from spotrun.cloud.local.layout import Change, Config, Pool

# Dollars an hour, for a pool without a price in the cluster file. They are invented, but their ratio is the usual one.
PRICES: dict[Market, float] = {"spot": 0.3, "flex": 0.5, "on-demand": 1.0}
SOURCE = "local.market"


@dataclass(frozen=True)
class Conditions:
    """The market at one moment."""

    prices: Mapping[str, float]  # dollars an hour for a machine, by pool
    advice: Mapping[str, Advice]  # by pool
    capacity: Mapping[str, int] = field(default_factory=dict)  # the most machines by zone or pool; absent: no limit
    dry: frozenset[str] = frozenset()  # zones and pools that give no machine
    notice: Mapping[str, float] = field(default_factory=dict)  # seconds of notice by zone or pool; absent: the usual
    next: float = math.inf  # seconds after the cloud's start when the market changes again


def at(elapsed: float, config: Config, changes: Sequence[Change], began: float) -> Conditions:
    """The market `elapsed` seconds after the cloud's start.

    changes: those made by hand. Among changes at the same time, these count last.
    began: epoch seconds of the start.
    """
    ordered = sorted((*config.market, *changes), key=lambda change: change.after)
    past = [change for change in ordered if change.after <= elapsed]
    said = {pool.name: [change for change in past if change.where in (pool.name, pool.zone)] for pool in config.pools}
    history = {pool.name: _prices(pool, said[pool.name], began) for pool in config.pools}
    dry = {change.where: change.dry for change in past if change.dry is not None}
    return Conditions(
        prices={name: found[-1].value for name, found in history.items()},
        advice={name: _advice(found, history[name], began) for name, found in said.items()},
        capacity={**config.capacity, **{c.where: c.capacity for c in past if c.capacity is not None}},
        dry=frozenset(where for where in dry if dry[where]),
        notice={c.where: c.notice for c in past if c.notice is not None},
        next=min((change.after for change in ordered if change.after > elapsed), default=math.inf),
    )


def _prices(pool: Pool, said: Iterable[Change], began: float) -> tuple[Said, ...]:
    told = [Said(each.price, began + each.after, SOURCE) for each in said if each.price is not None]
    usual = Said(PRICES[pool.market], began, SOURCE)
    return tuple(told) if told and told[0].at <= began else (usual, *told)


def _advice(said: Iterable[Change], prices: tuple[Said, ...], began: float) -> Advice:
    found: dict[str, Said] = {}
    for each in said:
        for key in ("obtainability", "uptime", "preemptions"):
            if (value := getattr(each, key)) is not None:
                found[key] = Said(value, began + each.after, SOURCE)
    return Advice(found.get("obtainability"), found.get("uptime"), found.get("preemptions"), prices)
