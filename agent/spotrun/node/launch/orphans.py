"""The processes that workers leave behind. They become the launcher's children, so that they end with the workers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from multiprocessing import forkserver, resource_tracker

from spotrun.machine.processes import adopt_orphans, children, descendants, kill

LONGEST = 2.0  # seconds to wait for the orphans' ends: a GPU or a disk may not answer
PAUSE = 0.005  # seconds between two looks


class Orphans:
    """The orphans of this process's tree. Construct it in the main thread, before there are workers."""

    def __init__(self) -> None:
        self._kept = set(descendants(os.getpid()))  # also what the script's imports have started, for all generations
        adopt_orphans()
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())

    def end(self) -> None:
        """Kill all orphans. Call this when all workers have ended.

        A worker that was killed could not end its children. They would keep ports and GPU memory.
        """
        deadline = time.monotonic() + LONGEST
        while (found := set(descendants(os.getpid())) - self._kept - _helpers()) and time.monotonic() < deadline:
            kill(found)
            time.sleep(PAUSE)
            self._reap()

    def _reap(self) -> None:
        for pid in set(children(os.getpid())) - _helpers():
            with contextlib.suppress(ChildProcessError):  # the handler has interrupted `end`
                os.waitpid(pid, os.WNOHANG)


def _helpers() -> set[int | None]:
    """The processes whose ends multiprocessing waits for."""
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    return {tracker, forkserver._forkserver._forkserver_pid}  # type: ignore[attr-defined]
