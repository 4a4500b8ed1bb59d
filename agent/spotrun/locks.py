"""Locks on files and folders, which end with the process that holds them."""

from __future__ import annotations

import fcntl


def try_lock(handle: int) -> bool:
    """Try to lock an open file or folder without waiting. True if this process has the lock now."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
