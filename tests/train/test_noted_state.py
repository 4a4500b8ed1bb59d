"""After a step that does not count: whether the state in memory is still that of the step before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from spotrun.train import failures, noted_state
from spotrun.train.idle_optimizer import IdleOptimizer
from spotrun.train.noted_state import NotedState
from spotrun.train.parallel import Parallel
from tests.train.generations import flatten

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "foreach": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "one by one": lambda parameters: torch.optim.Adam(parameters, foreach=False),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


class Script:
    """A script's objects, and a step of it."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.model = Parallel(layers, torch.device("cpu"))
        self.mean = AveragedModel(layers)
        self.optimizer = make(self.model.parameters())
        inner = [lr_scheduler.LinearLR(self.optimizer), lr_scheduler.ConstantLR(self.optimizer)]
        self.scheduler = lr_scheduler.SequentialLR(self.optimizer, inner, [2])
        self.scaler = torch.amp.GradScaler("cpu")
        self.data = iter(torch.randn(9, 3, 4))
        self.step()
        self.noted = NotedState(self.objects, [self.model])
        assert NotedState.of(self.objects, [self.model])

    @property
    def objects(self) -> list[Any]:
        return [self.model, self.mean, self.optimizer, self.scheduler, self.scaler]

    def backward(self) -> None:
        self.scaler.scale(self.model(next(self.data)).square().mean()).backward()

    def optimize(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def step(self) -> None:
        self.backward()
        self.optimize()

    def state(self) -> list[Any]:
        return [flatten({str(key): value for key, value in each.state_dict().items()}) for each in self.objects]


@pytest.fixture
def script() -> Iterator[Script]:
    yield Script()
    failures.void = False


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_step_up_to_its_gradients_changes_nothing_that_stays(make: Any) -> None:
    script = Script(make)
    for step in (1, 2):
        script.noted.note(step)
        before = script.state()
        for group in script.optimizer.param_groups:
            group["lr"] = 0.7
        script.backward()
        assert script.state() != before
        assert script.noted.put_back(step)
        assert script.state() == before
        script.step()
        assert not script.noted.put_back(step)


def test_the_rest_of_a_void_step_is_put_back(script: Script) -> None:
    """Its optimizer does nothing, but its scheduler and its scaler go on."""
    script.noted.note(1)
    before = script.state()
    script.backward()
    failures.void = True
    idle = IdleOptimizer(script.optimizer)
    script.optimize()
    idle.end()
    assert script.state() != before
    assert script.noted.put_back(1)
    assert script.state() == before


def scale_data(script: Script) -> None:
    next(script.model.parameters()).data.mul_(2)


def replace_data(script: Script) -> None:
    next(script.model.parameters()).data = torch.ones(8, 4)


def read_data(script: Script) -> None:
    float(next(script.model.parameters()).data.sum())  # it may change it later


@torch.no_grad()
def scale(script: Script) -> None:
    next(script.model.parameters()).mul_(2)


def average(script: Script) -> None:
    script.mean.update_parameters(script.model)


def replace_buffer(script: Script) -> None:
    script.model.module[1].running_mean = torch.ones(8)


def add_layer(script: Script) -> None:
    script.model.module.append(nn.Linear(2, 2))


def add_group(script: Script) -> None:
    script.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def reset_momentum(script: Script) -> None:
    for values in script.optimizer.state.values():
        values["exp_avg"].zero_()


def replace_momentum(script: Script) -> None:
    for values in script.optimizer.state.values():
        values["exp_avg"] = torch.zeros_like(values["exp_avg"])


def clear_state(script: Script) -> None:
    script.optimizer.state.clear()


def count(script: Script) -> None:
    next(iter(script.optimizer.state.values()))["calls"] = 3


def step_by_closure(script: Script) -> None:
    """In a void step, after which the closure makes gradients again."""
    failures.void = True
    script.optimizer.step(lambda: 1.0)


def give_parameter_to_collective(script: Script) -> None:
    script.noted.check_collective(([next(script.mean.parameters()).detach()],))


def forget(script: Script) -> None:
    script.noted.forget()


@pytest.mark.parametrize(
    "change",
    [
        scale_data,
        replace_data,
        read_data,
        scale,
        average,
        replace_buffer,
        add_layer,
        add_group,
        Script.step,
        forget,
        reset_momentum,
        replace_momentum,
        clear_state,
        count,
        step_by_closure,
        give_parameter_to_collective,
    ],
)
def test_what_may_have_changed_the_state(script: Script, change: Callable[[Script], None]) -> None:
    script.noted.note(1)
    change(script)
    assert not script.noted.put_back(1)
    script.noted.note(2)
    assert not script.noted.put_back(1)


def test_a_collective_on_other_tensors_changes_nothing(script: Script) -> None:
    script.noted.note(1)
    script.noted.check_collective((torch.ones(3), [torch.ones(2)], 3))
    assert script.noted.put_back(1)


def test_an_optimizer_may_keep_anything(script: Script) -> None:
    script.optimizer.state["step"] = 1  # type: ignore[index]
    script.noted.note(1)
    assert script.noted.put_back(1)
    script.optimizer.state["step"] = 2  # type: ignore[index]
    assert not script.noted.put_back(1)


class Own:
    """An object that a script tracks. It may change at any time."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def __call__(self, epoch: int) -> float:
        return 1.0


class Extra(nn.Linear):
    def get_extra_state(self) -> int:
        return 3


class Renamed(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"calls": 3}


class Counting(nn.Linear):
    def _save_to_state_dict(self, *args: Any) -> None:
        super()._save_to_state_dict(*args)


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_state_dict_pre_hook(lambda *_: None)
    return module


def saved_metric() -> nn.Module:
    """A metric with its values in its state_dict."""
    metric = torchmetrics.MeanMetric()
    metric.persistent(True)
    return metric


def view_of_a_larger_tensor() -> nn.Module:
    """Its weight is a part of another tensor."""
    module = nn.Linear(2, 2)
    module.weight.data = torch.ones(3, 2)[:2]
    return module


class Lookahead(torch.optim.Optimizer):
    """As timm's: it does not call `super().__init__`."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups = base, base.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()


def large() -> nn.Module:
    """As a codebook that each forward pass changes by its `data`."""
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.ones(noted_state.SMALL))
    return module


def with_lambda(script: Script, call: Any) -> Any:
    return lr_scheduler.LambdaLR(script.optimizer, call)


def with_tensor(script: Script, value: torch.Tensor) -> Any:
    return torch.optim.AdamW(script.model.parameters(), lr=value)


@pytest.mark.parametrize(
    ("more", "known"),
    [
        (lambda _: Own(), False),
        (lambda _: Extra(2, 2), False),
        (lambda _: nn.Sequential(Renamed(2, 2)), False),
        (lambda _: Parallel(Renamed(2, 2), torch.device("cpu")), False),
        (lambda _: Counting(2, 2), False),
        (lambda _: hooked(), False),
        (lambda _: large(), False),
        (lambda _: view_of_a_larger_tensor(), False),
        (lambda script: Lookahead(script.optimizer), False),
        (lambda script: with_lambda(script, Own()), False),
        (lambda script: with_lambda(script, lambda epoch: 0.9), True),
        (lambda script: with_tensor(script, torch.tensor(0.1)), False),
        (lambda _: nn.Linear(2, 2), True),
        (lambda _: nn.Sequential(torchmetrics.MeanMetric()), True),
        (lambda _: saved_metric(), False),
    ],
)
def test_which_objects_can_be_kept_in_memory(script: Script, more: Callable[[Script], Any], known: bool) -> None:
    found = NotedState.of([*script.objects, more(script)], [script.model])
    assert (found is not None) == known


def test_a_note_that_takes_too_long_is_made_again_later(script: Script) -> None:
    """Until then, no optimizer has a hook."""
    script.noted.end_step(1, step_seconds=1e9)
    assert (script.noted.next, len(script.optimizer._optimizer_step_pre_hooks)) == (0, 1)
    script.noted.end_step(2, step_seconds=1e-9)
    assert (script.noted.next, len(script.optimizer._optimizer_step_pre_hooks)) == (2 + noted_state.AGAIN, 0)
    assert not script.noted.put_back(2)  # nothing has watched it
    script.noted.end_step(script.noted.next, step_seconds=1e9)
    assert script.noted.put_back(2 + noted_state.AGAIN)
    script.step()
    assert not script.noted.put_back(2 + noted_state.AGAIN)
