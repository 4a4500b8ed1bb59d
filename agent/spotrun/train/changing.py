"""The part of a model that training changes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from spotrun.errors import MisuseError


class Changing:
    """What training changes in a model with frozen parameters: the other parameters, and the buffers.

    The script makes the frozen ones. So a snapshot of a large model with adapters (LoRA) has the adapters only. A
    parameter that was ever trained belongs to it, and so does a frozen one that has changed, such as an average.
    """

    changes_with_optimizer = True  # see `NotedState`

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {name for name, _ in model.named_buffers()}
        self._versions: dict[str, int] = {}  # of the parameters, when training begins

    def begin(self) -> None:
        """From now on, a change of a parameter counts."""
        self._versions = {name: each._version for name, each in self._model.named_parameters()}

    def note(self) -> None:
        """Note which parameters have changed by now."""
        for name, each in self._model.named_parameters():
            if each.requires_grad or self._versions.get(name, each._version) != each._version:
                self._names.add(name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        self.note()
        return {name: each for name, each in self._model.state_dict().items() if name in self._names}

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        own = dict((*self._model.named_parameters(), *self._model.named_buffers()))
        mine = self.state_dict().keys()
        if self._versions and mine - saved.keys():
            raise dist.DistError("a layer was unfrozen after the saved state: the script must start again")
        if lost := sorted((saved.keys() - own.keys()) | (mine - saved.keys())):
            where = "saved state" if lost[0] in saved else "model"
            raise MisuseError(f"only the {where} has {lost[0]}. Submit a changed script as a new job")
        self._names |= saved.keys()
        with torch.no_grad():
            for name, values in saved.items():
                own[name].copy_(values)
