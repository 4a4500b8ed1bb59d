"""How fast training goes on after a machine is lost: plain torchrun, tuned torchrun, spotrun.

python -m bench.recovery [--runs 5] [--scenarios spare cold …] [--systems plain tuned spotrun] [--out bench/RESULTS.md]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from bench import spot
from bench.phases import Phases, phases
from bench.processes import adopt_orphans, sweep, tail
from bench.report import describe_machine, render, write_section
from bench.systems import SCENARIOS, BenchError, Scenario, System, stepping
from bench.torchrun import PLAIN, STOCK, TUNED, Torchrun
from bench.watch import Watch

STOCK_SCENARIO = SCENARIOS["spare"]
PREFIX = "spotrun-bench-"  # of a run's folder; this process's id follows


@dataclass(frozen=True)
class Run:
    """One measured run. phases: None if no step followed within the timeout (a hang)."""

    system: str
    scenario: str
    phases: Phases | None


def main() -> int:
    args = parse()
    adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        clear_stale()
        runs = measure_all(args)
    except BenchError as error:
        print(f"bench-recovery: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench-recovery: interrupted, nothing written", file=sys.stderr)
        return 130
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        sweep()
    text = render(runs, describe_machine(), datetime.now(UTC).date(), args.timeout, args.stock_timeout)
    write_section(args.out, "recovery", text)
    print(f"\n{text}\nwritten to {args.out}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.recovery", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="of each system in each scenario")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--timeout", type=float, default=120, help="seconds without a step that count as a hang")
    parser.add_argument(
        "--stock-runs", type=int, default=3, help="of torchrun without the variable, to count its hangs"
    )
    parser.add_argument("--stock-timeout", type=float, default=60, help="seconds, for those")
    parser.add_argument("--out", type=Path, default=Path("bench/RESULTS.md"))
    return parser.parse_args()


def measure_all(args: argparse.Namespace) -> list[Run]:
    """Every run. The systems take turns, so that other work on this machine slows all of them equally."""
    runs = []
    for index in range(args.runs):
        for scenario in args.scenarios:
            for name in args.systems:
                runs.append(measure(SYSTEMS[name], SCENARIOS[scenario], index, args.timeout))
                show(runs[-1], index, args.runs)
    for index in range(args.stock_runs):
        runs.append(measure(_stock, STOCK_SCENARIO, index, args.stock_timeout))
        show(runs[-1], index, args.stock_runs)
    return runs


def measure(build: Callable[[], System], scenario: Scenario, index: int, timeout: float) -> Run:
    """Measure one interruption. When this returns or raises, nothing is left that the run started, opened or wrote."""
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        watch = Watch(folder / "events.jsonl")
        system = build()
        try:
            system.start(scenario, folder, watch)
            settle(watch, index)
            with ThreadPoolExecutor(1) as pool:  # so that events are seen before the call returns
                fault = pool.submit(system.fault, scenario)
                while not fault.done():
                    watch.step()
            fault_time, victim = fault.result()

            def recovered() -> Phases | None:
                system.tick()
                return phases(watch.events, fault_time, victim)

            watch.until(lambda _: recovered() is not None, timeout)
            found = recovered()
            if found is None:
                print(tail(folder), file=sys.stderr)
            return Run(system.name, scenario.name, found)
        finally:
            system.close()
            sweep()
            watch.close()


def clear_stale() -> None:
    """Remove what benchmarks that were killed have left: their folders, and the local clouds that ran there."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            spot.remove(folder)
            shutil.rmtree(folder, ignore_errors=True)


def settle(watch: Watch, index: int) -> None:
    """Let the job make some more steps, a few more in each run: faults fall at all distances from a checkpoint."""
    now = max(event.step for event in watch.events)
    goal = now + 40 + 7 * index
    if not watch.until(lambda events: stepping(events[-8:], steps=goal), timeout=120):
        raise BenchError(f"the job stopped stepping before any fault, at step {now}")


def show(run: Run, index: int, runs: int) -> None:
    text = (
        "no step: hang" if run.phases is None else f"{run.phases.total:6.2f} s, {run.phases.steps_lost:.0f} steps lost"
    )
    print(f"{time.strftime('%H:%M:%S')}  {index + 1}/{runs}  {run.scenario:8} {run.system:8} {text}", flush=True)


def _interrupt(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(number)


def _stock() -> System:
    return Torchrun(STOCK)


def _plain() -> System:
    return Torchrun(PLAIN)


def _tuned() -> System:
    return Torchrun(TUNED)


def _spotrun() -> System:
    return spot.Spotrun()


SYSTEMS: dict[str, Callable[[], System]] = {"plain": _plain, "tuned": _tuned, "spotrun": _spotrun}


if __name__ == "__main__":
    sys.exit(main())
