"""A worker wakes the agent: with a byte in a FIFO beside the control blocks. What has happened is in the control block.

The agent also looks at the control blocks from time to time. So a byte that is lost costs time, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

PAUSE = 0.01  # seconds between two wakes at least: the FIFO is open to the job's code


def wake(path: str) -> None:
    """Wake the agent that reads this FIFO. Does nothing if there is none. Never waits."""
    if not path:
        return
    with contextlib.suppress(OSError):  # there is no reader, or the FIFO is full
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(handle, b"\0")
        finally:
            os.close(handle)


class Wakeups:
    """The agent's end of a new FIFO at `path`. woken: called in the running event loop. Raises OSError."""

    def __init__(self, path: Path, woken: Callable[[], None]) -> None:
        self.path, self._woken = path, woken
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        self._handle = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)  # the FIFO always has a writer
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._handle, self._read)

    def close(self) -> None:
        """Remove the FIFO. Later calls change nothing."""
        if self._handle >= 0:
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
            self._handle = -1
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._handle, 1 << 16)
        self._loop.remove_reader(self._handle)
        self._loop.call_later(PAUSE, self._listen)
        self._woken()

    def _listen(self) -> None:
        if self._handle >= 0:
            self._loop.add_reader(self._handle, self._read)
