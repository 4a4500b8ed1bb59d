"""The machines of a simulated market: pools give and take the machines that the trace says, with notice.

A pool behaves as a managed group: it goes on trying until it has as many machines as its size says. A zone gives no
machine that it would take again within the time of a notice.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random

from spotrun.head.capacity.sizes import Pool
from spotrun.simulate.traces import Changes, at


@dataclass(frozen=True)
class Fault:
    """A machine is taken. Its pool makes another one when it can."""

    at: float  # when the notice comes
    pool: str  # the pool whose oldest machine is taken
    notice: float = 0.0  # seconds; 0: the machine ends at once


@dataclass
class Machine:
    """One machine."""

    name: str
    pool: str
    created: float
    ready_at: float  # when its agent is ready
    noticed: bool = False  # whether the cloud has said that it takes the machine
    ends: float = math.inf  # when the cloud takes it
    gone: float = math.inf  # when it ended


@dataclass
class Group:
    """One pool as the market has it."""

    name: str
    most: int
    counts: Changes  # machines that its zone gives; (): as many as wanted
    prices: Changes
    delay: float = 0.0  # seconds before a lost machine is made again
    size: int = 0
    machines: dict[str, Machine] = field(default_factory=dict)
    made: int = 0
    again: float = 0.0  # no machine is made before this time
    price_now: float = 0.0


class Market:
    """All pools, what they cost, and what happens to them next."""

    def __init__(
        self,
        boot: float,
        notice: float,
        random: Random,
        faults: Iterable[Fault] = (),
        boots: Iterable[float] = (),
    ) -> None:
        """boot: seconds until a machine is ready. boots: the same for the first machines. faults: beyond the traces."""
        self.groups: dict[str, Group] = {}
        self.cost = 0.0  # USD of machines that have ended
        self.hours: dict[str, float] = {}  # machine-hours by pool, of machines that have ended
        self.now = 0.0
        self.looks = 0  # a counter that goes up when the head would see something new
        self._boot, self._notice, self._random, self._boots = boot, notice, random, iter(boots)
        self._faults = sorted(faults, key=lambda fault: -fault.at)
        self._changes: list[tuple[float, str]] = []  # when a pool changes, latest first

    def add(self, name: str, most: int, counts: Changes, prices: Changes, begin: float, delay: float = 0.0) -> None:
        """Add a pool. counts: empty if it gives as many machines as wanted. Times are seconds after `begin`."""
        shift = [(begin + time, value) for time, value in counts]
        group = Group(name, most, tuple(shift), tuple((begin + time, value) for time, value in prices), delay)
        group.price_now = group.prices[0][1] if group.prices else 0.0
        self.groups[name] = group
        times = {time - lead for time, _ in shift[1:] for lead in (0.0, self._notice) if time - lead > begin}
        times |= {time for time, _ in group.prices[1:]}
        self._changes = sorted({*self._changes, *((time, name) for time in times)}, reverse=True)

    @property
    def next(self) -> float:
        """When something happens here next."""
        booting = (machine.ready_at for machine in self.machines() if machine.ready_at > self.now)
        again = (g.again for g in self.groups.values() if g.again > self.now and len(g.machines) < g.size)
        change = self._changes[-1][0] if self._changes else math.inf
        fault = self._faults[-1].at if self._faults else math.inf
        taken = (machine.ends for machine in self.machines() if machine.noticed)
        return min(change, fault, *(min(times, default=math.inf) for times in (booting, again, taken)))

    def advance(self, now: float) -> None:
        """Let everything happen up to this time, which is at most `next`."""
        due = set()
        while self._changes and self._changes[-1][0] <= now:
            due.add(self._changes.pop()[1])
        for group in self.groups.values():
            for machine in group.machines.values():
                self.looks += self.now < machine.ready_at <= now
        self.now = now
        while self._faults and self._faults[-1].at <= now:
            fault = self._faults.pop()
            self._notify(min(self.groups[fault.pool].machines.values(), key=_age), now + fault.notice)
        for group in self.groups.values():
            self._take(group)
            if group.name in due:
                self._change(group)
            if len(group.machines) < group.size:
                self._fill(group)

    def resize(self, sizes: Mapping[str, int], remove: Iterable[str]) -> None:
        """Delete these machines, and set these sizes."""
        for name in remove:
            group = next(g for g in self.groups.values() if name in g.machines)
            self._end(group, group.machines[name])
            group.size -= 1
        for pool, size in sizes.items():
            group = self.groups[pool]
            group.size = size
            for machine in sorted(group.machines.values(), key=_age)[size:]:
                self._end(group, machine)
            self._fill(group)
        self.looks += 1

    def pools(self) -> tuple[Pool, ...]:
        """The pools, as from the head's `Fleet.pools`."""
        return tuple(
            Pool(
                group.name, group.most, group.size, dict.fromkeys(group.machines, "ready"),
                "short" if len(group.machines) < group.size else "open",
            )
            for group in self.groups.values()
        )  # fmt: skip

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each pool."""
        return {group.name: group.size for group in self.groups.values()}

    @property
    def prices(self) -> dict[str, float]:
        """USD an hour, by pool."""
        return {group.name: group.price_now for group in self.groups.values()}

    def machines(self) -> Iterable[Machine]:
        """Those that exist."""
        for group in self.groups.values():
            yield from group.machines.values()

    def close(self) -> None:
        """End everything, so that `cost` and `hours` are complete."""
        for group in self.groups.values():
            for machine in list(group.machines.values()):
                self._end(group, machine)

    def _change(self, group: Group) -> None:
        """Apply a change of the zone: it gives more or fewer machines, or has another price."""
        if group.prices:
            price = at(group.prices, self.now)
            self.looks += price != group.price_now
            group.price_now = price
        if not group.counts:
            return
        staying = [machine for machine in group.machines.values() if not machine.noticed]
        time, count = self._least(group)
        for machine in self._random.sample(staying, max(0, len(staying) - count)):
            self._notify(machine, time)
        self._take(group)

    def _notify(self, machine: Machine, ends: float) -> None:
        machine.noticed, machine.ends = ends > self.now, ends
        self.looks += 1

    def _take(self, group: Group) -> None:
        """End the machines whose time is over."""
        for machine in [each for each in group.machines.values() if each.ends <= self.now]:
            self._end(group, machine)
            group.again = max(group.again, self.now + group.delay)
            self.looks += 1

    def _least(self, group: Group) -> tuple[float, int]:
        """The fewest machines that the zone gives within the notice, and from when on."""
        counts = group.counts
        index = max(0, bisect_right(counts, (self.now, math.inf)) - 1)
        least = (self.now, int(counts[index][1]))
        for time, count in counts[index + 1 :]:
            if time > self.now + self._notice:
                break
            if count < least[1]:
                least = (time, int(count))
        return least

    def _fill(self, group: Group) -> None:
        if group.again > self.now:
            return
        most = self._least(group)[1] if group.counts else group.most
        staying = sum(not machine.noticed for machine in group.machines.values())
        while len(group.machines) < group.size and staying < most:
            name = f"{group.name}-{group.made}"
            group.made, staying = group.made + 1, staying + 1
            group.machines[name] = Machine(name, group.name, self.now, self.now + next(self._boots, self._boot))
            self.looks += 1

    def _end(self, group: Group, machine: Machine) -> None:
        del group.machines[machine.name]
        machine.gone = self.now
        span = self.now - machine.created
        self.hours[group.name] = self.hours.get(group.name, 0.0) + span / 3600
        self.cost += bill(group.prices, machine.created, self.now)


def _age(machine: Machine) -> tuple[bool, float, str]:
    return machine.noticed, machine.created, machine.name


def bill(prices: Changes, begin: float, end: float) -> float:
    """USD for one machine from `begin` to `end`. prices: USD an hour."""
    if not prices:
        return 0.0
    index = max(0, bisect_right(prices, (begin, math.inf)) - 1)
    total, time = 0.0, begin
    while time < end:
        until = min(end, prices[index + 1][0] if index + 1 < len(prices) else math.inf)
        total += (until - time) * prices[index][1]
        time, index = until, index + 1
    return total / 3600
