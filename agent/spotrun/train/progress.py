"""What a writer tells the agent about its snapshots."""

from __future__ import annotations

import time
from collections import deque

from spotrun.state.control import NONE, Control

SLOW = 0.5e9  # bytes per second: assumed rate of copying and hashing, until it is measured


class Progress:
    """Tells the agent how far a snapshot is, and how long it may take: a state of 100 GB takes longer than one of 1 MB.

    When a worker's peer is gone, the agent ends the worker after its snapshot is committed, and waits for as long as
    that may take.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self.step = NONE  # of the newest snapshot that was begun
        self._size = 0  # bytes of the newest snapshot
        self._began = 0.0  # monotonic seconds
        self._paces: deque[float] = deque(maxlen=3)  # seconds per byte of the last snapshots

    @property
    def expected(self) -> float:
        """Seconds that the newest snapshot takes from its beginning to its record, at the slowest recent pace."""
        return self._size * max(self._paces, default=1 / SLOW)

    def begin(self, step: int, size: int) -> None:
        """A snapshot of `size` bytes begins."""
        self.step, self._size, self._began = step, size, time.monotonic()
        self._control.expected = self.expected
        self._control.begun = step

    def copied(self, step: int) -> None:
        """The state is in memory, without its hash and its record."""
        self._control.copied = step

    def committed(self, step: int) -> None:
        """The snapshot counts."""
        took = time.monotonic() - self._began
        self._paces.append(took / max(1, self._size))
        self._control.took = took
        self._control.committed = step

    def dropped(self) -> None:
        """The snapshot will not count, so nobody has to wait for it."""
        self._control.begun = self._control.copied = self._control.committed
