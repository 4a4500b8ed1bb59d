"""Random numbers as a function of (seed, step, rank).

Every generator is seeded before each batch, so a snapshot holds no generator states. Any rank's snapshot serves all
ranks, and a resumed step draws the same numbers as an undisturbed one.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
import xxhash
from numpy.random import BitGenerator

# `random.seed`, `numpy.random.seed` and `torch.manual_seed` take longer, and each step pays for them. The last one
# would also prepare every kind of device that is not in use: 0.16 ms, each time.
_PYTHON: Any = random._inst
_NUMPY: Any = numpy.random  # its annotations lack the functions for bit generators
_RANDOM: Any = numpy.random.mtrand._rand
_seed_python = super(random.Random, _PYTHON).seed
_seed_numpy = _RANDOM.seed
_seed_torch = torch.default_generator.manual_seed
_cuda: bool | None = None  # whether there are GPUs; None before the first `reseed`
_given = _NUMPY.get_bit_generator()  # numpy's own, or the last one that `seed_all` gave to it


def derive(*keys: int | str) -> int:
    """A seed that follows from the keys. torch takes 63 bits everywhere."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, keys)).encode()) >> 1


def reseed(*keys: int | str) -> None:
    """Seed python, numpy, torch and CUDA from the keys."""
    global _cuda
    if _cuda is None:
        _cuda = torch.cuda.is_available()
    seed_all(derive(*keys))


def seed_all(value: int, bits: BitGenerator | None = None) -> None:
    """Seed them from a derived seed, after a first `reseed`. bits: a generator that was seeded with `numpy_seed` of it.

    To give numpy another generator takes less time than to seed its own.
    """
    global _given
    if bits is not None and _RANDOM._bit_generator is _given:  # otherwise the script has chosen one
        _NUMPY.set_bit_generator(bits)
        _given = bits
    else:
        _reseed_numpy(numpy_seed(value))
    _seed_python(value)
    _PYTHON.gauss_next = None
    _seed_torch(value)
    if _cuda:
        torch.cuda.manual_seed_all(value)


def numpy_seed(value: int) -> int:
    """The 32 bits of a seed that numpy takes."""
    return value & 0xFFFFFFFF


def _reseed_numpy(seed: int) -> None:
    try:
        _seed_numpy(seed)
    except TypeError:  # the script has called numpy.random.set_bit_generator
        numpy.random.seed(seed)
        _RANDOM.set_state({**_RANDOM.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})
