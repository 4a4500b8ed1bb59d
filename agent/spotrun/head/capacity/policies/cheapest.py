"""The policy of jobs without hurry: the least cost, however long it takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from spotrun.cloud.base import Market
from spotrun.head.capacity.policies.elastic import elastic
from spotrun.head.capacity.policies.zones import ORDER, holds, zones
from spotrun.head.capacity.situation import Demand, Placement, Situation


def cheapest(seen: Situation, job: Demand, before: Placement | None) -> Placement:
    """As `elastic`, but on the cheapest market alone, and with `min` nodes: of more nodes, each would do less work.

    The job waits for that market, and moves only if another zone saves more than the move costs.
    """
    job = replace(job, max=job.min, spares=0)
    found = elastic(seen, job, before, _markets(seen, job), thrifty=True)
    return replace(found, reason=f"cheapest: {found.reason}")


def _markets(seen: Situation, job: Demand) -> Iterable[Market]:
    """The cheapest market with enough machines for the job; all markets if none has enough alone."""
    for market in ORDER:
        if any(holds(job, zone, beside=False) for zone in zones(seen, job, (market,))):
            return (market,)
    return ORDER
