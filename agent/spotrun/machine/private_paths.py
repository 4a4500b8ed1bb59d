"""Folders and sockets that belong to this user alone, on a computer that other users share.

Any user can make a folder in places such as /dev/shm, and so take a name that spotrun will use. An existing folder is
used only if it belongs to this user and nobody else may write to it.
"""

from __future__ import annotations

import os
import pwd
import socket
import stat
import struct
from pathlib import Path
from typing import Any

from spotrun.errors import SpotrunError

UMASK = "SPOTRUN_UMASK"  # the variable: the umask of a job's script, in octal digits; default: the agent's umask
PEER = struct.Struct("3i")  # SO_PEERCRED's struct ucred: pid, uid, gid


class NotOursError(SpotrunError):
    """A folder or a socket is not private to this user. The message names the path and the fix."""


def make_folder(path: Path) -> Path:
    """Make the folder with mode 0700, or check it and change its mode to 0700. Raises `NotOursError`."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        check_folder(path)
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(0o700)
    return path


def check_folder(path: Path) -> None:
    """Raise `NotOursError` if the folder, or a link to it, belongs to another user, or if others may write to it."""
    _check_owner(path, path.lstat())
    if not path.is_dir():
        raise NotOursError(f"{path} is in the way: it is not a folder")
    found = path.stat()
    _check_owner(path, found)
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o022:
        advice = f"see what is in it, then `chmod 700 {path}`"
        raise NotOursError(f"{path} is not used: others may write to it (mode {mode:04o}); {advice}")


def check_socket(path: Path) -> None:
    """Raise `NotOursError` if the Unix socket belongs to another user."""
    found = path.lstat()
    if not stat.S_ISSOCK(found.st_mode):
        raise NotOursError(f"{path} is in the way: it is not a socket")
    _check_owner(path, found)


def is_own_peer(peer: Any) -> bool:
    """Whether the other end of a Unix socket is this user, or root (unix(7), SO_PEERCRED)."""
    _, uid, _ = PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    return uid in (os.geteuid(), 0)


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise NotOursError(f"{path} belongs to {_name(found.st_uid)}, not to {_name(os.geteuid())}: it is not used")


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
