"""What the soak's scripts have in common: their arguments, how they begin, and what they write at the end."""

import argparse
import hashlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import as_gpu  # type: ignore[import-not-found]  # beside this script
import torch

import spotrun

EPOCHS = 2


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--loaders", type=int, default=0, help="processes that load data, for each rank")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds added to each step")
    parser.add_argument("--gpu", action="store_true", help="imitate a GPU: see as_gpu.py")
    return parser.parse_args()


def begin(args: argparse.Namespace) -> tuple[spotrun.Run, TextIO, torch.Tensor]:
    """For a script with a Trainer. Returns its run, the file for the steps that it makes, and its samples."""
    if args.gpu:
        as_gpu.imitate()
    torch.set_num_threads(1)
    run = spotrun.init(seed=5)
    torch.manual_seed(0)
    record = (args.out / f"steps-{run.generation}-{run.rank}-{time.time_ns()}.jsonl").open("a", buffering=1)
    return run, record, torch.randn(args.samples, 16, generator=torch.Generator().manual_seed(1))


def write_final(
    run: spotrun.Run, out: Path, models: Iterable[Any], optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Rank 0 writes a digest of the final state."""
    digest = hashlib.sha256()
    for model in models:
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
    for optimizer in optimizers:
        for state in optimizer.state_dict()["state"].values():
            for value in state.values():
                digest.update(value.numpy().tobytes())
    if run.rank == 0:
        result = {"world_size": run.world_size, "step": run.step, "digest": digest.hexdigest()}
        (out / "final.json").write_text(json.dumps(result))
