"""The default policy: in the best zone, as many machines as there are between `min` and `max`.

A generation stays in one zone, unless the job file says `zones: any`. The job moves if another zone would pay for the
move: the gain in work until the job ends, or until the zone is likely to take a machine, is more than the move costs.
Machines of a dearer market stand in for those that the cheapest market of the zone lacks, up to `min`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from spotrun.cloud.base import Market
from spotrun.head.capacity.policies.zones import ORDER, Zone, again, ask, fit, held, holds, rate, staying, use, zones
from spotrun.head.capacity.situation import Demand, Placement, Situation, nothing
from spotrun.head.capacity.sizes import Need
from spotrun.text import count

GAIN = 1.1
"""Another zone must promise this many times the rate, or cost this many times less. So small changes move no job."""


def elastic(
    seen: Situation,
    job: Demand,
    before: Placement | None,
    markets: Iterable[Market] = ORDER,
    thrifty: bool = False,
) -> Placement:
    """Stay, move or wait, as the module says.

    markets: those that the job may use. thrifty: the best zone is the cheapest one, not the fastest.
    """
    found = zones(seen, job, markets)
    if thrifty:  # all that follows compares rates, so turn costs into rates: half the cost is twice the rate
        least = min((zone.cost for zone in found), default=0.0)
        found = [replace(zone, rate=rate(job, job.min) * least / zone.cost) if zone.cost else zone for zone in found]
    if not found:
        return nothing(job, "no pool suits the job")
    here = max(found, key=lambda zone: held(job, zone.pools))
    placement = _training(job, here, found) if held(job, here.pools) else _waiting(job, found, before)
    times = [again(offer) for zone in found for offer in zone.offers]
    return replace(placement, wake=min((at for at in times if at > seen.now), default=None))


def _training(job: Demand, here: Zone, found: list[Zone]) -> Placement:
    """Stay, or prepare a move and carry it out once the other zone is ready."""
    now = held(job, here.pools)
    better = [zone for zone in found if zone is not here and job.wants and pays(job, zone, zone.hope, here)]
    if not better:
        return _in(job, here, ask(job, here), f"{_name(here)}: {_count(job, here)}{_others(found, here)}")
    best = max(better, key=_score)
    if best.ready >= job.min and pays(job, best, best.ready, here):
        there = count(best.ready, "machine")
        return _in(job, best, ask(job, best), f"moves to {_name(best)}: {there} there, {now} in {here.name}")
    why = f"{_name(here)}: {now} of {job.max} machines; {best.name} is asked for more, to move there"
    return _in(job, here, (*ask(job, here), *ask(job, best)), why)


def _waiting(job: Demand, found: list[Zone], before: Placement | None) -> Placement:
    """The best zone is asked first. If it has too few machines, it is still asked, and the next zone too."""
    ready = [zone for zone in found if zone.ready >= job.min]
    able = [zone for zone in found if holds(job, zone)]
    ranked = _ranked(job, able or [zone for zone in found if holds(job, zone, beside=False)] or found, before)
    if not able and not ready:  # its machines would cost money, and wait for others
        return _in(job, ranked[0], (), f"{_name(ranked[0])}: no room for {count(job.min, 'machine')} beside other jobs")
    if ready:
        best = max(ready, key=lambda zone: (rate(job, zone.ready), _score(zone)))
        last = next((zone for zone in ready if before is not None and zone.pools & before.use), best)
        if rate(job, best.ready) <= rate(job, last.ready) * GAIN and last.cost <= best.cost * GAIN:
            best = last
        ready = [best]
        if _similar(best, ranked[0]) or best.ready >= min(job.max, ranked[0].hope):
            return _in(job, best, ask(job, best), f"{_name(best)}: {_count(job, best)}{_others(found, best)}")
    asked = []
    for zone in ranked:
        asked.append(zone)
        if zone.hope >= job.min:
            break
    # The job's machines are in the zone with most of them: `hold_idle` says how long it keeps them.
    chosen = max(ready or reversed(asked), key=lambda zone: sum(fit(job, offer) for offer in zone.offers))
    needs = tuple(need for zone in asked for need in ask(job, zone))
    short = f"; {', '.join(_name(zone) for zone in asked[:-1])} short of machines" if asked[:-1] else ""
    return _in(job, chosen, needs, f"asks {_name(asked[-1])}{short}")


def _ranked(job: Demand, found: list[Zone], before: Placement | None) -> list[Zone]:
    """The best zone first. A zone that was asked last and gave enough stays first, unless another is much better.

    The machines of the zone that was asked boot already. Those of other zones are only a hope.
    """
    ranked = sorted(found, key=lambda zone: (zone.hope < job.min, *(-each for each in _score(zone))))
    for zone in ranked:
        asked = before is not None and any(zone.pools & need.pools for need in before.needs)
        if asked and sum(fit(job, offer) for offer in zone.offers) >= job.min and _similar(zone, ranked[0]):
            return [zone, *(other for other in ranked if other is not zone)]
    return ranked


def _similar(zone: Zone, best: Zone) -> bool:
    return best.rate <= zone.rate * GAIN and zone.cost <= best.cost * GAIN


def pays(job: Demand, to: Zone, nodes: float, here: Zone) -> bool:
    """Whether a move to `nodes` machines of another zone pays: gain in rate x expected stay > cost of the move.

    If the rate there is not lower, a saving of money counts too: saving x expected stay > price of the move. The stay
    ends with the job, or when the new zone is likely to fall short.
    """
    if nodes < job.min:
        return False
    old, new = _worth(job, here, max(staying(job, here.pools), here.hope)), _worth(job, to, nodes)
    stay = min(to.offers[0].history.mean_up, job.left / new if job.left is not None else math.inf)
    if new > old * GAIN:
        return (new - old) * stay > old * job.move + new * job.restart
    priced = all(offer.price is not None for zone in (to, here) for offer in zone.offers)
    saved = here.cost - to.cost
    if not priced or new < old or here.cost <= to.cost * GAIN:
        return False
    return saved * new * stay > here.cost * old * job.move + to.cost * new * job.restart


def _worth(job: Demand, zone: Zone, nodes: float) -> float:
    """The rate that can be expected of this many machines of a zone."""
    return zone.rate * rate(job, nodes) / rate(job, zone.hope) if zone.hope else rate(job, nodes)


def _score(zone: Zone) -> tuple[float, float]:
    return round(zone.rate, 6), -zone.cost


def _in(job: Demand, zone: Zone, needs: tuple[Need, ...], reason: str) -> Placement:
    return Placement(use(job, zone), needs, job.min, job.max, job.spares, reason)


def _name(zone: Zone) -> str:
    pools = ", ".join(offer.name for offer in zone.offers)
    return f"{pools} in {zone.name}" if zone.name else pools


def _count(job: Demand, zone: Zone) -> str:
    likely = min(job.max, math.floor(zone.hope + 1e-9))
    return f"up to {likely} of {job.max} machines" if likely < job.max else count(job.max, "machine")


def _others(found: list[Zone], best: Zone) -> str:
    others = [f"{zone.name} {round(zone.hope, 1):g}" for zone in found if zone is not best and zone.name]
    return f"; other zones would probably have: {', '.join(others)}" if others else ""
