"""What the training loop costs under spotrun: run.steps, run.backward, run.ddp and the control block, beside bare DDP.

python -m bench.overhead [--launches 20] [--rounds 100] [--out bench/RESULTS.md]

Two workers on this machine make steps of four loops. Three loops have the same model, DDP instance, optimizer and
dataset: a bare DDP loop; the same again, which shows how exact the numbers are; and one under spotrun, with a real
control block. If each loop has a model of its own, the place of its memory makes more difference than what is measured.
In a bare step, nothing of spotrun runs in the training thread. The benchmark checks that.

The model's work takes about 50 times as long as spotrun's code. Its time varies by more than spotrun adds. So a
stopwatch runs only while a step does something else than this work: the loader, DDP's and torch's Python code, and all
of spotrun's. The difference between two loops is then spotrun's. What the stopwatch cannot show: spotrun's code takes
room in the caches, so that the model's work may take longer. Whole steps are compared for that.

In a round, each loop makes some steps in a row, of which the last one counts. So its code was last used one step
before, as in a real training. No snapshot is taken: adaptive snapshots have a limit of their own, 1 % of the time.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from bench.processes import answer
from bench.report import describe_machine, write_section

WORKERS = 2
HIDDEN, BATCH = 620, 64  # a step takes about 5 ms on one core of a server
STEP = 0.005  # seconds of the step for which the goal is set
GOAL = 0.01  # of that step
PATIENCE = 600.0  # seconds
WARM = 20  # rounds that do not count
IN_A_ROW = 3  # steps of a loop in a round
KINDS = ("bare", "bare, the same again", "**under spotrun**", "bare, with find_unused_parameters")
SPOTRUN = 2  # the place of that kind

Times = tuple[float, float]  # of a step: seconds outside of the model's work; the training thread's processor time
OUTSIDE, PROCESSOR = range(2)
Round = list[Times]  # a step of each kind


@dataclass(frozen=True)
class Launch:
    """What rank 0 has measured in one launch of the workers.

    prepared: seconds of processor time for what spotrun does for many batches together, for each batch. A median step
    does not have it. threads: seconds of processor time of spotrun's other threads, for each second that passes.
    """

    rounds: list[Round]
    prepared: float
    threads: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.overhead", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--launches", type=int, default=20, help="of the workers: their memory lies elsewhere each time"
    )
    parser.add_argument("--rounds", type=int, default=100, help="in a launch: some steps of each loop")
    parser.add_argument("--out", type=Path, default=Path("bench/RESULTS.md"))
    args = parser.parse_args()
    text = render([measure(args.rounds, launch) for launch in range(args.launches)])
    write_section(args.out, "overhead", text)
    print(f"\n{text}\nwritten to {args.out}")


def measure(rounds: int, launch: int = 0) -> Launch:
    """launch: its number, which decides in which order the loops make their steps."""
    with tempfile.TemporaryDirectory(prefix="spotrun-overhead-") as folder:
        found: Launch | None = answer(_work, WORKERS, (folder, WARM + rounds, launch), PATIENCE)
    if found is None:
        raise SystemExit("bench-overhead: a worker failed: its output is above")
    return replace(found, rounds=found.rounds[WARM:])


def render(launches: list[Launch]) -> str:
    """The section of the results."""
    prepared = statistics.median(each.prepared for each in launches)
    threads = statistics.median(each.threads for each in launches) * STEP
    step, noise = (_added(launches, kind, OUTSIDE) for kind in (SPOTRUN, 1))
    added, same = statistics.median(step) + prepared + threads, statistics.median(noise)
    low, high = (each + prepared + threads for each in interval(step))
    held = "held" if high < GOAL * STEP else "not held" if low >= GOAL * STEP else "not decided by these launches"
    return "\n".join(
        [
            "## What a step costs under spotrun",
            "",
            f"{datetime.now(UTC).date().isoformat()}, {describe_machine()}. {WORKERS} workers with gloo, one thread "
            f"each, are launched {len(launches)} times. A launch has {len(launches[0].rounds)} rounds. In a round, "
            f"each of four loops makes {IN_A_ROW} steps, in random order. Only the last of a loop's {IN_A_ROW} steps "
            "counts. The first three loops have the same model, DDP instance, optimizer and dataset:",
            "",
            "* bare: a bare DDP loop. In its steps, nothing of spotrun runs in the training thread",
            "* bare, the same again: shows how exact the numbers are",
            "* under spotrun: with `run.ddp`, `run.steps`, `run.backward`, an `ElasticSampler` and the control block; "
            "no snapshots. The state of each step is noted, so that a lost node loses no step, unless that takes more "
            "than 0.2 % of a step",
            "* bare, with `find_unused_parameters=True`: `run.ddp` sets this on the CPU from three workers on. Then "
            "DDP keeps the order of its buckets, and restarts change no bit. This loop has a model of its own, whose "
            "memory lies elsewhere, so its numbers are less exact",
            "",
            "Outside: the time of a step that is not the work of the model, the loss function, the autograd engine or "
            "the optimizer. This is the time of the loader, of the Python code of DDP and torch, and of spotrun. "
            "Processor time: of the whole step, in the training thread. It also shows whether the model's work takes "
            "longer because spotrun's code takes room in the caches, but it varies much more.",
            "",
            "How much longer a step of a loop is: for each round, the difference between the loop's step and the mean "
            "of those of both bare loops; then the median of these over the rounds of a launch; then the median over "
            "the launches. The second bare loop is compared with the first one.",
            "",
            f"Goal: spotrun adds less than {GOAL:.0%} to a step of {STEP * 1e3:g} ms. It adds {added * 1e6:.0f} µs "
            f"(95 % confidence: {low * 1e6:.0f} to {high * 1e6:.0f} µs), {added / STEP:.2%} of {STEP * 1e3:g} ms: "
            f"{held}. This is the median step's time outside, in the table, and what that step does not show: "
            f"{prepared * 1e6:.1f} µs for what is prepared for many batches together, and {threads * 1e6:.1f} µs of "
            f"spotrun's other threads. The same loop again adds {same * 1e6:.1f} µs (95 % confidence: "
            f"{' to '.join(f'{each * 1e6:.1f}' for each in interval(noise))} µs).",
            "",
            "| a step | outside, µs | more than bare | (launches) | processor time, µs | more than bare | (launches) |",
            "|---|---|---|---|---|---|---|",
            *(
                f"| {name} | {_cells(launches, at, OUTSIDE)} | {_cells(launches, at, PROCESSOR)} |"
                for at, name in enumerate(KINDS)
            ),
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


def _added(launches: list[Launch], kind: int, clock: int) -> list[float]:
    """By how much a step of this kind is longer than a bare one: the median of each launch.

    A loop is compared with both bare loops, because their mean varies less than either; the second one with the first.
    """
    bare = slice(0, 1 if kind == 1 else SPOTRUN)

    def more(steps: Round) -> float:
        return steps[kind][clock] - statistics.mean(each[clock] for each in steps[bare])

    return [statistics.median(map(more, each.rounds)) for each in launches]


def _cells(launches: list[Launch], kind: int, clock: int) -> str:
    middle = statistics.median(each[kind][clock] for launch in launches for each in launch.rounds)
    if kind == 0:
        return f"{middle * 1e6:,.0f} | |"
    more = _added(launches, kind, clock)
    return f"{middle * 1e6:,.0f} | {statistics.median(more) * 1e6:.0f} | {min(more) * 1e6:.0f} to {max(more) * 1e6:.0f}"


def _work(rank: int, port: int, folder: str, rounds: int, launch: int, results: Any) -> None:
    from spotrun.state.control import Context, Control

    control = Path(folder) / f"control-{rank}"
    Control(control, create=True).close()
    slots = str(Path(folder) / f"slots-{rank}")
    context = Context(
        "job",
        1,
        f"n{rank}",
        str(control),
        slots,
        folder,
        snapshot_interval=1 << 40,
        controls=[str(control)],
        regroups=True,
    )
    os.environ |= {Context.VARIABLE: context.to_env(), "RANK": str(rank), "WORLD_SIZE": str(WORKERS)}
    os.environ |= {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    found = _measure(rank, rounds, launch)
    if rank == 0:
        results.put(found)
    dist.barrier()
    os._exit(0)


class _Stopwatch:
    """Adds up the seconds in which it runs. It is stopped while a step does the model's work."""

    def __init__(self) -> None:
        self.seconds = self._since = 0.0

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self._since

    def without(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose time does not count."""

        def called(*args: Any, **options: Any) -> Any:
            self.stop()
            try:
                return call(*args, **options)
            finally:
                self.start()

        return called


_WATCH = _Stopwatch()


def _network() -> Any:
    from torch import nn

    class Network(nn.Sequential):
        forward = _WATCH.without(nn.Sequential.forward)

    layers = nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10)
    return Network(*layers)


def _optimizer(parameters: Any) -> Any:
    import torch

    class Optimizer(torch.optim.AdamW):
        def _accelerator_graph_capture_health_check(self) -> None:  # torch 2.13 calls it after the pre-hooks
            _WATCH.stop()

    return Optimizer(parameters)


def _train(loss: Any, backward: Callable[[Any], None], optimizer: Any) -> None:
    """The rest of a step, once its loss is computed."""
    backward(loss)
    optimizer.step()  # stops the stopwatch
    optimizer.zero_grad()
    _WATCH.start()


def _measure(rank: int, count: int, launch: int) -> Launch:
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    import spotrun
    from spotrun.train import batches
    from spotrun.train.unused import Spare

    torch.autograd._engine_run_backward = _WATCH.without(torch.autograd._engine_run_backward)
    samples = (count * IN_A_ROW + 1) * BATCH * WORKERS
    data = TensorDataset(torch.randn(samples, 64), torch.randint(10, (samples,)))
    # Before `spotrun.init`: a script that makes such a sampler later restarts after a failure, and notes no state.
    loaders = [DataLoader(data, BATCH, sampler=DistributedSampler(data, WORKERS, rank)) for _ in range(3)]
    other = DistributedDataParallel(Spare(_network(), static=False), find_unused_parameters=True)
    run = spotrun.init()
    model = run.ddp(_network())
    optimizer = _optimizer(model.parameters())
    loops = [
        _bare(model._ddp, optimizer, loaders[0]),
        _bare(model._ddp, optimizer, loaders[1]),
        _under_spotrun(run, model, optimizer, data),
        _bare(lambda batch: other.module.take(other(batch)), _optimizer(other.parameters()), loaders[2]),
    ]
    began, busy = time.monotonic(), _seconds_of_threads()
    rounds = list(_rounds(run, optimizer, loops, count, random.Random(launch)))
    threads = (_seconds_of_threads() - busy) / (time.monotonic() - began)
    for loop in loops[:SPOTRUN]:
        if seen := _with_hooks(optimizer, False, partial(_calls, loop)):
            raise AssertionError(f"the bare loop calls spotrun: {seen}")
    return Launch(rounds, _prepare(rank, 64 * batches.AT_ONCE), threads)


def _rounds(run: Any, optimizer: Any, loops: list[Iterator[None]], count: int, draw: random.Random) -> Iterator[Round]:
    """Steps of all loops, in an order that is drawn for each round. draw: gives the same in all workers."""
    for _ in range(count):
        found: Round = [(0.0, 0.0)] * len(loops)
        for kind in draw.sample(range(len(loops)), len(loops)):
            run._clock.resume()  # for spotrun, no time has passed while the other loops made their steps
            for _ in range(IN_A_ROW):
                found[kind] = _with_hooks(optimizer, kind == SPOTRUN, partial(_time, loops[kind]))
        yield found


def _with_hooks(optimizer: Any, wanted: bool, call: Callable[[], Any]) -> Any:
    """The result of the call. Unless the optimizer's hooks are wanted, they are away meanwhile: spotrun has one."""
    hooks = optimizer._optimizer_step_pre_hooks
    kept = {} if wanted else dict(hooks)
    if not wanted:
        hooks.clear()
    result = call()
    hooks.update(kept)
    return result


def _calls(loop: Iterator[None]) -> set[str]:
    """The functions of spotrun that a step of this loop calls."""
    import spotrun

    folder, found = str(Path(spotrun.__file__).parent), set[str]()

    def see(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            found.add(frame.f_code.co_qualname)

    sys.setprofile(see)
    next(loop)
    sys.setprofile(None)
    return found


def _prepare(rank: int, count: int) -> float:
    """`Launch.prepared`: so many batches are described, and their seeds derived, 64 at a time.

    An `ElasticSampler` looks up many samples at a time. A bare loop's sampler does that for all samples of the epoch.
    """
    from spotrun.train import batches

    described = batches.elastic(0, count * BATCH * WORKERS, BATCH, WORKERS, rank)
    began = time.thread_time()
    for _ in batches.with_seeds(described, 0, 0, rank):
        pass
    return (time.thread_time() - began) / count


def _seconds_of_threads() -> float:
    """Seconds of processor time that spotrun's other threads have used."""
    own = (each.ident for each in threading.enumerate() if each.name.startswith("spotrun"))
    return sum(time.clock_gettime(time.pthread_getcpuclockid(each)) for each in own if each is not None)


def _time(loop: Iterator[None]) -> Times:
    busy, _WATCH.seconds = time.thread_time(), 0.0
    _WATCH.start()
    next(loop)
    _WATCH.stop()
    return _WATCH.seconds, time.thread_time() - busy


def _bare(ddp: Any, optimizer: Any, loader: Any) -> Iterator[None]:
    """A step each time."""
    import torch

    loss_fn = _WATCH.without(torch.nn.CrossEntropyLoss())
    for x, y in loader:
        _train(loss_fn(ddp(x), y), torch.Tensor.backward, optimizer)
        yield


def _under_spotrun(run: Any, model: Any, optimizer: Any, data: Any) -> Iterator[None]:
    """The same under spotrun."""
    import torch
    from torch.utils.data import DataLoader

    import spotrun

    loss_fn, sampler = _WATCH.without(torch.nn.CrossEntropyLoss()), spotrun.ElasticSampler(data, seed=0)
    run.track(model=model, optimizer=optimizer, sampler=sampler)
    for _ in run.epochs(1):
        for x, y in run.steps(DataLoader(data, BATCH, sampler=sampler)):
            _train(loss_fn(model(x), y), run.backward, optimizer)
            yield


if __name__ == "__main__":
    main()
