"""A baseline: what SkyPilot's managed jobs do (`sky/jobs/recovery_strategy.py`, EAGER_NEXT_REGION).

The cluster has a fixed number of nodes. When it loses one, the whole cluster is taken down, and launched in the
cheapest other zone. A launch that does not get all nodes is taken down, and the next zone by price is tried. When the
last zone has failed, the tries begin again after a pause, with the cheapest zone. Only spot machines are used.
"""

from __future__ import annotations

from spotrun.head.capacity.situation import Demand, Offer, Placement, Situation
from spotrun.head.capacity.sizes import Need

LAUNCH = 60.0  # seconds until a launch has failed
PAUSE = 60.0  # seconds after all zones have failed: RETRY_INIT_GAP_SECONDS, whose growth is left out


def failover(seen: Situation, job: Demand, before: Placement | None) -> Placement:
    """One zone, all nodes."""
    offers = sorted(
        (offer for offer in seen.offers if offer.name in job.pools and offer.market == "spot"),
        key=lambda offer: (offer.price or 0.0, offer.name),
    )
    if not offers:
        return Placement(frozenset(), (), job.max, job.max, reason="no spot pool suits the job")
    if before is None:
        return _launch(seen, job, offers[0])
    if before.wake is not None and seen.now < before.wake:
        return before
    now = next((index for index, offer in enumerate(offers) if offer.name in before.use), None)
    if now is None:  # all zones had failed
        return _launch(seen, job, offers[0])
    if not job.wants:
        return Placement(before.use, (Need(sum(job.members.values()), before.use),), job.max, job.max)
    if _serving(offers[now]) >= job.max:
        return Placement(before.use, before.needs, job.max, job.max, reason=before.reason)
    if job.members:  # it ran: the other zones first
        others = [offer for offer in offers if offer is not offers[now]]
        return _launch(seen, job, others[0]) if others else _pause(seen, job)
    return _launch(seen, job, offers[now + 1]) if now + 1 < len(offers) else _pause(seen, job)


def _serving(offer: Offer) -> int:
    return sum(state != "leaving" for state in offer.pool.states.values())


def _launch(seen: Situation, job: Demand, offer: Offer) -> Placement:
    pools = frozenset({offer.name})
    reason = f"all {job.max} nodes in {offer.zone}"
    return Placement(pools, (Need(job.max, pools),), job.max, job.max, reason=reason, wake=seen.now + LAUNCH)


def _pause(seen: Situation, job: Demand) -> Placement:
    reason = f"no zone has {job.max} machines: the next try is in {PAUSE:.0f} s"
    return Placement(frozenset(), (), job.max, job.max, reason=reason, wake=seen.now + PAUSE)
