"""Exact mode: the host waits until it knows that the results of a step's collectives are right.

The kernel of an aborted NCCL collective returns as if it had succeeded. Without exact mode, the host has usually queued
the optimizer's step by then, so all of the state counts as lost. In exact mode, the host waits at the end of a step's
last `run.backward`. It waits again at the step's end if there was another collective. An abort is announced before it
begins. So if none is announced when the wait is over, the results are right, and the state of this step is whole if a
later step fails.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from spotrun.train import distributed, failures
from spotrun.train.group_health import GroupHealth


class Exactness:
    """Makes the host wait for collectives on this device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._health = GroupHealth()
        self._done = False  # whether no collective has begun since the last wait
        self._watch_backward()

    def renew(self) -> None:
        """Another generation begins. Aborts of the last one do not count."""
        self._health = GroupHealth()
        self._done = False

    def expect(self) -> None:
        """A collective may begin now."""
        self._done = False

    def wait(self) -> None:
        """Wait until the collectives of this step are done. Raises `DistError` if a result may be wrong."""
        if self._done:
            return
        distributed.synchronize_stream(self._device)
        failures.check()
        if why := self._health.trouble():
            raise dist.DistError(f"the step does not count: {why}")
        self._done = True

    def _watch_backward(self) -> None:
        """From now on, notice backward passes, in which DDP exchanges gradients, even without `run.backward`."""
        backward: Any = torch.autograd.backward

        @functools.wraps(backward)
        def noted(*args: Any, **options: Any) -> None:
            self.expect()
            try:
                backward(*args, **options)
            finally:
                self.expect()

        torch.autograd.backward = noted
