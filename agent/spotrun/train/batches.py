"""Which batch of a loader belongs to which step, and how much it weighs."""

from __future__ import annotations

import functools
import itertools
import logging
import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from spotrun.errors import MisuseError
from spotrun.train.distributed import rank_and_world
from spotrun.train.rng import Generators, Seeds, derive, prepare, reseed
from spotrun.train.sampler import ElasticSampler, deal, share, taken

AT_ONCE = 64  # batches that are described together: one in each step took 20 µs more (bench/RESULTS.md)
END = object()  # in place of a batch: the loader has no more
log = logging.getLogger(__name__)
_generators = Generators()  # of samplers that are none of torch's

_PLACE = "_spotrun_place"  # attribute of a loader: this worker's rank, and the number of workers, in its last epoch
_TORCHS = (BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)  # each rank draws for itself


@dataclass(slots=True)
class Batch:
    """One batch of one rank."""

    weight: float  # factor for its mean loss: makes DDP's mean over ranks the mean over all samples of the step
    last: bool  # this batch completes the step
    end: int  # position in the epoch after this batch: samples, or batches without an ElasticSampler
    samples: int  # of this rank; 0: the batch only repeats samples
    number: int = 0  # of the batch in its step, from 0; with `global_batch`: among the batches of all ranks
    own: range | None = None  # this rank's positions in the epoch, if known

    @property
    def padding(self) -> bool:
        return self.samples == 0


def whole_number(value: object, call: str) -> int:
    """The value, which the script gives to this call, as an int. Raises `MisuseError`."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise MisuseError(f"{call}: give a whole number") from None


def warn_of_no_steps(epoch: int) -> None:
    """Say that the script has called no `run.steps` in this epoch, the first one of this process."""
    log.warning("epoch %d had no step, so no snapshot is taken: go through the batches with run.steps(loader)", epoch)


def check(loader: Any, tracked: Collection[object]) -> None:
    """Raise `MisuseError` unless the loader's sampler is the tracked ElasticSampler, or there is no ElasticSampler."""
    sampler = sampler_of(loader)
    samplers = [item for item in tracked if isinstance(item, ElasticSampler)]
    if sampler is not None and all(item is not sampler for item in samplers):
        raise MisuseError("the loader's ElasticSampler is not tracked: add sampler=… to run.track(…)")
    if any(item is loader for item in tracked):
        raise MisuseError("the loader is tracked: leave it out of run.track(…); run.steps continues at the right batch")
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset) and any(item is dataset for item in tracked):
        raise MisuseError(
            "the loader's IterableDataset is tracked: leave it out of run.track(…), and have its __iter__ begin a new "
            "pass. run.steps skips the batches that the epoch has had"
        )
    if sampler is None and samplers:
        raise MisuseError(
            "an ElasticSampler is tracked, but the loader given to run.steps does not use it: "
            "give it to DataLoader(sampler=…), and that DataLoader to run.steps"
        )


class StepSize(NamedTuple):
    """What belongs to a step.

    accumulate: batches of each rank. global_batch: samples of all ranks together; 0: as many as these batches have.
    """

    accumulate: int = 1
    global_batch: int = 0

    @property
    def several(self) -> bool:
        """Whether a step may have more than one batch of a rank."""
        return self.accumulate > 1 or self.global_batch > 0


ONE_EACH = StepSize()


def step_size(loader: Any, accumulate: int, global_batch: int | None) -> StepSize:
    """The size of the steps of `run.steps` with these arguments. Raises `MisuseError` if they do not fit."""
    if sampler_of(loader) is not None and not getattr(loader, "in_order", True):
        raise MisuseError(
            "run.steps(loader): leave out in_order=False: the loader's batches must come in the ElasticSampler's order"
        )
    if global_batch is None:
        call = f"run.steps(loader, accumulate={accumulate!r})"
        if (accumulate := whole_number(accumulate, call)) <= 0:
            raise MisuseError(f"{call}: give a number above 0")
        return StepSize(accumulate)
    call, batch = f"run.steps(loader, global_batch={global_batch!r})", getattr(loader, "batch_size", None)
    global_batch = whole_number(global_batch, call)
    if sampler_of(loader) is None or not batch:
        raise MisuseError(f"{call}: give the DataLoader an ElasticSampler and a batch_size")
    if accumulate != 1:
        raise MisuseError(f"{call}: leave out accumulate: it follows from the number of workers")
    if global_batch <= 0 or global_batch % batch:
        raise MisuseError(f"{call}: give a multiple of the loader's batch_size, {batch}")
    return StepSize(1, global_batch)


@functools.lru_cache(1)  # again if the number of workers has changed, not in each epoch
def warn_of_idle(size: StepSize, batch: int, world: int) -> None:
    """Say that some of the workers do nothing that counts."""
    if size.global_batch and (count := size.global_batch // batch) < world:
        log.warning(
            "a step has only %d batches for %d workers, so some of them only repeat samples: "
            "use a smaller batch_size, or fewer workers",
            count,
            world,
        )


def elastic(
    position: int, n: int, batch: int, world: int, rank: int, size: StepSize = ONE_EACH, drop_last: bool = False
) -> Iterator[Batch]:
    """The rest of an epoch of `n` samples of an ElasticSampler, from `position` on."""
    accumulate, global_batch = size
    if global_batch:
        yield from _dealt(position, n, batch, world, rank, global_batch, drop_last)
        return
    whole = batch * world
    while accumulate == 1 and n - position >= whole:  # as below, in less time
        end = position + whole
        yield Batch(1.0, True, end, batch, 0, range(position + rank, end, world))
        position = end
    while taken(position, n, batch, world, drop_last):
        rounds: list[tuple[int, int]] = []
        at = position
        while len(rounds) < accumulate and (count := taken(at, n, batch, world, drop_last)):
            rounds.append((at, count))
            at += count
        whole = at - position
        for number, (start, count) in enumerate(rounds):
            own = share(start, n, batch, world, rank)
            last = number == len(rounds) - 1
            yield Batch(len(own) * world / whole, last, start + count, len(own), number, own)
        position = at


def _dealt(
    position: int, n: int, batch: int, world: int, rank: int, global_batch: int, drop_last: bool
) -> Iterator[Batch]:
    while whole := taken(position, n, global_batch, 1, drop_last):
        dealt = deal(position, n, batch, world, rank, global_batch)
        for at, own in enumerate(dealt):
            end = position + min(whole, (at + 1) * batch * world)
            last = at == len(dealt) - 1
            yield Batch(len(own) * world / whole, last, end, len(own), at * world + rank, own)
        position += whole


def plain(consumed: int, total: int | None, batch: int, accumulate: int = 1) -> Iterator[Batch]:
    """The rest of an epoch of any other loader, of `total` batches; None: unknown."""
    for start in itertools.count(consumed, accumulate):
        if total is not None and start >= total:
            return
        rounds = accumulate if total is None else min(accumulate, total - start)
        for number in range(rounds):
            yield Batch(1 / rounds, number == rounds - 1, start + number + 1, batch, number)


def with_seeds(described: Iterator[Batch], seed: int, step: int, rank: int) -> Iterator[tuple[Batch, Seeds]]:
    """The batches, each with the seeds of its random numbers. step: that of the first batch."""
    return itertools.chain.from_iterable(_with_seeds(described, seed, step, rank))


def _with_seeds(described: Iterator[Batch], seed: int, step: int, rank: int) -> Iterator[list[tuple[Batch, Seeds]]]:
    while part := list(itertools.islice(described, AT_ONCE)):
        values = []
        for batch in part:
            values.append(derive(seed, step, batch.number, rank))
            step += batch.last
        yield list(zip(part, prepare(values), strict=True))


def begin_at(loader: Any, seed: int, epoch: int, step: int, rank: int, count: int, accumulate: int) -> Iterator[Any]:
    """Start a loader without an ElasticSampler, and skip the `count` batches that this epoch has had.

    The first batch is fetched now, because the loader shuffles then. step: the next one.
    """
    iterator = begin(loader, seed, epoch, rank)
    first = next(iterator, END)
    if not count:
        return itertools.chain([first], iterator)
    _skip(iterator, count, seed, step, accumulate, rank)
    return iterator


def begin(loader: Any, seed: int, epoch: int, rank: int) -> Iterator[Any]:
    """An epoch of a loader without an ElasticSampler: its order follows from these numbers.

    The loader shuffles when its first batch is fetched, by a generator of its own or by the global one. If the sampler
    is none of torch's, its generator does not follow from the rank: the sampler may deal out one order to all ranks.
    """
    _renew_processes(loader)
    sampler: Any = getattr(loader, "sampler", None)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", sampler)  # with batch_sampler=…, the loader's own one is not used
    if type(inner) in _TORCHS and (batch_sampler is None or type(batch_sampler) in _TORCHS):
        for number, generator in enumerate(getattr(each, "generator", None) for each in (loader, inner)):
            if isinstance(generator, torch.Generator):
                generator.manual_seed(derive(seed, "loader", number, epoch, rank))
    else:
        _generators.begin_epoch((batch_sampler, inner), epoch)
    reseed(seed, "epoch", epoch, rank)
    return iter(loader)


def _renew_processes(loader: Any) -> None:
    """End the processes of a loader that keeps them (`persistent_workers=True`), if this worker has another rank now.

    They have copies of the script's objects, and so of `run`, from when they began.
    """
    if not isinstance(loader, DataLoader) or not loader.persistent_workers:
        return
    iterator: Any = loader._iterator
    place = rank_and_world()
    if vars(loader).setdefault(_PLACE, place) != place and iterator is not None:
        iterator._shutdown_workers()
        loader._iterator = None
    vars(loader)[_PLACE] = place


def _skip(iterator: Iterator[Any], count: int, seed: int, step: int, accumulate: int, rank: int) -> None:
    """Fetch that many batches of an epoch, as its steps did: the first one is fetched already."""
    log.warning(
        "skipping the %d batches that this epoch has had; an ElasticSampler needs no such pass, and gives each sample "
        "once an epoch when the number of workers changes",
        count,
    )
    first = step - -(-count // accumulate)
    for number in range(1, count):
        reseed(seed, first + number // accumulate, number % accumulate, rank)
        next(iterator, None)


def steps_in(n: int, batch: int, world: int, size: StepSize, drop_last: bool) -> int:
    """Steps in a whole epoch of an ElasticSampler."""
    accumulate, global_batch = size
    if global_batch:
        return n // global_batch if drop_last else -(-n // global_batch)
    batches = n // (batch * world) if drop_last else -(-n // (batch * world))
    return -(-batches // accumulate)


def sampler_of(loader: Any) -> ElasticSampler | None:
    """The loader's ElasticSampler, if it has one."""
    sampler = getattr(loader, "sampler", None)
    return sampler if isinstance(sampler, ElasticSampler) else None


def obstacle(loader: Any, read: str) -> str:
    """Why a script cannot begin an epoch again with this loader, in the same process; empty: it can.

    read: what told the script the number of workers, before it began the epoch; empty: nothing did.
    """
    if isinstance(loader, Iterator):
        return f"run.steps got a {type(loader).__name__}, and an iterator cannot begin again"
    if read and sampler_of(loader) is None:
        return f"the script reads {read} before run.steps, and the loader has no ElasticSampler"
    return ""


def length_of(loader: Any, accumulate: int) -> int | None:
    """Batches in an epoch of a loader; None if it has no length."""
    try:
        return len(loader)
    except TypeError:
        if accumulate > 1:
            raise MisuseError("run.steps(loader, accumulate=…) needs a loader that has a length") from None
        return None


def to_device(value: Any, device: torch.device) -> Any:
    """A batch with its tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if hasattr(value, "to"):  # packed sequences, graphs, tokenizers' batches
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if type(value) in (list, tuple):
        return type(value)(to_device(item, device) for item in value)
    return value
