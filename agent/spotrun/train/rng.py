"""Random numbers as a function of (seed, step, rank).

Instead of saving generator states, every generator is seeded anew before each batch. So they need no room in a
snapshot, any rank's snapshot serves all, and a resumed step draws what the undisturbed one drew.
"""

from __future__ import annotations

import hashlib
import random

import numpy
import torch


def reseed(*keys: int | str) -> None:
    """Seed python, numpy, torch and CUDA from the keys."""
    digest = hashlib.blake2b("/".join(map(str, keys)).encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little") >> 1  # torch takes 63 bits everywhere
    random.seed(value)
    numpy.random.seed(value & 0xFFFFFFFF)
    torch.manual_seed(value)
