"""How fast training goes on after a machine is lost: plain torchrun, tuned torchrun, torchft, spotrun.

python -m bench.recovery [--runs 5] [--rows main sizes …] [--systems plain tuned …] [--out bench/RESULTS.md]
python -m bench.recovery --scenarios spare --sizes 25M 100M --setups 0 30      # these rows alone
python -m bench.recovery --rows join sizes setups notice --runs 3   # the section recovery-rows
python -m bench.recovery --rows trainer --runs 3   # the section recovery-trainer: scripts with a Trainer
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
from datetime import UTC, datetime
from pathlib import Path

import psutil

from bench import broadcast, rate_plots, record, rows, spot, torchft_system
from bench.phases import Phases, joining, phases, steps_of_others, usual_step
from bench.processes import sweep, tail
from bench.report import describe_machine, render, write_section
from bench.systems import SCENARIOS, SIZES, BenchError, Run, Scenario, System, Workload, stepping
from bench.torchrun import PLAIN, STOCK, TUNED, Torchrun
from bench.watch import Watch
from spotrun.machine.processes import adopt_orphans
from spotrun.node.launch.preload import ask_for_large_pages

STOCK_SCENARIO = SCENARIOS["spare"]
JOINED = 3.0  # seconds of training with a newcomer in which a pause is looked for
AFTER = 4.0  # seconds that a run is followed after its first new step
PREFIX = "spotrun-bench-"  # of a run's folder; this process's id follows


Row = tuple[Scenario, Workload]
ROWS: dict[str, tuple[Row, ...]] = {
    "main": tuple((scenario, Workload()) for scenario in SCENARIOS.values() if scenario.fault != "join"),
    "join": tuple((SCENARIOS["join"], Workload(size)) for size in ("0.1M", "25M")),
    "three": tuple((SCENARIOS["three"], Workload(size)) for size in ("0.1M", "25M", "100M")),
    "sizes": tuple((SCENARIOS["spare"], Workload(size)) for size in ("0.1M", "25M", "100M")),
    "notice": tuple((SCENARIOS["fixed"], Workload(size)) for size in ("0.1M", "25M")),
    "setups": tuple(
        (SCENARIOS["spare"], Workload(size, setup)) for size, setup in (("0.1M", 8), ("0.1M", 30), ("100M", 30))
    ),
    "trainer": (
        *((SCENARIOS["spare"], Workload(setup=setup, trainer="hugging_face")) for setup in (0, 30)),
        (SCENARIOS["fixed"], Workload(trainer="hugging_face")),
        *((SCENARIOS[name], Workload(trainer="lightning")) for name in ("spare", "fixed")),
    ),
}


def main() -> int:
    args = parse()
    adopt_orphans()
    ask_for_large_pages()  # in all systems, as spotrun's workers do
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
    write(args, runs)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.recovery", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="runs of each system in each row")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="which groups of rows")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, help="only these, with --sizes, --setups")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="parameters of the model")
    parser.add_argument("--setups", nargs="+", type=float, help="seconds that the script's set-up takes")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--minutes", type=float, default=240, help="after so many minutes, no further run begins")
    parser.add_argument("--timeout", type=float, default=120, help="seconds without a step that count as a hang")
    parser.add_argument(
        "--stock-runs", type=int, default=3, help="of torchrun without the variable, to count its hangs"
    )
    parser.add_argument("--stock-timeout", type=float, default=60, help="seconds, for those")
    parser.add_argument("--record", type=Path, help="append the runs to this file, and report on all runs in it")
    parser.add_argument("--note", default="", help="more about the machine, for the report")
    parser.add_argument("--out", type=Path, default=Path("bench/RESULTS.md"))
    return parser.parse_args()


def rows_of(args: argparse.Namespace) -> list[Row]:
    """The rows to measure."""
    if not (args.scenarios or args.sizes or args.setups):
        return [row for name in args.rows for row in ROWS[name]]
    scenarios = args.scenarios or ["spare"]
    workloads = [Workload(size, setup) for size in args.sizes or [Workload().size] for setup in args.setups or [0.0]]
    return [(SCENARIOS[name], workload) for name in scenarios for workload in workloads]


def measure_all(args: argparse.Namespace) -> list[Run]:
    """Every run. The systems take turns, so that other work on this machine slows all of them equally."""
    wanted, runs = rows_of(args), list[Run]()
    systems = available(args.systems)
    deadline = time.monotonic() + 60 * args.minutes
    turns = [
        (index, *row, name) for index in range(args.runs) for row in wanted for name in systems if takes_part(name, row)
    ]
    for index, scenario, workload, name in turns:
        if time.monotonic() > deadline:
            print(f"bench-recovery: {args.minutes:g} minutes are over; {len(runs)} of {len(turns)} runs are done")
            return runs
        runs.append(measure(SYSTEMS[name], scenario, workload, index, args.timeout))
        if args.record is not None:
            record.append(args.record, runs[-1])
        show(runs[-1], index, args.runs)
    if any(workload == Workload() for _, workload in wanted):
        for index in range(args.stock_runs):
            runs.append(measure(_stock, STOCK_SCENARIO, Workload(), index, args.stock_timeout))
            if args.record is not None:
                record.append(args.record, runs[-1])
            show(runs[-1], index, args.stock_runs)
    return runs


def available(names: list[str]) -> list[str]:
    """The systems that can run here. If torchft is missing, a message says so."""
    if any(name.startswith("torchft") for name in names):
        try:
            torchft_system.prepare()
        except torchft_system.Unavailable as error:
            print(f"bench-recovery: without torchft: {error}", file=sys.stderr)
            return [name for name in names if not name.startswith("torchft")]
    return names


def takes_part(name: str, row: Row) -> bool:
    """Whether the system is measured in this row. torchft has no spares and does not use the notice.

    torchrun restarts all workers, which then run the set-up again: a set-up adds its own time, and is not measured.
    torchft as published only shows how often its scripts end.
    """
    scenario, workload = row
    if workload.trainer and name.startswith("torchft"):
        return False
    if name == torchft_system.STOCK.name:
        return row in ((SCENARIOS["spare"], Workload("0.1M")), (SCENARIOS["spare"], Workload("25M")))
    if scenario.fault == "join":
        return name in ("spotrun", "torchft", "torchft-tuned")
    if name.startswith("torchft"):
        return scenario.name in ("spare", "three") and workload != Workload()
    return name == "spotrun" or not workload.setup


def write(args: argparse.Namespace, runs: list[Run]) -> None:
    """Write the sections of the report for which there are runs."""
    if args.record is not None:
        runs = record.read(args.record)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    device = f"All workers share the GPUs {gpus}, with gloo." if gpus else "No GPU was used."
    machine = " ".join([f"{describe_machine()}.", device, args.note]).strip(". ")
    day = datetime.now(UTC).date()
    main_runs = [run for run in runs if run.workload == Workload() and run.scenario != "join"]
    texts = {}
    if main_runs:
        texts["recovery"] = render(main_runs, machine, day, args.timeout, args.stock_timeout)
    others = [run for run in runs if run not in main_runs and not run.workload.trainer]
    if others:
        sizes = {run.workload.size for run in runs}
        reference = {size: broadcast.measure(Workload(size)) for size in SIZES if size in sizes}
        stock = (STOCK.name, torchft_system.STOCK.name)
        plots = rate_plots.plots([run for run in (*main_runs, *others) if run.system not in stock])
        for name, text in plots.items():
            (args.out.parent / "plots").mkdir(exist_ok=True)
            (args.out.parent / "plots" / name).write_text(text)
        texts["recovery-rows"] = rows.render(others, reference, machine, day, args.timeout, list(plots))
    if trainers := [run for run in runs if run.workload.trainer]:
        texts["recovery-trainer"] = rows.render_trainer(trainers, machine, day, args.timeout)
    for name, text in texts.items():
        write_section(args.out, name, text)
        print(f"\n{text}\nwritten to {args.out}")


def measure(build: Callable[[], System], scenario: Scenario, workload: Workload, index: int, timeout: float) -> Run:
    """Measure one interruption. When this returns or raises, nothing is left that the run started, opened or wrote."""
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        watch = Watch(folder / "events.jsonl")
        system = build()
        try:
            system.start(scenario, workload, folder, watch)
            settle(watch, index, workload)
            with ThreadPoolExecutor(1) as pool:  # so that events are seen before the call returns
                fault = pool.submit(system.fault, scenario)
                while not fault.done():
                    watch.step()
            fault_time, victim = fault.result()

            def recovered() -> Phases | None:
                system.tick()
                if scenario.fault == "join":
                    return joining(watch.events, fault_time, JOINED)
                return phases(watch.events, fault_time, victim)

            watch.until(lambda _: recovered() is not None, timeout)
            found = recovered()
            if found is None:
                print(tail(folder), file=sys.stderr)
            usual = usual_step(watch.events, fault_time)
            watch.until(lambda _: False, AFTER)
            steps = steps_of_others(watch.events, fault_time, victim)
            return Run(system.name, scenario.name, found, workload, usual, steps)
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


def settle(watch: Watch, index: int, workload: Workload) -> None:
    """Wait for some more steps, a few more in each run. So the faults come at all distances from a checkpoint."""
    now = max(event.step for event in watch.events)
    goal = now + (22 if workload.large else 40) + 7 * index
    if not watch.until(lambda events: stepping(events[-8:], steps=goal), timeout=300):
        raise BenchError(f"the job stopped stepping before any fault, at step {now}")


def show(run: Run, index: int, runs: int) -> None:
    text = (
        "no step: hang" if run.phases is None else f"{run.phases.total:6.2f} s, {run.phases.steps_lost:.0f} steps lost"
    )
    row = f"{run.scenario:8} {run.workload.size:4} {run.workload.setup:2g} s  {run.system:8}"
    print(f"{time.strftime('%H:%M:%S')}  {index + 1}/{runs}  {row} {text}", flush=True)


def _interrupt(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(number)


def _stock() -> System:
    return Torchrun(STOCK)


def _plain() -> System:
    return Torchrun(PLAIN)


def _tuned() -> System:
    return Torchrun(TUNED)


def _torchft() -> System:
    return torchft_system.Torchft(torchft_system.DEFAULTS)


def _torchft_tuned() -> System:
    return torchft_system.Torchft(torchft_system.TUNED)


def _torchft_stock() -> System:
    return torchft_system.Torchft(torchft_system.STOCK)


def _spotrun() -> System:
    return spot.Spotrun()


SYSTEMS: dict[str, Callable[[], System]] = {
    "plain": _plain,
    "tuned": _tuned,
    "torchft": _torchft,
    "torchft-tuned": _torchft_tuned,
    "torchft-stock": _torchft_stock,
    "spotrun": _spotrun,
}


if __name__ == "__main__":
    sys.exit(main())
