"""End processes with their parent, find and kill descendants, mark a fork. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Iterable
from pathlib import Path

MARK = "SPOTRUN_NODE_MARK"  # this variable marks all processes of a local machine
ZYGOTE = "SPOTRUN_ZYGOTE"  # the variable: path of the socket of `spotrun.node.launch.zygote`, if there is one

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENV_START, _ENV_END = 47, 48  # in /proc/PID/stat, counted from the field after the name (proc(5))
OOM_SCORE = "500"  # from -1000 (killed never) to 1000 (first); the agent and a user's programs have lower scores


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends (prctl(2)). If the parent has ended already, exit."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of all orphans of its process tree (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def show_environment() -> None:
    """Make /proc/PID/environ show this fork's own variables, MARK first. Otherwise it shows the parent's.

    This overwrites the memory in which the program got its variables at its start. Before the call, clear `os.environ`
    and fill it again, so that the process no longer uses this memory. Variables that do not fit into it are not shown.
    Forks of this process show the same variables. Raises OSError if MARK does not fit.
    """
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(stat[_ENV_START]), int(stat[_ENV_END])
    first = os.fsencode(MARK)
    variables = sorted(os.environb.items(), key=lambda item: item[0] != first)
    text = b"".join(b"%s=%s\0" % item for item in variables)
    shown = text[: text.rfind(b"\0", 0, end - start) + 1]
    if first in os.environb and not shown:
        raise OSError(errno.ENOSPC, f"{end - start} bytes are too few for {MARK} in /proc/{os.getpid()}/environ")
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def offer_to_oom_killer() -> None:
    """Make the kernel kill this process and its children before others when memory runs out (proc(5), oom_score_adj).

    Without this, the process has the agent's score, and the kernel may kill the agent instead.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)


def children(pid: int) -> list[int]:
    """The children of `pid`, as far as /proc shows them."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for task in list(Path(f"/proc/{pid}/task").iterdir()):
            with contextlib.suppress(OSError):  # the thread has ended
                found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, as far as /proc shows them."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def is_tracker(pid: int) -> bool:
    """Whether the process is a resource tracker of multiprocessing, or torch's (of the sharing strategy `file_system`).

    It removes the shared memory that others leave, and then ends by itself, after the last of them.
    """
    with contextlib.suppress(OSError):  # the process has ended
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return any(each in command for each in (b"multiprocessing.resource_tracker", b"torch_shm_manager"))
    return False


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to each process that still exists and belongs to this user, except resource trackers."""
    for pid in pids:
        if is_tracker(pid):
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_descendants() -> None:
    """Kill all descendants before this process leaves: they would keep ports and GPU memory."""
    with contextlib.suppress(ValueError):  # this is not the main thread, where handlers run
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a DataLoader's handler raises when its workers are killed
    kill(descendants(os.getpid()))
