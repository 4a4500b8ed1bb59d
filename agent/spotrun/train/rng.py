"""Random numbers as a function of (seed, step, rank).

Every generator is seeded before each batch, so a snapshot holds no generator states. Any rank's snapshot serves all
ranks, and a resumed step draws the same numbers as an undisturbed one.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy
import torch
import xxhash

# `random.seed`, `numpy.random.seed` and `torch.manual_seed` take longer, and each step pays for them. The last one
# would also prepare every kind of device that is not in use: 0.16 ms, each time.
_PYTHON: Any = random._inst
_seed_python = super(random.Random, _PYTHON).seed
_seed_numpy = numpy.random.mtrand._rand.seed
_seed_torch = torch.default_generator.manual_seed


def derive(*keys: int | str) -> int:
    """A seed that follows from the keys. torch takes 63 bits everywhere."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, keys)).encode()) >> 1


def reseed(*keys: int | str) -> None:
    """Seed python, numpy, torch and CUDA from the keys."""
    seed_all(derive(*keys))


def seed_all(value: int) -> None:
    """Seed all of these generators with a value of `derive`."""
    _seed_python(value)
    _PYTHON.gauss_next = None
    try:
        _seed_numpy(value & 0xFFFFFFFF)
    except TypeError:  # the script has called numpy.random.set_bit_generator
        numpy.random.seed(value & 0xFFFFFFFF)
        own = numpy.random.mtrand._rand
        own.set_state({**own.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})
    _seed_torch(value)
    if _has_cuda():
        torch.cuda.manual_seed_all(value)


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()
