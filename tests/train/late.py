"""A GPU's copies beside training, played on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from spotrun.train.staging import Copy
from tests.helpers import SLOW

Pair = tuple[torch.Tensor, torch.Tensor]


class Late:
    """A stage whose copies beside training are in flight until the guard, or until the test calls `arrive`."""

    def __init__(self) -> None:
        self.graph = False  # a CUDA graph is being recorded
        self.beside: list[int] = []  # bytes that each snapshot had copied beside training
        self.seconds: float | None = 0.0  # for which each copy delays the device
        self.arrive: Callable[[], None] = lambda: None

    def takes(self, tensor: torch.Tensor) -> bool:
        return True

    def capturing(self) -> bool:
        return self.graph

    def pin(self, memory: torch.Tensor) -> None: ...

    def unpin(self, memory: torch.Tensor) -> None: ...

    def start(self, pairs: Sequence[Pair], beside: Sequence[bool]) -> Copy:
        for (source, target), aside in zip(pairs, beside, strict=True):
            if not aside:
                target.copy_(source)
        late = [pair for pair, aside in zip(pairs, beside, strict=True) if aside]
        self.beside.append(sum(source.nbytes for source, _ in late))
        copy = LateCopy(late, self)
        self.arrive = copy.guard
        return copy


class LateCopy:
    def __init__(self, pairs: Sequence[Pair], stage: Late) -> None:
        self._pairs, self._stage = pairs, stage
        self._done = threading.Event()
        if not pairs:
            self._done.set()

    def guard(self) -> None:
        if not self._done.is_set():
            for source, target in self._pairs:
                target.copy_(source)
            self._done.set()

    def wait(self) -> None:
        assert self._done.wait(60 * SLOW)

    def seconds(self) -> float | None:
        return self._stage.seconds
