"""What several tests need."""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import os
import time
from collections.abc import Callable, Coroutine
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, overload

from tests.conftest import SHARED

T = TypeVar("T")
SLOW = 4.0  # how much longer than on a quiet machine anything may take: a limit is there for what never comes


def wait_for(look: Callable[[], T | None], timeout: float = 30.0, what: str = "") -> T:
    """The first truthy result of `look`, polled; an AssertionError that names `what` after `timeout` seconds.

    timeout: on a quiet machine; a busy one gets `SLOW` times as long.
    """
    timeout *= SLOW
    deadline = time.monotonic() + timeout
    while True:
        began = time.monotonic()
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what or look}")
        time.sleep(_pause(began))


@overload
async def await_for(look: Callable[[], Coroutine[Any, Any, T | None]], timeout: float = 30.0, what: str = "") -> T: ...
@overload
async def await_for(look: Callable[[], T | None], timeout: float = 30.0, what: str = "") -> T: ...
async def await_for(look: Callable[[], Any], timeout: float = 30.0, what: str = "") -> Any:
    """`wait_for` in an event loop; `look` may be a coroutine function."""
    timeout *= SLOW
    deadline = time.monotonic() + timeout
    while True:
        began = time.monotonic()
        found = look()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what or look}")
        await asyncio.sleep(_pause(began))


def _pause(began: float) -> float:
    """Seconds until the next look. A look that starts programs must not keep busy what it waits for."""
    return min(2.0, max(0.02, 3 * (time.monotonic() - began)))


def once(name: str, make: Callable[[], str]) -> str:
    """What `make` returns: one worker calls it, and all workers of this run get the result."""
    path = Path(os.environ[SHARED]) / sha256(name.encode()).hexdigest()
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(make())
    return path.read_text()


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
