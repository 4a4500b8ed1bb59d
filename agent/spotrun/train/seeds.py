"""The seeds of coming batches, prepared for many at once.

A step of training leaves the caches to the model. So what takes 3 µs when it is done again and again takes 30 µs when
it is done once in a step (bench/RESULTS.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from numpy.random import MT19937, BitGenerator, RandomState

from spotrun.train.batches import Batch
from spotrun.train.rng import derive, numpy_seed

AT_ONCE = 64  # batches


class Seeded(NamedTuple):
    """A batch, and what `rng.seed_all` needs for its random numbers."""

    batch: Batch
    value: int
    bits: BitGenerator


class Seeds:
    """Prepares seeds. An iterator of `along` is valid until the next one."""

    def __init__(self) -> None:
        self._states: list[RandomState] = []  # making one takes 0.1 ms, so they are used again

    def along(self, described: Iterator[Batch], seed: int, step: int, rank: int) -> Iterator[Seeded]:
        """The batches with the seeds of `reseed(seed, step, number, rank)`. step: that of the first batch.

        A batch may use its generator until the next one is fetched.
        """
        return itertools.chain.from_iterable(self._parts(described, seed, step, rank))

    def _parts(self, described: Iterator[Batch], seed: int, step: int, rank: int) -> Iterator[list[Seeded]]:
        while part := list(itertools.islice(described, AT_ONCE)):
            while len(self._states) < len(part):
                self._states.append(RandomState(MT19937(0)))
            found = []
            for batch, state in zip(part, self._states, strict=False):
                value = derive(seed, step, batch.number, rank)
                state.seed(numpy_seed(value))
                found.append(Seeded(batch, value, state._bit_generator))
                step += batch.last
            yield found
