"""What the training loop costs under spotrun: run.steps, run.backward, run.ddp and the control block, beside bare DDP.

python -m bench.overhead [--launches 30] [--turns 15] [--out bench/RESULTS.md]

Two workers on this machine make ten steps of each of four loops in turn: a bare DDP loop; the same again, which shows
how exact the numbers are; one with the option that spotrun sets from three workers on; and the first one under spotrun,
with a real control block. No snapshot is taken: adaptive snapshots have a limit of their own, 1 % of the time.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bench.processes import answer
from bench.report import describe_machine, write_section

WORKERS = 2
HIDDEN, BATCH = 620, 64  # a step takes about 5 ms on one core of a server
STEP = 0.005  # seconds of the step for which the goal is set
GOAL = 0.01  # of that step
PATIENCE = 600.0  # seconds
TURN = 10  # steps that a loop makes in its turn
FIRST = 2  # the first ones, which do not count: the loop's code and data are not in the caches yet
WARM = 5  # turns of each loop that do not count
KINDS = ("bare", "bare, the same again", "bare, with find_unused_parameters", "**under spotrun**")


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.overhead", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--launches", type=int, default=30, help="of the workers: their memory lies elsewhere each time"
    )
    parser.add_argument("--turns", type=int, default=15, help="of each loop in a launch")
    parser.add_argument("--out", type=Path, default=Path("bench/RESULTS.md"))
    args = parser.parse_args()
    text = render([measure(args.turns, launch) for launch in range(args.launches)], args.turns)
    write_section(args.out, "overhead", text)
    print(f"\n{text}\nwritten to {args.out}")


Times = tuple[float, float]  # of a step: seconds that passed, seconds of the training thread's processor time
Round = list[Times]  # the median step of a turn of each kind


def measure(turns: int, launch: int = 0) -> list[Round]:
    """The turns of rank 0 in one launch. launch: its number, which decides in which order the loops are made."""
    with tempfile.TemporaryDirectory(prefix="spotrun-overhead-") as folder:
        found: list[Round] | None = answer(_work, WORKERS, (folder, WARM + turns, launch), PATIENCE)
    if found is None:
        raise SystemExit("bench-overhead: a worker failed: its output is above")
    return found[WARM:]


def render(launches: list[list[Round]], turns: int) -> str:
    """The section of the results."""
    added, noise = (statistics.median(_added(launches, kind, 1)) for kind in (3, 1))
    low, high = interval(_added(launches, 3, 1))
    share = added / STEP
    held = "held" if share < GOAL else "not held"
    return "\n".join(
        [
            "## What a step costs under spotrun",
            "",
            f"{datetime.now(UTC).date().isoformat()}, {describe_machine()}. {WORKERS} workers with gloo, one thread "
            f"each, are launched {len(launches)} times. In a launch, four loops make {TURN} steps in turn, {turns} "
            "times. Where the memory of a loop lies makes more difference than what is measured here. So the loops are "
            "made in another order in each launch, and there are many launches:",
            "",
            "* bare: a bare DDP loop",
            "* bare, the same again: shows how exact the numbers are",
            "* bare, with `find_unused_parameters=True`: `run.ddp` sets this on the CPU from three workers on. Then "
            "DDP keeps the order of its buckets, and restarts change no bit",
            "* under spotrun: the first loop with `run.ddp`, `run.steps`, `run.backward`, an `ElasticSampler` and the "
            "control block; no snapshots",
            "",
            "How much longer a step of a loop is: for each turn, the difference between the loop's median step and "
            "the mean of those of both bare loops; then the median of these over the turns of a launch; then the "
            "median over the launches. The second bare loop is compared with the first one. "
            f"The first {FIRST} steps of a turn do not count. The workers wait for each other, and other programs "
            "disturb them, so the time that passes varies much. The processor time of the training thread varies less. "
            "Forward and backward pass, optimizer and spotrun run in this thread.",
            "",
            f"Goal: spotrun adds less than {GOAL:.0%} to a step of {STEP * 1e3:g} ms. It adds {added * 1e6:.0f} µs of "
            f"processor time to the training thread (95 % confidence: {low * 1e6:.0f} to {high * 1e6:.0f} µs), "
            f"{share:.2%} of {STEP * 1e3:g} ms: {held}. The same loop again adds {noise * 1e6:.0f} µs.",
            "",
            "| a step | ms | more than bare, µs | (launches) | processor time, ms | more than bare, µs | (launches) |",
            "|---|---|---|---|---|---|---|",
            *(f"| {name} | {_cells(launches, at, 0)} | {_cells(launches, at, 1)} |" for at, name in enumerate(KINDS)),
        ]
    )


def interval(values: list[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the median: two of the values, by the sign test (David & Nagaraja, 2003, 7.1)."""
    ordered, count = sorted(values), len(values)
    outside, below = 0, 0.0  # how many values are outside on each side, and how probable it is that so few are below
    while below + math.comb(count, outside) / 2**count <= 0.025:
        below += math.comb(count, outside) / 2**count
        outside += 1
    at = max(0, outside - 1)
    return ordered[at], ordered[count - 1 - at]


def _added(launches: list[list[Round]], kind: int, clock: int) -> list[float]:
    """By how much a step of this kind is longer than a bare one: the median of each launch.

    A loop is compared with both bare loops, because their mean varies less than either; the second one with the first.
    """
    bare = slice(0, 1 if kind == 1 else 2)

    def more(turn: Round) -> float:
        return turn[kind][clock] - statistics.mean(each[clock] for each in turn[bare])

    return [statistics.median(map(more, rounds)) for rounds in launches]


def _cells(launches: list[list[Round]], kind: int, clock: int) -> str:
    middle = statistics.median(each[kind][clock] for rounds in launches for each in rounds)
    if kind == 0:
        return f"{middle * 1e3:.3f} | |"
    more = _added(launches, kind, clock)
    return f"{middle * 1e3:.3f} | {statistics.median(more) * 1e6:.0f} | {min(more) * 1e6:.0f} to {max(more) * 1e6:.0f}"


def _work(rank: int, port: int, folder: str, turns: int, launch: int, results: Any) -> None:
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
    seconds = list(_rounds(rank, turns, launch))
    if rank == 0:
        results.put(seconds)
    dist.barrier()
    os._exit(0)


def _network() -> Any:
    from torch import nn

    layers = nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10)
    return nn.Sequential(*layers)


def _rounds(rank: int, turns: int, launch: int) -> Iterator[Round]:
    """A turn of each loop at a time, each loop being the first equally often."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import TensorDataset

    from spotrun.train.parallel import _Spare

    count = (1 + turns * TURN) * BATCH * WORKERS
    data = TensorDataset(torch.randn(count, 64), torch.randint(10, (count,)))
    makers = [
        lambda: _bare(DistributedDataParallel(_network()), data, rank),
        lambda: _bare(DistributedDataParallel(_network()), data, rank),
        lambda: _bare(DistributedDataParallel(_Spare(_network()), find_unused_parameters=True), data, rank),
        lambda: _under_spotrun(data),
    ]
    made = {}
    for kind in random.Random(launch).sample(range(len(makers)), len(makers)):  # the same order in all workers
        made[kind] = makers[kind]()
        next(made[kind])  # makes the rest of its memory
    loops = [made[kind] for kind in range(len(makers))]
    for number in range(turns):
        found: Round = [(0.0, 0.0)] * len(loops)
        for at in range(len(loops)):
            kind = (number + at) % len(loops)
            found[kind] = _median_step(loops[kind])
        yield found


def _median_step(loop: Iterator[None]) -> Times:
    times = []
    for _ in range(TURN):
        began, busy = time.monotonic(), time.thread_time()
        next(loop)
        times.append((time.monotonic() - began, time.thread_time() - busy))
    passed, used = zip(*times[FIRST:], strict=True)
    return statistics.median(passed), statistics.median(used)


def _bare(ddp: Any, data: Any, rank: int) -> Iterator[None]:
    """A step each time."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    loss_fn, optimizer = torch.nn.CrossEntropyLoss(), torch.optim.AdamW(ddp.parameters())
    for x, y in DataLoader(data, BATCH, sampler=DistributedSampler(data, WORKERS, rank)):
        loss_fn(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def _under_spotrun(data: Any) -> Iterator[None]:
    """The same under spotrun."""
    import torch
    from torch.utils.data import DataLoader

    import spotrun

    run = spotrun.init()
    model = run.ddp(_network())
    loss_fn, optimizer = torch.nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters())
    sampler = spotrun.ElasticSampler(data, seed=0)
    run.track(model=model, optimizer=optimizer, sampler=sampler)
    for _ in run.epochs(1):
        for x, y in run.steps(DataLoader(data, BATCH, sampler=sampler)):
            run.backward(loss_fn(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            yield


if __name__ == "__main__":
    main()
