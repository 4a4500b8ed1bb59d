"""What run.log costs a training loop, and what the agent's system metrics cost.

python -m bench.metrics [--steps 400] [--rounds 8] [--out bench/RESULTS.md]

A process trains with the real `Metrics`, thread and disk included. Stretches of steps with `run.log` and
stretches without it alternate. The processor time of the whole process counts, so that other programs on the machine
disturb little. After that, the agent's real sensors are read as often as in an hour.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

from bench.report import describe_machine, write_section
from spotrun.node.telemetry.gpus import Gpus
from spotrun.node.telemetry.recorder import EVERY, FORMAT, LONGEST, Readings
from spotrun.node.telemetry.sensors import Sensors
from spotrun.state.control import Control
from spotrun.state.points import Header
from spotrun.store import Store
from spotrun.train.metrics import Metrics

STEP = 0.005  # seconds of a step
VALUES, USUAL = (1, 5, 50), 5  # numbers in a call
MATRIX = torch.ones(128, 128)
READINGS = 720  # of the machine
BLOCK = round(LONGEST / EVERY)  # readings in a block
RANKS = dict.fromkeys(range(8), (1000, 0.005123, 0.004321))  # in a reading, of each rank: as in `WorkerGroup.ranks`
GOAL, GOAL_SYSTEM = 0.01, 0.005  # of a step, and of a core


@dataclass(frozen=True)
class Row:
    """Seconds per step in each stretch, for calls with `values` numbers."""

    values: int
    computes: bool  # whether a step computes. If not, it sleeps, as if it waited for a GPU; then caches are cold
    call: list[float]  # of the training thread in run.log
    without: list[float]  # processor time of the process
    logged: list[float]  # the same with run.log

    @property
    def overhead(self) -> float:
        """Processor time of all threads for run.log, as a share of a step."""
        pairs = [with_log - without for with_log, without in zip(self.logged, self.without, strict=True)]
        return median(pairs) / STEP


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.metrics", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="in a stretch")
    parser.add_argument("--rounds", type=int, default=8, help="pairs of stretches")
    parser.add_argument("--out", type=Path, default=Path("bench/RESULTS.md"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(values, computes, args.steps, args.rounds) for computes in (True, False) for values in VALUES]
    reading = measure_system(READINGS)
    text = render(rows, reading, describe_machine(), f"{datetime.now(UTC).date()}", args.steps, args.rounds)
    write_section(args.out, "metrics", text)
    print(f"{text}\nwritten to {args.out}")
    return 0


def measure(values: int, computes: bool, steps: int, rounds: int) -> Row:
    """Measure calls with this many numbers. One of the numbers is a tensor."""
    with tempfile.TemporaryDirectory(prefix="spotrun-bench-") as name:
        folder = Path(name)
        metrics = Metrics(Control(folder / "control", create=True), str(folder / "metrics"))
        metrics.begin(Header("bench", 1, 0, 0))
        row = Row(values, computes, [], [], [])
        for number in range(rounds):
            for logs in (False, True) if number % 2 else (True, False):
                used, call = _stretch(metrics if logs else None, values, computes, steps)
                (row.logged if logs else row.without).append(used / steps)
                row.call.extend([call / steps] if logs else [])
        return row


def measure_system(readings: int) -> float:
    """Processor seconds, of all threads, of a reading: taken, kept with the times of 8 ranks, and put into a bucket."""
    with tempfile.TemporaryDirectory(prefix="spotrun-bench-") as name:
        sensors, store = Sensors(Path(name), Path(name)), Store(name)
        kept = Readings({"format": FORMAT, "job": "bench", "node": "n", "gpus": sensors.gpus.names(), "every": EVERY})
        sensors.read()
        began = time.process_time()
        for number in range(1, readings + 1):
            kept.add(sensors.read(), RANKS)
            if number % BLOCK == 0:
                kept.put(store, kept.begin())
                kept.drop()
        return (time.process_time() - began) / readings


def _stretch(metrics: Metrics | None, values: int, computes: bool, steps: int) -> tuple[float, float]:
    """Processor seconds beyond the steps' own work, and seconds of the training thread in run.log."""
    numbers = {f"value {number}": number / 7 for number in range(values - 1)}
    loss = torch.tensor(0.5)
    began, own, call = time.process_time(), 0.0, 0.0
    for step in range(steps):
        own += _work(computes)
        if metrics is not None:
            at = time.perf_counter()
            metrics.log(step + 1, 0, 8.0 * step, False, {"loss": loss, **numbers})
            call += time.perf_counter() - at
    if metrics is not None:
        metrics.flush()
    return time.process_time() - began - own, call


def _work(computes: bool) -> float:
    """Make a step. Returns the processor seconds of this thread."""
    began, end = time.thread_time(), time.perf_counter() + STEP
    while computes and time.perf_counter() < end:
        torch.mm(MATRIX, MATRIX)
    if not computes:
        time.sleep(STEP)
    return time.thread_time() - began


TEXT = """\
In turn, {steps} steps with one call of `run.log` each, and {steps} steps without it, {rounds} times. A step takes
{step:g} ms. A step multiplies matrices, or it sleeps, as if it waited for a GPU. After a sleep, the core was idle,
so the call is slower. Call: the median time in which the training thread is in `run.log`. Overhead: the processor
time that all threads take for the call, also to write to the disk, as a share of a step. Training loses less than
this, because the thread that writes does not delay a step that waits for a GPU, a disk or another worker. The goal
is 1 %."""


def render(rows: Sequence[Row], reading: float, machine: str, day: str, steps: int, rounds: int) -> str:
    """The section of the results. reading: processor seconds of a reading of the machine."""
    text = TEXT.format(rounds=rounds, steps=steps, step=STEP * 1e3).replace("\n", " ")
    lines = ["## What `run.log` and system metrics cost", "", f"{day}, {machine}. {text}", ""]
    lines += ["| numbers in a call | a step | call, µs | overhead, µs a step | overhead, % |", "|---|---|---|---|---|"]
    for row in rows:
        share, step = row.overhead, "computes" if row.computes else "sleeps"
        call = f"{median(row.call) * 1e6:.1f}"
        lines.append(f"| {row.values} | {step} | {call} | {share * STEP * 1e6:.1f} | {share * 100:.2f} |")
    core, most = reading / EVERY, next(row.overhead for row in rows if row.values == USUAL)
    both, own, gpus = _held(most + core, GOAL), _held(core, GOAL_SYSTEM), "some" if Gpus().names() else "none"
    lines += [
        "",
        f"The agent reads the machine every {EVERY:g} s, and puts the readings into the bucket. A reading takes "
        f"{reading * 1e3:.2f} ms of processor time, which is {core:.3%} of a core (goal: {GOAL_SYSTEM:.1%}): {own}. "
        f"Together with calls of {USUAL} numbers in steps that compute, this is {most + core:.2%} of a core (goal: "
        f"{GOAL:.0%}): {both}. If a machine has GPUs, they are read too. This machine has {gpus}.",
    ]
    return "\n".join(lines) + "\n"


def _held(found: float, goal: float) -> str:
    return "held" if found < goal else "not held"


if __name__ == "__main__":
    sys.exit(main())
