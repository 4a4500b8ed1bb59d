"""Batches that go to the workers in turn, for a Trainer whose steps have the same samples for any number of workers.

A Trainer counts its steps by batches, so each worker needs the same number of them in a step. If the batches cannot be
divided evenly, a worker repeats the first one of the step, and its loss counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from spotrun.train.rng import Apart
from spotrun.train.sampler import deal, taken


class Dealt:
    """A batch sampler: gives this rank's batches. batch_sampler: gives those of all ranks, in one order everywhere.

    count: batches in a step. seed: called before each batch, with its number among the epoch's batches of all ranks, so
    that its dataset and its collator draw the same random numbers, whichever rank loads it.
    """

    def __init__(
        self, batch_sampler: Any, count: int, world: int, rank: int, seed: Callable[[int], None] = lambda _: None
    ) -> None:
        # Here, a Trainer and accelerate look for `set_epoch`.
        self.batch_sampler, self.sampler = batch_sampler, getattr(batch_sampler, "sampler", None)
        self._count, self._world, self._rank, self._seed = count, world, rank, seed

    def __iter__(self) -> Iterator[list[int]]:
        whole, begun, apart = iter(self.batch_sampler), 0, Apart()
        while step := self._draw(whole, apart):
            own = [*range(self._rank, len(step), self._world)]
            for at in own if len(own) * self._world >= len(step) else [*own, 0]:
                self._seed(begun + at)
                yield step[at]
            begun += len(step)

    def _draw(self, whole: Iterator[list[int]], apart: Apart) -> list[list[int]]:
        """The batches of a step. A sampler may draw now, and must draw the same on each rank."""
        with apart.drawing():
            return list(islice(whole, self._count))

    def __len__(self) -> int:
        steps, rest = divmod(len(self.batch_sampler), self._count)
        return steps * -(-self._count // self._world) + -(-rest // self._world)


@dataclass(frozen=True)
class Epoch:
    """What the batches of an epoch weigh.

    n: samples in the epoch. batch: samples of a batch; the last one may have fewer. global_batch: samples of a step.
    """

    n: int
    batch: int
    global_batch: int
    world: int
    rank: int

    @classmethod
    def of(cls, batch_sampler: Any, batch: int, global_batch: int, world: int, rank: int) -> Epoch:
        """The epoch of a batch sampler that gives the batches of all ranks."""
        sampler: Any = getattr(batch_sampler, "sampler", None)
        n = whole = len(batch_sampler) * batch
        if hasattr(sampler, "__len__") and whole - batch < len(sampler) <= whole:
            n = len(sampler)
        return cls(n, batch, global_batch, world, rank)

    @property
    def steps(self) -> int:
        return max(1, -(-self.n // self.global_batch))

    def samples(self, step: int, number: int) -> int:
        """How many samples this rank's batch of this number in the epoch's step has. 0: it only repeats samples."""
        return len(self._own(step)[number])

    def factor(self, step: int, number: int, divisor: int = 0) -> float:
        """By what to multiply the loss of this rank's batch of this number in the epoch's step.

        Then the mean over all ranks is that over all samples of the step. 0: the batch only repeats samples.
        divisor: by what the Trainer divides the loss; 0: by the number of batches that the rank has in the step.
        """
        own = self._own(step)
        share = len(own[number]) * self.world / taken(step * self.global_batch, self.n, self.global_batch, 1)
        return share * (divisor or len(own))

    def _own(self, step: int) -> list[range]:
        """This rank's batches of the step."""
        return deal(step * self.global_batch, self.n, self.batch, self.world, self.rank, self.global_batch)
