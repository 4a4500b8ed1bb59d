"""The baseline's script: what a careful user writes by hand to survive torchrun's restarts.

DDP, a checkpoint by torch.save every --save-every steps into a shared folder (written aside, then renamed), and a
resume from the newest one at start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
# The kernel kills a worker when its agent dies, so that nothing of a killed node is left: so it is with a lost machine.
# This comes before the imports, because they take longest. If the agent died before this line, the whole benchmark did.
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
if not os.path.exists(f"/proc/{os.environ.get('BENCH_PID', os.getppid())}"):
    sys.exit("the benchmark is gone")

import argparse  # noqa: E402
from datetime import timedelta  # noqa: E402
from itertools import islice  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import work  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402


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
