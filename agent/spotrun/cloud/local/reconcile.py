"""The decisions of a managed instance group. Pure: from a view to a plan."""

from __future__ import annotations

import math
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
    """Epoch seconds when a stopping machine is taken (infinity: it goes now), or a terminated one may return."""
    ends: float = math.inf  # epoch seconds when its pool's `max_run_duration` ends it


@dataclass(frozen=True)
class View:
    """Everything that `plan` needs."""

    now: float  # epoch seconds
    pools: Mapping[str, Pool]  # by name, with the head's
    wanted: Mapping[str, frozenset[int]]  # the numbers of each pool's machines
    machines: Mapping[str, Member]  # by name
    capacity: Mapping[str, int] = field(default_factory=dict)  # the most machines by zone
    dry: frozenset[str] = frozenset()  # zones that give no machine now


@dataclass(frozen=True)
class Plan:
    """What to do now."""

    create: tuple[tuple[str, int], ...] = ()  # pool and number of each machine to create
    destroy: tuple[str, ...] = ()  # machines to end
    forget: tuple[str, ...] = ()  # ended machines that are no longer wanted
    short: Mapping[str, int] = field(default_factory=dict)  # by pool: how many machines its zone does not give
    wake: float = math.inf  # epoch seconds of the next look


def machine_name(pool: str, index: int) -> str:
    return f"{pool}-{index}"


def plan(view: View) -> Plan:
    """Create missing machines that the zones can give; destroy machines that are not wanted or whose time is over."""
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
    used: dict[str, int] = {}
    for machine in view.machines.values():
        if machine.state != "terminated" and machine.pool != HEAD and machine.pool in view.pools:
            zone = view.pools[machine.pool].zone
            used[zone] = used.get(zone, 0) + 1
    create: list[tuple[str, int]] = []
    short: dict[str, int] = {}
    for name, pool in view.pools.items():
        for index in sorted(view.wanted.get(name, frozenset())):
            there = view.machines.get(machine_name(name, index))
            if there is not None and there.state != "terminated":
                continue
            if there is not None and there.due > view.now:
                dues.append(there.due)
            elif name == HEAD or _has_room(view, pool.zone, used.get(pool.zone, 0)):
                create.append((name, index))
                used[pool.zone] = used.get(pool.zone, 0) + (name != HEAD)
            else:
                short[name] = short.get(name, 0) + 1
    return Plan(tuple(create), tuple(destroy), tuple(forget), short, min(dues, default=math.inf))


def resized(wanted: frozenset[int], size: int) -> frozenset[int]:
    """The numbers after a resize: the lowest free ones are added, the highest ones removed."""
    if size <= len(wanted):
        return frozenset(sorted(wanted)[:size])
    free = (index for index in range(len(wanted) + size) if index not in wanted)
    return wanted | {next(free) for _ in range(size - len(wanted))}


def _has_room(view: View, zone: str, used: int) -> bool:
    return zone not in view.dry and used < view.capacity.get(zone, math.inf)
