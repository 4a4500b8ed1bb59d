"""Other tries: growing pauses between them, and a second one for what may have been damaged on its way here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


def read_twice(read: Callable[[], T], *damage: type[Exception]) -> T:
    """What `read` returns. If it raises one of these errors, it is called once more: the object itself may be whole."""
    try:
        return read()
    except damage as error:
        log.warning("reading it once more: %s", error)
        return read()


@dataclass
class Backoff:
    """Pauses that double from `first` seconds until they reach `longest` seconds."""

    first: float
    longest: float
    tries: int = 0  # pauses taken since the last reset

    def next(self) -> float:
        """Seconds to pause after another failed try."""
        self.tries += 1
        return self.after(self.tries)

    def after(self, tries: int) -> float:
        """Seconds to pause after this many failed tries, from 1 on."""
        return min(self.longest, self.first * 2.0 ** min(tries - 1, 60))

    def reset(self) -> None:
        """Begin with the first pause again."""
        self.tries = 0
