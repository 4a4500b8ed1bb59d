"""What the head and operators ask of a cloud: one small protocol, with one package for each cloud."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

# The end of the message about a stockout, if network.placement puts the pool's machines close to each other.
NEAR = (
    "; network.placement may be the reason, because machines close to each other are scarcer: set `placement: false`"
    " in the cluster file and run `make up` between jobs"
)
Market = Literal["spot", "flex", "on-demand"]
State = Literal["provisioning", "running", "stopping", "terminated"]


@dataclass(frozen=True)
class Instance:
    """One machine as the cloud lists it."""

    name: str  # Unique in the cluster. A recreated machine has the same name, except on AWS.
    pool: str  # the name of its pool; `head` for the head's machine
    zone: str  # its zone
    address: str  # its private IP address; empty if it has none yet
    state: State  # as the cloud lists it
    market: Market  # spot, flex or on-demand
    created: float  # epoch seconds
    id: str  # unique to each incarnation
    ends: float = 0.0  # epoch seconds when the cloud ends it, if that is known, as with `max_run_duration`; 0: never
    started: float = 0.0  # epoch seconds since when it costs money, if the cloud says so; 0: it does not


@dataclass(frozen=True)
class Ended:
    """A machine that has ended, and what it is billed for."""

    machine: str  # its name
    pool: str  # the name of its pool
    created: float  # as in `Instance`
    since: float  # epoch seconds since when it cost money
    until: float  # epoch seconds until when it cost money


@dataclass(frozen=True)
class Problem:
    """Why a pool has fewer machines than its size."""

    pool: str  # the pool's name
    kind: Literal["stockout", "quota", "queue", "other"]  # what the cloud lacks. queue: the request waits for its turn
    message: str  # one line for the operator
    at: float  # epoch seconds when the problem was first seen


@dataclass(frozen=True)
class Said:
    """A number that the cloud says."""

    value: float  # the number
    at: float  # epoch seconds since when it holds: the time of a price change, otherwise of the answer
    source: str  # the cloud's call that says it


@dataclass(frozen=True)
class Advice:
    """What the cloud says about the market of a pool. None, or empty: it says nothing."""

    obtainability: Said | None = None  # 0 to 1: how likely the pool gets all its `max` machines now
    uptime: Said | None = None  # seconds that a machine of the pool is expected to run
    preemptions: Said | None = None  # 0 to 1: of such machines that ended lately, the share that the cloud took
    prices: tuple[Said, ...] = ()  # dollars an hour for a machine, oldest first


@dataclass(frozen=True)
class Shortfall:
    """A quota that is too small for `max` machines of a pool."""

    pool: str  # the pool's name
    quota: str  # what the cloud calls the quota
    has: float  # what the quota allows, in its own unit
    needs: float  # what `max` machines of the pool take
    used: float = 0.0  # what others than this cluster already use; 0 if the cloud does not say
    certain: bool = True  # whether the cloud really counts the pool's machines by this quota


@dataclass(frozen=True)
class Left:
    """Something in the account that has the cluster's label."""

    kind: str  # what the cloud calls it
    name: str  # its id or name
    hourly: float | None = 0.0  # dollars an hour; None: not known
    stays: bool = False  # whether `make down` leaves it for the next `make up`


@dataclass(frozen=True)
class Image:
    """A machine image that `make image` baked, and what is stored for it."""

    name: str  # spotrun-<date>-<time>
    id: str  # what the cloud's calls take: an AMI's id, on Google Cloud the name
    made: float  # epoch seconds
    gigabytes: float  # What is billed. On AWS, the volume's size if the size of the snapshot is unknown.
    snapshots: tuple[str, ...] = ()  # Ids of its snapshots. Google's images have none.
    users: tuple[str, ...] = ()  # names of the templates and machines that start from it


class Cloud(Protocol):
    """Pools and their machines. Every method raises `CloudError` if the cloud refuses or does not answer."""

    async def nodes(self) -> list[Instance]:
        """Every machine of the cluster, also the head's (pool `head`). Raises `PartialError` if a zone is silent."""

    async def ended(self) -> Sequence[Ended]:
        """Machines that ended within the last hour, if the cloud says when they ended. Any of them may be left out."""

    async def sizes(self) -> dict[str, int]:
        """The size that each pool should have, without the head's. Raises `PartialError` as `nodes` does."""

    async def resize(self, pool: str, size: int) -> None:
        """Set the number of machines of a pool. Returns before the pool has them.

        A lower size is only for giving up machines that do not exist yet. To end a machine, `remove` it by name.
        """

    async def remove(self, names: Sequence[str]) -> None:
        """Delete these machines, and lower the size of each pool by the number of its deleted machines."""

    async def recreate(self, names: Sequence[str]) -> None:
        """Replace these machines by new ones. The new machines have the same names, except on AWS."""

    async def preempt(self, name: str, notice: float | None = None) -> None:
        """Take a spot machine as the cloud would, `notice` seconds after the notice; None: the usual time."""

    async def prices(self) -> dict[str, float]:
        """Dollars an hour for one machine of each pool."""

    async def advice(self) -> Mapping[str, Advice]:
        """What the cloud says about the pools' markets. Pools about which it says nothing are left out.

        If a right is missing, or the cloud does not offer a call, its numbers are left out. The log says so once.
        """

    async def problems(self) -> list[Problem]:
        """Why pools are smaller than their sizes. If a pool's zone does not answer: the last known reasons."""

    async def shortfalls(self) -> list[Shortfall]:
        """Quotas that are too small for all the machines that the cluster file allows."""

    async def close(self) -> None:
        """Close connections."""
