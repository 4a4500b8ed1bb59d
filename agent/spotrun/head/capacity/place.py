"""Where should each job train, and on which machines? `place(situation)` is pure, and its tests are data.

Jobs are served by priority, then by deadline, then in the order of the queue. Each job counts on the machines that the
jobs before it leave. A job that trains keeps `min` nodes: `allocate` gives them to no other job of the same priority.
So no other job of that priority counts on these nodes. A job that waits asks for no machines if it could not begin with
them beside the nodes that other jobs keep.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from spotrun.head.capacity.policies.budget import within_budget
from spotrun.head.capacity.policies.cheapest import cheapest
from spotrun.head.capacity.policies.deadline import deadline
from spotrun.head.capacity.policies.elastic import elastic
from spotrun.head.capacity.policies.zones import nodes
from spotrun.head.capacity.situation import Demand, Placement, Policy, Situation

Placements = Mapping[str, Placement]  # by job id


def place(seen: Situation, before: Placements | None = None) -> Placements:
    """A placement for each demand. before: what the last call said."""
    before, found = before or {}, dict[str, Placement]()
    taken = dict.fromkeys((offer.name for offer in seen.offers), 0.0)
    ranked = sorted(seen.demands, key=rank)
    held = {demand.job: _firm(seen, demand) for demand in ranked}
    above, equals = dict(taken), list[Demand]()  # what jobs of higher priority have; earlier jobs of this priority
    for index, demand in enumerate(ranked):
        if equals and equals[0].priority != demand.priority:
            above, equals = dict(taken), []
        rivals = [other for other in ranked[index + 1 :] if other.priority == demand.priority]
        trains = any(demand.members.values())
        others = {name: taken[name] + _sum(held, rivals, name) for name in taken}
        if not trains:  # a job that trains does not move to another zone because of a machine that is kept for minutes
            others = {offer.name: others[offer.name] + offer.kept for offer in seen.offers}
        firm = {name: above[name] + _sum(held, (*equals, *rivals), name) for name in taken}
        # Earlier jobs may wait, and ask for no machines. A promised deadline does not wait for them.
        if demand.deadline is None and not (demand.holds or trains):
            others = {name: max(others[name], firm[name]) for name in taken}
        offers = (replace(offer, others=others[offer.name], firm=firm[offer.name]) for offer in seen.offers)
        now = replace(seen, offers=tuple(offers))
        demand = replace(demand, leave=_promised(now, demand, ranked[index + 1 :]))
        placement = policy_of(demand)(now, demand, before.get(demand.job))
        found[demand.job] = placement = replace(placement, hourly=hourly(seen, demand, placement))
        _take(taken, seen, demand, placement)
        if not held[demand.job]:
            held[demand.job] = _awaited(now, demand, placement)
        equals.append(demand)
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


def hourly(seen: Situation, demand: Demand, placement: Placement) -> float:
    """USD an hour for the job's devices of all machines that are asked for, as far as prices are known."""
    prices = {offer.name: (offer.price or 0.0) * demand.share(offer) for offer in seen.offers}
    return sum(
        need.machines * max((prices.get(pool, 0.0) for pool in need.pools), default=0.0) for need in placement.needs
    )


def _promised(seen: Situation, demand: Demand, later: Sequence[Demand]) -> int:
    """The machines of the on-demand pools of a job that later jobs with a deadline may need."""
    safe = demand.pools.intersection(offer.name for offer in seen.offers if offer.market == "on-demand")
    return sum(each.min for each in later if each.deadline is not None and each.wants and each.pools & safe)


def _sum(held: Mapping[str, Mapping[str, float]], jobs: Iterable[Demand], pool: str) -> float:
    return sum(held[job.job].get(pool, 0.0) for job in jobs)


def _firm(seen: Situation, demand: Demand) -> dict[str, float]:
    """The machines that no other job of the same priority gets, by pool: `min` of those on which the job trains."""
    return _least(seen, demand, {offer.name: demand.members.get(offer.name, 0) for offer in seen.offers})


def _awaited(seen: Situation, demand: Demand, placement: Placement) -> dict[str, float]:
    """The machines with which a job that waits will begin, by pool: no later job of its priority begins on these.

    None if there will never be enough.
    """
    offers = [offer for offer in seen.offers if offer.name in placement.use]
    if sum(offer.pool.max for offer in offers) < demand.min:
        return {}
    return _least(seen, demand, {offer.name: nodes(demand, offer, offer.pool.max - offer.firm) for offer in offers})


def _least(seen: Situation, demand: Demand, machines: Mapping[str, int]) -> dict[str, float]:
    """`min` of these machines, by pool."""
    left, found = demand.min if demand.wants else 0, dict[str, float]()
    for offer in seen.offers:
        mine = min(left, machines.get(offer.name, 0))
        if mine > 0:
            found[offer.name] = mine * demand.share(offer)
            left -= mine
    return found


def _take(taken: dict[str, float], seen: Situation, demand: Demand, placement: Placement) -> None:
    """Count the machines that a job has or will have, without spares: any job may take those."""
    mine = {pool: float(max(count, placement.reserve.get(pool, 0))) for pool, count in demand.members.items()}
    mine = {pool: float(count) for pool, count in placement.reserve.items()} | mine
    for need in placement.needs:
        wanted = min(need.machines, max(demand.min, demand.max))
        left = wanted - sum(mine.get(pool, 0.0) for pool in need.pools)
        for offer in seen.offers:
            if offer.name in need.pools and left > 0:
                most = nodes(demand, offer, offer.pool.max - taken[offer.name])
                more = min(left, max(0.0, most - mine.get(offer.name, 0.0)))
                mine[offer.name], left = mine.get(offer.name, 0.0) + more, left - more
    for offer in seen.offers:
        taken[offer.name] += mine.get(offer.name, 0.0) * demand.share(offer)
