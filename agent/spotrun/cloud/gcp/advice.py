"""What Google says about the market of spot machines: `advice.capacity` and `advice.capacityHistory`.

https://cloud.google.com/compute/docs/instances/view-vm-availability says how likely a zone gives a number of machines,
and how long they run: 1, 10 or 60 minutes.
https://cloud.google.com/compute/docs/instances/view-spot-preemption-price has the daily preemption rates of a zone for
30 days, and the prices of a region for a year. It has neither custom types nor N1 machines with GPUs.

Both are previews. If Google refuses one of them, the log says so once, and the head goes on without it.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from google.cloud import compute_v1

from spotrun.cloud.base import Advice, Said
from spotrun.cloud.gcp.api import OPTIONS, Api
from spotrun.cloud.gcp.instances import epoch
from spotrun.errors import CloudError
from spotrun.spec import ClusterSpec, PoolSpec

T = TypeVar("T")

CAPACITY, HISTORY = "advice.capacity", "advice.capacityHistory"
_KEEP = 600.0  # seconds between two rounds of questions
_DAYS = 7  # the preemption rate is the mean of this many days
log = logging.getLogger(__name__)


class Adviser:
    """Asks about each spot pool, one question after the other, and keeps the answers."""

    def __init__(self, cluster: ClusterSpec, api: Api, keep: float = _KEEP) -> None:
        self._cluster, self._api, self._keep = cluster, api, keep
        self._found: dict[str, Advice] = {}
        self._until = 0.0
        self._refused: set[str] = set()  # what was refused, as the log has said

    async def advice(self) -> dict[str, Advice]:
        """The newest answers, by pool. An answer that Google does not give again stays as it was, with its time."""
        if time.monotonic() >= self._until:
            self._until = time.monotonic() + self._keep
            spot = [pool for pool in self._cluster.pools if pool.market == "spot"]
            scores = await self._each(CAPACITY, spot, self._capacity)
            kept = [pool for pool in spot if _has_history(pool)]
            rates = await self._each(HISTORY, kept, self._preemptions)
            prices = await self._each(HISTORY, kept, self._prices)
            for pool in spot:
                self._note(pool.name, scores.get(pool.name), rates.get(pool.name), prices.get(pool.name))
        return dict(self._found)

    def _note(
        self,
        pool: str,
        scores: tuple[Said | None, Said | None] | None,
        rate: Said | None,
        prices: tuple[Said, ...] | None,
    ) -> None:
        last = self._found.get(pool, Advice())
        obtainability, uptime = scores or (None, None)
        found = Advice(
            obtainability or last.obtainability, uptime or last.uptime, rate or last.preemptions, prices or last.prices
        )
        if found != Advice():
            self._found[pool] = found

    async def _each(
        self, what: str, pools: Iterable[PoolSpec], ask: Callable[[PoolSpec], Awaitable[T]]
    ) -> dict[str, T]:
        """The answers for these pools, up to the first refusal."""
        found: dict[str, T] = {}
        for pool in pools:
            try:
                found[pool.name] = await ask(pool)
            except CloudError as error:
                if what not in self._refused:
                    self._refused.add(what)
                    log.warning("Google gives no advice about the market; the head decides without it: %s", error)
                break
        else:
            self._refused.discard(what)
        return found

    async def _capacity(self, pool: PoolSpec) -> tuple[Said | None, Said | None]:
        """Obtainability and uptime of all the pool's machines at once."""
        selection = compute_v1.CapacityAdviceRequestInstanceFlexibilityPolicyInstanceSelection(
            machine_types=[pool.machine], guest_accelerators=_accelerators(pool)
        )
        body = compute_v1.CapacityAdviceRequest(
            instance_properties={"scheduling": {"provisioning_model": "SPOT"}},
            # One type: for several, Google answers with one score for all.
            instance_flexibility_policy={"instance_selections": {"pool": selection}},
            distribution_policy={"target_shape": "ANY_SINGLE_ZONE", "zones": [{"zone": f"zones/{pool.zone}"}]},
            size=pool.max,
        )
        request = compute_v1.CapacityAdviceRpcRequest(
            project=self._api.project, region=self._cluster.region, capacity_advice_request_resource=body
        )
        answer = await self._api.ask(f"{CAPACITY} of pool {pool.name}", lambda c: c.advice.capacity(request, **OPTIONS))
        scores = [each.scores for each in answer.recommendations if each.scores]
        if not scores:
            return None, None
        uptime, now = seconds(scores[0].estimated_uptime), time.time()
        obtainability = min(1.0, max(0.0, scores[0].obtainability))
        return Said(obtainability, now, CAPACITY), None if uptime is None else Said(uptime, now, CAPACITY)

    async def _preemptions(self, pool: PoolSpec) -> Said | None:
        answer = await self._history(pool, "PREEMPTION", f"zones/{pool.zone}")
        rates = [(epoch(each.interval.start_time), each.preemption_rate) for each in answer.preemption_history]
        latest = [rate for _, rate in sorted(rates)[-_DAYS:]]
        return Said(sum(latest) / len(latest), time.time(), HISTORY) if latest else None

    async def _prices(self, pool: PoolSpec) -> tuple[Said, ...]:
        """Google has prices by region, not by zone."""
        answer = await self._history(pool, "PRICE", "")
        known = [each for each in answer.price_history if each.list_price.currency_code in ("", "USD")]
        found = (Said(_dollars(each.list_price), epoch(each.interval.start_time), HISTORY) for each in known)
        return tuple(sorted((each for each in found if each.value > 0), key=lambda each: each.at))

    async def _history(self, pool: PoolSpec, kind: str, place: str) -> compute_v1.CapacityHistoryResponse:
        body = compute_v1.CapacityHistoryRequest(
            instance_properties={"machine_type": pool.machine, "scheduling": {"provisioning_model": "SPOT"}},
            types=[kind],
        )
        if place:
            body.location_policy = compute_v1.CapacityHistoryRequestLocationPolicy(location=place)
        request = compute_v1.CapacityHistoryAdviceRequest(
            project=self._api.project, region=self._cluster.region, capacity_history_request_resource=body
        )
        return await self._api.ask(
            f"{HISTORY} of pool {pool.name}", lambda c: c.advice.capacity_history(request, **OPTIONS)
        )


def seconds(duration: str) -> float | None:
    """600.0 from Google's "600s"; None if it is not a duration."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)s", duration)
    return float(found[1]) if found else None


def _has_history(pool: PoolSpec) -> bool:
    return pool.accelerator is None and "custom-" not in pool.machine


def _accelerators(pool: PoolSpec) -> list[compute_v1.AcceleratorConfig]:
    found = pool.accelerator
    kinds = [(found.type, found.count)] if found else []
    return [compute_v1.AcceleratorConfig(accelerator_type=kind, accelerator_count=count) for kind, count in kinds]


def _dollars(money: compute_v1.Money) -> float:
    return money.units + money.nanos / 1e9
