"""The baseline's script: what a careful user writes by hand to survive torchrun's restarts.

DDP, a checkpoint by torch.save every --save-every steps into a shared folder (written aside, then renamed), and a
resume from the newest one at start.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import die_with_agent  # noqa: F401
import torch
import torch.distributed as dist
import work
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    work.mark("entered")
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.group_timeout))
    work.mark("grouped")
    work.set_up()
    model = DistributedDataParallel(work.build_model().to(work.DEVICE))
    optimizer = work.build_optimizer(model)
    step = load(args.checkpoints, model, optimizer)
    work.mark("restored", step)
    try:
        train(args, model, optimizer, step)
    except BaseException:
        work.mark("failed")
        raise


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--group-timeout", type=float, default=1800, help="seconds; torch's own default is 1800")
    return parser.parse_args()


def train(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    data = work.build_data()
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=work.BATCH, sampler=sampler)
    loss_fn = nn.CrossEntropyLoss()
    pace = work.Pace()
    while step < args.steps:
        epoch, done = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for x, y in islice(loader, done, None):
            loss_fn(model(x.to(work.DEVICE)), y.to(work.DEVICE)).backward()
            optimizer.step()
            optimizer.zero_grad()
            pace.wait()
            step += 1
            work.mark("step", step)
            if step % args.save_every == 0 and dist.get_rank() == 0:
                save(args.checkpoints, model, optimizer, step)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    partial = folder / f"partial-{os.getpid()}"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
    os.replace(partial, folder / f"{step:010d}.pt")
    for old in sorted(folder.glob("*.pt"))[:-3]:
        old.unlink()


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore the newest checkpoint, if there is one. Returns the step after which it was made; 0 without one."""
    found = sorted(folder.glob("*.pt"))
    if not found:
        return 0
    state = torch.load(found[-1], map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    main()
