"""The policy of jobs with a budget: if the money left does not pay for the work left, the job is treated as `cheapest`.

A move that has begun is finished. Between two generations, a job has no members. So its policies may count on other
machines than before the move, and the money may pay for them, or not pay any more. If the job followed these policies
back to the machines that it has just left, it would go back and forth without end.

The budget itself is kept elsewhere: `planner.spending` stops the job while there is money left to save its state.
"""

from __future__ import annotations

from dataclasses import replace

from spotrun.head.capacity.policies.cheapest import cheapest
from spotrun.head.capacity.policies.zones import price, rate, usable
from spotrun.head.capacity.situation import Demand, Offer, Placement, Policy, Situation


def within_budget(policy: Policy) -> Policy:
    """The policy, as far as its machines are likely to end the job within the budget; else `cheapest`."""

    def bounded(seen: Situation, job: Demand, before: Placement | None) -> Placement:
        begun = before if before is not None and _begins(seen, job, before) else None
        if begun is not None and begun.thrifty:
            return begun
        # Each of the two policies continues its own last placement.
        was_thrifty = before is not None and before.thrifty
        wanted = policy(seen, job, None if was_thrifty else before)
        cost = expected_cost(seen, job, wanted)
        if job.budget is None or cost is None or cost <= job.budget:
            return wanted
        if begun is not None and (expected_cost(seen, job, begun) or 0.0) < cost:
            return begun
        thrifty = cheapest(seen, job, before if was_thrifty else None)
        least = expected_cost(seen, job, thrifty)
        if least is None or least >= cost:
            why = f"the rest will cost about ${cost:.2f}, and ${job.budget:.2f} of the budget is left"
            return replace(wanted, reason=f"{wanted.reason}; {why}")
        why = f"other machines would cost about ${cost:.2f}, and ${job.budget:.2f} of the budget is left"
        return replace(thrifty, reason=f"{thrifty.reason}; {why}", thrifty=True)

    return bounded


def _begins(seen: Situation, job: Demand, before: Placement) -> bool:
    """Whether the job has no members, but where it was placed, enough machines are ready: a generation begins soon."""
    ready = sum(usable(job, offer) for offer in seen.offers if offer.name in before.use)
    return not any(job.members.values()) and ready >= job.min


def expected_cost(seen: Situation, job: Demand, placement: Placement) -> float | None:
    """USD for the rest of the work on the dearest of the pools that the job uses or asks; None: not known.

    Pools that are only asked count too: otherwise the job would ask for machines that it cannot pay for.
    """
    pools = placement.use.union(*(need.pools for need in placement.needs if need.machines > 0))
    offers = [offer for offer in seen.offers if offer.name in pools and offer.price is not None]
    if job.left is None or not offers:
        return None
    offer = max(offers, key=lambda each: _pays(job, each))
    return _pays(job, offer) * placement.max * job.left / rate(job, placement.max, offer.speed) / 3600


def _pays(job: Demand, offer: Offer) -> float:
    """USD an hour for a node of the job."""
    return price(offer) * job.share(offer)
