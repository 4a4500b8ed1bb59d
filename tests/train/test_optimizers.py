"""What spotrun does with the script's optimizers: steps that do not count, and the room for a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from spotrun.state import slots
from spotrun.train import optimizer_state, training_state
from spotrun.train.encoding import Encoder
from spotrun.train.idle_optimizer import IdleOptimizer
from spotrun.train.slot_files import Reader
from spotrun.train.snapshot import Writer
from spotrun.train.training_state import TrainingState, load
from spotrun.train.transfer import Received
from tests.train.blocks import block

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    (optim.Adam, {"lr": 0.1, "weight_decay": 0.1, "fused": True}),
    (optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "centered": True}),
]


def stepped(make: Any, options: dict[str, Any]) -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 40)
    optimizer = make(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(("make", "options"), KINDS)
def test_a_step_that_does_not_count_changes_nothing(make: Any, options: dict[str, Any]) -> None:
    model, optimizer = stepped(make, options)
    weight, state = model.weight.detach().clone(), {key: value.clone() for key, value in leaves(optimizer)}
    gradient = model.weight.grad
    idle = IdleOptimizer(optimizer)
    optimizer.step()
    assert model.weight.equal(weight)
    assert all(state[key].equal(value) for key, value in leaves(optimizer))
    assert model.weight.grad is gradient
    idle.end()
    optimizer.step()
    assert not model.weight.equal(weight)


def leaves(optimizer: Any) -> list[tuple[Any, torch.Tensor]]:
    states = optimizer.state_dict()["state"]
    return [
        ((index, name), each) for index, state in states.items() for name, each in state.items() if each is not None
    ]


@pytest.mark.parametrize(("make", "options"), KINDS)
def test_room_for_a_state_changes_no_parameter(make: Any, options: dict[str, Any]) -> None:
    wanted = dict(leaves(stepped(make, options)[1]))
    model = nn.Linear(3, 40)
    weight, optimizer = model.weight.detach().clone(), make(model.parameters(), **options)
    assert optimizer_state.allocate(optimizer)
    assert model.weight.equal(weight)
    assert model.weight.grad is None
    assert optimizer.param_groups[0]["lr"] == options["lr"]
    assert {key: (each.shape, each.dtype) for key, each in leaves(optimizer)} == {
        key: (each.shape, each.dtype) for key, each in wanted.items()
    }
    optimizer_state.clear(optimizer)
    assert leaves(optimizer) == []


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "options"), KINDS)
def test_cuda_a_state_is_loaded_into_the_memory_on_the_device(make: Any, options: dict[str, Any]) -> None:
    """The state that was made before takes the values, so the device never has two of them."""
    torch.manual_seed(0)
    model, other = nn.Linear(3, 40, device="cuda"), nn.Linear(3, 40, device="cuda")
    optimizer, newcomer = make(model.parameters(), **options), make(other.parameters(), **options)
    model(torch.ones(2, 3, device="cuda")).sum().backward()
    optimizer.step()
    assert optimizer_state.allocate(newcomer)
    states = [TrainingState(0), TrainingState(0)]
    states[0].objects, states[1].objects = {"optimizer": optimizer}, {"optimizer": newcomer}
    before = {name: each.data_ptr() for name, each in states[1].destinations().items()}
    encoder = Encoder()
    record = slots.Record("job", 1, 1, 0, "", states[0].encode(encoder))
    into = states[1].destinations()
    for name, each in encoder.tensors.items():
        into[name].copy_(each)
    states[1].load(record, Received(into))
    after = states[1].destinations()
    assert {name: each.data_ptr() for name, each in after.items()} == before
    assert all(after[name].equal(each) for name, each in encoder.tensors.items())
    assert any(each.is_cuda for each in after.values())


def test_no_room_is_made_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 40)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def fail(self: optim.SGD) -> None:
        self.state[model.weight]["momentum_buffer"] = torch.zeros(40, 3)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(optim.SGD, "step", fail)
    assert not optimizer_state.allocate(optimizer)
    assert (leaves(optimizer), model.weight.grad, optimizer.param_groups[0]["lr"]) == ([], None, 0.1)


def test_no_room_is_made_where_that_may_do_more() -> None:
    model = nn.Linear(3, 40)
    steps: list[Any] = []
    hooked = optim.SGD(model.parameters(), lr=0.1)
    hooked.register_step_pre_hook(lambda *arguments: steps.append(arguments))
    assert not optimizer_state.allocate(hooked)
    assert not optimizer_state.allocate(optim.LBFGS(model.parameters()))
    assert not optimizer_state.allocate(optim.AdamW(model.parameters(), lr=torch.tensor(0.1), capturable=True))
    assert not optimizer_state.allocate(optim.AdamW(model.parameters(), capturable=True)), "it divides by the rate"
    assert not optimizer_state.allocate(stepped(*KINDS[0])[1])
    assert steps == []


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.RMSprop, optim.NAdam, optim.RAdam, optim.Adamax])
@pytest.mark.parametrize(("dtype", "eps"), [(torch.float16, 1e-8), (torch.float32, 0.0), (torch.bfloat16, 1e-8)])
def test_making_room_never_divides_by_zero(kind: Any, dtype: torch.dtype, eps: float) -> None:
    """A usual `eps` is 0 in float16. Then a step with gradients of 0 makes all parameters NaN."""
    model = nn.Linear(3, 4, dtype=dtype)
    weight, optimizer = model.weight.detach().clone(), kind(model.parameters(), eps=eps)
    made = optimizer_state.allocate(optimizer)
    assert model.weight.equal(weight)
    assert made == (dtype == torch.bfloat16)


def test_a_state_is_loaded_into_the_memory_that_is_there(tmp_path: Path) -> None:
    """The memory of the model and of the optimizer is used, because new memory costs more than the copy."""
    model, optimizer = stepped(*KINDS[1])
    state = TrainingState(0)
    state.objects = {"model": model, "optimizer": optimizer}
    writer = Writer(tmp_path, "job", 1, block())
    writer.take(1, state.encode, set(), wait=True)
    writer.settle()
    wanted = {name: tensor.clone() for name, tensor in state.destinations().items()}
    before = {name: tensor.data_ptr() for name, tensor in state.destinations().items()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    slot, record = slots.newest(tmp_path, "job")[0]
    state.load(record, Reader(tmp_path, slot))
    after = state.destinations()
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == before
    assert all(tensor.equal(wanted[name]) for name, tensor in after.items())


class Views(Received):
    """A state that gives views of its tensors, and fails if somebody asks for a copy."""

    def tensor(self, name: str) -> torch.Tensor:
        raise AssertionError("nobody needs a copy of its own")

    def view(self, name: str) -> torch.Tensor:
        return self._tensors[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_has_no_memory_yet_is_copied_once(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """As on a GPU after a restart: only the learning rate, a tensor, has memory. The rest is not copied on the host."""
    monkeypatch.setattr(training_state, "_copies", lambda item: True)
    model, other = nn.Linear(3, 40, dtype=dtype), nn.Linear(3, 40, dtype=dtype)
    optimizer = optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    model(torch.ones(2, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    encoder = Encoder()
    saved = encoder.encode(optimizer.state_dict(), "o")
    loaded = optim.AdamW(other.parameters(), lr=torch.tensor(0.5), foreach=False)
    own = training_state._own_tensors(loaded, "o")
    load(loaded, saved, Views(encoder.tensors), own)
    assert own.keys() < encoder.tensors.keys()
    assert float(loaded.param_groups[0]["lr"]) == pytest.approx(0.1)
    assert all(each.equal(dict(leaves(optimizer))[key]) for key, each in leaves(loaded))


def test_a_state_of_more_precision_stays_in_its_memory() -> None:
    """As an optimizer of the script's own has it."""
    model = nn.Linear(3, 40, dtype=torch.bfloat16)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for each in model.parameters():
        optimizer.state[each]["momentum_buffer"] = torch.rand(each.shape)
    own = training_state._own_tensors(optimizer, "o")
    before = {key: each.data_ptr() for key, each in leaves(optimizer)}
    encoder = Encoder()
    saved = encoder.encode(optimizer.state_dict(), "o")
    values = {name: each.clone().add(1) for name, each in encoder.tensors.items()}
    load(optimizer, saved, Received(values), own)
    assert {key: each.data_ptr() for key, each in leaves(optimizer)} == before
    assert {float(each.min()) >= 1 for _, each in leaves(optimizer)} == {True}


def test_a_state_of_another_shape_has_memory_of_its_own(tmp_path: Path) -> None:
    _, optimizer = stepped(*KINDS[0])
    writer = Writer(tmp_path, "job", 1, block())
    writer.take(1, lambda encoder: encoder.encode(optimizer.state_dict(), "o"), set(), wait=True)
    writer.settle()
    slot, record = slots.newest(tmp_path, "job")[0]
    reader = Reader(tmp_path, slot)
    other = torch.zeros(7)
    load(optimizer, record.state, reader, dict.fromkeys((entry.name for entry in reader.entries), other))
    assert all(each.shape != other.shape for _, each in leaves(optimizer))
    assert not any(reader.holds(each) for _, each in leaves(optimizer))


def test_a_group_that_the_script_holds_is_still_the_optimizers_after_a_regroup() -> None:
    """A script may look a group up before its loop, to set its rate in each step. The state is loaded in the loop."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    groups, held = optimizer.param_groups, optimizer.param_groups[1]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    encoder = Encoder()
    objects = {"optimizer": encoder.encode(optimizer.state_dict(), "optimizer")}
    held["lr"] = 0.5
    state = TrainingState(0)
    state.objects = {"optimizer": optimizer}
    run = {"seed": 0, "step": 1, "epoch": 0, "consumed": 0}
    record = slots.Record("job", 1, 1, 0, "", {"run": run, "objects": objects})
    state.load(record, Received({name: each.clone() for name, each in encoder.tensors.items()}))
    assert held["lr"] == 0.1
    held["lr"] = 0.25
    assert optimizer.param_groups is groups
    assert optimizer.param_groups[1]["lr"] == 0.25
    assert held["params"] == [model.bias]
