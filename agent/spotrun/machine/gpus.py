"""The GPUs and devices of this machine. Standard library only: agents and training scripts import this module."""

from __future__ import annotations

import os
import re
from pathlib import Path

DEVICES = "SPOTRUN_DEVICES"  # how many devices a machine of the local cloud has, if its pool says so


def device_count() -> int:
    """The devices of this machine: its GPUs; without GPUs, what its local pool says, or one."""
    return gpu_count() or int(os.environ.get(DEVICES) or 1)


def gpu_count(dev: Path = Path("/dev")) -> int:
    """The number of NVIDIA GPUs, counted by their device files."""
    try:
        return sum(1 for path in dev.iterdir() if re.fullmatch(r"nvidia[0-9]+", path.name))
    except OSError:
        return 0
