"""The training state: the position in the training, and the objects that `run.track` names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from spotrun.errors import MisuseError
from spotrun.state import slots
from spotrun.train import collectives
from spotrun.train.encoding import Encoder, Stateful, decode
from spotrun.train.parallel import Parallel

log = logging.getLogger(__name__)


class Tensors(Protocol):
    """Where the tensors of a saved state are: a slot, or memory of this process."""

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, to be kept."""

    def view(self, name: str) -> torch.Tensor:
        """The tensor, to be copied at once."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether somebody else may overwrite the tensor."""


def _instead(item: object) -> str:
    """What to track in place of this object, for the end of a message."""
    if isinstance(item, Sampler):
        return "; use spotrun.ElasticSampler, or leave the sampler out of run.track"
    if isinstance(item, DataLoader):
        return "; leave it out, and track its ElasticSampler"
    return "; put it into an object that has both methods"


class TrainingState:
    """What a snapshot holds.

    seed: of all random numbers. step: steps completed since the job began. epoch: the current epoch.
    consumed: batches of this epoch that are done; only counted for a loader without an ElasticSampler.
    objects: what `run.track` names.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = self.epoch = self.consumed = 0
        self.objects: dict[str, Stateful] = {}

    def name(self, objects: dict[str, Stateful]) -> None:
        """What `run.track` names. Raises `MisuseError` for a second call, or an object that has no state."""
        if self.objects:
            raise MisuseError("run.track was called before: name everything in one call")
        if not objects:
            raise MisuseError("run.track() tracks nothing; write run.track(model=model, optimizer=optimizer, …)")
        for name, item in objects.items():
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise MisuseError(
                    f"run.track({name}=…): a {type(item).__name__} lacks state_dict() or load_state_dict()"
                    f"{_instead(item)}"
                )
        self.objects = objects

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The tracked optimizers."""
        return [item for item in self.objects.values() if isinstance(item, torch.optim.Optimizer)]

    def encode(self, encoder: Encoder) -> dict[str, Any]:
        """The state as JSON values; the encoder collects its tensors."""
        run = {"seed": self.seed, "step": self.step, "epoch": self.epoch, "consumed": self.consumed}
        objects = {}
        try:
            for name, item in self.objects.items():
                collectives.state_of = name
                objects[name] = encoder.encode(item.state_dict(), name)
        except RecursionError:
            raise MisuseError(f"run.track({name}=…): the state is nested too deeply, or contains itself") from None
        finally:
            collectives.state_of = ""
        return {"run": run, "objects": objects}

    def destinations(self) -> dict[str, torch.Tensor]:
        """The tensors of this process, by name, into which a saved state can be written before it is loaded."""
        found: dict[str, torch.Tensor] = {}
        for name, item in self.objects.items():
            found |= _own_tensors(item, name)
        return found

    def only_reads(self) -> bool:
        """Whether `load` only reads the saved tensors. False if an object loads with methods that are not torch's."""
        return all(_only_reads(item) for item in self.objects.values() if _copies(item))

    def load(self, record: slots.Record, tensors: Tensors) -> None:
        """Load a snapshot with these tensors. Raises `MisuseError` if it lacks a tracked object."""
        run, saved = record.state["run"], record.state["objects"]
        if missing := sorted(self.objects.keys() - saved.keys()):
            raise MisuseError(
                f"the saved state of step {record.step} has no {missing[0]!r}, which run.track names; it has "
                f"{', '.join(sorted(saved))}. Submit a changed script as a new job"
            )
        if dropped := sorted(saved.keys() - self.objects.keys()):
            log.warning("the saved state of %s is ignored: run.track does not name it", ", ".join(dropped))
        for name, item in self.objects.items():
            own = _own_tensors(item, name) if isinstance(item, torch.optim.Optimizer) else {}
            groups = item.param_groups if isinstance(item, torch.optim.Optimizer) else None
            try:
                load(item, saved[name], tensors, own)
            except ValueError as error:
                if groups is None or "parameter group" not in str(error):
                    raise
                raise MisuseError(
                    f"run.track({name}=…): {error}. Make all parameter groups before run.track, and none in training"
                ) from error
            if isinstance(item, torch.optim.Optimizer) and groups is not None:
                _keep_groups(item, groups)
        self.seed, self.step, self.epoch, self.consumed = run["seed"], run["step"], run["epoch"], run["consumed"]
        for optimizer in self.optimizers:
            # Otherwise a scheduler warns if its first step in this process comes before the optimizer's.
            optimizer._opt_called = True  # type: ignore[attr-defined]


def load(item: Stateful, saved: Any, tensors: Tensors, own: Mapping[str, torch.Tensor] = {}) -> None:
    """Have the object load its saved state.

    own: the object's tensors that receive the values, by name; the object keeps them. For other names, a module copies
    the values into its own tensors, and an optimizer copies them to its device. Both get views of the slot, which all
    workers of a node share. All other objects get copies, and so does an object that kept a view.
    """
    if _copies(item):
        # A module copies the values to where its own tensors have them.
        arrange = not isinstance(item, nn.Module)
        _give(item, decode(saved, partial(_fill, tensors, own, tensors.view), arrange), own)
        loaded = Encoder()
        state = loaded.encode(item.state_dict(), "state")
        if not arrange and _is_plain(item):
            _check_loaded(_names(saved), tensors, _names(state), loaded.tensors)
        if not any(tensors.holds(tensor) for tensor in loaded.tensors.values()):
            return
    _give(item, decode(saved, partial(_fill, tensors, own, tensors.tensor)), own)


def _check_loaded(
    saved: Mapping[str, str], tensors: Tensors, now: Mapping[str, str], loaded: Mapping[str, torch.Tensor]
) -> None:
    """Raise `MisuseError` if a module cannot have the values that were saved.

    torch converts a value to the type that the module's own tensor has. Of two values for one tensor, it keeps the
    later one. saved, now: names of tensors by the module's names for them.
    """
    places: dict[str, str] = {}
    for key in (key for key in saved if key in now):
        before, after = tensors.view(saved[key]).dtype, loaded[now[key]].dtype
        if _loses(before, after):
            raise MisuseError(
                f"{saved[key]} has become {before} in training, but the script's set-up makes it {after}, which cannot "
                "hold its values: give it this type before run.track"
            )
        if (first := places.setdefault(now[key], saved[key])) != saved[key]:
            raise MisuseError(
                f"{first} and {saved[key]} have become two tensors in training, but the script's set-up makes them "
                "one: make two of them before run.track"
            )


def _names(state: Any) -> dict[str, str]:
    """The names of the tensors in a module's encoded state, by the module's names for them."""
    pairs = state["v"] if "$" in state else state.items()
    return {key: value["v"] for key, value in pairs if isinstance(value, dict) and value.get("$") == "tensor"}


def _give(item: Stateful, saved: Any, own: Mapping[str, torch.Tensor] = {}) -> None:
    # Hooks may number the parameters in another way.
    if not isinstance(item, torch.optim.Optimizer) or not _only_reads(item):
        item.load_state_dict(saved)
        return
    states = {
        key: {name: None if _has_parts(value) else value for name, value in values.items()}
        if isinstance(values, dict)
        else values
        for key, values in saved["state"].items()
    }
    item.load_state_dict({**saved, "state": states})
    _keep_types(item, saved, own)


def _has_parts(value: object) -> bool:
    """Whether torch (2.13) takes it for a collection, to load each part: then a text is lost, and an array fails."""
    return isinstance(value, Iterable) and not isinstance(value, torch.Tensor)


def _to(device: torch.device, value: Any) -> Any:
    """The value with its tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return type(value)({key: _to(device, each) for key, each in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_to(device, each) for each in value)
    return value


def _keep_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Give the optimizer its own dicts again, with the loaded values: the script may hold a reference to them.

    An optimizer inside of it may hold the loaded list, so that list gets the dicts, too.
    """
    loaded = optimizer.param_groups
    for own, other in zip(groups, loaded, strict=True):
        if own is not other:
            own.clear()
            own.update(other)
    loaded[:] = groups
    optimizer.param_groups = groups


def _keep_types(optimizer: torch.optim.Optimizer, saved: Any, own: Mapping[str, torch.Tensor]) -> None:
    """Put back what has another type now: torch (2.13) converts a state to the type of its parameter when it loads it.

    Also put in what was not loaded: see `_has_parts`. saved: the whole state, with its tensors. own: those of them that
    are the optimizer's. An optimizer may also keep something that is no parameter's.
    """
    kept = {id(each) for each in own.values()}
    for index, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
        values, state = saved["state"].get(index), optimizer.state.get(parameter)
        if not isinstance(values, dict) or not isinstance(state, dict):
            continue
        for name, value in values.items():
            now = state.get(name)
            if _has_parts(value):
                state[name] = _to(parameter.device, value)
            elif isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and value.dtype != now.dtype:
                state[name] = value if id(value) in kept else value.to(now.device, copy=True)


def _loses(saved: torch.dtype, now: torch.dtype) -> bool:
    """Whether the conversion may lose something: whole numbers, bits, or precision."""
    if saved == now or not saved.is_floating_point or saved.itemsize == 1:
        return saved != now
    return torch.promote_types(saved, now) != now


def _fill(
    tensors: Tensors, own: Mapping[str, torch.Tensor], other: Callable[[str], torch.Tensor], name: str
) -> torch.Tensor:
    """The saved tensor, in the object's own memory if there is any. New memory costs more than the copy itself.

    other: returns the saved tensor if the object has no such memory.
    """
    mine = own.get(name)
    if mine is None:
        return other(name)
    found = tensors.view(name)
    if (found.dtype, found.shape) != (mine.dtype, mine.shape):
        return other(name)
    return mine.copy_(found)


def _own_tensors(item: Stateful, name: str) -> dict[str, torch.Tensor]:
    """The object's tensors on CPUs and GPUs, by name; empty unless it is known to accept them as a state."""
    if not _is_plain(item):
        return {}
    encoder = Encoder()
    encoder.encode(item.state_dict(), name)
    return {name: tensor for name, tensor in encoder.tensors.items() if tensor.is_cpu or tensor.is_cuda}


def _is_plain(item: Stateful) -> bool:
    """Whether the object has torch's own `load_state_dict`, which accepts a state whose tensors are the object's."""
    return type(item).load_state_dict in _PLAIN and (not isinstance(item, Parallel) or _is_plain(item.module))


def _copies(item: Stateful) -> bool:
    """Whether the object copies what it loads."""
    if isinstance(item, torch.optim.Optimizer):
        return all(tensor.device.type != "cpu" for group in item.param_groups for tensor in group["params"])
    return isinstance(item, nn.Module)


def _only_reads(item: Stateful) -> bool:
    """Whether the object loads a state by torch's own methods alone."""
    if not _is_plain(item):
        return False
    if not isinstance(item, nn.Module):
        return not getattr(item, "_optimizer_load_state_dict_pre_hooks", None)
    return all(
        type(each)._load_from_state_dict.__module__.startswith("torch.nn.") and not each._load_state_dict_pre_hooks
        for each in item.modules()
    )


_PLAIN = (nn.Module.load_state_dict, Parallel.load_state_dict, torch.optim.Optimizer.load_state_dict)
