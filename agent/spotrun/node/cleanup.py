"""Removing what other jobs, dead workers and killed agents have left on this node."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")


def empty(folder: Path, keep: Collection[str] = ()) -> None:
    """Remove everything in a folder except the entries `keep`."""
    if folder.is_dir():
        remove(path for path in folder.iterdir() if path.name not in keep)


def set_aside(folder: Path, keep: Collection[str]) -> list[Path]:
    """Rename everything in a folder except `keep` and what is being made there (`new-…`); return the new paths."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in keep and not path.name.startswith("new-"):
            with contextlib.suppress(OSError):
                found.append(path.rename(folder / f"old-{uuid.uuid4().hex}"))
    return found


def remove(paths: Iterable[Path]) -> None:
    """Remove folders with all that they contain."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def remove_halves(scratch: Path) -> None:
    """Remove what a killed agent has left half done: copies for uploads, and working folders of jobs that may go on.

    Call this before any job begins: later, a thread may be making such a folder.
    """
    empty(scratch / "parts")
    remove(scratch.glob("work/*/new-*"))


def remove_nccl_segments() -> list[str]:
    """Remove NCCL's segments of shared memory that no process uses; return their paths.

    The workers of a node share files with random names, `/dev/shm/nccl-…`. A killed worker leaves its segments, and
    they would take memory from the snapshots for as long as the machine lives. A living worker has its segments open or
    mapped from their creation on, so those stay. Files of other users stay too.
    """
    found = unused_nccl_segments()
    for path in found:
        Path(path).unlink(missing_ok=True)
    if found:
        log.info("removed the shared memory of dead workers: %s", ", ".join(found))
    return found


def unused_nccl_segments() -> list[str]:
    """The paths of NCCL's segments of this user that no process has open or mapped."""
    # Listed first: segments made after this are not touched.
    found = {str(path) for path in SHARED_MEMORY.glob("nccl-*") if _is_ours(path)}
    return sorted(found - set(_used_files(f"{SHARED_MEMORY}/nccl-"))) if found else []


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def open_files(prefix: str) -> Iterator[str]:
    """The paths with this prefix that a process of this user has open."""
    for process in Path("/proc").glob("[0-9]*"):
        yield from _open_files(process, prefix)


def _used_files(prefix: str) -> Iterator[str]:
    """The paths with this prefix that a process of this user has open or mapped."""
    for process in Path("/proc").glob("[0-9]*"):
        # Open files before mapped ones: a process maps a segment before it closes the file.
        yield from _open_files(process, prefix)
        with contextlib.suppress(OSError), (process / "maps").open(errors="replace") as maps:
            for line in maps:
                if prefix in line:
                    yield line[line.index(prefix) :].rstrip("\n")


def _open_files(process: Path, prefix: str) -> Iterator[str]:
    with contextlib.suppress(OSError):  # the process has just ended, or is another user's
        for each in list(os.scandir(process / "fd")):
            with contextlib.suppress(OSError):
                if (path := os.readlink(each.path)).startswith(prefix):
                    yield path
