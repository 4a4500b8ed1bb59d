"""Whether the results of this process's collectives can be trusted.

The kernel of an aborted NCCL collective returns as if it had succeeded, so the step goes on with an incomplete sum. A
script can abort a group, and so does `spotrun.train.regroup`. torch aborts after an error if the variable
TORCH_NCCL_ASYNC_ERROR_HANDLING is 1 or 2. A copied snapshot is therefore committed only if no group was aborted and no
group reports an error. torch's NCCL watchdog records an error before it aborts anything (ProcessGroupNCCL.cpp,
`Watchdog::runLoop`).

An aborted kernel sends other ranks what it has, marked as valid (see `train/exactness.py`). Their step goes on with a
wrong sum too, and nothing on such a rank shows it. So a rank writes a note into the generation's store before it
aborts, and each rank looks for this note before it commits a snapshot. There is no note if the store does not answer
within `_NOTING`, or if torch aborts by itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

_NOTE = "spotrun/aborts"  # key in the generation's store: it is there if a rank has begun to abort a group
_NOTING = 0.5  # seconds that an abort waits until the store has the note: its machine may be gone
_ANSWER = 10.0  # seconds in which the store must say whether there is a note; torch would wait without a limit
T = TypeVar("T")
log = logging.getLogger(__name__)

_store: dist.Store | None = None  # where the ranks of this generation tell each other of aborts
_noted = False  # whether this rank has begun to write its note in this generation
_aborts = 0  # of all groups in this process
_own = threading.local()  # counted: whether this thread's aborts are counted already
_watched = False


class GroupHealth:
    """Aborts and errors of the process groups since this object was made."""

    def __init__(self) -> None:
        _watch()
        self._before = _aborts

    def trouble(self) -> str:
        """Why results cannot be trusted; "" if they can. Ask after the device has computed them."""
        if _aborts != self._before:
            return "a process group was aborted"
        return f"a process group reports an error: {found}" if (found := error()) else ""


def begin(store: dist.Store | None) -> None:
    """A generation begins. store: its own, where the ranks meet; None: there is no such store."""
    global _store, _noted
    _store, _noted = store, False


def count_abort() -> None:
    """Count an abort that another thread is about to begin, and tell the other ranks of it."""
    global _aborts
    _aborts += 1
    note_abort()


def note_abort() -> None:
    """Tell the other ranks that this one is about to abort a group. Only the first call in a generation does it."""
    global _noted
    store, before, _noted = _store, _noted, True
    if store is None or before:
        return
    try:
        _ask(lambda: store.add(_NOTE, 1), _NOTING)  # unlike `set`, it waits for the answer
    except Exception as error:
        log.warning("the other workers cannot be told of an abort: %r", error)


def abort_elsewhere() -> str:
    """Why an abort of another rank may have spoilt this rank's results; "" if there is no note of one.

    Ask after the device has computed the results.
    """
    store = _store
    if store is None:
        return ""
    try:
        noted = _ask(lambda: store.check([_NOTE]), _ANSWER)
    except Exception as error:
        return f"the workers' store does not say whether one of them has aborted a process group: {error!r}"
    return "another worker has aborted a process group" if noted else ""


def _ask(call: Callable[[], T], seconds: float) -> T:
    """The result of a call to the store. Raises `TimeoutError` if the store does not answer in time."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="spotrun-note", daemon=True).start()
    return future.result(seconds)


@contextmanager
def counted() -> Iterator[None]:
    """The aborts of this thread in this context are counted already."""
    _own.counted = True
    try:
        yield
    finally:
        _own.counted = False


def error() -> str:
    """The error that a process group reports; "" if none does."""
    return next(filter(None, map(_error, list(dist.distributed_c10d._world.pg_map))), "")


def _error(group: Any) -> str:
    """The error that a backend of the group reports; "" if there is none. Only NCCL's backend reports errors."""
    for device in group._device_types:
        get_error = getattr(group._get_backend(device), "get_error", None)
        if get_error is not None and (name := get_error().name) != "SUCCESS":
            return str(name)
    return ""


def _watch() -> None:
    """Count aborts from now on. torch cannot say whether a group was aborted.

    An abort counts before it begins, so it is known when the aborted kernels return.
    """
    global _watched
    if not _watched:
        for name in ("ProcessGroup", "Backend", "ProcessGroupNCCL"):
            kind = getattr(c10d, name, None)  # a torch without CUDA has no ProcessGroupNCCL
            if kind is not None and "abort" in vars(kind):
                kind.abort = _counted(kind.abort)
    _watched = True


def _counted(abort: Any) -> Any:
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(_own, "counted", False):
            count_abort()
        return abort(self, *args, **kwargs)

    return counted
