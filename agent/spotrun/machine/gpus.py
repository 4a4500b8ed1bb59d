"""The GPUs of this machine. Standard library only: agents and training scripts import this module."""

from __future__ import annotations

import re
from pathlib import Path


def gpu_count(dev: Path = Path("/dev")) -> int:
    """The number of NVIDIA GPUs, counted by their device files."""
    try:
        return sum(1 for path in dev.iterdir() if re.fullmatch(r"nvidia[0-9]+", path.name))
    except OSError:
        return 0
