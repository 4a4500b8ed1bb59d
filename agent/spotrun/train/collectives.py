"""The script's own collectives, such as those that add up metrics, and barriers.

If a peer is gone, a collective fails. A script could only end then. So in a step, the script does not get the error:
the collective returns without a result, and the step does not count, as if `run.backward` had failed. DDP calls its
collectives in C++, which this module does not touch: see `Parallel.forward`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from spotrun.errors import MisuseError, SpotrunError

# Methods of a process group that `torch.distributed` calls for collectives and messages: those of torch 2.13, which
# calls `all_gather_single`, and those of torch 2.15.
_NAMES = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
_LEFT = (
    "this process group has ended: when the nodes change, another one takes its place. Do not keep "
    "torch.distributed.group.WORLD in a variable: leave `group` out of the call"
)
MESSAGES = ("recv", "recv_anysource", "send")  # between two ranks
state_of = ""  # the tracked object whose `state_dict` is called now
_handle: Callable[[Exception], bool] | None = None  # True: the error is handled, and is not raised
_thread = 0  # the id of the thread whose errors are handled
_see: Callable[[str, Iterable[Any]], None]  # gets what that thread gives to collectives


class _Done(c10d.FakeWork):
    """Work that has ended."""

    def is_completed(self) -> bool:
        return True


def watch(handle: Callable[[Exception], bool], see: Callable[[str, Iterable[Any]], None]) -> None:
    """Watch the collectives that this thread calls, from now on.

    handle: gets their errors, and returns False to raise them. see: gets their names and arguments, before the calls.
    """
    global _handle, _see, _thread
    if _handle is None:
        for name in _NAMES:
            if name in vars(c10d.ProcessGroup):
                setattr(c10d.ProcessGroup, name, _guarded(getattr(c10d.ProcessGroup, name), _Done))
        c10d.Work.wait = _guarded(c10d.Work.wait, lambda: True)  # type: ignore[method-assign]
    _handle, _see, _thread = handle, see, threading.get_ident()


def handled(error: Exception) -> bool:
    """Whether the script's thread may go on after this error of a collective, in a step that does not count."""
    return _handle is not None and threading.get_ident() == _thread and _handle(error)


def _guarded(call: Callable[..., Any], result: Callable[[], Any]) -> Callable[..., Any]:
    """The call, or `result()` if its error is handled. For a collective, that is work that is done."""

    @functools.wraps(call)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == _thread:
            if state_of:
                raise MisuseError(
                    f"run.track({state_of}=…): state_dict() calls a collective ({call.__name__}), but not all workers "
                    "call state_dict() at the same time. Have the collective in the step, and keep its result"
                )
            _see(call.__name__, (*args, *kwargs.values()))
        try:
            if isinstance(args[0], c10d.ProcessGroup) and args[0] not in distributed_c10d._world.pg_map:
                raise SpotrunError(_LEFT)
            return call(*args, **kwargs)
        except Exception as error:
            if not handled(error):
                raise
            return result()

    return guarded
