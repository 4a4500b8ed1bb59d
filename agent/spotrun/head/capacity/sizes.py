"""How many machines each pool should have now: `decide(observation)` is pure, and its tests are data.

Pools are used in the order of a need, or else of the cluster file. A pool whose zone has no machines is still asked (a
managed group goes on trying, at no cost), while the next pools stand in for what it lacks. Afterwards the machines that
are too many are removed one by one, but never a member of the running generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

EXTRA = 3  # the most machines that a pool gets in addition to its abandoned ones: those cost money too


@dataclass(frozen=True)
class Pool:
    """One pool as it is."""

    name: str
    max: int
    size: int  # what the cloud was asked for last
    states: Mapping[str, str] = field(default_factory=dict)  # of its machines by name, as in `fleet.classify`
    supply: Literal["open", "short", "away", "closed"] = "open"
    """short: the pool cannot get its size. closed: it should have no machines, because none would become fit.
    away: its zone does not answer; nothing is asked of it, and `states` has only the machines known to be there."""
    leaving: frozenset[str] = frozenset()
    """Machines under notice. Their successors are asked for now, as far as the pool has room. No other pool stands in,
    because its machine would become a member and stay."""
    ending: frozenset[str] = frozenset()
    """Machines that the cloud ends, which may take many minutes. It may have successors for them already."""

    @property
    def abandoned(self) -> frozenset[str]:
        """Machines that no job can use and that nothing replaces."""
        return self.having("abandoned")

    @property
    def serving(self) -> int:
        """Machines to count on. Those being replaced count too, unless some are abandoned.

        Those that the cloud ends count as their successors, unless the pool is short: none may come.
        """
        doubtful = self._doubtful if self.abandoned else frozenset[str]()
        return len(self.states.keys() - doubtful - (self.ending if self.supply == "short" else frozenset()))

    @property
    def fit(self) -> int:
        """Machines to count on now. If some are abandoned, only those that have shown that they are fit."""
        return len(self.states) - len(self._doubtful)

    @property
    def sound(self) -> int:
        """Those of the fit machines that the cloud does not end."""
        return len(self.states.keys() - self._doubtful - self.ending)

    @property
    def _doubtful(self) -> frozenset[str]:
        waits = ("booting", "checking", "unfit") if self.abandoned else ()
        return self.having("replacing", "abandoned", *waits)

    def having(self, *states: str) -> frozenset[str]:
        """The machines in one of these states."""
        return frozenset[str]().union(*(self._by_state.get(state, ()) for state in states))

    @cached_property
    def _by_state(self) -> Mapping[str, frozenset[str]]:
        found: dict[str, list[str]] = {}
        for name, state in self.states.items():
            found.setdefault(state, []).append(name)
        return {state: frozenset(names) for state, names in found.items()}


@dataclass(frozen=True)
class Need:
    """Machines that jobs want."""

    machines: int
    pools: frozenset[str] = frozenset()  # any machine of these pools will do; empty: of all pools
    has: frozenset[str] = frozenset()  # machines that these jobs have; those in other pools do not count
    order: tuple[str, ...] = ()  # these pools, the best one first; empty: in the order of the cluster file


@dataclass(frozen=True)
class Observation:
    """What `decide` sees."""

    pools: tuple[Pool, ...]
    needs: tuple[Need, ...]
    keep: frozenset[str] = frozenset()  # machines that must not be removed, such as members

    @property
    def needed(self) -> int:
        """The machines that all jobs want."""
        return sum(need.machines for need in self.needs)


@dataclass(frozen=True)
class Decision:
    """What should change in the pools."""

    sizes: dict[str, int]  # pools to resize
    remove: tuple[str, ...] = ()  # machines to delete; each lowers its pool's size by one


def decide(seen: Observation) -> Decision:
    """The sizes that should change, and the machines to remove."""
    if seen.needed == 0 and not seen.keep:
        return Decision({pool.name: 0 for pool in seen.pools if pool.size and pool.supply != "away"})
    sizes = _sizes(seen)
    # If no job wants a pool, its idle machines are removed, even if other pools lack machines.
    excess = {pool.name: [len(pool.states), len(pool.states)] for pool in seen.pools} | _excess(seen)
    remove: list[str] = []
    for pool in seen.pools:
        # With a smaller size alone, the cloud would choose the machines that end. So name them.
        surplus = pool.size - sizes[pool.name]
        if surplus <= 0:
            continue
        pending = max(0, pool.size - len(pool.states))
        spare, sound = excess[pool.name]
        idle = [name for name in sorted(pool.states, reverse=True) if name not in seen.keep]
        # Machines that end go first. To remove one whose successor is there changes no size.
        replaced = max(0, len(pool.states) - pool.size)
        ending = [name for name in idle if name in pool.ending][: max(0, surplus - pending) + replaced]
        lowered = max(0, len(ending) - replaced)
        left = surplus - pending - lowered
        spare -= 0 if pool.supply == "short" else lowered  # there, those that end do not count as spare: see `serving`
        idle = [name for name in idle if name not in pool.ending]
        abandoned = [name for name in idle if pool.states[name] == "abandoned"][: max(0, left)]
        left -= len(abandoned)
        replacing = [name for name in idle if pool.states[name] == "replacing"][: max(0, min(left, spare))]
        left, spare = left - len(replacing), spare - len(replacing)
        good = [name for name in idle if pool.states[name] not in ("replacing", "abandoned")]
        good = good[: max(0, min(left, spare, sound))]
        excess[pool.name][:] = spare - len(good), sound - len(good)
        taken = ending + abandoned + replacing + good
        remove += taken
        # `Cloud.remove` lowers the size itself. A smaller size cancels machines that do not exist yet.
        sizes[pool.name] = pool.size - min(surplus, pending) if not taken else pool.size
    changed = {pool.name: sizes[pool.name] for pool in seen.pools if sizes[pool.name] != pool.size}
    return Decision(changed, tuple(remove))


def _excess(seen: Observation) -> dict[str, list[int]]:
    """How many machines, and how many healthy ones, are too many. Pools that stand in for each other share a list.

    A pool may be short at one look and not at the next. So machines are removed only once such pools together have too
    many. Successors are not there yet, and may be unfit too. So no healthy machine is removed because of them.
    """
    groups: list[tuple[frozenset[str], int]] = []
    for need in seen.needs:
        names, needed = need.pools or frozenset(pool.name for pool in seen.pools), need.machines
        for group in [each for each in groups if each[0] & names]:
            groups.remove(group)
            names, needed = names | group[0], needed + group[1]
        groups.append((names, needed))
    found: dict[str, list[int]] = {}
    for names, needed in groups:
        pools = [pool for pool in seen.pools if pool.name in names]
        counts = (sum(pool.serving for pool in pools), sum(pool.sound for pool in pools))
        shared = [max(0, count - needed) for count in counts]
        found |= {pool.name: shared for pool in pools}
    return found


def _sizes(seen: Observation) -> dict[str, int]:
    """What each pool should have, before it is known which machines would go."""
    # A machine under notice stays for now, but does not count. Its successor counts.
    keep = seen.keep - frozenset[str]().union(*(pool.leaving for pool in seen.pools))
    kept = {pool.name: len(keep & pool.states.keys()) for pool in seen.pools}
    wants = dict(kept)  # these stay in any case
    serves = dict(kept)  # how many of the wanted machines each pool can be counted on for
    had = frozenset[str]().union(*(need.has for need in seen.needs))
    # Machines that are kept, and belong to no job.
    free = {pool.name: len((keep - had) & pool.states.keys()) for pool in seen.pools}
    left = []
    for need in sorted(seen.needs, key=lambda need: len(need.pools) or len(seen.pools)):
        allowed = [pool for pool in seen.pools if not need.pools or pool.name in need.pools]
        if need.order:
            allowed.sort(key=lambda pool: need.order.index(pool.name))
        there = frozenset[str]().union(*(pool.states for pool in allowed))
        missing = need.machines - len(need.has & keep & there)
        for pool in allowed:
            own = max(0, min(missing, free[pool.name]))
            free[pool.name], missing = free[pool.name] - own, missing - own
        for pool in allowed:
            missing -= _take(pool, missing, wants, serves, kept[pool.name])
        left.append((missing, allowed))
    sizes = {pool.name: _size(pool, wants[pool.name], kept[pool.name]) for pool in seen.pools}
    for missing, allowed in left:
        for pool in allowed:
            # If no pool stands in: one machine more for each abandoned one, which is removed when the new one serves.
            if missing > 0 and pool.abandoned and pool.supply in ("open", "short"):
                extra = min(len(pool.abandoned), EXTRA, max(0, pool.max - sizes[pool.name]))
                sizes[pool.name] += extra
                missing -= extra
    return sizes


def _take(pool: Pool, missing: int, wants: dict[str, int], serves: dict[str, int], kept: int) -> int:
    """Plan up to `missing` more machines in a pool. Returns how many of them can be counted on."""
    before = serves[pool.name]
    if pool.supply == "away":
        serves[pool.name] = max(before, min(pool.serving, before + max(missing, 0)))
        return serves[pool.name] - before
    most = kept if pool.supply == "closed" else max(pool.max, kept)
    wants[pool.name] = min(most, wants[pool.name] + max(missing, 0))
    # A pool that lacks machines counts only for what it has: the rest is asked of the next pools too.
    lacking = pool.supply != "open" or pool.abandoned
    serves[pool.name] = max(before, min(wants[pool.name], pool.serving) if lacking else wants[pool.name])
    return serves[pool.name] - before


def _size(pool: Pool, want: int, kept: int) -> int:
    if pool.supply == "away":
        return pool.size
    most = kept if pool.supply == "closed" else max(pool.max, kept)
    return want + max(0, min(len(pool.leaving), most - want))
