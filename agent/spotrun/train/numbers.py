"""Numbers that a script logs: plain ones, and those that a GPU has not computed yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch


def to_number(value: Any) -> float:
    """The value as a number, as it is now. May raise any exception if the value is not a number."""
    if isinstance(value, torch.Tensor):
        return float(value.item())  # raises if there is more than one element
    if isinstance(value, numpy.ndarray):
        return float(value.item())
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"a {type(value).__name__}; run.log_text keeps text")
    return float(value)


def is_on_gpu(value: Any) -> bool:
    """Whether reading the value would wait for a CUDA device."""
    return isinstance(value, torch.Tensor) and value.is_cuda


class Group:
    """One-element tensors of one CUDA device on their way to the host.

    The copy is queued on the current stream, behind the work that computes the tensors. So the copy has the values that
    the tensors have at this point of the script, and this thread does not wait.
    """

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad(), torch.cuda.device(values[0].device):
            same = len({each.dtype for each in values}) == 1 and not values[0].is_complex()
            parts = [each.detach().reshape(()) for each in values]
            stacked = torch.stack(parts if same else [each.to(torch.float64) for each in parts])
            self._host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True, device="cpu")
            self._host.copy_(stacked, non_blocking=True)
            self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def ready(self) -> bool:
        """Whether the values are there. Raises RuntimeError if the device has failed."""
        return bool(self._event.query())

    def number(self, index: int) -> float:
        return float(self._host[index].item())


class Later:
    """A number of a `Group`."""

    __slots__ = ("_group", "_index")

    def __init__(self, group: Group, index: int) -> None:
        self._group, self._index = group, index

    def ready(self) -> bool:
        return self._group.ready()

    def number(self) -> float:
        """The number. Call this only once it is ready."""
        return self._group.number(self._index)
