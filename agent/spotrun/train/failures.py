"""Telling a peer's death from an error of the user's code, and ending the process cleanly."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from spotrun.state import exit_note
from spotrun.state.control import EXIT_PEER, Context, Control

log = logging.getLogger(__name__)

# Texts of gloo, NCCL and the TCPStore in a plain RuntimeError when another process is gone.
_PEER = re.compile(
    r"gloo|NCCL|TCPStore|Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|"
    r"Socket (closed|Timeout|error)|socket (has|was) |Timed out waiting .* (recv|send|operation)"
)

void = False  # whether the step under way does not count, because another rank is gone: any error may follow from that
# `leave` calls these, the newest first: they wait until a snapshot is committed. The first is the launcher's: it ends
# the process's children.
_settlers: list[Callable[[], object]] = []
_flushers: list[Callable[[], object]] = []  # `flush` calls these


def is_peer_failure(error: BaseException | None) -> bool:
    """Whether another rank, or the way to it, is gone: the error (or its cause) says so, or it is known (`void`)."""
    if void:
        return True
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        # Other classes, such as ConnectionError, come from the script's own traffic.
        if type(error) is RuntimeError and _PEER.search(str(error)):
            return True
        error = error.__cause__
    return False


def check(error: BaseException | None = None) -> None:
    """Raise an error if the step under way does not count: what its collectives have left may mean nothing."""
    if void:
        raise error or dist.DistError("the step does not count: another worker is gone, or a collective has failed")


def before_leaving(settle: Callable[[], object]) -> None:
    """Have `leave` call `settle` before it ends this process."""
    _settlers.append(settle)


def before_ending(flush: Callable[[], object]) -> None:
    """Have `flush` called before this process ends, also if the script fails. It must return soon."""
    _flushers.append(flush)


def becomes_void(seconds: float) -> bool:
    """Whether the step under way is void, or becomes void within this time. Another thread may be about to learn it."""
    until = time.monotonic() + seconds
    while not void and time.monotonic() < until:
        time.sleep(0.02)
    return void


def flush() -> None:
    """Write what other processes will read, and what is only in this process's memory so far. Raises nothing."""
    for each in _flushers:
        with contextlib.suppress(Exception):
            each()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


class Handled:
    """A context whose errors go to `handle`, which returns False to raise the error.

    In a step, write `try` and call `handle` instead, which takes no time: this context would take 2 µs.
    """

    def __init__(self, handle: Callable[[Exception], bool]) -> None:
        self.handle = handle

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, Exception) and self.handle(error)


def end(context: Context, control: Control, rank: int, what: str, error: BaseException) -> NoReturn:
    """End this process because a peer failed, and tell the log and the agent. what: the meaning, in a few words."""
    message = f"{what}: {exit_note.summary(str(error))}"
    log.warning("%s", message)
    exit_note.write(context.control, "peer", rank, message, "".join(traceback.format_exception(error)))
    control.exit = EXIT_PEER
    leave(EXIT_PEER)


def leave(code: int) -> NoReturn:
    """End this process with the code. Commit a snapshot under way and flush the output first.

    No destructors run: those of a process group may wait for peers that are gone.
    """
    for settle in reversed(_settlers):
        with contextlib.suppress(Exception):
            settle()
    flush()
    os._exit(code)
