"""The head's lease: at most one process is the head of a cluster.

`clusters/<name>/lease.json` names the holder. The holder renews the lease by writing the object again, on the condition
that nobody else has. A head that finds a lease watches the object: if it stays the same for `TERM` seconds, its holder
is gone, and the head takes the lease over. So no two clocks are compared. A lease whose holder has ended on this same
machine, or has given the lease back, is taken at once.

A holder that was suspended for a while may have lost the lease without knowing. So it renews a stale lease before it
writes or asks for anything, and each object that only the head writes is replaced on a condition of its own (`owned`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from spotrun.errors import ConflictError, StoreError
from spotrun.store import Store, Version, epoch_key, lease_key
from spotrun.wire import Kept

log = logging.getLogger(__name__)

TERM = 8.0  # seconds without a renewal after which another head may take the lease
EVERY = 2.0  # seconds between renewals; Google Cloud Storage takes one write of an object a second


@dataclass(frozen=True)
class Holder:
    """A process that is or was the head.

    machine: as the cloud names it. host: the kernel's boot and the PID namespace, "" if they cannot be read.

    pid: the process's number. started: when it started, counted from the boot in the kernel's ticks.
    """

    machine: str
    host: str
    pid: int
    started: str

    @classmethod
    def of_this_process(cls, machine: str) -> Holder:
        """This process. machine: its machine's name in the cloud."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            host = f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
        except OSError:  # the service's sandbox hides them
            host = ""
        return cls(machine, host, os.getpid(), _started(os.getpid()))

    def sees_dead(self, other: Holder) -> bool:
        """Whether this process can tell that the other one has ended. They must run in the same place for that."""
        if (self.machine, self.host) != (other.machine, other.host):
            return False
        return other.pid != self.pid and _started(other.pid) != other.started


class Record(Kept):
    """clusters/<name>/lease.json. renewals: how often it was renewed, so that each renewal changes the object."""

    machine: str
    host: str
    pid: int
    started: str
    renewals: int = 0
    released: bool = False

    @property
    def holder(self) -> Holder:
        return Holder(self.machine, self.host, self.pid, self.started)


class Lease:
    """One head's lease on one cluster. renewed: when it was last known to be held, by the monotonic clock."""

    def __init__(self, store: Store, cluster: str, holder: Holder, term: float = TERM, every: float = EVERY) -> None:
        self.renewed = float("-inf")
        self._store, self._key = store, lease_key(cluster)
        self._term, self._every = term, every
        self._record = Record(**vars(holder))
        self._version: Version | None = None
        self._writing = asyncio.Lock()

    async def take(self) -> None:
        """Wait until the lease is free, and take it. A bucket that does not answer is asked again."""
        seen: Version | None = None
        since, said = time.monotonic(), ""
        while True:
            try:
                data, version = await asyncio.to_thread(self._store.read, self._key)
                if version != seen:
                    seen, since = version, time.monotonic()
                why = self._held(data, time.monotonic() - since)
                if not why:
                    self._version = version
                    return await self._write(self._record)
            except ConflictError:
                continue  # another head was faster
            except StoreError as error:
                why, since = str(error), time.monotonic()
            if why != said:
                log.info("waiting for the head's lease: %s", why)
            said = why
            await asyncio.sleep(self._every / 4)

    async def keep(self) -> None:
        """Renew for ever. Raises `ConflictError` when another head has the lease."""
        while True:
            await asyncio.sleep(self._every)
            try:
                await self.renew()
            except StoreError as error:
                log.warning("%s", error)

    async def check(self) -> None:
        """Return if the lease is held. One that may have run out is renewed first.

        Raises `ConflictError` when another head has it, `StoreError` when that cannot be found out.
        """
        if time.monotonic() - self.renewed > self._term / 2:
            await self.renew()

    async def renew(self) -> None:
        """Write the lease again. Raises `ConflictError`, `StoreError`."""
        await self._write(self._record.model_copy(update={"renewals": self._record.renewals + 1}))

    async def release(self) -> None:
        """Let the next head have it at once, if this one has it still."""
        if self._version is None:
            return
        try:
            await self._write(self._record.model_copy(update={"released": True}))
        except (ConflictError, StoreError) as error:
            log.info("the lease was not given back: %s", error)

    async def _write(self, record: Record) -> None:
        async with self._writing:
            began = time.monotonic()
            data = record.model_dump_json().encode()
            self._version = await asyncio.to_thread(self._store.replace, self._key, data, self._version)
            self._record, self.renewed = record, began

    def _held(self, data: bytes | None, unchanged: float) -> str:
        """Who has the lease; "" if nobody does. unchanged: seconds for which it has been as it is."""
        if data is None or unchanged > self._term:
            return ""
        try:
            record = Record.model_validate_json(data)
        except ValueError:
            return "the lease is of another version"
        here = self._record.holder
        if record.released or record.holder == here or here.sees_dead(record.holder):
            return ""
        return f"process {record.pid} on machine {record.machine} has it"


async def check(lease: Lease | None, store: Store, cluster: str, epoch: int) -> None:
    """Raise `SystemExit` if another head has taken over from head `epoch`: it has read what this one would change."""
    if lease is not None:
        try:
            await lease.check()
        except ConflictError as error:
            give_way(epoch, str(error))
    if await asyncio.to_thread(store.exists, epoch_key(cluster, epoch + 1)):
        give_way(epoch, f"head {epoch + 1} has taken over")


def give_way(epoch: int, why: str) -> NoReturn:
    """End this head."""
    log.warning("%s; this head (%d) ends", why, epoch)
    raise SystemExit(0)


def _started(pid: int) -> str:
    """When a process of this machine started; "" if there is none that lives."""
    try:
        # The name of the program, in brackets, may have spaces and brackets of its own: see proc(5).
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
