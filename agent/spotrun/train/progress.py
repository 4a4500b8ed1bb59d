"""What the agent is told of a snapshot under way: how far it is, and how long it may take.

The agent ends a worker whose peer is gone only once its snapshot is committed, and waits for that as long as the
snapshot may take. A state of 100 GB takes longer than one of 1 MB.
"""

from __future__ import annotations

import time
from collections import deque

from spotrun.state.control import Control

SLOW = 0.5e9  # bytes per second that are copied and hashed at least, until it is measured


class Progress:
    """Writes the control block, if there is one. One snapshot at a time."""

    def __init__(self, control: Control | None) -> None:
        self._control = control
        self._size = 0  # bytes of the newest snapshot
        self._began = 0.0  # monotonic seconds
        self._paces: deque[float] = deque(maxlen=3)  # seconds per byte of the last snapshots

    @property
    def expected(self) -> float:
        """Seconds that the newest snapshot takes from its beginning to its record, by the slowest of the last."""
        return self._size * max(self._paces, default=1 / SLOW)

    def begin(self, step: int, size: int) -> None:
        """A snapshot of `size` bytes begins."""
        self._size, self._began = size, time.monotonic()
        if self._control is not None:
            self._control.expected = self.expected
            self._control.begun = step

    def copied(self, step: int) -> None:
        """The state is in memory; its hash and its record are missing."""
        if self._control is not None:
            self._control.copied = step

    def committed(self, step: int) -> None:
        """The snapshot counts."""
        took = time.monotonic() - self._began
        self._paces.append(took / max(1, self._size))
        if self._control is not None:
            self._control.took = took
            self._control.committed = step

    def dropped(self) -> None:
        """The snapshot will not count: nobody has to wait for it."""
        if self._control is not None:
            self._control.begun = self._control.copied = self._control.committed
