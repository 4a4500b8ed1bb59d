"""A GPU's collectives and memory, imitated on the CPU.

A sum of gradients does not notice that a peer is gone: it waits until it is aborted. Then it returns as if it had
succeeded, and the host goes on. So this module then fills the gradients with NaN. Without exact mode, it also fills the
models and the optimizers' states, because the host may have started the optimizer's step.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from spotrun.train import distributed, regroup

ABORT, END = 1.0, 0.5  # seconds that an abort, and the end of a group, take
PATIENCE = 60.0  # seconds until a collective that nobody aborts fails
_memory: list[Any] = []  # models and optimizers
_aborted: list[Any] = [None]  # the process group whose collectives were aborted last
_spoilt: list[Callable[[], bool]] = [lambda: False]  # see `spoil`
_really_end_groups = distributed._end_groups
_idle = threading.Event()  # no collective is under way
_idle.set()


def imitate() -> None:
    """From now on, this worker's device counts as a GPU."""
    regroup.survives_failure = lambda device: False
    distributed.abort_collectives = _abort
    distributed.synchronize = _synchronize
    distributed._has_nccl = lambda group: group.size() > 1
    distributed._end_groups = _end_groups


def spoil(aborted: Callable[[], bool]) -> None:
    """From now on, a peer's aborted kernel sends what it has to this worker, marked as valid.

    aborted: whether a peer has aborted by now.
    """
    _spoilt[0] = aborted


def hold(models: Iterable[Any], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """The models, which `run.ddp` made, and the optimizers are in the device's memory. Call it in the set-up.

    In exact mode, the host waits for the gradients, so nothing but the gradients is wrong after an abort.
    """
    if not json.loads(os.environ.get("SPOTRUN_CONTEXT", "{}")).get("exact"):
        _memory.extend([*models, *optimizers])
    for model in models:
        model.register_comm_hook(None, _exchange)


def hold_later(run: Any, optimizers: Callable[[], Iterable[torch.optim.Optimizer]]) -> None:
    """As `hold`, for what `run.train` or `run.fit` will make. optimizers: that it has made before the model."""
    make = run.ddp

    def held(*args: Any, **options: Any) -> Any:
        model = make(*args, **options)
        hold([model], optimizers())
        return model

    run.ddp = held


def _abort(group: Any, device: torch.device) -> None:
    """Kernels are told at once. The call takes longer, and the worker may be in the next group when it returns."""
    _aborted[0] = group
    time.sleep(ABORT)


def _end_groups(groups: list[Any], abort: threading.Thread | None) -> None:
    time.sleep(END)
    _really_end_groups(groups, abort)


def _synchronize(device: torch.device) -> None:
    _idle.wait()


def _exchange(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """As DDP does it: the mean over all workers."""
    group: Any = dist.group.WORLD
    buffer = bucket.buffer().mul_(1 / dist.get_world_size())
    _idle.clear()
    try:
        group._get_backend(buffer.device).allreduce([buffer]).get_future().wait()
    except RuntimeError:
        until = time.monotonic() + PATIENCE
        while _aborted[0] is not group and not _spoilt[0]():
            if time.monotonic() > until:
                raise
            time.sleep(0.002)
        # After a peer's abort, only the sum is wrong, and the optimizer uses it.
        _spoil(buffer, _memory if _aborted[0] is group else [])
    finally:
        _idle.set()
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def _spoil(buffer: torch.Tensor, memory: Iterable[Any]) -> None:
    tensors = [buffer]
    for each in memory:
        if isinstance(each, torch.optim.Optimizer):
            tensors += [value for state in each.state.values() for value in state.values()]
        else:
            tensors += [*each.parameters(), *each.buffers()]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.detach().fill_(float("nan"))
