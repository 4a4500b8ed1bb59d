"""The head's clock."""

from __future__ import annotations

import time
from collections.abc import Callable

CATCH_UP = 0.5  # speed of the clock while it is ahead of the wall clock


class Clock:
    """Epoch seconds for every decision of one head. They never go back.

    The clock follows the wall clock. If the wall clock steps back, this clock continues at half speed until the wall
    clock has caught up. So a time-out takes at most twice as long, and not longer by the whole step.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._now, self._read_at = wall(), monotonic()

    def __call__(self) -> float:
        read_at = self._monotonic()
        passed, self._read_at = read_at - self._read_at, read_at
        self._now = max(self._wall(), self._now + passed * CATCH_UP)
        return self._now
