"""Telling a peer's death from an error of the user's code, and leaving the process in good order."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

# What gloo, NCCL and the TCPStore write into a plain RuntimeError when another process is gone.
_PEER = re.compile(
    r"gloo|NCCL|TCPStore|Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|"
    r"Socket (closed|Timeout|error)|socket (has|was) |Timed out waiting .* (recv|send|operation)"
)

# Called, the last one first, before the process leaves by `leave`: they wait for a snapshot whose commit is under way.
# The first is the launcher's, which then ends the process's children.
_settlers: list[Callable[[], object]] = []


def is_peer_failure(error: BaseException | None) -> bool:
    """Whether the error (or its cause) says that another rank, or the way to it, is gone."""
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        # An exception of another class, ConnectionError say, comes from the script's own traffic.
        if type(error) is RuntimeError and _PEER.search(str(error)):
            return True
        error = error.__cause__
    return False


def before_leaving(settle: Callable[[], object]) -> None:
    """Have `settle` called before this process leaves by `leave`."""
    _settlers.append(settle)


def leave(code: int) -> NoReturn:
    """End this process at once with the code: commit what is in flight, flush the output, run no destructors.

    Destructors of a process group may wait for peers that are gone.
    """
    for settle in reversed(_settlers):
        with contextlib.suppress(Exception):
            settle()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
