"""Parameters that get no gradient, on CPUs with three or more workers.

There, `run.ddp` has DDP look for unused parameters, because DDP then keeps its buckets, and so the order of its sums.
The script has not asked for that. So here DDP gets to know that all parameters are used, and an unused one is an error,
as on GPUs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from spotrun.errors import SpotrunError


class Used:
    """Which parameters got a gradient. DDP refuses unused ones, but not on the CPU, where it looks for them.

    There, this class refuses them. So a script that would fail on GPUs fails on the CPU too, at the same place (the
    next forward pass), and with the same remedy.
    """

    def __init__(self) -> None:
        self._names: dict[nn.Parameter, str] = {}
        self._seen: set[str] = set()
        self._counts = False

    def include(self, module: nn.Module) -> None:
        """From now on, also look at these parameters, if they require gradients now."""
        for name, each in module.named_parameters():
            if each.requires_grad and each not in self._names:
                self._names[each] = name
                each.register_post_accumulate_grad_hook(partial(self._see, name))  # type: ignore[no-untyped-call]

    def begin(self, counts: bool) -> None:
        """A forward pass begins. counts: whether its backward pass averages gradients over the ranks."""
        missing = [name for name in self._names.values() if name not in self._seen]
        if self._seen and missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise SpotrunError(
                f"parameter {missing[0]}{more} got no gradient in the last step. If not every step uses every "
                "parameter, say so: run.ddp(module, find_unused_parameters=True)"
            )
        self._seen.clear()
        self._counts = counts

    def forget(self) -> None:
        """The last step does not count."""
        self._seen.clear()

    def _see(self, name: str, _: torch.Tensor) -> None:
        if self._counts:
            self._seen.add(name)


class Spare(nn.Module):
    """The module and one unused parameter: DDP warns, on every rank, if it looks for unused ones and finds none.

    DDP takes a parameter for unused if the result of the newest forward pass does not depend on it. But a script may
    use it in an earlier forward pass, beside the module, for a result of a class that DDP does not know, or in a
    backward pass of its own (`torch.utils.checkpoint`). So DDP gets a result that depends on all parameters.
    """

    def __init__(self, module: nn.Module, static: bool) -> None:
        """static: DDP learns from the results of the first step which parameters they depend on."""
        super().__init__()
        self.module = module
        self.unused = nn.Parameter(torch.zeros(1))
        self._own, self._static = list(module.parameters()), static

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What DDP gets. The caller of DDP gets `take()`."""
        found = self.module(*args, **kwargs)
        if self._static:
            return found
        self.__dict__["_result"] = found  # a module takes longer to set an attribute
        return _All.apply(*[each for each in self._own if each.requires_grad])  # type: ignore[no-untyped-call]

    def take(self, returned: Any) -> Any:
        """What the module has returned in the newest forward pass. returned: by DDP."""
        return returned if self._static else self.__dict__.pop("_result")


class _All(torch.autograd.Function):
    """A tensor that depends on all of these. No backward pass goes through it."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device="cpu")
