"""Baselines for jobs with a deadline, from "Can't Be Late" (Wu et al., NSDI 2024), sections 3.2 and 4.

Both know how much work is done and left, and the time d that a change of machines takes. They share two rules:

- Use a spot machine whenever there is one, and keep it until it is taken.
- If the job has no spot machine, and the time left is less than the work left plus 2 d, use an on-demand machine to the
  end.
"""

from __future__ import annotations

from dataclasses import replace

from spotrun.head.capacity.situation import Demand, Placement, Situation
from spotrun.head.capacity.sizes import Need


def uniform_progress(seen: Situation, job: Demand, before: Placement | None) -> Placement:
    """Keep progress in proportion to time. If the job is behind, and there is no spot machine, use an on-demand one.

    The job leaves the on-demand machine only for a spot machine, and only when it is ahead by 2 d: the paper's
    hysteresis (`rc_cr_threshold` in its simulator). It gives up the on-demand machine while the spot machine boots.
    """
    found = greedy(seen, job, before)
    if job.deadline is None or job.left is None or found.use != _pools(seen, job, "spot") or not job.wants:
        return found
    work, time, d = job.done + job.left, job.deadline - job.submitted, job.restart
    pace, elapsed = work / time, seen.now - job.submitted
    if before is not None and before.use == _pools(seen, job, "on-demand"):
        ahead = (elapsed + 2 * d) * pace
        if job.done < ahead - 1e-6:
            wait = (ahead - job.done) / (1 - pace) if pace < 1 else time
            return replace(_on_demand(seen, job, "behind"), wake=seen.now + max(1.0, wait))
        if _serving(seen, found.use):
            return found
        stays = _on_demand(seen, job, "ahead, until there is a spot machine")
        return replace(stays, needs=(*stays.needs, *found.needs))
    if _serving(seen, found.use):
        return found
    if job.done < elapsed * pace - 1e-6:
        return _on_demand(seen, job, "there is no spot machine, and the progress is behind")
    behind = job.submitted + job.done / pace + 1e-3
    return replace(found, wake=min(found.wake or behind, max(behind, seen.now + 1e-3)))


def greedy(seen: Situation, job: Demand, before: Placement | None) -> Placement:
    """A spot machine whenever there is one, else none, until the last moment."""
    spot = _pools(seen, job, "spot")
    nodes = job.max if job.wants else sum(job.members.values())
    found = Placement(spot, (Need(nodes, spot),) if spot else (), job.max, job.max, reason="spot machines")
    if job.deadline is None or job.left is None or not job.wants:
        return found
    last = job.deadline - job.left - 2 * job.restart
    runs = any(pool in spot for pool in job.members) and _serving(seen, spot)
    if runs:
        return found
    if seen.now >= last - 1e-3:
        return _on_demand(seen, job, "the deadline allows no other change")
    return replace(found, wake=last)


def _on_demand(seen: Situation, job: Demand, reason: str) -> Placement:
    pools = _pools(seen, job, "on-demand")
    return Placement(pools, (Need(job.max, pools),) if pools else (), job.max, job.max, reason=reason)


def _pools(seen: Situation, job: Demand, market: str) -> frozenset[str]:
    return frozenset(offer.name for offer in seen.offers if offer.name in job.pools and offer.market == market)


def _serving(seen: Situation, pools: frozenset[str]) -> bool:
    """Whether the pools have a machine that stays."""
    states = (state for offer in seen.offers if offer.name in pools for state in offer.pool.states.values())
    return any(state != "leaving" for state in states)
