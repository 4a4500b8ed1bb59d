"""Whether the tracked state is still that of the step before, after a step that does not count.

gloo fails before it changes a parameter. On a GPU, this is so only in exact mode (`train/exactness.py`). If neither an
optimizer nor the script has changed the state in the step, the state in memory is still whole, and no snapshot is
needed. Small things that change before the gradients are exchanged, such as the statistics of BatchNorm, are put back.

An in-place operation on a tensor raises its `_version`. An operation on its `data` does not, nor does a collective
(torch 2.13). So after a step that uses the `data` of a parameter, or a collective on a tracked tensor, the state comes
from a snapshot. The same holds for a script that tracks objects of its own.
"""

from __future__ import annotations

import logging
import sys
import time
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.hooks import RemovableHandle

from spotrun.state.control import MOST
from spotrun.train.encoding import Stateful
from spotrun.train.idle_optimizer import is_idle
from spotrun.train.parallel import Parallel
from spotrun.train.sampler import ElasticSampler

SMALL = 1 << 20  # bytes of all buffers together: so many are copied in each step, not more
SHARE = 0.002  # of a step: what a note may take, unless `always`; 11 µs with 8 parameters, 1.4 ms with 1,000
AGAIN = 100  # steps from such a note to the next one: it may take a smaller part then

_State = tuple[Any, Any, Any, int]  # a parameter, the name of a value, the value, its version

# Whether an optimizer, a use of a parameter's `data`, or a collective may have changed the state in this step.
_touched = False
_watches = False

log = logging.getLogger(__name__)


class NotedState:
    """Notes the state of a step, and tells later whether it is still the same. For objects that are known: see `of`."""

    @classmethod
    def of(cls, objects: Collection[Stateful], models: Sequence[Parallel], always: bool = False) -> NotedState | None:
        """None if an object may change in any way while a step computes gradients.

        objects: what `run.track` names. models: what `run.ddp` made. always: note each step, whatever it costs.
        """
        try:
            return cls(objects, models, always) if cls._knows(objects, models) else None
        except Exception:  # an object of the script is not what it seems
            return None

    @staticmethod
    def _knows(objects: Collection[Stateful], models: Sequence[Parallel]) -> bool:
        modules = [*models, *(each for each in objects if isinstance(each, nn.Module))]
        small = sum(each.nbytes for each in _buffers(modules)) <= SMALL
        # A parameter that is a part of another tensor changes with it, and does not show it.
        whole = all(each.untyped_storage().nbytes() <= each.nbytes for each in _parameters(modules))
        return small and whole and all(map(_is_known, [*models, *objects]))

    def __init__(self, objects: Collection[Stateful], models: Sequence[Parallel], always: bool = False) -> None:
        self._always = always
        self._lost = False  # whether an object of the script is not what it seems
        self.next = 0  # no step before this one is noted: a note takes too large a part of a step
        self.unsure = False  # whether a message of this step may be wrong, because an abort has spoilt it
        self._seconds = 0.0  # that a note takes; 0: unknown
        self._places: set[int] | None = None  # where the memory of the noted tensors is; None: not known yet
        self._modules = [*models, *(each for each in objects if isinstance(each, nn.Module))]
        self._optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
        self._schedulers = [each for each in objects if isinstance(each, lr_scheduler.LRScheduler)]
        self._schedulers += [inner for each in self._schedulers for inner in inside(each)]
        self._scalers = [each for each in objects if isinstance(each, torch.amp.GradScaler)]
        self._step = -1  # of the noted state; -1: none is noted
        self._hooks: list[RemovableHandle] = []
        _watch()
        self._parameters, self._buffers = _parameters(self._modules), _buffers(self._modules)
        self._copies = [torch.empty_like(each) for each in self._buffers]
        self._versions: list[int] = []
        self._states: list[_State] = []
        self._groups: list[dict[str, Any]] = []
        self._fields: list[dict[str, Any]] = []
        self._scales: list[list[Any]] = []

    def begin(self, step: int, step_seconds: float, inside: bool) -> None:
        """A generation begins with this step. inside: the script is in its loop over steps."""
        self.unsure = False
        if inside and not self._lost:
            self.end_step(step, step_seconds)

    def end_step(self, step: int, step_seconds: float) -> None:
        """A step has ended: note the state. If it may be wrong, forget it. Call it at `next` and the steps after it.

        step_seconds: of a usual step; 0: unknown.
        """
        began = time.perf_counter()
        try:
            self.note(step)
        except Exception as error:
            self._do_without(error)
            return
        took = time.perf_counter() - began
        self._seconds = 0.5 * (self._seconds + took) if self._seconds else took
        if step_seconds and self._seconds > SHARE * step_seconds and not self._always:
            self._rest(step + AGAIN)
        if self.unsure:
            self.unsure = False
            self.forget()

    def note(self, step: int) -> None:
        """Note the state, which is that of this step."""
        global _touched
        if not self._hooks:  # now: in the set-up, an optimizer with a hook would not get its state early
            self._hooks = [each.register_step_pre_hook(_touch) for each in self._optimizers]
        self._step, self._places, _touched = step, None, False
        self._versions = [each._version for each in self._parameters]
        if self._copies:
            torch._foreach_copy_(self._copies, [each.detach() for each in self._buffers])
        self._states = _states(self._optimizers)
        self._groups = [
            {key: value for key, value in group.items() if key != "params"} for group in _groups(self._optimizers)
        ]
        self._fields = [dict(vars(each)) for each in self._schedulers]
        self._scales = [[None if each is None else each.clone() for each in _scale(item)] for item in self._scalers]

    def forget(self) -> None:
        """No state is noted any more."""
        self._step = -1

    def check_collective(self, values: Iterable[Any]) -> None:
        """The script gives these to a collective, which may write into their tensors."""
        global _touched
        if self._step >= 0 and not _touched and (given := list(_tensors(values))):
            if self._places is None:
                noted = [value for _, _, value, _ in self._states if isinstance(value, torch.Tensor)]
                self._places = {_place(each) for each in [*self._parameters, *noted]}
            _touched = any(_place(each) in self._places for each in given)

    def put_back(self, step: int) -> bool:
        """Put back what is small. Returns whether all of the state is that of this step then."""
        try:
            return not self._lost and self._put_back(step)
        except Exception as error:
            self._do_without(error)
            return False

    def _do_without(self, error: Exception) -> None:
        log.warning("after a failure, the state comes from the newest snapshot: %s", error)
        self._lost = True
        self._rest(MOST)

    def _rest(self, until: int) -> None:
        """Note no state before this step. Until then, a step does not wait for the optimizers' hooks."""
        self.next = until
        self.forget()
        for each in self._hooks:
            each.remove()
        self._hooks.clear()

    def _put_back(self, step: int) -> bool:
        groups = _groups(self._optimizers)
        if (
            step != self._step
            or _touched
            or not _same(_parameters(self._modules), self._parameters)
            or not _same(_buffers(self._modules), self._buffers)
            or [each._version for each in self._parameters] != self._versions
            or not _equal(_states(self._optimizers), self._states)
            or len(groups) != len(self._groups)
        ):
            return False
        if self._copies:
            torch._foreach_copy_([each.detach() for each in self._buffers], self._copies)
        for group, values in zip(groups, self._groups, strict=True):
            group.update(values)
        for scheduler, fields in zip(self._schedulers, self._fields, strict=True):
            vars(scheduler).clear()
            vars(scheduler).update(fields)
        for scaler, noted in zip(self._scalers, self._scales, strict=True):
            scaler._scale, scaler._growth_tracker = noted
        return True


def _states(optimizers: Iterable[torch.optim.Optimizer]) -> list[_State]:
    """What the optimizers keep: each value with the version that it has."""
    return [
        (parameter, name, value, getattr(value, "_version", 0))
        for optimizer in optimizers
        for parameter, values in optimizer.state.items()
        for name, value in (values.items() if isinstance(values, dict) else ((None, values),))
    ]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among these values, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _equal(found: Sequence[_State], noted: Sequence[_State]) -> bool:
    """Whether it is the same. A value that is no tensor must be the same object."""
    return len(found) == len(noted) and all(
        one[0] is other[0] and one[1] == other[1] and one[2] is other[2] and one[3] == other[3]
        for one, other in zip(found, noted, strict=True)
    )


def _same(found: Sequence[torch.Tensor], noted: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(noted) and all(one is other for one, other in zip(found, noted, strict=True))


def _parameters(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    return list(dict.fromkeys(each for module in modules for each in module.parameters()))


def _buffers(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    return list(dict.fromkeys(each for module in modules for each in module.buffers()))


def _groups(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for each in optimizers for group in each.param_groups]


def _scale(scaler: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The state of a `GradScaler` (torch 2.13). Both are None until it is used for the first time."""
    return (scaler._scale, scaler._growth_tracker) if scaler.is_enabled() else (None, None)


def inside(scheduler: Any) -> list[Any]:
    """The schedulers that this one calls."""
    inner = getattr(scheduler, "_schedulers", [])
    return [*inner, *(deeper for each in inner for deeper in inside(each))]


def _is_known(item: object) -> bool:
    """Whether nothing of it but its tensors, and what `NotedState` notes, changes while a step computes gradients."""
    if isinstance(item, nn.Module):
        return not any(map(_has_more, item.modules()))
    if isinstance(item, torch.optim.Optimizer):
        values = [value for group in item.param_groups for key, value in group.items() if key != "params"]
        plain = type(item).state_dict is torch.optim.Optimizer.state_dict
        if not plain or any(isinstance(value, torch.Tensor) for value in values):
            return False
        return not (item._optimizer_state_dict_pre_hooks or item._optimizer_state_dict_post_hooks)
    if isinstance(item, lr_scheduler.LRScheduler):
        calls = getattr(item, "lr_lambdas", [])
        plain = all(each is None or isinstance(each, types.FunctionType) for each in calls)
        return plain and type(item).__module__ == lr_scheduler.__name__ and all(map(_is_known, inside(item)))
    if isinstance(item, torch.amp.GradScaler) or type(item) is ElasticSampler:
        return True
    return getattr(type(item), "changes_with_optimizer", False)  # an object of spotrun


def _has_more(module: nn.Module) -> bool:
    """Whether the module's state has more than parameters and buffers."""
    kind, plain = type(module), nn.Module
    return (
        not (kind.state_dict in (plain.state_dict, Parallel.state_dict) or _saves_nothing(module))
        or kind.get_extra_state is not plain.get_extra_state
        or not kind._save_to_state_dict.__module__.startswith("torch.nn.")
        or bool(module._state_dict_hooks or module._state_dict_pre_hooks)
    )


def _saves_nothing(module: nn.Module) -> bool:
    """Whether it is a metric of torchmetrics. Its state_dict has its values only if the script asks for that."""
    metrics: Any = sys.modules.get("torchmetrics")
    kept: Any = getattr(module, "_persistent", {})
    return metrics is not None and type(module).state_dict is metrics.Metric.state_dict and not any(kept.values())


def _touch(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """An optimizer begins a step.

    In a void step it does nothing (see `IdleOptimizer`), unless a closure computes gradients again.
    """
    global _touched
    if _touched:
        return
    given = (*args[1:], *options.values())  # torch counts the optimizer itself among the arguments
    _touched = not is_idle(optimizer) or any(each is not None for each in given)


def _watch() -> None:
    """From now on, notice each use of a parameter's `data`."""
    global _watches
    if _watches:
        return
    _watches = True
    data: Any = torch.Tensor.data

    def read(parameter: nn.Parameter) -> Any:
        _touch_data()
        return data.__get__(parameter)

    def write(parameter: nn.Parameter, value: torch.Tensor) -> None:
        _touch_data()
        data.__set__(parameter, value)

    nn.Parameter.data = property(read, write)  # type: ignore[assignment]


def _touch_data() -> None:
    global _touched
    _touched = True
