"""The policy of jobs with a deadline: spot machines while there is time to spare, safe machines when there is not.

Safe machines are those that the cloud does not take: on-demand machines, and flex machines that are there. Flex
machines cost less, but the job may have to wait for them. So it asks for them first, and on-demand machines stand in
while there are none. The point of no return is the last moment at which a start on on-demand machines still ends in
time. From then on the job asks for both, and uses the first ones that are ready. Before that, `waiting_game` says what
costs least: wait for spot machines, train on spot, or train on safe machines and return to spot. If the job would end
too late on safe machines, it uses them only if it would end sooner on them than on spot machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spotrun.cloud.base import Market
from spotrun.head.capacity.policies.elastic import elastic
from spotrun.head.capacity.policies.waiting_game import SPARE, Game, Tables, rounded, solve
from spotrun.head.capacity.policies.zones import Zone, held, holds, need, price, rate, room, usable, zones
from spotrun.head.capacity.situation import Demand, Offer, Placement, Situation
from spotrun.head.capacity.sizes import Need

MARGIN = 30.0  # seconds for decisions, orders and three looks at the cloud
WRONG, WRONG_ASKED = 0.1, 0.5  # parts of the work left: safe machines count as too late if they are later than this
AGAIN = 8  # a choice is made again when 1 / AGAIN of the work, or of the spare time, is used up
SAFE: tuple[Market, ...] = ("flex", "on-demand")


@dataclass(frozen=True)
class Outlook:
    """What the decision rests on. Times are seconds."""

    work: float  # left, on the safe machines
    spare: float  # until the deadline, beyond work and margin
    safe: Zone  # the safe machines
    nodes: int  # how many of them
    queue: tuple[Offer, ...]  # flex pools of the same zone: their machines are not there, but can be asked for
    spot: Zone | None  # the zone whose spot machines are best now
    wish: Placement  # on spot machines, if that is the choice
    on: str  # what it trains on now: spot, safe; "": nothing


def deadline(seen: Situation, job: Demand, before: Placement | None) -> Placement:
    """Spot machines or safe machines, as the module says."""
    found = safe_machines(seen, job) if job.deadline is not None and job.wants else None
    if found is None or job.deadline is None or job.left is None:
        plain = elastic(seen, job, before)
        if job.deadline is None or not job.wants:
            return plain
        why = "the deadline counts once the work left is measured"
        if found is None:
            why = "if machines are lost or missing, the deadline may be missed: no on-demand pool has room"
        return replace(plain, reason=f"{plain.reason}; {why}")
    view = _outlook(seen, job, before, job.deadline, job.left, *found)
    kept = {offer.name: view.nodes for offer in view.safe.offers if offer.market == "on-demand"}
    return replace(_place(seen, job, before, view), reserve=kept)


def _place(seen: Situation, job: Demand, before: Placement | None, view: Outlook) -> Placement:
    spot, left = view.spot, _time_left(view)
    if spot is None:
        found = _safe(job, view, (), f"only safe machines suit it: {left}")
        return replace(found, rest_until=_may_rest_until(view, seen.now + max(0.0, view.spare - job.restart)))
    ready = spot.ready >= job.min or held(job, spot.pools) >= job.min
    limit = job.restart + (_at_safe(job, view, job.unsaved) if view.on == "spot" else 0.0)
    if view.spare <= limit:
        if (instead := _too_late(seen, job, before, view)) is not None:
            return instead
        needs: tuple[Need, ...] = (need(view.nodes, view.queue),) if view.queue else ()
        found = _safe(job, replace(view, queue=()), needs, f"the point of no return: {left}")
        found = replace(found, rest_until=_may_rest_until(view, seen.now))
        return replace(found, use=found.use | _names(view.queue)) if not view.on else found
    game = _game(job, view, spot)
    choice = _choose(game, job, view, ready, before)
    # A second of waiting costs a second of the spare time. So does a second on spot, if it is done again later.
    last = seen.now + max(1.0, view.spare - limit)  # at least a second from now: the margin has room for that
    if choice == "safe":
        needs = _spot_to_move_to(seen, job, view) if view.on == "safe" and not ready else ()
        what = "a move to spot would not pay" if ready else "safe machines cost less than waiting for spot"
        found = replace(_safe(job, view, needs, f"{what}: {left}"), rest_until=seen.now)
        return replace(found, wake=seen.now + max(job.restart, view.work / AGAIN))
    found = view.wish
    state = "trains on spot" if ready else "waits for spot"
    wake = last if view.on == "spot" else min(last, seen.now + _patience(solve(game), job, view))
    reason = f"{state}: {left}; {found.reason}"
    return replace(found, reason=reason, wake=min(wake, found.wake or wake), rest_until=wake)


def _too_late(seen: Situation, job: Demand, before: Placement | None, view: Outlook) -> Placement | None:
    """Spot machines, if safe ones cannot end in time any more and would not end sooner. None: safe machines.

    Such safe machines would cost more for nothing. A job that is on safe machines keeps them.
    """
    late = job.move - MARGIN - view.spare
    asked = before is not None and any(need.pools & (view.safe.pools | _names(view.queue)) for need in before.needs)
    # What was measured may be a little wrong. If safe machines are asked for, only a great change stops that.
    if late <= max(MARGIN, view.work * (WRONG_ASKED if asked else WRONG)):
        return None
    first = 0.0 if view.on == "spot" else job.restart
    took = first + _seconds_on_spot(seen, job, view)
    if took > view.work + (first or job.move):
        return None
    in_time = took <= view.work + view.spare + MARGIN
    ends = "it ends in time" if in_time else "it ends no later"
    found, again = view.wish, seen.now + MARGIN
    what = f"on safe machines, the job would end {duration(late)} too late; on spot machines, {ends} if none is lost"
    reason, rest = f"{what}; {found.reason}", seen.now if in_time else _may_rest_until(view, seen.now)
    return replace(found, reason=reason, wake=min(again, found.wake or again), rest_until=rest)


def _may_rest_until(view: Outlook, at: float) -> float | None:
    """`at`, or None if the deadline cannot be met: then the job rests like one without a deadline."""
    return at if view.spare > -MARGIN else None


def _seconds_on_spot(seen: Situation, job: Demand, view: Outlook) -> float:
    """Seconds of the rest of the work on the spot machines that the job has or can expect. Infinite: too few."""
    spot, nodes = view.spot, 0.0
    speeds = [offer.speed for offer in seen.offers if job.members.get(offer.name)]
    if view.on == "spot":
        nodes = float(sum(job.members.values()) - sum(job.leaving.values()))
    elif view.on == "" and spot is not None:
        speeds = [offer.speed for offer in spot.offers]
        nodes = float(spot.ready) if _asked_for_safe(view) else min(float(job.max), max(spot.ready, spot.hope))
    if job.left is None or nodes < job.min or not speeds:
        return math.inf
    return job.left / rate(job, nodes, min(speeds))


def _asked_for_safe(view: Outlook) -> bool:
    """Whether safe machines were asked for."""
    return any(offer.pool.size - offer.others >= 1 for offer in (*view.queue, *view.safe.offers))


def _choose(game: Game, job: Demand, view: Outlook, up: bool, before: Placement | None) -> str:
    """`spot`, which includes waiting for spot machines, or `safe`. up: enough spot machines are ready.

    Solving the game takes a few milliseconds, so the choices that need no tables come first.
    """
    work, spare = view.work, view.spare
    if view.on == "spot":
        return "spot"
    if view.on == "safe":
        return "spot" if up and _would_move(game, job, view) else "safe"
    if up and before is not None and before.use and before.use.isdisjoint(view.safe.pools):
        return "spot"  # the job is on its way there: between two generations it has no members
    if _asked_for_safe(view):
        return "safe"  # they were asked for: another choice while they boot would waste the time spent
    if up or (view.spot is not None and view.spot.hope >= job.min):  # spot machines are there, or probably come
        if not _affords(job, view, job.restart):
            return "safe"
        tables = solve(game)
        on_spot = job.restart + tables.at(tables.spot, work, spare - job.restart)
        on_safe = tables.game.dear * job.restart + tables.at(tables.stay, work, spare - job.restart)
        return "spot" if on_spot <= on_safe else "safe"
    return "spot" if _waits(solve(game), job, work, spare) else "safe"


def _patience(tables: Tables, job: Demand, view: Outlook) -> float:
    """Seconds after which to choose again: when the job may stop waiting, or 1 / AGAIN of its spare time is over."""
    longest = max(MARGIN, view.spare / AGAIN)
    point = tables.game.spare / SPARE
    waited = point - view.spare % point
    while waited < longest and _waits(tables, job, view.work, view.spare - waited):
        waited += point
    return max(MARGIN, min(waited, longest))


def _waits(tables: Tables, job: Demand, work: float, spare: float) -> bool:
    """Whether waiting for spot machines costs less than safe machines."""
    sure = tables.game.dear * job.restart + tables.at(tables.safe, work, spare - job.restart)
    return tables.at(tables.wait, work, spare) < sure


def _would_move(game: Game, job: Demand, view: Outlook) -> bool:
    """Whether a job on safe machines moves when spot machines are ready."""
    if not _affords(job, view, rounded(game).move):
        return False
    tables = solve(game)
    moved = tables.game.move + tables.at(tables.spot, view.work, view.spare - tables.game.move)
    return moved <= tables.at(tables.stay, view.work, view.spare)


def _spot_to_move_to(seen: Situation, job: Demand, view: Outlook) -> tuple[Need, ...]:
    """What a job on safe machines asks of spot pools: machines of those zones to which a move would pay.

    Another zone may be likelier to have machines, but too dear. The job would give them up as soon as they boot.
    """
    found = [zone.pools for zone in zones(seen, job, ("spot",)) if _would_move(_game(job, view, zone), job, view)]
    return tuple(need for need in view.wish.needs if any(need.pools <= pools for pools in found))


def _game(job: Demand, view: Outlook, spot: Zone) -> Game:
    offer = spot.offers[0]
    now = max(spot.hope, float(job.min))
    fast = rate(job, now, offer.speed) / rate(job, view.nodes, view.safe.offers[0].speed)
    dear = view.nodes * price(view.safe.offers[0]) / (now * price(offer))
    lifetime = offer.history.mean_up if job.min < now else min(offer.history.mean_up, offer.history.lifetime)
    return Game(lifetime, offer.history.mean_down, job.restart, job.move, dear, fast, view.work, max(view.spare, 1.0))


def _outlook(
    seen: Situation, job: Demand, before: Placement | None, until: float, left: float, safe: Zone, nodes: int
) -> Outlook:
    work = left / rate(job, nodes, safe.offers[0].speed)
    found = [zone for zone in zones(seen, job, ("spot",)) if holds(job, zone, beside=False)]
    placed = elastic(seen, job, before, ("spot",))
    spot = next((zone for zone in found if zone.pools & placed.use), next(iter(found), None))
    on = "safe" if held(job, safe.pools) else "spot" if sum(job.members.values()) else ""
    queue = () if on == "safe" else _queue(seen, job, safe)
    return Outlook(work, until - seen.now - work - MARGIN, safe, nodes, queue, spot, placed, on)


def _queue(seen: Situation, job: Demand, safe: Zone) -> tuple[Offer, ...]:
    """The flex pools in the zone of the safe machines that have no machines ready."""
    found = (zone for zone in zones(seen, job, ("flex",)) if zone.name == safe.name)
    return tuple(offer for zone in found for offer in zone.offers if offer.name not in safe.pools and room(job, offer))


def safe_machines(seen: Situation, job: Demand) -> tuple[Zone, int] | None:
    """The zone with the most safe machines that no other job needs, and how many; None: no zone has enough."""
    found = []
    for zone in zones(seen, job, SAFE):
        sure = [offer for offer in zone.offers if offer.market == "on-demand" or usable(job, offer) >= job.min]
        most = max((room(job, offer) for offer in sure), default=0)
        nodes = min(job.max, max(job.min, most - job.leave))
        if most >= job.min:
            found.append((replace(zone, offers=tuple(sure)), nodes))
    return max(found, key=lambda each: (held(job, each[0].pools) > 0, each[1]), default=None)


def _safe(job: Demand, view: Outlook, also: tuple[Need, ...], reason: str) -> Placement:
    """Train on safe machines. Until they are ready, the job keeps training where it is."""
    offers = (*view.queue, *view.safe.offers)
    pools = _names(offers)
    there = sum(usable(job, offer) for offer in view.safe.offers) >= min(view.nodes, job.max)
    now = frozenset(pool for pool, count in job.members.items() if count) - pools
    needs = (need(min(job.max, view.nodes), offers), *also)
    if not there and now:
        needs += (Need(sum(job.members[pool] for pool in now), now),)
    return Placement(now if now and not there else pools, needs, job.min, job.max, 0, reason)


def _names(offers: Sequence[Offer]) -> frozenset[str]:
    return frozenset(offer.name for offer in offers)


def _affords(job: Demand, view: Outlook, first: float) -> bool:
    """Whether the job, once it is on spot machines, could lose them without notice and still end in time.

    first: seconds that the change to spot machines takes.
    """
    return view.spare - first > job.restart + _at_safe(job, view, job.checkpoint) + MARGIN


def _at_safe(job: Demand, view: Outlook, seconds: float) -> float:
    """How long the safe machines take for the work that the spot machines do in `seconds`."""
    nodes = sum(job.members.values()) if view.on == "spot" else job.max
    return seconds * rate(job, nodes) / rate(job, view.nodes)


def _time_left(view: Outlook) -> str:
    late = -MARGIN - view.spare
    if late > 0:
        return f"{duration(view.work)} of work on safe machines, {duration(late)} too long for the deadline"
    return f"{duration(view.work)} of work on safe machines, {duration(max(0.0, view.spare))} to spare"


def duration(seconds: float) -> str:
    """Such as 90 s, 5 min or 3.2 h."""
    if abs(seconds) < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if abs(seconds) < 7200 else f"{seconds / 3600:.1f} h"
