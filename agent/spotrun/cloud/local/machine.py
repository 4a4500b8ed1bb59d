"""One machine of the local cloud, as the daemon knows it."""

from __future__ import annotations

import asyncio
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from spotrun.cloud.base import Instance, State
from spotrun.cloud.local.layout import METADATA_PORT, SSH_PORT, Pool
from spotrun.cloud.local.metadata import Subject
from spotrun.machine.gpus import DEVICES
from spotrun.machine.processes import MARK

# The variables that all machines have, besides the daemon's.
ALL = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
# NCCL does not let two workers share a GPU, as those of two machines on this computer would. So a machine has GPUs only
# if this variable names some in the shell of `make up`, and if its pool has no `devices`.
VISIBLE = "CUDA_VISIBLE_DEVICES"


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
    started: float = 0.0  # epoch seconds since when it runs; 0: it has not run
    ended: float = 0.0  # epoch seconds when its processes were dead; 0: they are not
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

    def environment(self, mark: str, memory: Path, scratch: Path, keys: Path) -> dict[str, str]:
        """The variables of its first process. memory, scratch, keys: its folders."""
        server = f"{self.address}:{METADATA_PORT}"
        values = {
            **os.environ,
            **ALL,
            MARK: mark,
            "SPOTRUN_NODE": self.name,
            "SPOTRUN_TMPFS": str(memory),
            "TMPDIR": str(memory / "tmp"),  # removed with the machine, and so is what a killed process leaves in it
            "SPOTRUN_SCRATCH": str(scratch),
            "SPOTRUN_SSH_KEYS": str(keys),
            "SPOTRUN_SSH_PORT": str(SSH_PORT),
            "GCE_METADATA_HOST": server,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{server}/",
        }
        if self.pool.devices or not values.get(VISIBLE):
            values |= {DEVICES: str(self.pool.devices or 1), VISIBLE: ""}
        return values

    def instance(self) -> Instance:
        where = (self.pool.name, self.pool.zone, self.address)
        times = (self.ends, self.started)
        return Instance(self.name, *where, self.state, self.pool.market, self.created, self.id, *times)
