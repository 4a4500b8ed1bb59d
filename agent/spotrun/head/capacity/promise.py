"""Can the deadline of a new job be promised, without breaking the promises to other jobs? Pure.

A promise rests on on-demand machines: even without any spot machine, the job would end in time on them.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from spotrun.head.capacity.place import place, rank
from spotrun.head.capacity.policies.deadline import MARGIN, duration, safe_machines
from spotrun.head.capacity.policies.zones import rate, room
from spotrun.head.capacity.situation import Demand, Situation


def refusal(seen: Situation, job: Demand) -> str:
    """Why the deadline of a new job is refused, with the earliest one that can be kept. Empty: it can be kept, or the
    work is not known.

    seen: what the policies see, without the new job.
    """
    if job.deadline is None or job.left is None:
        return ""
    allowed = job.deadline - job.submitted
    before, after = _ends(seen), _ends(replace(seen, demands=(*seen.demands, job)))
    end = after[job.job]
    if end > job.deadline:
        needs = max(0.0, end - job.submitted)
        why = f"deadline: {duration(allowed)}: cannot be kept: the work takes {duration(job.left)} on one machine"
        return f"{why}; the earliest deadline is {math.ceil(needs)}s ({_clock(job.submitted + needs)})"
    for other in seen.demands:
        if other.deadline is not None and before[other.job] <= other.deadline < after[other.job]:
            late = f"job {other.job} would miss its deadline, {_clock(other.deadline)}"
            return f"deadline: {duration(allowed)}: {late}; submit this job with a later deadline or a lower priority"
    return ""


def _ends(seen: Situation) -> dict[str, float]:
    """When each job with a deadline ends if all of them train on their on-demand machines alone.

    A job that gets no on-demand machines now begins at the last deadline of the jobs before it that may use its pools.
    """
    found: dict[str, float] = {}
    earlier: list[Demand] = []
    place_of = place(seen)
    for demand in sorted(seen.demands, key=rank):
        if demand.deadline is None:
            continue
        placed, left = place_of[demand.job], demand.left or 0.0
        if placed.reserve:
            begin, fast = (
                seen.now,
                max(rate(demand, nodes, _speed(seen, pool)) for pool, nodes in placed.reserve.items()),
            )
        else:
            begin = max([seen.now, *(each.deadline or 0.0 for each in earlier if each.pools & demand.pools)])
            fast = _alone(seen, demand)
        found[demand.job] = begin + demand.restart + MARGIN + left / fast
        earlier.append(demand)
    return found


def _alone(seen: Situation, demand: Demand) -> float:
    """The rate of the job if no other job had machines: on its safe machines, or else on any machines."""
    alone = safe_machines(seen, replace(demand, leave=0))
    if alone is not None:
        return rate(demand, alone[1], alone[0].offers[0].speed)
    offers = [offer for offer in seen.offers if offer.name in demand.pools]
    most = min(demand.max, sum(room(demand, offer) for offer in offers))
    return rate(demand, max(most, demand.min), max((offer.speed for offer in offers), default=1.0))


def _speed(seen: Situation, pool: str) -> float:
    return next(offer.speed for offer in seen.offers if offer.name == pool)


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
