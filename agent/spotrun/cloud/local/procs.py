"""The processes of a machine: those with its mark in their environment, and their descendants.

Blocking: each call looks through /proc (a few milliseconds); in an event loop use `asyncio.to_thread`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable

from spotrun.machine.processes import MARK

_VARIABLE = f"{MARK}=".encode()
_ROUNDS = 100  # of stopping or killing, enough for any ordinary fork bomb


def mark_of(pid: int) -> str:
    """The mark in a process's environment; empty if there is none, or the process is gone or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read()
    except OSError:
        return ""
    if _VARIABLE not in environ:
        return ""
    for item in environ.split(b"\0"):
        if item.startswith(_VARIABLE):
            return item[len(_VARIABLE) :].decode(errors="replace")
    return ""


def last_word(pid: int) -> str:
    """The last argument of a process's command line; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return os.fsdecode(file.read().rstrip(b"\0").rpartition(b"\0")[2])
    except OSError:
        return ""


def status(pid: int) -> tuple[str, int]:
    """(state letter, parent's pid); ("X", 0) if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "X", 0
    return fields[0].decode(), int(fields[1])


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def find(accept: Callable[[str], bool]) -> set[int]:
    """Live processes with an accepted mark, and their descendants without a mark. Never this process."""
    everyone = pids()
    marks = {pid: mark_of(pid) for pid in everyone}
    found = {pid for pid, mark in marks.items() if mark and accept(mark)}
    parents = {pid: status(pid) for pid in everyone if pid in found or not marks[pid]}
    grown = True
    while grown:
        more = {pid for pid, (_, parent) in parents.items() if parent in found} - found
        grown = bool(more)
        found |= more
    return {pid for pid in found if parents[pid][0] not in "ZX"} - {os.getpid()}


def of_machine(mark: str) -> set[int]:
    return find(lambda found: found == mark)


def of_cluster(unique: str) -> set[int]:
    """The processes of all machines of a cluster, and its daemon, unless this process is the daemon."""
    return find(lambda found: found.startswith(f"{unique}/"))


def strays(known: set[int]) -> set[int]:
    """Orphans without a mark, which this process inherited when their machine lost its first process.

    known: children that are not orphans. No child may be starting meanwhile: its mark is not visible yet.
    """
    parents = {pid: status(pid) for pid in pids()}
    found = {pid for pid, (_, parent) in parents.items() if parent == os.getpid() and pid not in known}
    found -= {pid for pid in found if mark_of(pid)}
    return {pid for pid in found if parents[pid][0] not in "ZX"}


def stop(search: Callable[[], set[int]]) -> set[int]:
    """SIGSTOP everything that the search finds, until it finds nothing new. Returns all stopped pids."""
    stopped: set[int] = set()
    for _ in range(_ROUNDS):
        new = search() - stopped
        if not new:
            break
        _signal(new, signal.SIGSTOP)
        stopped |= new
    return stopped


def resume(search: Callable[[], set[int]]) -> None:
    """SIGCONT everything that the search finds."""
    _signal(search(), signal.SIGCONT)


def kill(search: Callable[[], set[int]], patience: float = 20.0) -> set[int]:
    """End everything that the search finds. When this returns, the sockets and files are closed.

    Processes are stopped first, so that none reacts to the death of another. Processes without a mark, which are found
    only as descendants, die first: so everything that is left can be found again if this is interrupted. Returns the
    killed pids.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + patience
    while found := stop(search):
        batch = {pid for pid in found if not mark_of(pid)} or found
        handles = []
        for pid in batch:
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(pid)
                handles.append(handle)
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        _await_end(handles, deadline)
        killed |= batch
        if time.monotonic() > deadline:  # a process is in an uninterruptible sleep; the kernel ends it later
            break
    return killed


def reap(children: Iterable[int]) -> None:
    """Reap the given processes that are dead children of this process."""
    for pid in children:
        with contextlib.suppress(OSError):
            os.waitpid(pid, os.WNOHANG)


def await_exit(pid: int, patience: float) -> bool:
    """Wait for a process to end, at most `patience` seconds. Returns whether it has ended."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return True
    return _await_end([handle], time.monotonic() + patience)


def _await_end(handles: list[int], deadline: float) -> bool:
    """Wait until every process is dead with all its threads: then its pidfd is readable."""
    ended = True
    for handle in handles:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        ended &= bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
        os.close(handle)
    return ended


def _signal(targets: set[int], number: int) -> None:
    for pid in targets:
        with contextlib.suppress(OSError):
            os.kill(pid, number)
