"""How long snapshots delay training: local rank 0 copies the state, or all workers of the node share the copy.

python -m bench.snapshots [--runs 7] [--out bench/RESULTS.md]

Each worker is a process with the whole state in its own memory (on the CPU), and the real writer or section. The two
ways take turns. A delay is the time of the slowest worker at the step boundary.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.report import describe_machine, write_section
from spotrun.state.control import Control
from spotrun.train import sections
from spotrun.train.sections import Section, Sections
from spotrun.train.snapshot import Writer

SIZES = (1, 8, 32, 100, 1000)  # MB
WORKERS = (1, 2, 4)
TENSORS = 128  # of equal size; a model and its optimizer have hundreds
WARM_UP = 3  # snapshots: two are copied alone, so that all workers can map the slots
PATIENCE = 300.0  # seconds for one snapshot
FOLDER = Path("/dev/shm")
forked = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Row:
    """The snapshots of one state and number of workers, in seconds."""

    size: int  # MB
    workers: int
    alone: list[float]  # delays when local rank 0 copies everything
    shared: list[float]  # delays when all workers copy; empty: there is one worker
    commit_alone: list[float]  # from the beginning to the record
    commit_shared: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.snapshots", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=7, help="snapshots of each kind")
    parser.add_argument("--out", type=Path, default=Path("bench/RESULTS.md"))
    args = parser.parse_args()
    rows = [measure(size, workers, args.runs) for size in SIZES for workers in WORKERS]
    text = render(rows, describe_machine(), f"{datetime.now(UTC).date()}", args.runs)
    write_section(args.out, "snapshots", text)
    print(f"{text}\nwritten to {args.out}")
    return 0


def measure(size: int, workers: int, runs: int) -> Row:
    """Take snapshots of `size` MB in as many processes."""
    with tempfile.TemporaryDirectory(prefix="spotrun-bench-", dir=FOLDER) as name:
        folder = Path(name)
        for rank in range(workers):
            Control(folder / f"control-{rank}", create=True).close()
        barrier, results = forked.Barrier(workers), forked.SimpleQueue()
        processes = [
            forked.Process(target=_work, args=(folder, rank, workers, size, runs, barrier, results), daemon=True)
            for rank in range(workers)
        ]
        try:
            for process in processes:
                process.start()
            found = [results.get() for _ in processes]
        finally:
            for process in processes:
                process.join(PATIENCE)
                process.kill()
    slowest = {kind: [max(each) for each in zip(*(one[kind] for one in found), strict=True)] for kind in found[0]}
    kinds = ("alone", "shared", "took alone", "took shared")
    return Row(size, workers, *(slowest.get(kind, []) for kind in kinds))


TEXT = """\
{runs} snapshots of each kind, taken in turn: median (least). Other programs ran on the machine meanwhile. Each worker
has one thread, and all of the state in its memory, in {tensors} tensors. Alone: local rank 0 copies the state. Shared:
each worker of the node copies a part. The delay is that of the slowest worker. Commit: until the snapshot has its
record. Most of that is the checksum, which delays no step. One core copies about as fast as the memory of this machine
allows, so more workers gain little here. On a machine with GPUs, each worker has a link of its own to the host: that
has not been measured."""


def render(rows: Sequence[Row], machine: str, day: str, runs: int) -> str:
    """The section of the results."""
    lines = [
        "## How long a snapshot delays training",
        "",
        f"{day}, {machine}. " + TEXT.format(runs=runs, tensors=TENSORS).replace("\n", " "),
        "",
        "| state, MB | workers | delay alone, ms | delay shared, ms | commit alone, ms | commit shared, ms |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [_cell(each) for each in (row.alone, row.shared, row.commit_alone, row.commit_shared)]
        lines.append(f"| {row.size:,} | {row.workers} | {' | '.join(cells)} |")
    lines += [
        "",
        f"Local rank 0 copies less than {sections.MINIMUM >> 20} MiB alone (`MINIMUM` in `train/sections.py`). Sharing "
        "costs a millisecond or two, which shows with the smallest states: each worker then encodes its state and "
        "answers. By arithmetic, a GPU copies 32 MiB in about the same time over PCIe 4; that has not been measured.",
    ]
    return "\n".join(lines) + "\n"


def _cell(seconds: Sequence[float]) -> str:
    return f"{median(seconds) * 1e3:.1f} ({min(seconds) * 1e3:.1f})" if seconds else ""


def _work(folder: Path, rank: int, workers: int, size: int, runs: int, barrier: Any, results: Any) -> None:
    """One worker: its seconds at each boundary, by kind."""
    torch.set_num_threads(1)
    limit, sections.MINIMUM = sections.MINIMUM, 0
    controls = [Control(folder / f"control-{each}") for each in range(workers)]
    own = controls[rank]
    own.pid = multiprocessing.current_process().pid or 0
    state = {f"{index}": torch.ones(size * 1_000_000 // TENSORS // 4) for index in range(TENSORS)}
    equal = {sections.place(tensor) for tensor in state.values()}
    barrier.wait(PATIENCE)
    worker = _Worker(folder, rank, controls, state, equal)
    found: dict[str, list[float]] = {}
    kinds = ["alone"] * WARM_UP + ["alone", "shared"][: min(2, workers)] * runs
    for number, kind in enumerate(kinds):
        step = 2 * number + 2
        for at in (step - 1, step):
            own.step = at
            barrier.wait(PATIENCE)
            if at == step:
                seconds = worker.end_step(step, kind == "alone")
            elif kind == "shared":
                worker.announce(step)
            barrier.wait(PATIENCE)
            worker.settle()
            barrier.wait(PATIENCE)
        if number >= WARM_UP:
            found.setdefault(kind, []).append(seconds)
            found.setdefault(f"took {kind}", []).append(controls[0].took)
        if kind == "shared" and controls[-1].section != step:
            raise SystemExit(f"the snapshot of step {step} was not shared")
    sections.MINIMUM = limit
    results.put(found)


class _Worker:
    """The writer on local rank 0, and a section elsewhere."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        controls: list[Control],
        state: dict[str, torch.Tensor],
        equal: set[sections.Place],
    ) -> None:
        self._encode = lambda encoder: encoder.encode(state, "state")
        self._writer: Writer | None = None
        self._section: Section | None = None
        if rank == 0:
            others = Sections(controls[0], controls[1:]) if len(controls) > 1 else None
            slots = folder / "slots"
            self._writer = Writer(slots, "job", 1, controls[0], sections=others, equal=lambda: equal)
        else:
            place = (rank, len(controls))
            self._section = Section(folder / "slots", place, controls[rank], controls[0], self._encode, lambda: equal)

    def announce(self, step: int) -> None:
        if self._writer is not None:
            self._writer.announce(step, exact=True)

    def end_step(self, step: int, alone: bool) -> float:
        """Seconds at the boundary."""
        began = time.perf_counter()
        if self._writer is not None:
            self._writer.take(step, self._encode, set(), wait=True, alone=alone)
        elif self._section is not None:
            self._section.end_step(step, set, alone)
        return time.perf_counter() - began

    def settle(self) -> None:
        """Wait until the snapshot is committed, or the slot mapped."""
        if self._writer is not None and self._writer.announced < 0:
            self._writer.settle()
        elif self._section is not None:
            self._section.settle()


if __name__ == "__main__":
    sys.exit(main())
