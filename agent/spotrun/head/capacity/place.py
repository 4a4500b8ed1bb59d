"""Where should each job train, and on which machines? `place(situation)` is pure, and its tests are data.

Jobs are served by priority, then by deadline, then in the order of the queue. Each job counts on the machines that the
jobs before it leave. A job that trains keeps `min` nodes: `allocate` gives them to no other job of the same priority.
So no other job of that priority counts on these nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from spotrun.head.capacity.policies.budget import within_budget
from spotrun.head.capacity.policies.cheapest import cheapest
from spotrun.head.capacity.policies.deadline import deadline
from spotrun.head.capacity.policies.elastic import elastic
from spotrun.head.capacity.situation import Demand, Placement, Policy, Situation

Placements = Mapping[str, Placement]  # by job id


def place(seen: Situation, before: Placements | None = None) -> Placements:
    """A placement for each demand. before: what the last call said."""
    before, found = before or {}, dict[str, Placement]()
    taken = dict.fromkeys((offer.name for offer in seen.offers), 0.0)
    ranked = sorted(seen.demands, key=rank)
    held = {demand.job: _firm(seen, demand) for demand in ranked}
    for index, demand in enumerate(ranked):
        later = sum(each.min for each in ranked[index + 1 :] if each.deadline is not None and each.wants)
        demand = replace(demand, leave=later)
        rivals = [held[other.job] for other in ranked[index + 1 :] if other.priority == demand.priority]
        firm = {name: taken[name] + sum(each.get(name, 0.0) for each in rivals) for name in taken}
        offers = tuple(replace(offer, others=firm[offer.name]) for offer in seen.offers)
        placement = policy_of(demand)(replace(seen, offers=offers), demand, before.get(demand.job))
        found[demand.job] = placement = replace(placement, hourly=hourly(seen, placement))
        _take(taken, seen, demand, placement)
    return found


def rank(demand: Demand) -> tuple[float, float, int]:
    """Sorts demands: a demand that is served earlier comes first."""
    return -demand.priority, math.inf if demand.deadline is None else demand.deadline, demand.order


def policy_of(demand: Demand) -> Policy:
    """The policy that decides for a job. A deadline counts more than `cheapest`. A budget bounds each policy."""
    found: Policy = elastic
    if demand.deadline is not None:
        found = deadline
    elif demand.cheapest:
        found = cheapest
    return within_budget(found) if demand.budget is not None else found


def hourly(seen: Situation, placement: Placement) -> float:
    """USD an hour with all machines that are asked for, as far as prices are known."""
    prices = {offer.name: offer.price or 0.0 for offer in seen.offers}
    return sum(
        need.machines * max((prices.get(pool, 0.0) for pool in need.pools), default=0.0) for need in placement.needs
    )


def _firm(seen: Situation, demand: Demand) -> dict[str, float]:
    """The machines that no other job of the same priority gets, by pool: `min` of those on which the job trains."""
    left, found = demand.min if demand.wants else 0, dict[str, float]()
    for offer in seen.offers:
        mine = min(left, demand.members.get(offer.name, 0))
        if mine > 0:
            found[offer.name] = mine * min(1.0, (demand.devices or offer.devices) / offer.devices)
            left -= mine
    return found


def _take(taken: dict[str, float], seen: Situation, demand: Demand, placement: Placement) -> None:
    """Count the machines that a job has or will have."""
    mine = {pool: float(max(count, placement.reserve.get(pool, 0))) for pool, count in demand.members.items()}
    mine = {pool: float(count) for pool, count in placement.reserve.items()} | mine
    for need in placement.needs:
        left = need.machines - sum(mine.get(pool, 0.0) for pool in need.pools)
        for offer in seen.offers:
            if offer.name in need.pools and left > 0:
                more = min(left, max(0.0, offer.pool.max - taken[offer.name] - mine.get(offer.name, 0.0)))
                mine[offer.name], left = mine.get(offer.name, 0.0) + more, left - more
    for offer in seen.offers:
        share = (demand.devices or offer.devices) / offer.devices
        taken[offer.name] += mine.get(offer.name, 0.0) * min(1.0, share)
