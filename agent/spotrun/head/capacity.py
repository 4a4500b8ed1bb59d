"""How many machines each pool should have now: `decide(observation)` is pure, and its tests are data.

Pools are used in the order of the cluster file. A pool whose zone has no machines keeps being asked (a managed
group goes on trying, at no cost) while the next pools stand in for what it lacks. What is too much afterwards is
removed node by node, never a member of the running generation.
"""

from __future__ import annotations

from dataclasses import dataclass

EXTRA = 3  # machines in the place of unusable ones that stay, in a pool: they are paid for as well


@dataclass(frozen=True)
class Pool:
    """One pool as it is.

    short: something keeps it from the machines that it was asked for. unusable, coming, unproven: of `running`, those
    that no job can count on, those of them in whose place others are on their way, and those that have not shown yet
    whether they are fit. closed: it is to have no machines, as none would serve. leaving: machines under notice: their
    successors are asked for now, of the same pool and as far as it has room. A full one gets them from its group a
    little later, and nobody stands in meanwhile: whoever does becomes a member, and stays, at another pool's price.
    away: its zone does not answer. Nothing is asked of it; `running` is only what is known to be there all the same.
    """

    name: str
    max: int
    size: int
    running: tuple[str, ...] = ()
    short: bool = False
    unusable: frozenset[str] = frozenset()
    closed: bool = False
    leaving: int = 0
    coming: frozenset[str] = frozenset()
    unproven: frozenset[str] = frozenset()
    away: bool = False

    @property
    def not_replacing(self) -> frozenset[str]:
        """Those in whose place nobody comes."""
        return self.unusable - self.coming

    @property
    def serving(self) -> int:
        """Machines to count on: also those that others take the place of soon, unless some are given up."""
        return self.fit if self.not_replacing else len(self.running)

    @property
    def fit(self) -> int:
        """Those of use now. Where some are given up, that is only those that have shown that they are fit."""
        doubtful = self.unusable | self.unproven if self.not_replacing else self.unusable
        return sum(name not in doubtful for name in self.running)


@dataclass(frozen=True)
class Observation:
    """needed: machines the job wants. keep: nodes that must not be taken away (members)."""

    pools: tuple[Pool, ...]
    needed: int
    keep: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Decision:
    """sizes: pools to resize. remove: nodes to delete, each lowering its pool's size by one."""

    sizes: dict[str, int]
    remove: tuple[str, ...] = ()


def decide(seen: Observation) -> Decision:
    """Sizes for the pools, changed ones only."""
    if seen.needed == 0:
        return Decision({pool.name: 0 for pool in seen.pools if pool.size and not pool.away})
    sizes = _sizes(seen)
    # A pool may say at one look that it is short and not at the next: what is there goes only once it is too much.
    excess = max(0, sum(pool.serving for pool in seen.pools) - seen.needed)
    # Others in the place of unusable ones are not there yet, and may be no good either: no healthy one goes for them.
    healthy = max(0, sum(pool.fit for pool in seen.pools) - seen.needed)
    remove: list[str] = []
    for pool in seen.pools:
        # Shrinking by size would let the cloud choose whom to end; name the nodes instead.
        surplus = pool.size - sizes[pool.name]
        if surplus <= 0:
            continue
        pending = max(0, pool.size - len(pool.running))
        idle = [name for name in reversed(pool.running) if name not in seen.keep]
        bad = [name for name in idle if name in pool.not_replacing][: max(0, surplus - pending)]
        coming = [name for name in idle if name in pool.coming][: max(0, min(surplus - pending - len(bad), excess))]
        excess -= len(coming)
        good = [name for name in idle if name not in pool.unusable]
        good = good[: max(0, min(surplus - pending - len(bad) - len(coming), excess, healthy))]
        excess, healthy = excess - len(good), healthy - len(good)
        taken = bad + coming + good
        remove += taken
        # remove() lowers the size itself; what was never born is taken back by size.
        sizes[pool.name] = pool.size - min(surplus, pending) if not taken else pool.size
    changed = {pool.name: sizes[pool.name] for pool in seen.pools if sizes[pool.name] != pool.size}
    return Decision(changed, tuple(remove))


def _sizes(seen: Observation) -> dict[str, int]:
    """What each pool should have, before it is known who would have to go."""
    sizes: dict[str, int] = {}
    kept = {pool.name: len(seen.keep.intersection(pool.running)) for pool in seen.pools}
    missing = seen.needed - sum(kept.values())  # those stay, wherever they are
    for pool in seen.pools:
        if pool.away:
            sizes[pool.name] = pool.size
            missing -= pool.serving - kept[pool.name]
            continue
        most = kept[pool.name] if pool.closed else max(pool.max, kept[pool.name])
        want = min(most, kept[pool.name] + max(missing, 0))
        sizes[pool.name] = want + max(0, min(pool.leaving, most - want))
        # Such a pool counts only for what it has: the rest is asked of the next ones too.
        lacking = pool.short or pool.not_replacing
        missing -= (min(want, pool.serving) if lacking else want) - kept[pool.name]
    for pool in seen.pools:
        # No pool stands in: a machine more in the place of each unusable one, which goes when that one serves.
        if missing > 0 and pool.not_replacing and not pool.closed and not pool.away:
            extra = min(len(pool.not_replacing), EXTRA, max(0, pool.max - sizes[pool.name]))
            sizes[pool.name] += extra
            missing -= extra
    return sizes
