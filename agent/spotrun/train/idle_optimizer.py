"""An optimizer in a step that does not count."""

from __future__ import annotations

from typing import Any

import torch

_idle: set[torch.optim.Optimizer] = set()


def is_idle(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's `step` changes nothing now."""
    return optimizer in _idle


class IdleOptimizer:
    """Until `end`, the optimizer's `step` changes nothing and takes no time: the parameters have no gradients in it.

    Before and after `step`, the script sees the gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._optimizer = optimizer
        _idle.add(optimizer)
        self._hooks = (
            optimizer.register_step_pre_hook(self._begin_step),
            optimizer.register_step_post_hook(self._end_step),
        )

    def end(self) -> None:
        """From now on, the optimizer works."""
        for each in self._hooks:
            each.remove()
        _idle.discard(self._optimizer)

    def _begin_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter.grad is not None:
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None

    def _end_step(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside.clear()
