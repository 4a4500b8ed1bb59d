"""What killed workers leave in shared memory: NCCL's segments, which no process removes once the workers are dead.

NCCL makes files with random names, `/dev/shm/nccl-…`, for workers of a node to meet in. A killed worker leaves its own,
which would take memory from the snapshots for as long as the machine lives.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

SHARED = Path("/dev/shm")


def remove(folder: Path | None = None, proc: Path = Path("/proc")) -> list[str]:
    """Remove NCCL's segments that no process uses any more; their names. Other users' files are left alone.

    A segment's process has it open or mapped from its creation on, so none of a worker that lives is taken for a dead
    one's: neither of the next generation, nor of another machine of a local cloud.
    """
    folder = folder or SHARED
    found = {str(path) for path in folder.glob("nccl-*") if _ours(path)}  # listed first: a later one is not touched
    if found:
        found -= set(_used(proc, f"{folder}/nccl-"))
    for path in found:
        Path(path).unlink(missing_ok=True)
    if found:
        log.info("removed what dead workers left in shared memory: %s", ", ".join(sorted(found)))
    return sorted(found)


def _ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _used(proc: Path, prefix: str) -> Iterator[str]:
    """Files with that prefix that a process of this user has open or mapped."""
    for process in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or it is another user's
            # First what is open, then what is mapped: a segment is mapped before it is closed.
            for each in list(os.scandir(process / "fd")):
                with contextlib.suppress(OSError):
                    yield os.readlink(each.path)
            with (process / "maps").open(errors="replace") as maps:
                for line in maps:
                    if prefix in line:
                        yield line[line.index(prefix) :].rstrip("\n")
