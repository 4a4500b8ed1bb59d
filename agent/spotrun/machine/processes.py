"""Processes that end with their parent, and what is on this machine. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
OOM_SCORE = "500"  # of -1000 (never) to 1000 (first); what an agent's unit and a user's programs have is below


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, `parent`, ends (prctl(2)); exits if it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def offer_to_oom_killer() -> None:
    """Have the kernel take this process, and what it starts, before others when memory runs out: before the agent above
    all, from which it would have inherited its protection (proc(5), oom_score_adj)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, as far as /proc shows them."""
    found: list[int] = []
    for task in _list(Path(f"/proc/{pid}/task")):
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to each of them that is still there, and ours."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_descendants() -> None:
    """End all that is below this process, which is about to leave: its children would keep ports and GPU memory."""
    with contextlib.suppress(ValueError):  # it is not the main thread, where handlers run
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a DataLoader's handler raises when its workers are killed
    kill(descendants(os.getpid()))


def _list(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
