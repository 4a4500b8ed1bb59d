"""What only a GPU shows: the cost of a step and of snapshots, what a fault would lose, and how NCCL's groups end.

python -m bench.gpu [--parts gate groups steps exact snapshots] [--turns 20] [--seconds 40] [--sizes 100M 1B]

Each part is a process of its own, with NCCL and one GPU; `exact` is two, which share the GPU with gloo. Recovery
between machines is in `bench.recovery`, which uses a GPU if CUDA_VISIBLE_DEVICES is set.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.gpu_loops import (
    FIRST,
    LAYERS,
    SMALL,
    TURN,
    WIDTH,
    bare,
    mean_step,
    paced,
    prepare,
    seconds_of,
    sizes_of,
    under_spotrun,
)
from bench.processes import answer
from bench.report import describe_machine, write_section

WARM = 2  # turns of each loop that do not count
GROUPS = 5  # process groups that are made and ended
PATIENCE = 300.0  # seconds for a part
KINDS = ("bare", "bare, the same again", "bare, the host waits for each backward pass", "**under spotrun**")


@dataclass(frozen=True)
class Kept:
    """Snapshots of one model while it trains.

    bare, step: mean seconds of a step, without spotrun and with it. longest: seconds of the longest step. state:
    bytes. ready: seconds from the first step until the first snapshot has its record. commit: median seconds from a
    snapshot's begin to its record. lost: seconds of training since the newest snapshot, seen at the end of each step.
    """

    size: str
    bare: float
    step: float
    longest: float
    state: int
    ready: float
    commit: float
    lost: list[float]


@dataclass(frozen=True)
class Group:
    """An NCCL process group of one process. Seconds to make it, to have the device idle, and to leave it after that."""

    made: float
    idle: float
    left: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--turns", type=int, default=20, help="of each loop, for the cost of a step")
    parser.add_argument("--seconds", type=float, default=40, help="of training with snapshots, for each size")
    parser.add_argument("--sizes", nargs="+", choices=LAYERS, default=["100M", "1B"], help="models with snapshots")
    parser.add_argument("--out", type=Path, default=Path("bench/RESULTS.md"), help="its section is replaced")
    args = parser.parse_args()
    import torch

    if not torch.cuda.device_count():  # asks NVML, and does not initialise CUDA
        print("bench-gpu: torch finds no CUDA device on this machine: `nvidia-smi` says why", file=sys.stderr)
        return 1
    where = f"{datetime.now(UTC).date().isoformat()}, {torch.cuda.get_device_name()}, {describe_machine()}"
    text = f"## On a GPU\n\n{where}. One process with NCCL, fp32 with TF32, AdamW.\n"
    print(f"\n{text}")
    with tempfile.TemporaryDirectory(prefix="spotrun-gpu-", dir="/dev/shm") as folder:
        for name in args.parts:
            found = PARTS[name](args, folder)
            print(found, flush=True)
            text += f"\n{found}"
            write_section(args.out, "gpu", text)  # at once: the machine may be taken away before the rest
    print(f"\nwritten to {args.out}")
    return 0


def part(work: Callable[..., None], *args: Any, ranks: int = 1) -> Any:
    """What processes of its own find."""
    found = answer(work, ranks, args, PATIENCE)
    if found is None:
        raise SystemExit(f"bench-gpu: {work.__name__.strip('_')} failed: the output is above")
    return found


def steps(args: argparse.Namespace, folder: str) -> str:
    """What a step costs."""
    found: list[list[float]] = part(_steps, folder, args.turns)
    rows = [
        f"| {name} | {statistics.median(turn[at] for turn in found) * 1e3:.3f} | {_added(found, at)} |\n"
        for at, name in enumerate(KINDS)
    ]
    return (
        f"What a step costs: four loops make {TURN} steps in turn, {len(found)} times, with a model of 50 M "
        f"parameters. The device has finished before and after a turn's last {TURN - FIRST} steps, whose time counts. "
        "More: how much longer than the bare loop, the median over the turns. In the third loop, the host waits until "
        "the device has finished the backward pass before it starts the optimizer. With `exact: true`, spotrun does "
        "this in each step. The last loop takes no snapshots, and has run.ddp's wrapper around the model. If it is "
        "faster than the bare one, other differences of the loops outweigh what spotrun costs.\n\n"
        "| loop | ms a step | more, µs (share) |\n|---|---|---|\n" + "".join(rows)
    )


def exact(args: argparse.Namespace, folder: str) -> str:
    """What `exact: true` costs two workers."""
    found: list[list[float]] = part(_exact, folder, args.turns, ranks=2)
    plain, whole = (statistics.median(turn[at] for turn in found) for at in (0, 1))
    return (
        f"What `exact: true` costs: two workers share the GPU and train {SMALL[1] * SMALL[0] * (SMALL[0] + 1):,} "
        f"parameters over gloo. They make {TURN} steps without it and {TURN} with it in turn, {len(found)} times. "
        f"Medians: {plain * 1e3:.3f} and {whole * 1e3:.3f} ms a step. The median difference, in µs (share): "
        f"{_added(found, 1)}. gloo makes the host wait for the sums of gradients anyway. With NCCL, the wait of the "
        "third loop above comes in addition.\n"
    )


def snapshots(args: argparse.Namespace, folder: str) -> str:
    """What snapshots cost, and what a fault would lose."""
    rows = [_row(part(_snapshots, folder, size, args.seconds)) for size in args.sizes]
    return (
        "Snapshots with the adaptive interval. With snapshots: the mean of the second half of the steps. Lost: what a "
        "fault at the end of a step would cost, in seconds of training since the newest snapshot. First snapshot: from "
        "the end of the first step until it has its record. The host's memory is laid out and locked meanwhile.\n\n"
        "| parameters | state, GB | step without spotrun, ms | with snapshots, ms | more | longest step, s | "
        "first snapshot, s | snapshot, s | lost, s: median | most |\n|---|---|---|---|---|---|---|---|---|---|\n"
        + "".join(rows)
    )


def groups(args: argparse.Namespace, folder: str) -> str:
    """How long NCCL's groups take to begin and end."""
    found: list[Group] = part(_groups, folder)
    names = (
        ("made", "make the group, with a first all-reduce"),
        ("idle", "abort it, until the device is idle"),
        ("left", "leave it, with the wait for the end of the group before"),
    )
    return (
        f"An NCCL group of one process was made and left {len(found)} times, each time while a kernel ran and the "
        "group before ended.\n\n"
        + "".join(f"* {name}: {_span([getattr(each, key) for each in found])}\n" for key, name in names)
    )


def gate(args: argparse.Namespace, folder: str) -> str:
    """How long the health gate takes, and what it says against this machine."""
    seconds, problems = asyncio.run(_gate())
    return (
        f"The health gate's questions about GPUs (nvidia-smi twice, a matrix product, the import of torch) took "
        f"{seconds:.1f} s. It found {'; '.join(problems) or 'nothing against the machine'}.\n"
    )


PARTS = {"gate": gate, "groups": groups, "steps": steps, "exact": exact, "snapshots": snapshots}


async def _gate() -> tuple[float, tuple[str, ...]]:
    from spotrun.node.health.probe import Programs, probe_hardware
    from spotrun.node.health.verdict import Facts, judge

    began = time.monotonic()
    until = asyncio.get_running_loop().time() + PATIENCE
    facts = await probe_hardware(Facts(disk=1 << 50), "10.0.0.1", Programs(), until)
    return time.monotonic() - began, judge(facts)


def _added(found: list[list[float]], kind: int) -> str:
    if kind == 0:
        return ""
    more = statistics.median(turn[kind] - turn[0] for turn in found)
    return f"{more * 1e6:.0f} ({more / statistics.median(turn[0] for turn in found):.2%})"


def _row(kept: Kept) -> str:
    cells = [kept.size, f"{kept.state / 1e9:.1f}", f"{kept.bare * 1e3:.1f}", f"{kept.step * 1e3:.1f}"]
    cells += [f"{kept.step / kept.bare - 1:.2%}", f"{kept.longest:.2f}", f"{kept.ready:.2f}", f"{kept.commit:.2f}"]
    cells += [f"{statistics.median(kept.lost):.2f}", f"{max(kept.lost):.2f}"]
    return f"| {' | '.join(cells)} |\n"


def _span(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


def _steps(rank: int, port: int, folder: str, turns: int, results: Any) -> None:
    """For each turn, the seconds of a step of each kind."""
    import torch

    prepare(folder, port, interval=1 << 40)
    spotrun = under_spotrun(*sizes_of("50M"))
    loops = [bare("50M", waits=False), bare("50M", waits=False), bare("50M", waits=True), spotrun]
    found = []
    for number in range(WARM + turns):
        turn = [0.0] * len(loops)
        for at in range(len(loops)):
            kind = (number + at) % len(loops)
            turn[kind] = seconds_of(loops[kind])
        found.append(turn)
    results.put(found[WARM:])
    torch.cuda.synchronize()
    os._exit(0)


def _exact(rank: int, port: int, folder: str, turns: int, results: Any) -> None:
    """For each turn, the seconds of a step without exact mode and with it."""
    import torch

    import spotrun

    prepare(folder, port, interval=1 << 40, rank=rank, world=2, exact=True)
    run = spotrun.init()
    loop = under_spotrun(*SMALL, run)
    next(loop)
    boundary = run._boundary
    kinds = (None, None), (boundary.exactness, boundary._noted)
    if boundary.exactness is None or boundary._noted is None:
        raise SystemExit("the job is not exact")
    found = []
    for number in range(WARM + turns):
        turn = [0.0, 0.0]
        for kind in (number % 2, 1 - number % 2):
            boundary.exactness, boundary._noted = kinds[kind]
            turn[kind] = seconds_of(loop)
        found.append(turn)
    results.put(found[WARM:])
    torch.cuda.synchronize()
    os._exit(0)


def _snapshots(rank: int, port: int, folder: str, size: str, seconds: float, results: Any) -> None:
    """One `Kept`."""
    import torch

    control = prepare(folder, port, interval=0)
    loop = bare(size, waits=False)
    alone = mean_step([end for end, _ in zip(paced(loop), range(2 * TURN), strict=False)])
    loop.close()
    torch.cuda.empty_cache()
    ends, lost, took = list[float](), list[float](), list[float]()
    ready, newest = None, control.committed
    for end in paced(under_spotrun(*sizes_of(size))):
        ends.append(end)
        if control.committed != newest:
            newest = control.committed
            ready = ready or end - ends[0]
            took.append(control.took)
        if ready is not None:
            lost.append(end - ends[newest - 1])
        if end > ends[0] + seconds:
            break
    state = 3 * 4 * (LAYERS[size] * WIDTH * (WIDTH + 1))
    if ready is None:
        raise SystemExit(f"no snapshot of {size} was ready after {seconds:g} s: give more --seconds")
    times = ready, statistics.median(took), lost
    longest = max(after - before for before, after in pairwise(ends))
    results.put(Kept(size, alone, mean_step(ends), longest, state, *times))
    os._exit(0)


def _groups(rank: int, port: int, folder: str, results: Any) -> None:
    """Some `Group`s."""
    import torch
    import torch.distributed as dist

    from spotrun.train.distributed import NCCL_ENVIRONMENT, abort_in_time, leave_in_time

    os.environ |= NCCL_ENVIRONMENT
    device = torch.device("cuda", 0)
    found, tensor = [], torch.ones(1 << 20, device=device)
    for _ in range(GROUPS):
        began = time.monotonic()
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        made = time.monotonic()
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # about 0.05 s
        dist.all_reduce(tensor)
        if not abort_in_time(device, 60.0):
            raise SystemExit(1)
        idle = time.monotonic()
        if not leave_in_time(device, aborts=True, patience=60.0):
            raise SystemExit(1)
        found.append(Group(made - began, idle - made, time.monotonic() - idle))
    results.put(found)
    os._exit(0)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
