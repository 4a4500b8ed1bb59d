"""What is loaded is what was saved: types, the order in memory, and what torch's own methods do not load."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn, optim

from spotrun.errors import MisuseError
from spotrun.state import slots
from spotrun.train import collectives
from spotrun.train.encoding import Encoder, decode
from spotrun.train.parallel import Parallel
from spotrun.train.training_state import TrainingState
from spotrun.train.transfer import Received


def load(to: dict[str, Any], saved: dict[str, Any], into: bool = False) -> None:
    """Give these objects the state of the others. into: as a newcomer receives it, where that is possible."""
    states, encoder = (TrainingState(0), TrainingState(0)), Encoder()
    states[0].name(to)
    states[1].name(saved)
    tree = json.loads(json.dumps(states[1].encode(encoder)))
    tensors = {name: each.contiguous().clone() for name, each in encoder.tensors.items()}  # as they lie in a slot
    for name, each in states[0].destinations().items() if into else ():
        if name in tensors and each.is_contiguous():
            tensors[name] = each.copy_(tensors[name])
    states[0].load(slots.Record("job", 1, 1, 0, "", tree), Received(tensors))


def train(model: Any, optimizer: Any, seed: int) -> None:
    model(torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


FUSED: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda parameters: optim.AdamW(parameters, lr=0.1, fused=True),
    "SGD": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda parameters: optim.Adam(parameters, lr=0.1),
}


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED.keys())
def test_the_state_of_a_fused_optimizer_lies_in_memory_as_its_parameters(
    make: Callable[[Any], optim.Optimizer],
) -> None:
    """The fused kernels pair values by their place in memory: in the usual order, they would pair the wrong ones."""
    models = [nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2)]  # type: ignore[call-overload]
    optimizers = [make(each.parameters()) for each in models]
    train(models[0], optimizers[0], 1)
    load(*({"model": models[at], "optimizer": optimizers[at]} for at in (1, 0)))
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 2)
    assert torch.equal(models[0].weight, models[1].weight)


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 7).t(),
        torch.randn(3, 7, dtype=torch.complex64).t().conj(),
        numpy.asfortranarray(numpy.random.rand(3, 7)),
        numpy.random.rand(5, 3, 7).transpose(1, 0, 2),
    ],
    ids=["channels_last", "transposed", "conjugated", "of Fortran", "an array with its axes in another order"],
)
def test_values_keep_their_order_in_memory(value: Any) -> None:
    """A sum in another order may have another last bit."""
    encoder = Encoder()
    tree = json.loads(json.dumps(encoder.encode([value, value], "x")))
    found, again = decode(tree, lambda name: encoder.tensors[name].resolve_conj().contiguous().clone())
    assert (found == value).all()
    if isinstance(value, torch.Tensor):
        assert found.stride() == value.stride()
        assert again is found
    else:
        assert found.strides == value.strides


def test_values_with_gaps_lose_them() -> None:
    encoder = Encoder()
    tree = encoder.encode([torch.arange(9.0)[::2], torch.ones(1).expand(4)], "x")
    found = decode(tree, lambda name: encoder.tensors[name].contiguous().clone())
    assert [each.stride() for each in found] == [(1,), (1,)]
    assert found[0].tolist() == [0, 2, 4, 6, 8]


class Own(optim.Optimizer):
    """It keeps more for a parameter than torch's own optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {
                "mode": "warm",
                "counts": numpy.arange(3),
                "history": [torch.tensor([1 / 3]), (None, b"\xff", torch.tensor([1 / 7], dtype=torch.float64))],
                "nested": {"weight": torch.tensor([1 / 3], dtype=torch.float64), 1: "text"},
                "low": torch.ones(2, dtype=torch.bfloat16),
                "step": 3,
            }


@pytest.mark.parametrize("into", [False, True])
def test_what_an_optimizer_of_the_script_keeps(into: bool) -> None:
    """torch makes another text of a text, cannot load an array, and converts tensors in lists and dicts."""
    models = [nn.Linear(2, 2).half(), nn.Linear(2, 2).half()]
    models[1].weight = nn.Parameter(models[1].weight.float())  # one that has more precision than its state
    models[0].weight = nn.Parameter(models[0].weight.float())
    optimizers = [Own(each.parameters()) for each in models]
    optimizers[0].step()
    load({"optimizer": optimizers[1]}, {"optimizer": optimizers[0]}, into)
    encoders = Encoder(), Encoder()
    trees = [each.encode(item.state_dict(), "x") for each, item in zip(encoders, optimizers, strict=True)]
    assert json.dumps(trees[0]) == json.dumps(trees[1]), "also in the same order"
    for name, value in encoders[0].tensors.items():
        found = encoders[1].tensors[name]
        assert (found.dtype, found.tolist()) == (value.dtype, value.tolist()), name
        assert found.data_ptr() != value.data_ptr()


def test_a_buffer_whose_type_has_changed_in_training() -> None:
    """torch would convert 0.75 to 0."""
    models = [nn.BatchNorm1d(2), nn.BatchNorm1d(2)]
    models[0].num_batches_tracked = torch.tensor(0.75)
    with pytest.raises(MisuseError, match=r"model\.num_batches_tracked has become torch\.float32 in training, but the"):
        load({"model": models[1]}, {"model": models[0]})


def test_a_module_with_more_precision_than_what_was_saved() -> None:
    """The script may convert it after run.track."""
    models = [nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2)]
    load({"model": models[1]}, {"model": models[0]})
    assert torch.equal(models[1].weight.bfloat16(), models[0].weight)


class Two(nn.Module):
    def __init__(self, one: bool) -> None:
        super().__init__()
        self.register_buffer("first", torch.ones(2))
        self.register_buffer("second", self.first if one else torch.full((2,), 2.0))


def test_buffers_that_are_one_tensor_only_in_the_set_up() -> None:
    """torch would give both the value of the second one."""
    with pytest.raises(MisuseError, match=r"model\.first and model\.second have become two tensors in training, but"):
        load({"model": Two(one=True)}, {"model": Two(one=False)})
    later = Two(one=False)
    load({"model": later}, {"model": Two(one=True)})
    assert later.second.tolist() == [1, 1]  # type: ignore[operator]


class Halving(nn.Linear):
    """It changes what it loads."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: 2 * value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        for each in state_dict.values():
            each.mul_(0.5)
        return super().load_state_dict(state_dict, *args, **kwargs)


def test_a_model_of_run_ddp_that_changes_what_it_loads_gets_no_snapshot_to_write_into() -> None:
    """The other workers of the node, or of the job, may read that snapshot now."""
    state = TrainingState(0)
    for module, only_reads in ((nn.Linear(2, 2), True), (Halving(2, 2), False)):
        state.objects = {"model": Parallel(module, torch.device("cpu"))}
        assert state.only_reads() == only_reads
        assert bool(state.destinations()) == only_reads


class Asking:
    """Its state comes from this call."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.state_dict = call

    def load_state_dict(self, state: Any) -> None: ...


def test_a_state_that_needs_a_collective_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local rank 0 alone asks for it, so the others would take it for another collective."""
    calls: list[str] = []
    monkeypatch.setattr(collectives, "_thread", threading.get_ident())
    monkeypatch.setattr(collectives, "_see", lambda name, _: calls.append(name), raising=False)

    def allreduce(_: Any) -> float:
        return 1.0

    guarded = collectives._guarded(allreduce, lambda: None)
    state = TrainingState(0)
    state.name({"good": Asking(lambda: 2.0), "bad": Asking(lambda: guarded(1))})
    with pytest.raises(MisuseError, match=r"run\.track\(bad=…\): state_dict\(\) calls a collective \(allreduce\), but"):
        state.encode(Encoder())
    assert calls == []
    assert guarded(1) == 1.0, "elsewhere, collectives are allowed"
    assert calls == ["allreduce"]


def test_a_state_that_contains_itself_is_an_error() -> None:
    value: dict[str, Any] = {}
    value["itself"] = value
    state = TrainingState(0)
    state.name({"odd": Asking(lambda: value)})
    with pytest.raises(MisuseError, match=r"run\.track\(odd=…\): the state is nested too deeply, or contains itself"):
        state.encode(Encoder())
    assert collectives.state_of == ""


@pytest.mark.parametrize("more", [[], [nn.Parameter(torch.ones(1))]], ids=["another group", "another parameter"])
def test_a_group_that_training_has_added_is_a_mistake_that_is_named(more: list[nn.Parameter]) -> None:
    """The set-up would make the same optimizer each time, so another try would not help."""
    own = [nn.Parameter(torch.ones(1))]
    saved = optim.SGD([*own, *more], lr=1.0)
    if not more:
        saved.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(MisuseError, match=r"run\.track\(sgd=…\): loaded state.* Make all parameter groups before"):
        load({"sgd": optim.SGD(own, lr=1.0)}, {"sgd": saved})
