"""Random faults against small jobs on the local cloud.

python -m bench.soak [--runs 10] [--seed 1] [--resume] [--out bench/RESULTS.md] [--keep build/soak]

Each run has a seed, which stands for a job and a sequence of faults (`bench.soak.plan`). After the run, weights,
samples, waits, counted failures, and leftovers of the cluster are checked (`bench.soak.checks`). A run that fails keeps
its files, and the output says how to repeat that run alone. Ctrl-C or SIGTERM ends the soak with the table of the runs
so far; with `--resume`, a soak goes on after the runs that ended.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter

from bench.processes import sweep
from bench.report import describe_machine, write_section
from bench.soak.drive import Outcome, baseline, drive
from bench.soak.plan import Scenario, scenario
from bench.soak.table import render
from spotrun.machine.processes import adopt_orphans

ROOT = Path(__file__).parents[2]
_OUTCOME = TypeAdapter(Outcome)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=_count, default=10, help="how many seeds, one after the other")
    parser.add_argument("--seed", type=int, default=1, help="the first")
    parser.add_argument("--resume", action="store_true", help="count the runs of a soak that was broken off")
    parser.add_argument("--out", type=Path, help="the file that the table goes into, too")
    parser.add_argument("--keep", type=Path, default=Path("build/soak"), help="folder for files of runs that failed")
    args = parser.parse_args()
    keep = args.keep.absolute()
    # A shell starts what it puts into the background with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    adopt_orphans()
    known = Baselines(keep / "undisturbed")
    journal = Journal(keep / "outcomes.jsonl", args.resume)
    seeds = range(args.seed, args.seed + args.runs)
    outcomes = [each for each in journal.read() if each.scenario.seed in seeds]
    commit = _commit()
    try:
        for seed in sorted(set(seeds) - {each.scenario.seed for each in outcomes}):
            outcomes.append(_run(scenario(seed), keep, known))
            outcomes[-1].commit = commit
            journal.add(outcomes[-1])
    except KeyboardInterrupt:
        again = f"make soak RUNS={args.runs} SEED={args.seed} ARGS=--resume"
        print(f"\nbroken off after {len(outcomes)} of {args.runs} runs; to go on: {again}")
        if not outcomes:
            return 130
    finally:
        sweep()
        shutil.rmtree(keep / "undisturbed", ignore_errors=True)
    text = render(outcomes, describe_machine(), f"{datetime.now(UTC).date()}")
    print(f"\n{text}")
    if args.out is not None:
        write_section(args.out, "soak", text)
        print(f"written to {args.out}")
    if len(outcomes) < args.runs:
        return 130
    return 1 if any(outcome.problems for outcome in outcomes) else 0


class Journal:
    """The outcomes of a soak in a file, one on each line. resume: keep those of the soak before."""

    def __init__(self, path: Path, resume: bool) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not resume:
            path.write_bytes(b"")

    def read(self) -> list[Outcome]:
        """Raises pydantic's ValidationError."""
        lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        return [_OUTCOME.validate_json(line) for line in lines]

    def add(self, outcome: Outcome) -> None:
        with self._path.open("ab") as file:
            file.write(_OUTCOME.dump_json(outcome) + b"\n")


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
    plan, kind = ", ".join(map(str, found.faults)), found.shape.name
    kind += ", as on GPUs" * found.gpu + ", exact" * found.exact
    print(f"{time.strftime('%H:%M:%S')}  seed {found.seed}: {kind}, {found.size} nodes: {plan}", flush=True)
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


def _commit() -> str:
    """The short name of the commit that is checked out; empty if there is none."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text.strip()!r} is not a number of runs: 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
