"""What the head and the operator ask of a cloud: one small protocol, one module a cloud behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

# Ends the message of a stockout in a pool whose machines are close to each other by network.placement.
NEAR = (
    "; network.placement may be the reason, since machines close to each other are scarcer: set `placement: false`"
    " in the cluster file and run `make up` between jobs"
)
Market = Literal["spot", "on-demand"]
State = Literal["provisioning", "running", "stopping", "terminated"]


@dataclass(frozen=True)
class Instance:
    """One machine as the cloud lists it.

    name: stable within its pool; a machine that was recreated has it again. id: unique to each incarnation.
    created: epoch seconds. ends: when the cloud will end it by itself, as it was told to; 0: never.
    """

    name: str
    pool: str
    zone: str
    address: str
    state: State
    market: Market
    created: float
    id: str
    ends: float = 0.0


@dataclass(frozen=True)
class Problem:
    """Why a pool has fewer machines than its size. `at`: epoch seconds when it was first seen."""

    pool: str
    kind: Literal["stockout", "quota", "other"]
    message: str
    at: float


@dataclass(frozen=True)
class Shortfall:
    """A quota that does not let a pool have all the machines that its cluster file allows.

    quota: what the cloud calls it. has: what it allows, in its own unit. needs: what `max` machines of the pool take.
    used: what others than this cluster have of it already; 0 where the cloud does not say.
    """

    pool: str
    quota: str
    has: float
    needs: float
    used: float = 0.0


@dataclass(frozen=True)
class Left:
    """Something in the account that carries the cluster's label.

    kind: what the cloud calls it. name: its id or name. hourly: dollars for an hour; None: not known. stays: whether
    `down` leaves it for the next `up`.
    """

    kind: str
    name: str
    hourly: float | None = 0.0
    stays: bool = False


class Cloud(Protocol):
    """Pools and their nodes. Every method raises `CloudError` when the cloud refuses or does not answer."""

    async def nodes(self) -> list[Instance]:
        """Every machine of the cluster, the head's (pool `head`) too. Raises `PartialError` if some zones are out."""

    async def sizes(self) -> dict[str, int]:
        """The size that each pool was told to have; without the head's. Raises `PartialError` as `nodes` does."""

    async def resize(self, pool: str, size: int) -> None:
        """Set the number of machines of a pool. Returns before the pool has them.

        A lower size is for machines that never came. To take a machine away, use `remove`, which names it.
        """

    async def remove(self, names: Sequence[str]) -> None:
        """Delete these machines, and lower the size of each one's pool accordingly."""

    async def recreate(self, names: Sequence[str]) -> None:
        """Replace these machines by new ones; of the same names where the cloud gives names (not on EC2)."""

    async def preempt(self, name: str, notice: float | None = None) -> None:
        """Take a spot machine as the cloud would, `notice` seconds after saying so; None: as long as is usual."""

    async def prices(self) -> dict[str, float]:
        """Dollars for an hour of one machine of each pool."""

    async def problems(self) -> list[Problem]:
        """What keeps pools from their sizes at this moment; the last known where one pool's zone does not answer."""

    async def shortfalls(self) -> list[Shortfall]:
        """Quotas that do not let the pools have all the machines that the cluster file allows."""

    async def close(self) -> None:
        """Let go of connections."""
