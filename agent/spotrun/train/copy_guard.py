"""Which tensors may be copied beside training, and the moment when they must be safe.

A snapshot's copies of a GPU's state run beside the next step until the guard, which is the end of the step's last
backward pass, an optimizer's step, or the end of `run.steps`. What changes a tensor before that would tear its copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spotrun.train.snapshot import Writer
from spotrun.train.staging import Stage


class CopyGuard:
    """Calls the writer's guard, and knows of which tensors that guard is early enough.

    Call it at each such moment; as a context, it is called at the end.
    """

    def __init__(self, writer: Writer, stage: Stage, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._writer, self._stage, self._optimizers = writer, stage, optimizers
        self._captured: set[int] = set()  # `id` of optimizers
        self._called = False  # in the step under way
        self._trusted = False  # it was called in the step before
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)

    def __call__(self) -> None:
        if self._stage.capturing():
            self._writer.doubt()
        else:
            self._called = True
            self._writer.guard()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self()

    def end_step(self) -> None:
        """A step ended. One without a guard is replayed from a CUDA graph, or the script goes its own way."""
        self._trusted, self._called = self._called, False

    def beside(self) -> set[int]:
        """Data pointers of tensors that nothing is known to change but a tracked optimizer's step.

        Left out is an optimizer whose step is, or may be, in a CUDA graph: its replay calls no guard and raises no
        version. All are left out if the last step had no guard.
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
