"""What both scripts with a Trainer share. Under torchrun, they save a checkpoint every --save-every steps."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import work

if TYPE_CHECKING:
    from spotrun import Run


def begin() -> Run | None:
    """Returns None under torchrun."""
    torch.set_num_threads(1)
    work.mark("entered")
    if "SPOTRUN_CONTEXT" not in os.environ:
        return None
    import train_spotrun

    import spotrun

    train_spotrun.mark_regroups()
    return spotrun.init(seed=0, backend="gloo")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--group-timeout", type=float, default=1800, help="seconds; torch's own default is 1800")
    return parser.parse_args()
