"""Which tensors may be copied beside training, and when their copies must be complete.

A snapshot's copies of a GPU's state run beside the next step. They must be complete at the guard: the end of the step's
last backward pass, an optimizer's step, or the end of `run.steps`. A tensor that changes earlier has a torn copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spotrun.train.copier import Copier
from spotrun.train.staging import Stage


class CopyGuard:
    """Calls the copier's guard, and knows for which tensors that guard comes early enough.

    Call it at each such moment. As a context manager, it calls itself at the end.
    """

    def __init__(self, copier: Copier, stage: Stage, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._copier, self._stage, self._optimizers = copier, stage, optimizers
        self._captured: set[int] = set()  # `id` of optimizers
        self._called = False  # in this step
        self._trusted = False  # it was called in the last step
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)

    def __call__(self) -> None:
        if self._stage.capturing():
            self._copier.doubt()
        else:
            self._called = True
            self._copier.guard()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self()

    def end_step(self) -> None:
        """A step has ended. If it called no guard, a CUDA graph replayed it, or the loop is unusual."""
        self._trusted, self._called = self._called, False

    def beside(self) -> set[int]:
        """Data pointers of tensors that, as far as is known, only a tracked optimizer's step changes.

        Without the tensors of an optimizer whose step may be in a CUDA graph: a replay calls no guard and raises no
        version. Empty if the last step called no guard.
        """
        pointers: set[int] = set()
        for optimizer in self._optimizers if self._trusted else ():
            groups = optimizer.param_groups
            if id(optimizer) in self._captured or any(group.get("capturable") for group in groups):
                continue
            pointers |= {parameter.data_ptr() for group in groups for parameter in group["params"]}
            for values in optimizer.state.values():
                pointers |= {value.data_ptr() for value in values.values() if isinstance(value, torch.Tensor)}
        return pointers

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._stage.capturing():
            self._captured.add(id(optimizer))
        self()
