"""Random numbers as a function of (seed, step, rank).

Every generator is seeded before each batch, so a snapshot holds no generator states. Any rank's snapshot serves all
ranks, and a resumed step draws the same numbers as an undisturbed one.

NumPy's function that seeds takes 8 to 20 µs between two steps: the model's work has driven it out of the caches. So the
state that it would leave is prepared with a generator of its own, for many steps at once, and is copied in each step.
"""

from __future__ import annotations

import ctypes
import functools
import random
from typing import Any, NamedTuple

import numpy
import torch
import xxhash

# `random.seed`, `numpy.random.seed` and `torch.manual_seed` take longer, and each step pays for them. The last one
# would also prepare every kind of device that is not in use: 0.16 ms, each time.
_PYTHON: Any = random._inst
_seed_python = super(random.Random, _PYTHON).seed
_NUMPY: Any = numpy.random.mtrand._rand
_seed_torch = torch.default_generator.manual_seed

_WORDS = 624  # in the state of a Mersenne Twister; then follows how many of them are used


class Seeds(NamedTuple):
    """What all generators begin with. low: the seed of NumPy's. state: its state with that seed, if it is known."""

    value: int
    low: int
    state: bytes | None


def derive(*keys: int | str) -> int:
    """A seed that follows from the keys. torch takes 63 bits everywhere."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, keys)).encode()) >> 1


def reseed(*keys: int | str) -> None:
    """Seed python, numpy, torch and CUDA from the keys."""
    seed_all(prepare(*keys))


def prepare(*keys: int | str) -> Seeds:
    """The seeds that follow from the keys, for `seed_all`."""
    value = derive(*keys)
    low, state = value & 0xFFFFFFFF, None
    if _SHARED is not None:
        _SPARE._legacy_seeding(low)
        state = _spare.tobytes()
    return Seeds(value, low, state)


def seed_all(seeds: Seeds) -> None:
    """Seed all of these generators."""
    global _last
    value, low, state = seeds
    _seed_python(value)
    _PYTHON.gauss_next = None
    # The script may have given NumPy another generator since then. If no word is used since `_last`, NumPy keeps no
    # normal number for its next call either.
    same = _NUMPY._bit_generator is _SHARED and _words[_WORDS] == _WORDS and _words[0] == _last
    if same and state is not None:
        _shared[:] = state
    else:
        _seed_numpy(low)
    _last = low
    _seed_torch(value)
    if _has_cuda():
        torch.cuda.manual_seed_all(value)


def _seed_numpy(low: int) -> None:
    try:
        _NUMPY.seed(low)
    except TypeError:  # the script has called numpy.random.set_bit_generator
        numpy.random.seed(low)
        _NUMPY.set_state({**_NUMPY.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _memory(generator: Any) -> memoryview:
    """The state of a Mersenne Twister of NumPy."""
    return memoryview((ctypes.c_uint32 * (_WORDS + 1)).from_address(generator.ctypes.state_address)).cast("B")


def _is_known(generator: Any) -> bool:
    """Whether it is a Mersenne Twister, and its state lies in the memory as in NumPy 2.4."""
    if type(generator) is not numpy.random.MT19937:
        return False
    state: Any = generator.state["state"]
    return _memory(generator).cast("I").tolist() == [*state["key"].tolist(), state["pos"]]


_SPARE = numpy.random.MT19937(0)
_SHARED = _NUMPY._bit_generator if _is_known(_NUMPY._bit_generator) else None
_spare, _shared = _memory(_SPARE), _memory(_SHARED or _SPARE)
_words = _shared.cast("I")  # of the same memory
_last = -1  # the seed that NumPy's generator was given last, which is the first word of its state
