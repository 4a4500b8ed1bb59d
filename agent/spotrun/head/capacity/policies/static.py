"""A baseline: all of the job's machines from on-demand pools, from its beginning to its end."""

from __future__ import annotations

from spotrun.head.capacity.situation import Demand, Placement, Situation
from spotrun.head.capacity.sizes import Need


def static(seen: Situation, job: Demand, before: Placement | None) -> Placement:
    """The on-demand pools of the job, in the order of the cluster file."""
    pools = frozenset(offer.name for offer in seen.offers if offer.name in job.pools and offer.market == "on-demand")
    needs = (Need(job.max if job.wants else sum(job.members.values()), pools),) if pools else ()
    return Placement(pools, needs, job.max, job.max, reason="on-demand machines to the end")
