"""What the training loop costs under spotrun: run.steps, run.backward, run.ddp and the control block, beside bare DDP.

python -m bench.overhead [--pairs 40] [--steps 100] [--out bench/RESULTS.md]

Two workers on this machine take turns between a bare DDP loop, one with the option that spotrun sets from three workers
on, and the first one under spotrun, with a real control block. No snapshot is taken: adaptive snapshots have a limit of
their own, 1 % of the time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.processes import answer
from bench.report import describe_machine, write_section

WORKERS = 2
HIDDEN, BATCH = 620, 64  # a step takes about 5 ms on one core of a server
GOAL = 0.01  # of a step's time
PATIENCE = 600.0  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.overhead", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40, help="of a block of each kind")
    parser.add_argument("--steps", type=int, default=100, help="in a block")
    parser.add_argument("--out", type=Path, default=Path("bench/RESULTS.md"))
    args = parser.parse_args()
    pairs = measure(args.pairs, args.steps)
    text = render(pairs, args.steps)
    write_section(args.out, "overhead", text)
    print(f"\n{text}\nwritten to {args.out}")


Round = tuple[float, float, float]


def measure(pairs: int, steps: int) -> list[Round]:
    """Seconds of rank 0's median step in each round but the first: bare, with find_unused_parameters, under spotrun."""
    with tempfile.TemporaryDirectory(prefix="spotrun-overhead-") as folder:
        found: list[Round] | None = answer(_work, WORKERS, (folder, pairs + 1, steps), PATIENCE)
    if found is None:
        raise SystemExit("bench-overhead: a worker failed: its output is above")
    return found[1:]


def render(rounds: list[Round], steps: int) -> str:
    """The section of the results."""
    bare, looking, ours = (statistics.median(column) * 1e3 for column in zip(*rounds, strict=True))
    more, option = ([(each[index] - each[0]) / each[0] for each in rounds] for index in (2, 1))
    held = "held" if statistics.median(more) < GOAL else "not held"
    return "\n".join(
        [
            "## What a step costs under spotrun",
            "",
            f"{datetime.now(UTC).date().isoformat()}, {describe_machine()}. {WORKERS} workers with gloo, one thread "
            f"each, in {len(rounds)} rounds of three blocks of {steps} steps: a bare DDP loop; the same with "
            "`find_unused_parameters=True`, which `run.ddp` sets on the CPU from three workers on, so that DDP keeps "
            "the order of its buckets, and restarts change no bit; the same as the first under spotrun (`run.ddp`, "
            "`run.steps`, `run.backward`, an `ElasticSampler`, the control block; no snapshots). Each block has its "
            "median step. Times are medians of these; shares are medians of the rounds. "
            f"Goal: under {GOAL:.0%} more than a bare step of 5 ms: {held}.",
            "",
            "| a step | ms | more than bare | (quartiles) |",
            "|---|---|---|---|",
            f"| bare | {bare:.3f} | | |",
            f"| bare, with find_unused_parameters | {looking:.3f} | {_shares(option)} |",
            f"| **under spotrun** | {ours:.3f} | {_shares(more)} |",
        ]
    )


def _shares(values: list[float]) -> str:
    return f"{statistics.median(values):.1%} | {_quartile(values, 0):.1%} to {_quartile(values, 2):.1%}"


def _quartile(values: list[float], index: int) -> float:
    return statistics.quantiles(values, n=4)[index] if len(values) > 1 else values[0]


def _work(rank: int, port: int, folder: str, epochs: int, steps: int, results: Any) -> None:
    from spotrun.state.control import Context, Control

    control = Path(folder) / f"control-{rank}"
    Control(control, create=True).close()
    slots = str(Path(folder) / f"slots-{rank}")
    context = Context(
        "job", 1, f"n{rank}", str(control), slots, folder, snapshot_interval=1 << 40, controls=[str(control)]
    )
    os.environ |= {Context.VARIABLE: context.to_env(), "RANK": str(rank), "WORLD_SIZE": str(WORKERS)}
    os.environ |= {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    seconds = list(_blocks(rank, epochs, steps))
    if rank == 0:
        results.put(seconds)
    dist.barrier()
    os._exit(0)


def _network() -> Any:
    from torch import nn

    layers = nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10)
    return nn.Sequential(*layers)


def _blocks(rank: int, epochs: int, steps: int) -> Any:
    """The seconds of the median step in each epoch, as in `measure`."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    import spotrun
    from spotrun.train.parallel import _Spare

    count = steps * BATCH * WORKERS
    data = TensorDataset(torch.randn(count, 64), torch.randint(10, (count,)))
    loss_fn = nn.CrossEntropyLoss()
    ddps = [
        DistributedDataParallel(_network()),
        DistributedDataParallel(_Spare(_network()), find_unused_parameters=True),
    ]
    optimizers = [torch.optim.AdamW(each.parameters()) for each in ddps]
    own: Any = DistributedSampler(data, WORKERS, rank)
    bare_loader = DataLoader(data, BATCH, sampler=own)
    run = spotrun.init()
    model = run.ddp(_network())
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = spotrun.ElasticSampler(data, seed=0)
    loader = DataLoader(data, BATCH, sampler=sampler)
    run.track(model=model, optimizer=optimizer, sampler=sampler)
    for epoch in run.epochs(epochs):
        own.set_epoch(epoch)
        ends: list[list[float]] = [[], [], []]  # of the steps, by kind of loop
        for bare, bare_optimizer, mine in zip(ddps, optimizers, ends, strict=False):
            for x, y in bare_loader:
                loss_fn(bare(x), y).backward()
                bare_optimizer.step()
                bare_optimizer.zero_grad()
                mine.append(time.monotonic())
        for x, y in run.steps(loader):
            run.backward(loss_fn(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            ends[2].append(time.monotonic())
        yield tuple(statistics.median(after - before for before, after in pairwise(mine)) for mine in ends)


if __name__ == "__main__":
    main()
