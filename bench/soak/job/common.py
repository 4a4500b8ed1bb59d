"""What the soak's scripts have in common: their arguments, and what they write at the end."""

import argparse
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
