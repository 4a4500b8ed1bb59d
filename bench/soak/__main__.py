"""Random faults against small jobs on the local cloud.

python -m bench.soak [--runs 10] [--seed 1] [--out bench/RESULTS.md] [--keep build/soak]

Each run has a seed, which stands for a job and a sequence of faults (`bench.soak.plan`). After the run, weights,
samples, waits, and leftovers of the cluster are checked (`bench.soak.checks`). A run that fails keeps its files, and
the output says how to repeat that run alone.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from bench.processes import adopt_orphans, sweep
from bench.report import describe_machine, write_section
from bench.soak.drive import Outcome, baseline, drive
from bench.soak.plan import Scenario, scenario
from bench.soak.table import render


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=_count, default=10, help="how many seeds, one after the other")
    parser.add_argument("--seed", type=int, default=1, help="the first")
    parser.add_argument("--out", type=Path, help="the file that the table goes into, too")
    parser.add_argument("--keep", type=Path, default=Path("build/soak"), help="folder for files of runs that failed")
    args = parser.parse_args()
    keep = args.keep.absolute()
    adopt_orphans()
    known = Baselines(keep / "undisturbed")
    outcomes = []
    try:
        for seed in range(args.seed, args.seed + args.runs):
            outcomes.append(_run(scenario(seed), keep, known))
    finally:
        sweep()
        shutil.rmtree(keep / "undisturbed", ignore_errors=True)
    text = render(outcomes, describe_machine(), f"{datetime.now(UTC).date()}")
    print(f"\n{text}")
    if args.out is not None:
        write_section(args.out, "soak", text)
        print(f"written to {args.out}")
    return 1 if any(outcome.problems for outcome in outcomes) else 0


class Baselines:
    """The digests of undisturbed runs. Each is computed once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[str, int], str] = {}

    def __call__(self, wanted: Scenario) -> str:
        key = (wanted.shape.name, wanted.most)
        if key not in self._known:
            folder = self._folder / f"{key[0]}-{key[1]}"
            shutil.rmtree(folder, ignore_errors=True)
            self._known[key] = baseline(wanted, folder)
        return self._known[key]


def _run(found: Scenario, keep: Path, known: Baselines) -> Outcome:
    folder = keep / f"seed-{found.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    plan = ", ".join(map(str, found.faults))
    print(f"{time.strftime('%H:%M:%S')}  seed {found.seed}: {found.shape.name}, {found.size} nodes: {plan}", flush=True)
    outcome = drive(found, folder, known)
    if not outcome.problems:
        shutil.rmtree(folder, ignore_errors=True)
        text = f"{outcome.seconds:.0f} s, {outcome.interruptions} interruptions, {outcome.lost} steps done again"
        print(f"{time.strftime('%H:%M:%S')}    well: {text}", flush=True)
        return outcome
    for problem in outcome.problems:
        print(f"{time.strftime('%H:%M:%S')}    FAILED: {problem}", flush=True)
    print(f"          alone: make soak RUNS=1 SEED={found.seed}; its files: {folder}", flush=True)
    return outcome


def _count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text.strip()!r} is not a number of runs: 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
