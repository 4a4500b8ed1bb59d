"""A small training run whose end can be compared bit by bit; it prints what it saw as lines of JSON.

It is slow at the steps where a machine will be taken, so that the run does not end before that.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import threading
import time

import torch
from ballast import Ballast
from fitness import print_facts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from words import tell, watch_metadata

import spotrun
from spotrun.node.cleanup import SHARED_MEMORY, unused_nccl_segments

SLOW = 0.3  # seconds of a step, from the step where a machine will be taken

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--pause", type=float, default=0.0, help="seconds added to each step")
parser.add_argument("--mib", type=int, default=0, help="size of the state besides the model, on each worker")
parser.add_argument("--hold", default="", help="steps, such as 60,150: where each generation becomes slow")
parser.add_argument("--fitness", action="store_true", help="print what the health gate would see")
parser.add_argument("--watch", action="store_true", help="print what changes in the metadata server's notices")


def main() -> None:
    args = parser.parse_args()
    run = spotrun.init(seed=1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    generation = int(json.loads(os.environ.get("SPOTRUN_CONTEXT", "{}")).get("generation", 1))
    if args.fitness and run.is_main and generation == 1:
        print_facts()
    if args.watch and run.is_main:
        threading.Thread(target=watch_metadata, daemon=True).start()
    generator = torch.Generator().manual_seed(0)
    batch = 4
    inputs = torch.randn(args.steps * batch * run.world_size, 16, generator=generator)
    dataset = TensorDataset(inputs, inputs[:, :4].argmax(1))
    model = run.ddp(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = spotrun.ElasticSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=batch, sampler=sampler)
    ballast = {"ballast": Ballast(args.mib, run.device)} if args.mib else {}
    run.track(model=model, optimizer=optimizer, sampler=sampler, **ballast)
    holds = [int(step) for step in args.hold.split(",") if step]
    hold = holds[generation - 1] if generation <= len(holds) else args.steps + 1
    for _ in run.epochs(1):
        for x, y in run.steps(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            time.sleep(SLOW if run.step >= hold else args.pause)
    if generation > 1 and run.local_rank == 0:
        tell("segments", segments=len(list(SHARED_MEMORY.glob("nccl-*"))), left=unused_nccl_segments())
    if run.is_main:
        state = {"mib": args.mib, "world": run.world_size, "device": run.device.type}
        tell("train", digest=_digest(model, optimizer), steps=run.step, **state)


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A hash of the final state's bits."""
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.cpu().numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            found.update(value.cpu().numpy().tobytes())
    return found.hexdigest()


main()
