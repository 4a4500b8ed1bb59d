"""One machine of the local cloud, as the daemon knows it."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from spotrun.cloud.base import Instance, State
from spotrun.cloud.local.layout import Pool
from spotrun.cloud.local.metadata import Subject


@dataclass
class Machine:
    """A machine from its creation until nothing of it is left."""

    name: str  # stable: a machine that is recreated has the same name
    index: int  # its number in the pool
    pool: Pool  # the pool as it was when the machine was created
    address: str  # its loopback address
    id: str  # unique to this incarnation
    created: float  # epoch seconds
    subject: Subject  # what its metadata server tells of it
    state: State = "provisioning"  # as the cloud lists it
    due: float = math.inf  # epoch seconds when a stopping machine is taken, or when a terminated one may be recreated
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # set when nothing of the machine is left
    life: asyncio.Task[None] | None = None  # the task that runs it from boot to end
    pid: int = 0  # of its first process
    dying: bool = False  # whether its end has begun
    cut: asyncio.Task[None] | None = None  # the task that keeps it off the network, while it is cut off

    @property
    def ends(self) -> float:
        """Epoch seconds when `max_run_duration` ends it; 0: never."""
        return self.created + self.pool.max_run_duration if self.pool.max_run_duration else 0.0

    def instance(self) -> Instance:
        where = (self.pool.name, self.pool.zone, self.address)
        return Instance(self.name, *where, self.state, self.pool.market, self.created, self.id, self.ends)
