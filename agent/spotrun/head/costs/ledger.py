"""What machines cost, as one head counts it. Each job pays for its machine time, and the cluster pays for the rest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from spotrun.cloud.base import Advice
from spotrun.document import is_newer, problem
from spotrun.head.allocation.demand import Holdings
from spotrun.head.capacity.place import Placements
from spotrun.head.costs import job_totals
from spotrun.head.costs.bill import Rates, Use
from spotrun.head.costs.job_totals import Idle, Uses
from spotrun.head.costs.meter import NOBODY, Meter
from spotrun.head.fenced import FencedStore
from spotrun.head.fleet.classify import Condition
from spotrun.head.view import FleetView
from spotrun.store import Store, idle_key

log = logging.getLogger(__name__)

IDLE_EVERY = 10.0  # seconds between two writes of what idle devices cost


class Ledger:
    """The machine time of one cluster. Each job's own account is in its state."""

    def __init__(self, store: Store, cluster: str) -> None:
        self.idle = Idle()
        self._meter, self._rates = Meter(), Rates()
        self._counted_at = 0.0
        self._paid: dict[str, float] = {}  # by payer: up to when earlier heads have counted
        self._listed = False  # whether machines have been counted that the cloud lists
        self._switched: dict[str, tuple[float, float, float]] = {}
        """By pool: the price before, the price now, and when this head learned it. The price may be older than that."""
        self._fenced, self._key = FencedStore(store), idle_key(cluster)
        self._written: Idle | None = None  # None: the count of earlier heads has not been read yet
        self._reading = asyncio.Lock()
        self._is_newer = False  # whether that count is of a later version: then it stays, for a head of that version

    def count(
        self,
        view: FleetView,
        expected: Holdings,
        conditions: Mapping[str, Condition],
        rates: Rates,
        told: Mapping[str, Advice],
        placements: Placements | None = None,
    ) -> Mapping[str, Uses]:
        """The machine time since the last count, by job. Time that no job pays for goes to the cluster's account.

        expected: the devices that jobs have or that boot for them. told: the cloud's advice by pool, with old prices.
        placements: where each job trains, and which machines it asks for.
        """
        shares = job_totals.shares(view, expected, conditions, placements, rates.devices)
        paid = {NOBODY: self.idle.counted_at, **{job.id: job.counted_at for job in view.jobs}}
        if not self._listed:  # the first turns usually come before the cloud's first answer
            paid = self._paid = paid | self._paid
            self._listed = view.listed
        for pool, price in rates.prices.items():
            if (before := self._rates.prices.get(pool, price)) != price:
                self._switched[pool] = (before, price, self._counted_at)
        late = self._late_prices(told)
        self._rates, self._counted_at = rates, view.now
        self._meter, uses = self._meter.read(view, shares, paid)
        for payer, mine in late.items():
            uses[payer if payer in uses else NOBODY] += mine
        self.idle = job_totals.count_idle(self.idle, view.now, uses[NOBODY], rates)
        return uses

    def _late_prices(self, told: Mapping[str, Advice]) -> dict[str, list[Use]]:
        """Corrections, by payer: for the time between a change of price and the moment when this head learned it."""
        found: dict[str, list[Use]] = {}
        for pool, (before, price, known) in list(self._switched.items()):
            prices = told[pool].prices if pool in told else ()
            if prices and prices[-1].value == price:
                del self._switched[pool]
                for payer, uses in self._meter.repriced(pool, before, price, prices[-1].at, known).items():
                    found.setdefault(payer, []).extend(uses)
        return found

    def status(self) -> dict[str, Any]:
        """What idle devices have cost, for the status document."""
        idle, account = self.idle, [line.model_dump() for line in self.idle.account]
        found = {"idle_cost": idle.cost, "idle_node_seconds": idle.node_seconds, "idle_account": account}
        return found | {"counted_at": self._counted_at}

    async def read(self) -> None:
        """Read what earlier heads have counted. Call it before the first count, which goes on from there."""
        async with self._reading:  # the head's loop and the scaler begin together: it must be added once
            if self._written is not None:
                return
            before, self._is_newer = _idle(self._key, await self._fenced.find(self._key))
            self.idle = self._written = job_totals.joined(before, self.idle)

    async def write(self) -> None:
        """Keep the cost of idle devices for the next head. A head that dies may lose the last IDLE_EVERY seconds."""
        await self.read()
        assert self._written is not None
        changed = self.idle.node_seconds != self._written.node_seconds and not self._is_newer
        if changed and self.idle.counted_at - self._written.counted_at >= IDLE_EVERY:
            await self._fenced.put(self._key, self.idle.model_dump_json().encode())
            self._written = self.idle


def _idle(key: str, data: bytes | None) -> tuple[Idle, bool]:
    """The count in the bucket, and whether it is of a later version."""
    try:
        return (Idle.model_validate_json(data) if data is not None else Idle()), False
    except ValueError as error:
        log.warning("%s is not readable, idle devices are counted from 0: %s", key, problem(error))
        return Idle(), is_newer(error)
