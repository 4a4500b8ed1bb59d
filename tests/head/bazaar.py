"""A small market for tests of the policies: time goes by, zones have machines or not, and one job works.

Machines that are asked for are ready after `boot` if their zone has them. Whatever changes the members stops the work
for `move`. All machines of a zone may go without notice: then the work since the last checkpoint is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from spotrun.head.capacity.history import Histories, learn
from spotrun.head.capacity.place import place
from spotrun.head.capacity.situation import Demand, Offer, Placement, Situation
from spotrun.head.capacity.sizes import Pool

POLL = 15.0  # seconds between two decisions, at the most
START = 1_000_000.0


@dataclass
class Stall:
    """One pool of the market."""

    zone: str
    market: str = "spot"
    price: float = 1.0
    most: int = 1
    counts: Sequence[tuple[float, int]] = ()  # from when on it has how many machines; empty: always all
    ready: list[float] = field(default_factory=list)  # when each of its machines is or was ready
    asked: int = 0

    def there(self, elapsed: float) -> int:
        """How many machines it has."""
        return next((count for since, count in reversed(self.counts) if since <= elapsed), self.most)


@dataclass
class Outcome:
    """What became of the job."""

    finished: float | None = None  # seconds after its submission
    cost: float = 0.0  # USD for all machines
    reasons: list[str] = field(default_factory=list)
    trail: list[tuple[str, ...]] = field(default_factory=list)  # the pools that it trained on, in order


def work(job: Demand, stalls: Mapping[str, Stall], until: float) -> Outcome:
    """Run the job. job: with `left` as at its submission."""
    outcome, histories, before = Outcome(), Histories(), dict[str, Placement]()
    boot, now, done, saved, saved_at, stalled = job.restart - job.move, 0.0, 0.0, 0.0, 0.0, 0.0
    members: dict[str, int] = {}
    assert job.left is not None
    while now < until:
        step = POLL
        for name, stall in stalls.items():
            del stall.ready[min(stall.asked, stall.there(now)) :]
            stall.ready += [now + boot] * (min(stall.asked, stall.there(now)) - len(stall.ready))
            if members.get(name, 0) > len(stall.ready):
                members, done, stalled = {}, saved, 0.0  # all start again from the checkpoint
        usable = {name: sum(at <= now for at in stall.ready) for name, stall in stalls.items()}
        pools = {name: _pool(name, stall, now) for name, stall in stalls.items()}
        running = {n: {f"{n}-{i}": at for i, at in enumerate(stall.ready)} for n, stall in stalls.items()}
        histories = learn(histories, START + now, pools.values(), running)
        offers = tuple(
            Offer(pools[n], s.zone, s.market, price=s.price, usable=usable[n], history=histories.of()[n])  # type: ignore[arg-type]
            for n, s in stalls.items()
        )
        seen = replace(job, left=job.left - done, members=members, unsaved=now - saved_at if members else 0.0)
        before = dict(place(Situation(START + now, offers, (seen,)), before))
        placed = before[job.job]
        if not outcome.reasons or outcome.reasons[-1] != placed.reason:
            outcome.reasons.append(placed.reason)
        for name, stall in stalls.items():
            needed = sum(need.machines for need in placed.needs if name in need.pools)
            stall.asked = min(stall.most, max(needed, members.get(name, 0)))
        chosen = trains_on(placed, usable, members, job.min)
        if chosen != members:
            if members and chosen:  # between two generations, the head sees none
                chosen, step = {}, 1.0
            members, stalled, saved, saved_at = chosen, job.move, done, now
            outcome.trail.append(tuple(sorted(chosen)))
        nodes = sum(members.values())
        productive = max(0.0, step - stalled)
        stalled = max(0.0, stalled - step)
        done += productive * nodes**job.scaling if nodes else 0.0
        outcome.cost += sum(len(stall.ready) * stall.price for stall in stalls.values()) * step / 3600
        now += step
        if done >= job.left:
            outcome.finished = now
            return outcome
        if now - saved_at >= job.checkpoint:
            saved, saved_at = done, now
    return outcome


def trains_on(placed: Placement, usable: Mapping[str, int], members: Mapping[str, int], least: int) -> dict[str, int]:
    """How many machines of each pool train; none if they are fewer than the job needs."""
    chosen, left = dict[str, int](), placed.max
    for name in sorted(placed.use, key=lambda name: -members.get(name, 0)):
        if (count := min(left, usable[name])) > 0:
            chosen[name], left = count, left - count
    return chosen if sum(chosen.values()) >= least else {}


def _pool(name: str, stall: Stall, now: float) -> Pool:
    short = stall.asked > stall.there(now)
    states = {f"{name}-{index}": "ready" if at <= now else "booting" for index, at in enumerate(stall.ready)}
    return Pool(name, stall.most, stall.asked, states, "short" if short else "open")
