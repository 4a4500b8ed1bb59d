"""Random numbers as a function of (seed, step, rank), or of (seed, step, batch) if a step has a `global_batch`.

Every generator is seeded before each batch, so a snapshot holds no generator states. Any rank's snapshot serves all
ranks, and a resumed step draws the same numbers as an undisturbed one.

Python and NumPy have the same generator, a Mersenne Twister. Their functions that seed it take 8 to 20 µs between two
steps: the model's work has driven them out of the caches. So the states are computed here, for many steps at once, and
are copied in each step.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
import xxhash
from numpy.typing import NDArray

# `torch.manual_seed` takes longer: it also prepares every kind of device that is not in use, 0.16 ms each time.
_PYTHON: Any = random._inst
_NUMPY: Any = numpy.random.mtrand._rand
_seed_torch = torch.default_generator.manual_seed

_WORDS = 624  # in the state of a Mersenne Twister, of 32 bits each
# SplitMix64: https://doi.org/10.1145/2714064.2660195, with the constants of https://prng.di.unimi.it/splitmix64.c
_STEPS = numpy.arange(1, _WORDS + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


class Seeds(NamedTuple):
    """What all generators begin with.

    value: the seed. numpy: the words of NumPy's state, and how many of them are used: all. first: the first of these
    words. python: the same of Python's generator, with the number before the words.
    """

    value: int
    first: int
    numpy: bytes
    python: bytes


def derive(*keys: int | str) -> int:
    """A seed that follows from the keys. torch takes 63 bits everywhere."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, keys)).encode()) >> 1


def reseed(*keys: int | str) -> None:
    """Seed python, numpy, torch and CUDA from the keys."""
    seed_all(*prepare([derive(*keys)]))


def prepare(values: Sequence[int]) -> list[Seeds]:
    """For each of these values of `derive`, what `seed_all` takes."""
    words = _mixed(values).view(numpy.uint32)
    states = numpy.full((2, len(values), _WORDS + 1), _WORDS, dtype=numpy.uint32)
    states[0, :, :-1], states[1, :, 1:] = words[:, :_WORDS], words[:, _WORDS:]
    firsts, size = words[:, 0].tolist(), states[0, 0].nbytes
    found = [states[kind].tobytes() for kind in range(2)]
    at = range(0, len(values) * size, size)
    return [
        Seeds(value, first, found[0][start : start + size], found[1][start : start + size])
        for value, first, start in zip(values, firsts, at, strict=True)
    ]


def _mixed(values: Sequence[int]) -> NDArray[numpy.uint64]:
    """The first numbers of SplitMix64 with each of these seeds, as many as a Mersenne Twister has words."""
    found: NDArray[numpy.uint64] = numpy.array(values, dtype=numpy.uint64)[:, None] + _STEPS
    for shift, factor in _MIX:
        found ^= found >> numpy.uint64(shift)
        found *= numpy.uint64(factor)
    return found


def seed_all(seeds: Seeds) -> None:
    """Seed all of these generators."""
    global _last, _cuda
    value, first, of_numpy, of_python = seeds
    if _python is not None:
        _python[:] = of_python
        _PYTHON.gauss_next = None
    else:
        _PYTHON.setstate((_PYTHON.VERSION, (*memoryview(of_python).cast("I")[1:], _WORDS), None))
    # The script may have given NumPy another generator since then. If no word is used since `_last`, NumPy keeps no
    # normal number for its next call either.
    same = _NUMPY._bit_generator is _SHARED and _words[_WORDS] == _WORDS and _words[0] == _last
    if same and _shared is not None:
        _shared[:] = of_numpy
    else:
        _seed_numpy(value, of_numpy)
    _last = first
    _seed_torch(value)
    if _cuda is None:
        _cuda = torch.cuda.is_available()
    if _cuda:
        torch.cuda.manual_seed_all(value)


class Generators:
    """Generators that a script gave to a loader or to its samplers: their attributes, of torch, Python and NumPy.

    In each epoch they begin with a seed that follows from what they began with in the script.
    """

    def __init__(self) -> None:
        self._seeds: dict[Any, int] = {}  # the script's own

    def begin_epoch(self, places: Iterable[object], epoch: int) -> None:
        """Seed those of these loaders and samplers."""
        values = [value for place in places for value in _attributes(place)]
        for each in dict.fromkeys(value for value in values if isinstance(value, _KINDS)):
            if each not in self._seeds:
                self._seeds[each] = _first_seed(each)
            _seed_one(each, derive(self._seeds[each], epoch))


_KINDS = torch.Generator | random.Random | numpy.random.Generator | numpy.random.RandomState


def _attributes(place: object) -> list[Any]:
    return [getattr(place, "generator", None), *getattr(place, "__dict__", {}).values()]


def _first_seed(generator: Any) -> int:
    """A number for what a script's generator begins with: it is the same in each new worker."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    if isinstance(generator, random.Random):
        return derive(repr(generator.getstate()))
    if isinstance(generator, numpy.random.Generator):
        return derive(repr(generator.bit_generator.state))
    return derive(*generator.get_state()[1].tolist())


def _seed_one(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed if isinstance(generator, random.Random) else seed & 0xFFFFFFFF)


class Apart:
    """Random numbers that are drawn between batches, such as a sampler's: what seeds the batches does not change them.

    They go on from those of the first time.
    """

    def __init__(self) -> None:
        self._states: tuple[Any, ...] | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """What the body draws goes on from what the body before has drawn. The batches' numbers stay as they were."""
        before = _states()
        if self._states is not None:
            _set_states(self._states)
        yield
        first, self._states = self._states is None, _states()
        if not first:
            _set_states(before)


def _states() -> tuple[Any, ...]:
    return _PYTHON.getstate(), _NUMPY.get_state(legacy=False), torch.default_generator.get_state()


def _set_states(states: tuple[Any, ...]) -> None:
    of_python, of_numpy, of_torch = states
    _PYTHON.setstate(of_python)
    _NUMPY.set_state(of_numpy)
    torch.default_generator.set_state(of_torch)


def _seed_numpy(value: int, state: bytes) -> None:
    generator: Any = _NUMPY._bit_generator
    if type(generator) is numpy.random.MT19937:
        _NUMPY.set_state(("MT19937", numpy.frombuffer(state, numpy.uint32)[:_WORDS], _WORDS))
    else:  # the script has called numpy.random.set_bit_generator
        numpy.random.seed(value & 0xFFFFFFFF)
        _NUMPY.set_state({**_NUMPY.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})


def _memory(address: int) -> memoryview:
    """The state of a Mersenne Twister that lies there."""
    return memoryview((ctypes.c_uint32 * (_WORDS + 1)).from_address(address)).cast("B")


def _of_python(generator: Any) -> memoryview | None:
    """The memory of the generator's state, if it lies there as in CPython 3.11 to 3.14 (_randommodule.c); else None."""
    start, kind = object.__basicsize__, random.Random.__mro__[1]
    if sys.implementation.name != "cpython" or kind.__basicsize__ < start + 4 * (_WORDS + 1):
        return None
    found = _memory(id(generator) + start)
    _, (*words, used), _ = generator.getstate()
    return found if found.cast("I").tolist() == [used, *words] else None


def _of_numpy(generator: Any) -> memoryview | None:
    """The same for a generator of NumPy, as in NumPy 2.4."""
    if type(generator) is not numpy.random.MT19937:
        return None
    found, state = _memory(generator.ctypes.state_address), generator.state["state"]
    return found if found.cast("I").tolist() == [*state["key"].tolist(), state["pos"]] else None


_python = _of_python(_PYTHON)
_shared = _of_numpy(_NUMPY._bit_generator)
_SHARED = None if _shared is None else _NUMPY._bit_generator
_words = memoryview(b"") if _shared is None else _shared.cast("I")
_cuda: bool | None = None  # whether there is CUDA; None: not known yet
_last = -1  # the first word of the state that NumPy's generator was given last
