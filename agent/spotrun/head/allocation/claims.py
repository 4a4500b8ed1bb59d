"""What `allocate` is asked and what it answers: claims of jobs, hosts, and whose each device is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spotrun.text import count


@dataclass(frozen=True)
class Claim:
    """What one job that has not ended asks for."""

    job: str
    """Id of the job."""
    order: tuple[Any, ...] = ()
    """Sorts the claims of one priority, such as (submitted, id). Smaller ones are served first."""
    priority: int = 0
    """Higher ones are served first."""
    min: int = 1
    """The fewest nodes on which the job trains."""
    max: int = 1
    """The most nodes on which the job trains."""
    spares: int = 0
    """Nodes beyond `max` that stand by. They are served last of all, and any job may take them."""
    devices: int = 0
    """Devices of each node. 0: the whole machine, which no other job shares."""
    pools: frozenset[str] = frozenset()
    """Pools whose machines the job may use. Empty: any."""
    prefers: tuple[str, ...] = ()
    """The best pools first, such as the cheapest ones. Other pools come after them."""
    holds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The devices that the job has now, as indexes by node: those of the last allocation that still have its workers
    or its state. A node that is not among the hosts is gone."""
    standby: frozenset[str] = frozenset()
    """Nodes of `holds` on which the job does not train. They are taken first."""
    keeps: frozenset[str] = frozenset()
    """Other nodes that the job prefers: its snapshot or its code is there, or the next generation names them."""
    avoids: frozenset[str] = frozenset()
    """Nodes on which the job cannot be set up."""
    paused: bool = False
    """The job asks for nothing."""

    @property
    def most(self) -> int:
        """The most nodes to train on: `max`, or `min` if that is more."""
        return max(self.min, self.max)

    def may_use(self, host: Host) -> bool:
        """Whether this host could be one of the job's nodes if no other job had it."""
        allowed = (not self.pools or host.pool in self.pools) and host.name not in self.avoids
        return allowed and 0 < max(self.devices, 1) <= host.devices


@dataclass(frozen=True)
class Host:
    """A machine that jobs can be given."""

    name: str
    """Name of the node."""
    pool: str
    """Name of its pool."""
    devices: int = 1
    """How many it has. Their indexes are 0 to devices - 1."""
    there: bool = True
    """Whether the cloud has made it. A machine that was only asked for is given last."""


@dataclass(frozen=True)
class Allocation:
    """Whose each device is."""

    nodes: Mapping[str, Mapping[str, tuple[int, ...]]]
    """Device indexes by job and node. A job that shares its machines with no other job has all their devices. A job
    with fewer nodes than its `min` has none, and is not listed."""
    kept: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    """What a job without nodes still holds, because its state is there. No later job and no job of lower priority gets
    these devices. The caller leaves them out of `holds` when the state is in the bucket, or given up."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why a job has nothing, or fewer nodes than its `max`."""


def wanted(claim: Claim) -> str:
    """What a job needs to train: `4 nodes with 8 devices`."""
    return count(claim.min, "node") + (f" with {count(claim.devices, 'device')}" if claim.devices else "")


def pools(names: Iterable[str]) -> str:
    """`pool a`, `pools a and b`, `pools a, b and c`."""
    *most, last = sorted(names)
    return f"pools {', '.join(most)} and {last}" if most else f"pool {last}"
