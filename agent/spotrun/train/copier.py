"""Copying tensors into a slot, and what that costs training.

Tensors of a GPU are copied beside training, if only a tracked optimizer's step changes them (see `copy_guard`). All
others are copied before training goes on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec

import torch

from spotrun.state.control import Control
from spotrun.train.staging import Copying, DelayedCopy, Stage

log = logging.getLogger(__name__)

_P = ParamSpec("_P")


@dataclass
class _Stall:
    """What a snapshot cost training."""

    seconds: float
    copying: Copying | None  # copies that may delay the device; None when their delay is part of `seconds`


class Copier:
    """Copies tensors of this worker into slots, and does in a thread what training need not wait for.

    control: receives `stall`. stage: copies tensors of a GPU; None: all tensors are on the CPU.
    """

    def __init__(self, control: Control, stage: Stage | None) -> None:
        self._control, self._stage = control, stage
        self._copying: Copying | None = None  # copies that wait for their guard
        self._torn: frozenset[str] = frozenset()  # tensors that changed too early: training waits for their copies
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._running: Future[None] | None = None
        self._hurry = threading.Event()  # something waits for the work in the thread
        self._stalls = deque([_Stall(0.0, None)], maxlen=3)  # the first few snapshots are taken at any cost
        self.known: float | None = None  # what `stall` returns; None: call it

    def stall(self) -> float | None:
        """Seconds that a snapshot delays training, without layouts. None: not known yet for the last snapshot.

        The minimum of the last few: the process may have been stopped during one.
        """
        if self.known is not None:
            return self.known
        for each in self._stalls:
            if each.copying is not None and (seconds := each.copying.seconds()) is not None:
                each.seconds += seconds
                each.copying = None
                self._control.stall += seconds
        if self._stalls[-1].copying is not None:
            return None
        if all(each.copying is None for each in self._stalls):
            self.known = min(each.seconds for each in self._stalls)
            return self.known
        return min(each.seconds for each in self._stalls if each.copying is None)

    def guard(self) -> None:
        """Call before tensors that are copied beside training change: the device waits for their copies."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.guard()

    def doubt(self) -> None:
        """Call instead of `guard` while a CUDA graph is recorded: its replay changes tensors unnoticed."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.doubt()

    def settle(self, timeout: float | None = None) -> None:
        """Wait until the work in the thread is done. Raises its error, or `TimeoutError`.

        The filling of a slot with pages stops: a later snapshot goes on with it.
        """
        self._hurry.set()
        if self._running is not None:
            self._running.result(timeout)

    def _do(self, work: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Have the thread do this work. It may take its time until `settle` is called."""
        self._hurry.clear()
        self._running = self._pool.submit(work, *args, **kwargs)

    @property
    def _busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def _collect(self) -> None:
        """Raise the error of the work in the thread once, if it failed. It must be done."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def _copy(
        self, tensors: dict[str, torch.Tensor], views: dict[str, torch.Tensor], beside: set[int], later: bool = False
    ) -> Copying | None:
        """Copy the tensors into the views of the same names. None: the copies are complete.

        beside: data pointers of tensors that nothing changes before the next `guard`. later: nothing changes any tensor
        before the next `guard`.
        """
        if later and self._stage is None:
            pairs = [(tensor.resolve_conj().resolve_neg(), views[name]) for name, tensor in tensors.items()]
            return Copying(DelayedCopy(pairs), {})
        staged = {}
        for name, tensor in tensors.items():
            if self._stage is not None and self._stage.takes(tensor):
                staged[name] = tensor
            else:
                views[name].copy_(tensor.resolve_conj().resolve_neg())
        if self._stage is None or not staged:
            return None
        # An inference tensor has no version, so a change would go unnoticed.
        aside = {
            name: tensor
            for name, tensor in staged.items()
            if tensor.data_ptr() in beside and name not in self._torn and not tensor.is_inference()
        }
        pairs = [(tensor, views[name]) for name, tensor in staged.items()]
        return Copying(self._stage.start(pairs, [name in aside for name in staged]), aside)

    def _count(self, seconds: float, more: float, copying: Copying | None) -> None:
        """Count what a snapshot cost: `seconds`, the time of its copies on the device, and `more`, only this once."""
        self._stalls.append(_Stall(seconds, copying))
        self.known = None
        self._control.stall += seconds + more

    def _tear(self, step: int, changed: list[str]) -> None:
        """From now on, copy these tensors before training goes on: they changed while they were copied."""
        log.warning(
            "the snapshot of step %d is dropped: %s changed during the copy, before run.backward had ended. "
            "From now on it is copied first, and the GPU waits for that copy",
            step,
            changed[0] if len(changed) == 1 else f"{changed[0]} and {len(changed) - 1} other tensors",
        )
        self._torn |= frozenset(changed)
