"""Removing what other jobs, dead workers and killed agents have left on this node."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")


def empty(folder: Path, keep: str | None = None) -> None:
    """Remove everything in a folder except the entry `keep`."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name != keep:
                shutil.rmtree(path, ignore_errors=True)


def remove_nccl_segments(folder: Path | None = None, proc: Path = Path("/proc")) -> list[str]:
    """Remove NCCL's segments of shared memory that no process uses; return their paths.

    NCCL makes files with random names, `/dev/shm/nccl-…`, where the workers of a node meet. A killed worker leaves its
    segments, and nothing else removes them: they would take memory from the snapshots for as long as the machine lives.

    A living worker has its segments open or mapped from their creation on. So no segment in use is removed, whether of
    the next generation or of another machine of a local cloud. Files of other users are left alone.
    """
    found = unused_nccl_segments(folder, proc)
    for path in found:
        Path(path).unlink(missing_ok=True)
    if found:
        log.info("removed the shared memory of dead workers: %s", ", ".join(found))
    return found


def unused_nccl_segments(folder: Path | None = None, proc: Path = Path("/proc")) -> list[str]:
    """The paths of NCCL's segments of this user that no process has open or mapped."""
    folder = folder or SHARED_MEMORY
    found = {str(path) for path in folder.glob("nccl-*") if _is_ours(path)}  # listed first: later ones are not touched
    if found:
        found -= set(_used_files(proc, f"{folder}/nccl-"))
    return sorted(found)


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _used_files(proc: Path, prefix: str) -> Iterator[str]:
    """The paths with this prefix that a process of this user has open or mapped."""
    for process in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has just ended, or is another user's
            # Open files before mapped ones: a process maps a segment before it closes the file.
            for each in list(os.scandir(process / "fd")):
                with contextlib.suppress(OSError):
                    yield os.readlink(each.path)
            with (process / "maps").open(errors="replace") as maps:
                for line in maps:
                    if prefix in line:
                        yield line[line.index(prefix) :].rstrip("\n")
