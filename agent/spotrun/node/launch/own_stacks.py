"""A worker tells its own Python stacks: a thread of the worker answers on a local socket.

Not faulthandler in a signal handler: it reads frames of threads that run. When threads were busy, 30 of 1,367 requests
crashed the process. This thread holds the GIL while it looks, so no other thread changes. The price: a worker in which
C code holds the GIL for ever does not answer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any

from spotrun.machine import private_paths

log = logging.getLogger(__name__)

DEEPEST = 200  # calls of a stack that are in the answer: the innermost ones
MOST = 200  # threads that are in the answer
_SEND = 2.0  # seconds that a client has to read
_PAUSE = 1.0  # seconds after an error of `accept`, such as no free file descriptors


def address(pid: int) -> str:
    """The socket of a worker. It is an abstract one (unix(7)), which leaves no file behind."""
    return f"\0spotrun-stacks-{pid}"


def serve() -> None:
    """Answer from now on, until this process ends. If the socket cannot be made, the process goes on without it."""
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(address(os.getpid()))
        listener.listen(8)
    except OSError as error:
        log.warning("`make stacks` will not see this worker: %s", error)
        return
    threading.Thread(target=_answer, args=(listener,), name="spotrun-stacks", daemon=True).start()


def tell() -> str:
    """The stacks of all threads but this one, in the form of `py-spy dump --json`."""
    main, own = threading.main_thread().ident, threading.get_ident()
    names = {thread.ident: (thread.name, thread.native_id) for thread in threading.enumerate()}
    found = []
    for ident, frame in list(sys._current_frames().items())[-MOST:]:
        name, number = names.get(ident, ("", 0))
        if ident != own:
            number = os.getpid() if ident == main else number
            thread = {"pid": os.getpid(), "os_thread_id": number, "thread_name": name, "frames": _calls(frame)}
            found.append(thread)
    return json.dumps(found)


def _calls(frame: FrameType | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while frame is not None and len(found) < DEEPEST:
        code = frame.f_code
        found.append({"name": code.co_qualname, "filename": code.co_filename, "line": frame.f_lineno or 0})
        frame = frame.f_back
    return found


def _answer(listener: socket.socket) -> None:
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            time.sleep(_PAUSE)
            continue
        with peer, contextlib.suppress(OSError):  # the client is gone
            peer.settimeout(_SEND)
            if private_paths.is_own_peer(peer):
                peer.sendall(tell().encode(errors="replace"))
