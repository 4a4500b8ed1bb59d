"""Giving tracked objects their saved state out of a slot, without a copy of it where the object makes its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from spotrun.train.encoding import Encoder, Stateful, decode
from spotrun.train.snapshot import Reader


def load(item: Stateful, saved: Any, reader: Reader) -> None:
    """Have the object load what was saved of it.

    A module copies what it is given into its own tensors, and an optimizer copies it to its device: both get views of
    the slot, which all workers of a node share. Everything else gets copies. So does what kept a view after all.
    """
    if _copies(item):
        item.load_state_dict(decode(saved, reader.view))
        found = Encoder()
        found.encode(item.state_dict(), "state")
        if not any(reader.holds(tensor) for tensor in found.tensors.values()):
            return
    item.load_state_dict(decode(saved, reader.tensor))


def _copies(item: Stateful) -> bool:
    if isinstance(item, torch.optim.Optimizer):
        return all(tensor.device.type != "cpu" for group in item.param_groups for tensor in group["params"])
    return isinstance(item, nn.Module)
