"""What each zone offers one job. Shared by the policies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spotrun.cloud.base import Market
from spotrun.head.capacity.situation import Demand, Offer, Situation
from spotrun.head.capacity.sizes import Need, Pool

ORDER: dict[Market, int] = {"spot": 0, "flex": 1, "on-demand": 2}  # the dearer, the later
DEARER = 3.0  # on-demand over spot, where a price is not known: both clouds advertise 60 to 90 % off
RETRY = 1800.0  # seconds before a zone that fell short is asked again while the job trains elsewhere; doubles each time
RETRY_MOST = 4 * 3600.0


@dataclass(frozen=True)
class Zone:
    """The pools of one zone that a job may use, the cheapest market first."""

    name: str
    offers: tuple[Offer, ...]
    ready: int  # machines that could train for this job now
    hope: float  # machines that it is likely to have soon, `ready` among them
    rate: float  # work per second that can be expected, in seconds of one machine of speed 1
    cost: float  # USD for 3600 of that work; relative if prices are not known

    @property
    def pools(self) -> frozenset[str]:
        """Their names."""
        return frozenset(offer.name for offer in self.offers)


def zones(seen: Situation, job: Demand, markets: Iterable[Market] = ORDER) -> list[Zone]:
    """The zones with pools of these markets, in the order of the cluster file. With `across`, all zones are one."""
    found: dict[str, list[Offer]] = {}
    for offer in seen.offers:
        if offer.name in job.pools and offer.market in set(markets):
            found.setdefault("" if job.across else offer.zone, []).append(offer)
    return [_zone(seen, job, name, offers) for name, offers in found.items()]


def rate(job: Demand, nodes: float, speed: float = 1.0) -> float:
    """Work per second of this many nodes."""
    return float(speed * nodes**job.scaling) if nodes > 0 else 0.0


def price(offer: Offer) -> float:
    """USD an hour, more than 0, because policies compare ratios; 1 for a spot machine whose price is not known."""
    if offer.price is not None:
        return max(offer.price, 1e-6)
    return {"spot": 1.0, "flex": DEARER / 2, "on-demand": DEARER}[offer.market]


def held(job: Demand, pools: frozenset[str]) -> int:
    """Nodes of the current generation in these pools."""
    return sum(count for pool, count in job.members.items() if pool in pools)


def staying(job: Demand, pools: frozenset[str]) -> int:
    """Those of them that are not under notice."""
    return held(job, pools) - sum(count for pool, count in job.leaving.items() if pool in pools)


def ask(job: Demand, zone: Zone) -> tuple[Need, ...]:
    """The machines to ask of a zone. Machines of a dearer market only stand in for what the job lacks of its `min`."""
    if not job.wants:
        return (need(held(job, zone.pools), zone.offers),)
    wanted, cheap = job.max + job.spares, cheapest_market(zone)
    there = sum(fit(job, offer) for offer in cheap)
    lacks = any(offer.pool.supply != "open" or offer.pool.abandoned for offer in cheap)
    enough = there >= job.min or not (lacks or sum(room(job, offer) for offer in cheap) < job.min)
    if enough or len(cheap) == len(zone.offers):
        return (need(wanted, cheap),)
    return (need(wanted, cheap), need(job.min - there, zone.offers[len(cheap) :]))


def need(machines: int, offers: Sequence[Offer]) -> Need:
    """A need for machines of these pools. The first pools come first."""
    order = tuple(offer.name for offer in offers)
    return Need(machines, frozenset(order), order=order)


def use(job: Demand, zone: Zone) -> frozenset[str]:
    """The pools to train on: no dearer market, once the cheapest one has as many machines as the job trains on."""
    cheap = cheapest_market(zone)
    if sum(usable(job, offer) for offer in cheap) >= max(job.min, held(job, zone.pools)):
        return frozenset(offer.name for offer in cheap)
    return zone.pools


def fit(job: Demand, offer: Offer) -> int:
    """Machines of a pool that this job can count on. Machines under notice do not count."""
    return max(staying(job, frozenset({offer.name})), nodes(job, offer, _lasting(offer.pool) - offer.others))


def room(job: Demand, offer: Offer) -> int:
    """The most machines of a pool that this job could have."""
    return max(job.members.get(offer.name, 0), nodes(job, offer, offer.pool.max - offer.others))


def holds(job: Demand, zone: Zone, beside: bool = True) -> bool:
    """Whether the zone may have room for the job's `min`. beside: also beside the machines that other jobs keep.

    Of machines that jobs share, it is not known which ones have room. So this counts the most nodes that could be.
    """
    free = ((offer, offer.pool.max - (offer.firm if beside else 0.0)) for offer in zone.offers)
    most = sum(max(0, min(offer.pool.max, math.floor(left / job.share(offer) + 1e-9))) for offer, left in free)
    return most >= job.min or held(job, zone.pools) >= job.min


def usable(job: Demand, offer: Offer) -> int:
    """Machines of a pool that this job could train on now."""
    return max(job.members.get(offer.name, 0), nodes(job, offer, min(offer.usable, offer.pool.max) - offer.others))


def nodes(job: Demand, offer: Offer, machines: float) -> int:
    """Nodes of the job that so many machines of the pool have room for. Other jobs may share one of the machines."""
    whole = math.floor(machines + 1e-9)
    return whole + int(machines - whole > job.share(offer) - 1e-9)


def cheapest_market(zone: Zone) -> tuple[Offer, ...]:
    """The offers of the zone's cheapest market."""
    return tuple(offer for offer in zone.offers if offer.market == zone.offers[0].market)


def _zone(seen: Situation, job: Demand, name: str, offers: list[Offer]) -> Zone:
    offers.sort(key=lambda offer: (ORDER[offer.market], price(offer) / offer.speed))
    ready, hope, cost, speed = 0, 0.0, 0.0, 0.0
    for offer in offers:
        first = offer.market == offers[0].market
        likely = min(max(0.0, (job.max if first else job.min) - hope), _likely(seen, job, offer))
        ready += usable(job, offer)
        hope += likely
        cost += likely * price(offer)
        speed += likely * offer.speed
    pause = job.move if hope - 1 >= job.min else job.restart  # the others go on without a machine that is lost
    lost = sum(1 / offer.history.lifetime for offer in offers[:1]) * hope * pause
    speed = speed / hope if hope else offers[0].speed
    found = rate(job, hope, speed) / (1 + lost)
    cost = cost / found if found else price(offers[0]) * (1 + ORDER[offers[0].market])
    return Zone(name, tuple(offers), min(ready, job.max), hope, found, cost)


def _likely(seen: Situation, job: Demand, offer: Offer) -> float:
    """Machines that the job can expect of a pool."""
    pool, past = offer.pool, offer.history
    now, most = fit(job, offer), room(job, offer)
    if pool.supply in ("short", "away", "closed"):
        return now
    fell_short = past.short_at > 0 and seen.now < again(offer)
    if pool.size and _lasting(pool) >= pool.size and not (fell_short and pool.size <= past.short_with):
        return most  # it has given what it was asked for
    if fell_short:
        # Since then it may have been asked for less, for example because the job moves away. That it has so many now
        # says nothing about more.
        return min(most, max(now, past.short_with - math.ceil(offer.others)))
    chance = (past.up + 1.0) / (past.up + past.down + 1.0)  # with one assumed hour of success: a new pool gets a try
    if offer.advice.obtainability is not None:
        chance = offer.advice.obtainability.value
    return now + chance * (most - now)


def _lasting(pool: Pool) -> int:
    """Machines to count on that are not under notice."""
    return pool.fit - len(pool.having("leaving"))


def again(offer: Offer) -> float:
    """When a pool that fell short is assumed to have machines again, epoch seconds; 0 if it never fell short."""
    past = offer.history
    pause = min(RETRY_MOST, RETRY * 2 ** max(0, min(past.refusals, 9) - 1))
    return past.short_at + pause if past.short_at else 0.0
