"""What a managed instance group decides, as pure functions: a view in, the plan out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from spotrun.cloud.base import State
from spotrun.cloud.local.layout import Pool
from spotrun.spec.names import HEAD


@dataclass(frozen=True)
class Member:
    """A machine that is there, or was.

    due: epoch seconds. Of a stopping one: when it is taken (infinity: that is under way). Of a terminated one: when
    it may be created again. ends: epoch seconds when its pool's `max_run_duration` ends it.
    """

    pool: str
    index: int
    state: State
    due: float = math.inf
    ends: float = math.inf


@dataclass(frozen=True)
class View:
    """All that counts. wanted: the indexes of each pool's machines. dry: zones that give no machine at present."""

    now: float
    pools: Mapping[str, Pool]
    wanted: Mapping[str, frozenset[int]]
    machines: Mapping[str, Member]
    capacity: Mapping[str, int] = field(default_factory=dict)
    dry: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Plan:
    """What to do now. short: how many machines of each pool its zone does not give. wake: when to look again."""

    create: tuple[tuple[str, int], ...] = ()
    destroy: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()
    short: Mapping[str, int] = field(default_factory=dict)
    wake: float = math.inf


def machine_name(pool: str, index: int) -> str:
    return f"{pool}-{index}"


def plan(view: View) -> Plan:
    """Create what is wanted and missing as far as the zones give it; destroy what is not wanted or whose time is up."""
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
    """The indexes after a resize: the lowest free ones come, the highest ones go."""
    if size <= len(wanted):
        return frozenset(sorted(wanted)[:size])
    free = (index for index in range(len(wanted) + size) if index not in wanted)
    return wanted | {next(free) for _ in range(size - len(wanted))}


def _has_room(view: View, zone: str, used: int) -> bool:
    return zone not in view.dry and used < view.capacity.get(zone, math.inf)
