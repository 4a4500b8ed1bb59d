"""Making an optimizer's state before the values arrive.

New memory would take a large part of the transfer's time. On a GPU, two states would need room at the same time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# Classes whose step with a learning rate of 0 changes no parameter, and needs no closure. With `capturable`, Adam
# divides by the learning rate (torch 2.13).
_KNOWN = (optim.Adam, optim.AdamW, optim.SGD, optim.NAdam, optim.RAdam, optim.Adamax, optim.RMSprop, optim.Adagrad)


def allocate(optimizer: optim.Optimizer) -> bool:
    """Make the state by a step with gradients and learning rates of 0, as `torch.distributed.checkpoint` does.

    False: there is no new state: it exists already, there is too little memory, or the optimizer or its hooks might do
    more than make the state. The values are not those of a new optimizer: load a state, or `clear` the optimizer.
    """
    groups = optimizer.param_groups
    parameters = [each for group in groups for each in group["params"]]
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    hooks = hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    if type(optimizer) not in _KNOWN or hooks or optimizer.state or any(each.grad is not None for each in parameters):
        return False
    rates = [group["lr"] for group in groups]
    if not all(isinstance(rate, float) for rate in rates) or any(
        group.get("differentiable") or group.get("capturable") for group in groups
    ):
        return False
    if any(_divides_by_zero(group) for group in groups):
        return False
    try:
        for group in groups:
            group["lr"] = 0.0
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        type(optimizer).step(optimizer)
    except torch.OutOfMemoryError:
        clear(optimizer)
        return False
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for parameter in parameters:
            parameter.grad = None
    return True


def clear(optimizer: optim.Optimizer) -> None:
    """Make the optimizer new again."""
    optimizer.state.clear()


def _divides_by_zero(group: dict[str, Any]) -> bool:
    """Whether a step with gradients of 0 makes parameters NaN: `eps` keeps their divisors from 0, if it is not 0 too.

    The usual 1e-8 is 0 in float16.
    """
    types = {each.dtype for each in group["params"] if each.requires_grad}
    return "eps" in group and any(not torch.tensor(group["eps"], dtype=each) for each in types)
