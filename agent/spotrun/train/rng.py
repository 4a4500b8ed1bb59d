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

# The generators of `random.seed` and `numpy.random.seed`: these functions take longer, and each step pays for them.
_PYTHON: Any = random._inst
_NUMPY = numpy.random.mtrand._rand


def reseed(*keys: int | str) -> None:
    """Seed python, numpy, torch and CUDA from the keys."""
    value = xxhash.xxh3_64_intdigest("/".join(map(str, keys)).encode()) >> 1  # torch takes 63 bits everywhere
    super(random.Random, _PYTHON).seed(value)
    _PYTHON.gauss_next = None
    _NUMPY.seed(value & 0xFFFFFFFF)
    # torch.manual_seed would also prepare every kind of device that is not in use: 0.16 ms, each time.
    torch.default_generator.manual_seed(value)
    if _has_cuda():
        torch.cuda.manual_seed_all(value)


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()
