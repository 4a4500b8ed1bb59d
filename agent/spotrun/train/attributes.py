"""What the objects of a script have besides their saved state, such as the results of a validation so far.

If a worker is lost in a validation, the others validate again. Then a list in the module must not have the results of
the first attempt. Values of classes that are not known here stay as they are.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

MOST = 64 << 20  # bytes of all copies of tensors: further tensors are not copied, only watched

_Step = Callable[[], object]  # puts something back
_MODULE = frozenset(vars(nn.Module())) - {"_buffers"}  # what each module has; the parameters are in the saved state


class Attributes:
    """The attributes of these objects, and what is in them now."""

    def __init__(self, objects: Iterable[object]) -> None:
        self._seen: set[int] = set()
        self._steps: list[_Step] = []
        self._room = MOST
        self._error: Exception | None = None
        try:
            for each in objects:
                self._keep_object(each)
        except Exception as error:  # an object of the script is not what it seems; training goes on
            self._error = error

    def put_back(self) -> None:
        """Put back what was there. Raises `DistError`, so that the script starts again, if that is not possible."""
        try:
            if self._error is not None:
                raise self._error
            with torch.inference_mode():  # a tensor that was made in this mode changes in no other one
                for step in self._steps:
                    step()
        except Exception as error:
            raise dist.DistError(f"cannot put back what the script had before a validation: {error!r}") from error

    def _keep_object(self, item: object) -> None:
        values = vars(item)
        kept = {name: value for name, value in values.items() if not isinstance(item, nn.Module) or name not in _MODULE}
        if isinstance(item, nn.Module):
            for each in item.children():
                self._keep(each)

        def put_back() -> None:
            for name in values.keys() - kept.keys() - _MODULE:
                del values[name]
            values.update(kept)

        self._steps.append(put_back)
        for value in kept.values():
            self._keep(value)

    def _keep(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        if isinstance(value, nn.Module | torch.Tensor | list | deque | set | dict):
            self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._keep_object(value)
        elif isinstance(value, torch.Tensor):
            copied = value.nbytes <= self._room
            self._room -= value.nbytes * copied
            self._steps.append(_copy_of(value) if copied else _unchanged(value))
        elif isinstance(value, list | deque | set | dict):
            self._steps.append(_keep_items(value))
            for each in list(value.values() if isinstance(value, dict) else value):
                self._keep(each)


def _keep_items(given: Any) -> _Step:
    items = list(given.items() if isinstance(given, dict) else given)

    def put_back() -> None:
        found = list(given.items() if isinstance(given, dict) else given)
        if len(found) != len(items) or any(map(_differ, found, items)):
            given.clear()
            if isinstance(given, list | deque):
                given.extend(items)
            else:
                given.update(dict(items) if isinstance(given, dict) else items)  # a Counter would count pairs

    return put_back


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return any(map(operator.is_not, one, other))
    return one is not other


def _copy_of(tensor: torch.Tensor) -> _Step:
    copy = tensor.detach().clone()
    return lambda: tensor.detach().copy_(copy)


def _unchanged(tensor: torch.Tensor) -> _Step:
    version = _version(tensor)

    def check() -> None:
        if version is None or _version(tensor) != version:
            raise ValueError(f"a tensor has changed, and tensors of more than {MOST >> 20} MiB are not copied")

    return check


def _version(tensor: torch.Tensor) -> int | None:
    """How often the tensor has changed; None: it does not count that."""
    return None if tensor.is_inference() else tensor._version
