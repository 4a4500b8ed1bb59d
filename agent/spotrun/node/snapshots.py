"""The snapshots in this node's memory."""

from __future__ import annotations

from pathlib import Path

from spotrun.state import slots
from spotrun.wire import StateRef


def newest(folder: Path, job: str) -> StateRef | None:
    """The newest committed snapshot in a slot folder."""
    found = slots.newest(folder, job)
    return StateRef(generation=found[0][1].generation, step=found[0][1].step) if found else None


def left_in_memory(tmpfs: Path) -> tuple[str, StateRef] | None:
    """The job and its newest committed snapshot that an earlier agent has left in memory; None if there is none."""
    folders = sorted(tmpfs.iterdir()) if tmpfs.is_dir() else []
    found = ((folder.name, newest(folder / "slots", folder.name)) for folder in folders if (folder / "slots").is_dir())
    return next(((job, ref) for job, ref in found if ref is not None), None)
