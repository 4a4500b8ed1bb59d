"""What a worker reports while it trains: the numbers that the script logs, and where its time goes."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import torch

from spotrun.state.control import Control

log = logging.getLogger(__name__)

EVERY = 0.2  # seconds between publications: reading a CUDA tensor waits for the device


class Metrics:
    """The newest value of each name given to run.log()."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._published = 0.0
        self._fresh = False
        self._odd: set[str] = set()

    def update(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self._values[name] = value.detach() if isinstance(value, torch.Tensor) else value
        self._fresh = True

    def publish(self, control: Control, now: bool = False) -> None:
        """Write the values to the control block, if it is time or `now`. JSON has no infinities and NaNs: left out."""
        moment = time.monotonic()
        if not self._fresh or (not now and moment - self._published < EVERY):
            return
        self._published, self._fresh = moment, False
        control.write_metrics({name: number for name in self._values if math.isfinite(number := self._number(name))})

    def _number(self, name: str) -> float:
        """The value as a number. Anything else becomes NaN, with a warning: a display must not end a job."""
        try:
            return float(self._values[name])
        except (TypeError, ValueError, RuntimeError) as error:
            if name not in self._odd:
                self._odd.add(name)
                log.warning("run.log(%s=…) is not a number, left out: %s", name, error)
            return math.nan


class Clock:
    """Measures steps. step_seconds: of a usual step, without snapshots; 0 until two steps are done."""

    def __init__(self) -> None:
        self.step_seconds = 0.0
        self.samples = 0
        self._resumed: float | None = None
        self._ticks = 0

    def tick(self, control: Control) -> None:
        """A step is done: report its time, its duration and its samples."""
        now = time.time()
        control.stepped_at = now
        control.samples += self.samples
        self.samples = 0
        self._ticks += 1
        if not control.stepped_first:
            control.stepped_first = now
        if self._resumed is not None:
            took = time.monotonic() - self._resumed
            control.stepping += took
            # Moving average over about five steps, without the first: it pays for lazy set-up.
            if self._ticks > 1:
                self.step_seconds += (took - self.step_seconds) * (0.2 if self.step_seconds else 1.0)

    def resume(self) -> None:
        """The next step begins."""
        self._resumed = time.monotonic()
