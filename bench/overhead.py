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


Times = tuple[float, float]  # of a step: seconds that passed, seconds of the training thread's processor time
Round = tuple[Times, Times, Times]


def measure(pairs: int, steps: int) -> list[Round]:
    """Seconds of rank 0's median step in each round but the first: bare, with find_unused_parameters, under spotrun."""
    with tempfile.TemporaryDirectory(prefix="spotrun-overhead-") as folder:
        found: list[Round] | None = answer(_work, WORKERS, (folder, pairs + 1, steps), PATIENCE)
    if found is None:
        raise SystemExit("bench-overhead: a worker failed: its output is above")
    return found[1:]


def render(rounds: list[Round], steps: int) -> str:
    """The section of the results."""
    names = ("bare", "bare, with find_unused_parameters", "**under spotrun**")
    added = statistics.median(each[2][1] - each[0][1] for each in rounds)
    share = added / statistics.median(each[0][0] for each in rounds)
    held = "held" if share < GOAL else "not held"
    return "\n".join(
        [
            "## What a step costs under spotrun",
            "",
            f"{datetime.now(UTC).date().isoformat()}, {describe_machine()}. {WORKERS} workers with gloo, one thread "
            f"each, in {len(rounds)} rounds of three blocks of {steps} steps: a bare DDP loop; the same with "
            "`find_unused_parameters=True`, which `run.ddp` sets on the CPU from three workers on, so that DDP keeps "
            "the order of its buckets, and restarts change no bit; the same as the first under spotrun (`run.ddp`, "
            "`run.steps`, `run.backward`, an `ElasticSampler`, the control block; no snapshots). Each block has its "
            "median step. Times are medians of these; shares are medians of the rounds. The workers wait for each "
            "other, and other programs disturb them, so the time that passes varies much from round to round. The "
            "processor time of the training thread varies less: forward and backward pass, optimizer and spotrun run "
            "in it.",
            "",
            f"Goal: spotrun adds less than {GOAL:.0%} to a step. It adds {added * 1e6:.0f} µs of processor time to the "
            f"training thread, {share:.2%} of a step: {held}.",
            "",
            "| a step | ms | more than bare | (quartiles) | processor time, ms | more than bare | (quartiles) |",
            "|---|---|---|---|---|---|---|",
            *(f"| {name} | {_cells(rounds, kind, 0)} | {_cells(rounds, kind, 1)} |" for kind, name in enumerate(names)),
        ]
    )


def _cells(rounds: list[Round], kind: int, clock: int) -> str:
    """The step of a kind by one clock, and by how much it is longer than a bare one."""
    middle = f"{statistics.median(each[kind][clock] for each in rounds) * 1e3:.3f}"
    if kind == 0:
        return f"{middle} | |"
    more = [each[kind][clock] / each[0][clock] - 1 for each in rounds]
    return f"{middle} | {statistics.median(more):.1%} | {_quartile(more, 0):.1%} to {_quartile(more, 2):.1%}"


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
        ends: list[list[Times]] = [[], [], []]  # of the steps, by kind of loop
        for bare, bare_optimizer, mine in zip(ddps, optimizers, ends, strict=False):
            for x, y in bare_loader:
                loss_fn(bare(x), y).backward()
                bare_optimizer.step()
                bare_optimizer.zero_grad()
                mine.append((time.monotonic(), time.thread_time()))
        for x, y in run.steps(loader):
            run.backward(loss_fn(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            ends[2].append((time.monotonic(), time.thread_time()))
        yield tuple(tuple(_median_step(mine, clock) for clock in (0, 1)) for mine in ends)


def _median_step(ends: list[Times], clock: int) -> float:
    return statistics.median(after[clock] - before[clock] for before, after in pairwise(ends))


if __name__ == "__main__":
    main()
