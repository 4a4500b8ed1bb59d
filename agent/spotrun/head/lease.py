"""The head's lease: at most one process is the head of a cluster.

`clusters/<name>/lease.json` names the holder. The holder renews the lease by writing the object again, on the condition
that no other process has written it. A head that finds a lease watches the object. If the object stays the same for
`TERM` seconds, the holder is gone, and the head takes the lease over. So the clocks of two machines are never compared.
The head takes a lease at once if its holder has ended on the same machine, or has released the lease.

A holder that was suspended may no longer have the lease. So a head renews an old lease before it writes anything or
asks the cloud for anything. In addition, `fenced.FencedStore` replaces only objects that no other head has written.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
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
    """A process that is or was the head."""

    machine: str  # its machine's name in the cloud
    host: str  # the kernel's boot id and the PID namespace; "" if they cannot be read
    pid: int
    started: str  # when the process started, in kernel ticks since the boot

    @classmethod
    def of_this_process(cls, machine: str) -> Holder:
        """This process, on the machine that the cloud knows by this name."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            host = f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
        except OSError:  # the service's sandbox hides them
            host = ""
        return cls(machine, host, os.getpid(), _started(os.getpid()))

    def sees_dead(self, other: Holder) -> bool:
        """Whether the other process is known to have ended. Only a process on the same host can know that."""
        if (self.machine, self.host) != (other.machine, other.host):
            return False
        return other.pid != self.pid and _started(other.pid) != other.started


class Record(Kept):
    """clusters/<name>/lease.json: the holder of the lease."""

    machine: str
    host: str
    pid: int
    started: str
    renewals: int = 0  # a count, so that each renewal changes the object
    released: bool = False

    @property
    def holder(self) -> Holder:
        return Holder(self.machine, self.host, self.pid, self.started)


class Lease:
    """One head's lease on one cluster. renewed: when this head last renewed it, by the monotonic clock."""

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
        since, logged = time.monotonic(), ""
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
            if why != logged:
                log.info("waiting for the head's lease: %s", why)
            logged = why
            await asyncio.sleep(self._every / 4)

    async def keep(self) -> None:
        """Renew until cancelled. Raises `ConflictError` when another head has the lease."""
        while True:
            await asyncio.sleep(self._every)
            try:
                await self.renew()
            except StoreError as error:
                log.warning("%s", error)

    async def check(self) -> None:
        """Return if this head has the lease. Renew a lease that may have run out first.

        Raises `ConflictError` when another head has the lease, `StoreError` when the bucket does not answer.
        """
        if time.monotonic() - self.renewed > self._term / 2:
            await self.renew()

    async def renew(self) -> None:
        """Write the lease again. Raises `ConflictError`, `StoreError`."""
        await self._write(self._record.replace(renewals=self._record.renewals + 1))

    async def release(self) -> None:
        """Release the lease, if this head still has it: the next head can then take it at once."""
        if self._version is None:
            return
        try:
            await self._write(self._record.replace(released=True))
        except (ConflictError, StoreError) as error:
            log.info("the lease was not released: %s", error)

    async def _write(self, record: Record) -> None:
        async with self._writing:
            began = time.monotonic()
            data = record.model_dump_json().encode()
            self._version = await asyncio.to_thread(self._store.replace, self._key, data, self._version)
            self._record, self.renewed = record, began

    def _held(self, data: bytes | None, unchanged: float) -> str:
        """Who has the lease; "" if nobody has it. unchanged: seconds since the object last changed."""
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


def claim_epoch(store: Store, cluster: str) -> int:
    """The number of this head: one more than the last head's. The head that creates the key has the number."""
    prefix = epoch_key(cluster, 0).rsplit("/", 1)[0]
    names = [key.rsplit("/", 1)[1] for key in store.list(prefix)]
    epoch = max((int(name) for name in names if name.isdecimal()), default=0) + 1
    while not store.create(epoch_key(cluster, epoch), socket.gethostname().encode()):
        epoch += 1
    return epoch


async def check(lease: Lease | None, store: Store, cluster: str, epoch: int) -> None:
    """Raise `SystemExit` if another head has taken over from head `epoch`: that head has already read the state."""
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
    """When a process of this machine started; "" if the process does not run."""
    try:
        # The program's name is in brackets, and may itself contain spaces and brackets: see proc(5).
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
