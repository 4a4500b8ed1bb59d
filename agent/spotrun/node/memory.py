"""The memory for snapshots on this node: what jobs need, what is free, and which job takes too much."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spotrun.state import slots

SNAPSHOTS = 2  # of each job: while one is written, the older one must stay
RESERVE = 0.1  # share of the file system that must stay free of files that are not snapshots
_SLOT = re.compile(r"[0-9]+\.[a-z]+")  # a file of `spotrun.state.slots`


@dataclass(frozen=True)
class Need:
    """The memory that a job's snapshots take."""

    folder: Path  # the job's, in tmpfs
    state: int = 0  # bytes of the newest snapshot, as the head knows it; 0: not known

    @property
    def missing(self) -> int:
        """Bytes that two snapshots need beyond what the slots have already; 0 if their size is not known."""
        found = [_stat(slots.data_path(self.folder / "slots", slot)) for slot in slots.SLOTS]
        size = max([self.state, *(each.st_size for each in found if each)])
        return max(0, SNAPSHOTS * size - sum(_bytes(each) for each in found))


def free(tmpfs: Path) -> int:
    """Bytes that a folder has room for. In a tmpfs, the machine's memory is a second limit."""
    found = os.statvfs(tmpfs)
    room = found.f_bavail * found.f_frsize
    return min(room, _available_memory()) if _is_in_memory(tmpfs) else room


def excess(folder: Path) -> int:
    """Bytes of a job's files that are not snapshots, if they leave the other jobs too little room; else 0."""
    found = os.statvfs(folder)
    reserve = RESERVE * found.f_blocks * found.f_frsize
    if found.f_bavail * found.f_frsize >= reserve:
        return 0
    size = sum(_bytes(_stat(path)) for path in strays(folder))
    return size if size > reserve else 0


def strays(folder: Path) -> Iterator[Path]:
    """The files in a job's folder in tmpfs that are neither snapshots nor the agent's."""
    for path in folder.rglob("*"):
        where = path.relative_to(folder).parts
        known = where[0] in ("control", "launcher") or (len(where) == 2 and _SLOT.fullmatch(path.name))
        if not known and not path.is_dir():
            yield path


def _is_in_memory(folder: Path) -> bool:
    """Whether the folder's file system is a tmpfs (proc_pid_mountinfo(5))."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.startswith(("tmpfs ", "ramfs "))
    return False


def _available_memory() -> int:
    """`MemAvailable` of proc_meminfo(5), in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 1 << 62)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None


def _bytes(found: os.stat_result | None) -> int:
    return found.st_blocks * 512 if found else 0
