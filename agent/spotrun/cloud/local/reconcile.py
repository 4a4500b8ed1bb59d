"""The decisions of a managed instance group. Pure: from a view to a plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from spotrun.cloud.base import State
from spotrun.cloud.local.layout import Pool
from spotrun.spec.names import HEAD


@dataclass(frozen=True)
class Member:
    """A machine that exists, or existed."""

    pool: str  # its pool's name
    index: int  # its number in the pool
    state: State  # as the cloud lists it
    due: float = math.inf
    """Epoch seconds. Of a stopping machine: when it is taken; infinity: it is being taken now. Of a terminated machine:
    when it may return."""
    ends: float = math.inf  # epoch seconds when its pool's `max_run_duration` ends it


@dataclass(frozen=True)
class View:
    """Everything that `plan` needs."""

    now: float  # epoch seconds
    pools: Mapping[str, Pool]  # by name, with the head's
    wanted: Mapping[str, frozenset[int]]  # the numbers of each pool's machines
    machines: Mapping[str, Member]  # by name
    capacity: Mapping[str, int] = field(default_factory=dict)  # the most machines by zone or pool
    dry: frozenset[str] = frozenset()  # zones and pools that give no machine now
    queued: Mapping[str, float] = field(default_factory=dict)  # as the last plan had it
    queue_delay: float = 0.0  # seconds that a new request of a flex pool waits for its turn


@dataclass(frozen=True)
class Plan:
    """What to do now."""

    wanted: Mapping[str, frozenset[int]]  # as in `View`, from now on: without the machines whose time is over
    create: tuple[tuple[str, int], ...] = ()  # pool and number of each machine to create
    destroy: tuple[str, ...] = ()  # machines to end
    take: tuple[str, ...] = ()  # machines to preempt: there are more than the zone or pool may have
    forget: tuple[str, ...] = ()  # ended machines that are no longer wanted
    short: Mapping[str, int] = field(default_factory=dict)  # by pool: how many machines its zone does not give
    queued: Mapping[str, float] = field(default_factory=dict)  # by flex pool: when it is the turn of its request
    wake: float = math.inf  # epoch seconds of the next look


def machine_name(pool: str, index: int) -> str:
    return f"{pool}-{index}"


def plan(view: View) -> Plan:
    """Create missing machines that the zones can give; destroy machines that are not wanted or whose time is over.

    As Google does, a pool makes no successor for a machine whose time is over:
    https://cloud.google.com/compute/docs/release-notes, 29 April 2024.
    """
    destroy, forget, dues = [], [], []
    for name, machine in view.machines.items():
        wanted = machine.index in view.wanted.get(machine.pool, frozenset())
        if machine.state == "terminated":
            if not wanted:
                forget.append(name)
        elif machine.state == "stopping" and machine.due == math.inf:
            continue
        elif not wanted or (machine.state == "stopping" and machine.due <= view.now) or machine.ends <= view.now:
            destroy.append(name)
        else:
            dues.append(min(machine.ends, machine.due if machine.state == "stopping" else math.inf))
    used = Counter(place for each in view.machines.values() for place in _places(view, each))
    create: list[tuple[str, int]] = []
    short: dict[str, int] = {}
    queued: dict[str, float] = {}
    for name, pool in view.pools.items():
        missing, later = _missing(view, name)
        dues += later
        if pool.market == "flex" and missing:  # it gets all of them or none
            queued[name] = view.queued.get(name, view.now + view.queue_delay)
            turn = queued[name] <= view.now
            given = len(missing) if turn and _room(view, pool, used) >= len(missing) else 0
            dues += [] if turn else [queued[name]]
        else:
            given = min(len(missing), _room(view, pool, used))
        create += [(name, index) for index in missing[:given]]
        if name != HEAD:
            used.update(dict.fromkeys((pool.zone, name), given))
        if given < len(missing):
            short[name] = len(missing) - given
        elif name in queued:
            del queued[name]
    take = _surplus(view, frozenset(destroy))
    over = {(each.pool, each.index) for each in map(view.machines.__getitem__, destroy) if each.ends <= view.now}
    wants = {name: frozenset(i for i in numbers if (name, i) not in over) for name, numbers in view.wanted.items()}
    return Plan(wants, tuple(create), tuple(destroy), take, tuple(forget), short, queued, min(dues, default=math.inf))


def resized(wanted: frozenset[int], size: int) -> frozenset[int]:
    """The numbers after a resize: the lowest free ones are added, the highest ones removed."""
    if size <= len(wanted):
        return frozenset(sorted(wanted)[:size])
    free = (index for index in range(len(wanted) + size) if index not in wanted)
    return wanted | {next(free) for _ in range(size - len(wanted))}


def _missing(view: View, pool: str) -> tuple[list[int], list[float]]:
    """The numbers of a pool's machines that could be created now, and when others may be created (epoch seconds)."""
    missing, later = [], []
    for index in sorted(view.wanted.get(pool, frozenset())):
        there = view.machines.get(machine_name(pool, index))
        if there is None or (there.state == "terminated" and there.due <= view.now):
            missing.append(index)
        elif there.state == "terminated":
            later.append(there.due)
    return missing, later


def _places(view: View, machine: Member) -> tuple[str, ...]:
    """The zone and the pool in which a machine takes room."""
    if machine.state == "terminated" or machine.pool == HEAD or machine.pool not in view.pools:
        return ()
    return view.pools[machine.pool].zone, machine.pool


def _room(view: View, pool: Pool, used: Mapping[str, int]) -> int:
    """How many more machines a pool can get."""
    if pool.name == HEAD:
        return 1
    if view.dry & {pool.zone, pool.name}:
        return 0
    free = [view.capacity[place] - used[place] for place in (pool.zone, pool.name) if place in view.capacity]
    return max(0, min([*free, pool.max]))


def _surplus(view: View, ending: frozenset[str]) -> tuple[str, ...]:
    """The spot machines that the cloud takes, those with the highest numbers first. ending: machines that go anyway."""
    taken: list[str] = []
    for place, most in view.capacity.items():
        there = {name for name, each in view.machines.items() if place in _places(view, each)}
        staying = [n for n in there - ending if view.machines[n].state != "stopping" and n not in taken]
        spot = [name for name in staying if view.pools[view.machines[name].pool].market == "spot"]
        spot.sort(key=lambda name: (-view.machines[name].index, name))
        taken += spot[: max(0, len(staying) - most)]
    return tuple(taken)
