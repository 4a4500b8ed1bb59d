"""End processes with their parent, and find and kill descendants. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
OOM_SCORE = "500"  # from -1000 (killed never) to 1000 (first); the agent and a user's programs have lower scores


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends (prctl(2)). If the parent has ended already, exit."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def offer_to_oom_killer() -> None:
    """Make the kernel kill this process and its children before others when memory runs out (proc(5), oom_score_adj).

    Without this, the process has the agent's score, and the kernel may kill the agent instead.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, as far as /proc shows them."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for task in list(Path(f"/proc/{pid}/task").iterdir()):
            with contextlib.suppress(OSError):  # the thread has ended
                for child in (task / "children").read_text().split():
                    found += [int(child), *descendants(int(child))]
    return found


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to each process that still exists and belongs to this user."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_descendants() -> None:
    """Kill all descendants before this process leaves: they would keep ports and GPU memory."""
    with contextlib.suppress(ValueError):  # this is not the main thread, where handlers run
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a DataLoader's handler raises when its workers are killed
    kill(descendants(os.getpid()))
