"""Whether the results that a GPU has computed in this step are right, which the host waits for in exact mode.

The kernel of an aborted NCCL collective returns as if it had succeeded. Usually, the host has then queued the
optimizer's step, so all of the state counts as lost. In exact mode, the host waits for the gradients before an
optimizer steps, and for each later collective before the step ends. If nothing was aborted until then, the results are
right: an abort is announced before it begins. So the state of the last step is whole when a later step fails.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from spotrun.train import distributed, failures
from spotrun.train.group_health import GroupHealth


class Exactness:
    """Makes the host wait for what the device exchanges with others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._health = GroupHealth()
        self._known = False  # whether all results of collectives up to here are right
        self._watch_backward()

    def renew(self) -> None:
        """Another generation begins. Aborts of the last one do not count."""
        self._health = GroupHealth()
        self._known = False

    def doubt(self) -> None:
        """There may be a further collective under way."""
        self._known = False

    def confirm(self) -> None:
        """Wait until the collectives of this step are done. Raises `DistError` if a result may be wrong."""
        if self._known:
            return
        distributed.synchronize_stream(self._device)
        failures.check()
        if why := self._health.trouble():
            raise dist.DistError(f"the step does not count: {why}")
        self._known = True

    def _watch_backward(self) -> None:
        """From now on, notice backward passes, in which DDP exchanges gradients, even without `run.backward`."""
        backward: Any = torch.autograd.backward

        @functools.wraps(backward)
        def noted(*args: Any, **options: Any) -> None:
            self.doubt()
            try:
                backward(*args, **options)
            finally:
                self.doubt()

        torch.autograd.backward = noted
