"""Which rank sees which sample when: a global order that does not depend on the number of workers.

An epoch's permutation is a function of (seed, epoch). Each step takes the next batch * world positions of it. Rank r
gets every world-th of these, from the r-th on. If a step has a number of samples of its own (`global_batch`), it takes
so many positions, and the ranks get them batch by batch. So the position alone says what has been seen, even if the
world size changes.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from spotrun.errors import SpotrunError
from spotrun.train.distributed import rank_and_world

AT_ONCE = 4096  # samples that are looked up together: one at a time, a batch of 64 took 20 µs more


def taken(position: int, n: int, batch: int, world: int, drop_last: bool = False) -> int:
    """How many of `n` samples the step at `position` takes, over all ranks; 0: the epoch is over."""
    left = max(0, n - position)
    if drop_last and left < batch * world:
        return 0
    return min(batch * world, left)


def share(position: int, n: int, batch: int, world: int, rank: int) -> range:
    """The rank's positions in the step at `position`. Shares differ by at most one sample; the last may be empty."""
    return range(position + rank, min(n, position + batch * world), world)


def deal(position: int, n: int, batch: int, world: int, rank: int, global_batch: int) -> list[range]:
    """The rank's positions in each of its batches of the step at `position`, which takes `global_batch` samples.

    The step's batches are dealt to the ranks in turn. All ranks have the same number of batches. The last one is empty
    if there is none left for this rank.
    """
    end = min(n, position + global_batch)
    starts = range(position, end, batch)
    own = [range(start, min(start + batch, end)) for start in starts[rank::world]]
    return own + [range(0)] * (-(-len(starts) // world) - len(own))


_asked: list[Callable[[], None]] = []  # at most one


def when_asked(call: Callable[[], None]) -> None:
    """Have this called each time that a script asks how many samples a rank has, such as by `len(loader)`."""
    _asked[:] = [call]


class ElasticSampler(Sampler[int]):
    """Draws each sample exactly once an epoch, even if the number of workers changes.

    Give it to a `DataLoader` as `sampler`, track it (`run.track(sampler=sampler)`) and iterate with
    `run.steps(loader)`, which sets the batch size and moves `position` at each step boundary. All ranks make the same
    number of steps. A rank that has no sample left in a step gets repeated samples, and its `run.padding` is True. The
    last step of an epoch may leave a rank one sample. BatchNorm cannot train on one sample: use
    `drop_last=True` with it.
    """

    def __init__(self, dataset: Sized, seed: int = 0, shuffle: bool = True) -> None:
        self.n = len(dataset)
        if self.n == 0:
            raise SpotrunError("ElasticSampler: the dataset is empty")
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0
        self.batch = 1
        self.drop_last = False
        self.global_batch = 0  # 0: a step has a batch of each rank, or several
        self._order: tuple[tuple[int, int], torch.Tensor] | None = None
        self._start = 0  # where the next pass begins

    def bind(self, batch: int, drop_last: bool, global_batch: int = 0) -> None:
        """Set the loader's options, and how many samples a step has (see `run.steps`): the order depends on them."""
        self.batch, self.drop_last, self.global_batch = batch, drop_last, global_batch

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, unless it is the current one."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def resume(self) -> None:
        """Have the next pass begin at `position`. Other passes, such as one of `update_bn`, are of a whole epoch."""
        self._start = self.position

    def indices(self, positions: range) -> list[int]:
        """The samples at these positions of the epoch's permutation."""
        if not self.shuffle:
            return list(positions)
        if self._order is None or self._order[0] != (self.seed, self.epoch):
            key = hashlib.blake2b(f"{self.seed}/{self.epoch}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
            self._order = ((self.seed, self.epoch), torch.randperm(self.n, generator=generator, device="cpu"))
        found: list[int] = self._order[1][positions.start : positions.stop : positions.step].tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, 0
        return itertools.chain.from_iterable(self._dealt(start) if self.global_batch else self._parts(start))

    def _parts(self, position: int) -> Iterator[list[int]]:
        """This rank's samples from there on, in lists of one or more steps."""
        rank, world = rank_and_world()
        whole = self.batch * world
        while count := taken(position, self.n, self.batch, world, self.drop_last):
            if steps := min((self.n - position) // whole, max(1, AT_ONCE // self.batch)):
                # This rank's positions are `world` apart, also from one whole step to the next.
                count = steps * whole
                yield self.indices(range(position + rank, position + count, world))
            else:
                own = share(position, self.n, self.batch, world, rank)
                # Pad with two samples, if they fit: BatchNorm cannot train on one.
                yield self.indices(own if len(own) else range(min(2, self.batch, self.n)))
            position += count

    def _dealt(self, position: int) -> Iterator[list[int]]:
        """The same if a step has `global_batch` samples of all ranks."""
        rank, world = rank_and_world()
        found: list[int] = []
        while count := taken(position, self.n, self.global_batch, 1, self.drop_last):
            # A loader groups what it gets into batches, so only the last one of an epoch may be shorter.
            pad = range(self.batch) if count == self.global_batch else range(min(2, self.batch, self.n))
            for own in deal(position, self.n, self.batch, world, rank, self.global_batch):
                found += self.indices(own or pad)
            position += count
            if len(found) >= AT_ONCE:
                yield found
                found = []
        yield found

    def __len__(self) -> int:
        """Samples of one rank in a whole epoch: `len(loader)` is its number of batches, unless with `global_batch`."""
        for call in _asked:
            call()
        return -(-self.n // rank_and_world()[1])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed, "n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `SpotrunError` if the dataset has another length now."""
        if state["n"] != self.n:
            raise SpotrunError(
                f"ElasticSampler: the saved state is of a dataset of {state['n']} samples, this one has {self.n}. "
                "Train on the same data, or submit this as a new job"
            )
        self.epoch, self.position, self.seed = state["epoch"], state["position"], state["seed"]
