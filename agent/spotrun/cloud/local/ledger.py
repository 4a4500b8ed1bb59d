"""What the local cloud would bill: a line of JSON for each start and end of a machine, and for each price.

    {"at": 1763800000.1, "what": "price", "pool": "spot-a", "price": 0.3}
    {"at": 1763800060.2, "what": "running", "pool": "spot-a", "machine": "spot-a-0", "id": "…", "market": "spot"}

what: `up` (the cloud starts, and no machine of before exists), `price` (dollars an hour for each machine of the pool
from now on), and of a machine: `created`, `running` (it costs money from now on), `notice`, `taken` (its processes are
dead, and it costs nothing from now on), `ended` (nothing of it is left). The head's machine is not in it. Nothing of
spotrun reads this file: it is for a sum that does not depend on the head's own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from spotrun.cloud.local.machine import Machine
from spotrun.spec.names import HEAD


class Ledger:
    """Appends to the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._prices: dict[str, float] = {}

    def note(self, what: str, machine: Machine) -> None:
        """Something has happened to a machine."""
        if machine.pool.name != HEAD:
            about = {"machine": machine.name, "id": machine.id, "market": machine.pool.market}
            self._write(what, pool=machine.pool.name, **about)

    def begin(self) -> None:
        """The cloud starts."""
        self._write("up")

    def set_prices(self, prices: Mapping[str, float]) -> None:
        """Note the prices that have changed."""
        for pool, price in prices.items():
            if self._prices.get(pool) != price:
                self._write("price", pool=pool, price=price)
        self._prices = dict(prices)

    def _write(self, what: str, **values: object) -> None:
        line = json.dumps({"at": time.time(), "what": what, **values}) + "\n"
        with open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as file:
            file.write(line)
