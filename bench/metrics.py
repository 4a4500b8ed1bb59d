"""What run.log costs a training loop.

python -m bench.metrics [--steps 2000] [--rounds 8] [--out bench/RESULTS.md]

A process trains with the real `Metrics`, thread and disk included. Stretches of steps with `run.log` and
stretches without it alternate. The processor time of the whole process counts, so that other programs on the machine
disturb little.
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
from spotrun.state.control import Control
from spotrun.state.points import Header
from spotrun.train.metrics import Metrics

STEP = 0.005  # seconds of a step
VALUES = (1, 5, 50)  # numbers in a call


@dataclass(frozen=True)
class Row:
    """Seconds a step, of each stretch, for calls with `values` numbers."""

    values: int
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
    parser.add_argument("--steps", type=int, default=2000, help="in a stretch")
    parser.add_argument("--rounds", type=int, default=8, help="pairs of stretches")
    parser.add_argument("--out", type=Path, default=Path("bench/RESULTS.md"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(values, args.steps, args.rounds) for values in VALUES]
    text = render(rows, describe_machine(), f"{datetime.now(UTC).date()}", args.steps, args.rounds)
    write_section(args.out, "metrics", text)
    print(f"{text}\nwritten to {args.out}")
    return 0


def measure(values: int, steps: int, rounds: int) -> Row:
    """Measure calls with this many numbers. One of the numbers is a tensor."""
    with tempfile.TemporaryDirectory(prefix="spotrun-bench-") as name:
        folder = Path(name)
        metrics = Metrics(Control(folder / "control", create=True), str(folder / "metrics"))
        metrics.begin(Header("bench", 1, 0, 0))
        row = Row(values, [], [], [])
        for number in range(rounds):
            for logs in (False, True) if number % 2 else (True, False):
                used, call = _stretch(metrics if logs else None, values, steps)
                (row.logged if logs else row.without).append(used / steps)
                row.call.extend([call / steps] if logs else [])
        return row


def _stretch(metrics: Metrics | None, values: int, steps: int) -> tuple[float, float]:
    """Processor seconds beyond the steps' own work, and seconds of the training thread in run.log."""
    numbers = {f"value {number}": number / 7 for number in range(values - 1)}
    loss = torch.tensor(0.5)
    began, own, call = time.process_time(), 0.0, 0.0
    for step in range(steps):
        own += _work()
        if metrics is not None:
            at = time.perf_counter()
            metrics.log(step + 1, 0, 8.0 * step, False, {"loss": loss, **numbers})
            call += time.perf_counter() - at
    if metrics is not None:
        metrics.flush()
    return time.process_time() - began - own, call


def _work() -> float:
    """Make a step. Returns the processor seconds of this thread."""
    began = time.thread_time()
    time.sleep(STEP)
    return time.thread_time() - began


TEXT = """\
{rounds} pairs of stretches of {steps} steps of {step:g} ms with one call of `run.log` each, and as many without. Call:
the median time in which the training thread is in `run.log`. Overhead: the processor time that all threads take for it,
writing to the disk included, as a share of a step. It is more than what training can lose, because the thread that
writes does not delay a step that waits for a GPU, a disk or another worker. The goal is 1 %."""


def render(rows: Sequence[Row], machine: str, day: str, steps: int, rounds: int) -> str:
    """The section of the results."""
    text = TEXT.format(rounds=rounds, steps=steps, step=STEP * 1e3).replace("\n", " ")
    lines = ["## What `run.log` costs", "", f"{day}, {machine}. {text}", ""]
    lines += ["| numbers in a call | call, µs | overhead, µs a step | overhead, % |", "|---|---|---|---|"]
    for row in rows:
        share = row.overhead
        lines.append(f"| {row.values} | {median(row.call) * 1e6:.1f} | {share * STEP * 1e6:.1f} | {share * 100:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
