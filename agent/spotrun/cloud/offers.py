"""What a cluster file needs from each zone, and what a zone does not offer. Pure. It does not ask the clouds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from spotrun.spec import ClusterSpec
from spotrun.spec.names import HEAD

Kind = Literal["machine", "accelerator"]


@dataclass(frozen=True)
class Need:
    """What a pool, or the head, needs of its zone."""

    pool: str  # who needs it: `head`, or `pool` and the pool's name
    zone: str  # the zone of the pool
    kind: Kind  # whether `type` is a machine type or an accelerator type
    type: str  # the type's name in the cloud


@dataclass(frozen=True)
class Lack:
    """A need that the zone does not meet."""

    need: Need  # what is not offered
    elsewhere: tuple[str, ...]  # the zones of the region that offer it, in order

    def text(self) -> str:
        """The lack in one line, with what to do about it."""
        need = self.need
        found = ", ".join(self.elsewhere)
        instead = (
            f"zones of the region that do: {found}" if found else "no zone of the region does; take another region"
        )
        return f"{need.pool}: zone {need.zone} does not offer {need.kind} type {need.type}; {instead}"


def needs(cluster: ClusterSpec) -> tuple[Need, ...]:
    """What the head and the pools need, the head first."""
    found = [Need(HEAD, cluster.head.zone, "machine", cluster.head.machine)]
    for pool in cluster.pools:
        name = f"pool {pool.name}"
        found.append(Need(name, pool.zone, "machine", pool.machine))
        if pool.accelerator is not None:
            found.append(Need(name, pool.zone, "accelerator", pool.accelerator.type))
    return tuple(found)


def lacks(asked: Iterable[Need], offered: Mapping[tuple[Kind, str], Iterable[str]]) -> list[Lack]:
    """The needs that are not met. offered: for each kind and type, the zones of the region that have it."""
    zones = {key: tuple(sorted(found)) for key, found in offered.items()}
    return [
        Lack(need, zones.get((need.kind, need.type), ()))
        for need in asked
        if need.zone not in zones.get((need.kind, need.type), ())
    ]
