"""The GPUs and devices of this machine. Standard library only: agents and training scripts import this module."""

from __future__ import annotations

import os
import re
from pathlib import Path

# Set on a machine of the local cloud that uses no GPU of this computer: how many devices jobs find there.
DEVICES = "SPOTRUN_DEVICES"


def device_count() -> int:
    """How many devices jobs find on this machine.

    Its GPUs, or only those that CUDA_VISIBLE_DEVICES names; without GPUs, what its local pool says, or one.
    """
    if uses_gpus() and (named := os.environ.get("CUDA_VISIBLE_DEVICES")):
        return len(named.split(","))
    return gpu_count() or int(os.environ.get(DEVICES) or 1)


def uses_gpus() -> bool:
    """Whether jobs may use the GPUs of this computer: not on a machine of the local cloud that has none of them."""
    return DEVICES not in os.environ


def gpu_count(dev: Path = Path("/dev")) -> int:
    """The number of NVIDIA GPUs that jobs may use, counted by their device files."""
    if not uses_gpus():
        return 0
    try:
        return sum(1 for path in dev.iterdir() if re.fullmatch(r"nvidia[0-9]+", path.name))
    except OSError:
        return 0
