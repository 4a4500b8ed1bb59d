"""The training state: the position in the training, and the objects that `run.track` names."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spotrun.errors import SpotrunError
from spotrun.state import slots
from spotrun.train.encoding import Encoder, Stateful, decode
from spotrun.train.slot_files import Reader

log = logging.getLogger(__name__)


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

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The tracked optimizers."""
        return [item for item in self.objects.values() if isinstance(item, torch.optim.Optimizer)]

    def encode(self, encoder: Encoder) -> dict[str, Any]:
        """The state as JSON values; the encoder collects its tensors."""
        run = {"seed": self.seed, "step": self.step, "epoch": self.epoch, "consumed": self.consumed}
        objects = {name: encoder.encode(item.state_dict(), name) for name, item in self.objects.items()}
        return {"run": run, "objects": objects}

    def load(self, folder: Path, slot: int, record: slots.Record) -> None:
        """Load a committed snapshot. Raises `SpotrunError` if it lacks a tracked object."""
        run, saved = record.state["run"], record.state["objects"]
        if missing := sorted(self.objects.keys() - saved.keys()):
            raise SpotrunError(
                f"the saved state of step {record.step} has no {missing[0]!r}, which run.track names; it has "
                f"{', '.join(sorted(saved))}. Submit a changed script as a new job"
            )
        if dropped := sorted(saved.keys() - self.objects.keys()):
            log.warning("the saved state of %s is ignored: run.track does not name it", ", ".join(dropped))
        reader = Reader(folder, slot)
        for name, item in self.objects.items():
            load(item, saved[name], reader)
        self.seed, self.step, self.epoch, self.consumed = run["seed"], run["step"], run["epoch"], run["consumed"]
        for optimizer in self.optimizers:
            # Otherwise a scheduler whose step comes first in this process warns that the optimizer made none.
            optimizer._opt_called = True  # type: ignore[attr-defined]


def load(item: Stateful, saved: Any, reader: Reader) -> None:
    """Have the object load its saved state.

    A module copies the values into its own tensors, and an optimizer copies them to its device. Both get views of the
    slot, which all workers of a node share. All other objects get copies, and so does an object that kept a view.
    """
    if _copies(item):
        item.load_state_dict(decode(saved, reader.view))
        loaded = Encoder()
        loaded.encode(item.state_dict(), "state")
        if not any(reader.holds(tensor) for tensor in loaded.tensors.values()):
            return
    item.load_state_dict(decode(saved, reader.tensor))


def _copies(item: Stateful) -> bool:
    """Whether the object copies what it loads."""
    if isinstance(item, torch.optim.Optimizer):
        return all(tensor.device.type != "cpu" for group in item.param_groups for tensor in group["params"])
    return isinstance(item, nn.Module)
