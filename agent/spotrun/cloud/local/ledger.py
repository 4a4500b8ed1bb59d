"""What the local cloud would bill: a line of JSON for each start and end of a machine, and for each price.

    {"at": 1763800000.1, "what": "price", "pool": "spot-a", "price": 0.3}
    {"at": 1763800060.2, "what": "running", "pool": "spot-a", "machine": "spot-a-0", "id": "…", "market": "spot"}

what: `up` (the cloud starts, and no earlier machine exists), `price` (dollars an hour for each machine of the pool
from now on), and of a machine: `created`, `running` (it costs money from now on), `notice`, `taken` (its processes are
dead, and it costs nothing from now on), `ended` (nothing of it is left). The head's machine is not in it.
spotrun itself does not read this file. It is for adding up the costs in a second way, without the head.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from spotrun.cloud.base import Ended
from spotrun.cloud.local.machine import Machine
from spotrun.spec.names import HEAD

_HOUR = 3600.0  # seconds


class Ledger:
    """Appends to the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._prices: dict[str, float] = {}
        self._ended: list[Ended] = []

    def note(self, what: str, machine: Machine, at: float | None = None) -> None:
        """Something has happened to a machine. at: when, epoch seconds; None: now."""
        if machine.pool.name != HEAD:
            about = {"machine": machine.name, "id": machine.id, "market": machine.pool.market}
            self._write(what, at, pool=machine.pool.name, **about)

    def end(self, machine: Machine) -> None:
        """A machine's processes are dead."""
        machine.ended = time.time()
        self.note("taken", machine, machine.ended)
        if machine.started and machine.pool.name != HEAD:
            times = (machine.created, machine.started, machine.ended)
            self._ended.append(Ended(machine.name, machine.pool.name, *times))

    def ended(self) -> list[Ended]:
        """The machines that ended within the last hour, with the times that the file has."""
        self._ended = [each for each in self._ended if each.until > time.time() - _HOUR]
        return list(self._ended)

    def begin(self) -> None:
        """The cloud starts."""
        self._write("up")

    def set_prices(self, prices: Mapping[str, float]) -> None:
        """Note the prices that have changed."""
        for pool, price in prices.items():
            if self._prices.get(pool) != price:
                self._write("price", pool=pool, price=price)
        self._prices = dict(prices)

    def _write(self, what: str, at: float | None = None, **values: object) -> None:
        line = json.dumps({"at": time.time() if at is None else at, "what": what, **values}) + "\n"
        with open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as file:
            file.write(line)
