"""Exact mode: the host waits until it knows that the results of a step's collectives are right.

The kernel of an aborted NCCL collective returns as if it had succeeded. Without exact mode, the host has usually queued
the optimizer's step by then, so all of the state counts as lost. In exact mode, the host waits at the end of a step's
last `run.backward`. It waits again at the step's end if there was another collective.

An abort spoils the results of other ranks, too: an aborted kernel sends its neighbours what it has, marked as valid
(read in NCCL's `prims_ll.h` and `prims_simple.h` in November 2026). So each wait ends with a collective of gloo, which
a rank joins only if its results have come without an abort. When this collective succeeds, no rank had aborted anything
before its results were there. So they are right on every rank, and the state of this step is whole if a later step
fails.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from spotrun.train import distributed, failures
from spotrun.train.group_health import GroupHealth

_CPU = torch.device("cpu")


class Exactness:
    """Makes the host wait for collectives on this device. Every rank waits equally often."""

    @classmethod
    def of(cls, device: torch.device) -> Exactness | None:
        """None: the device's backend does not number its collectives."""
        try:
            return cls(device)
        except RuntimeError:
            return None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: Any = None  # takes CPU tensors; None: the default group
        self._health = GroupHealth()
        self.messages = 0  # between two ranks that the script has sent or received in this generation
        self._waited = self._begun()  # collectives that are known to have succeeded

    def renew(self, group: dist.ProcessGroup | None) -> None:
        """Another generation begins. group: takes CPU tensors; None: the default group."""
        self._group, self._health, self.messages = group, GroupHealth(), 0
        self._waited = self._begun()

    def wait(self) -> None:
        """Wait until the collectives so far are done on all ranks. Raises an error if a result may be wrong."""
        if dist.get_world_size() == 1:
            failures.check()
            return
        if self._begun() == self._waited:
            return
        distributed.synchronize(self._device)
        failures.check()
        if why := self._health.trouble():
            raise dist.DistError(f"the step does not count: {why}")
        self._meet()
        self._waited = self._begun()

    def _begun(self) -> int:
        """Collectives that have begun on the device in this generation: the same number on all ranks."""
        whole: Any = dist.group.WORLD
        backend = whole._get_backend(self._device)
        begun = int(backend._get_sequence_number_for_group())
        return begun - self.messages if isinstance(backend, dist.ProcessGroupGloo) else begun  # NCCL counts none

    def _meet(self) -> None:
        """Wait until every rank calls this. Raises an error if one is gone.

        The future, unlike the work, gives its error to no handler of the script's collectives.
        """
        whole: Any = self._group or dist.group.WORLD
        whole._get_backend(_CPU).allreduce([torch.zeros(1, device=_CPU)]).get_future().wait()
