"""The policy of jobs without hurry: the least cost, however long it takes."""

from __future__ import annotations

from dataclasses import replace

from spotrun.cloud.base import Market
from spotrun.head.capacity.policies.elastic import elastic
from spotrun.head.capacity.policies.zones import ORDER
from spotrun.head.capacity.situation import Demand, Placement, Situation


def cheapest(seen: Situation, job: Demand, before: Placement | None) -> Placement:
    """As `elastic`, but on the cheapest market alone, and with `min` nodes: of more nodes, each would do less work.

    The job waits for that market, and moves only if another zone saves more than the move costs.
    """
    markets = {offer.market for offer in seen.offers if offer.name in job.pools}
    least: Market = min(markets, key=ORDER.__getitem__, default="spot")
    found = elastic(seen, replace(job, max=job.min, spares=0), before, (least,), thrifty=True)
    return replace(found, reason=f"cheapest: {found.reason}")
