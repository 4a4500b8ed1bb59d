"""Compares policies of capacity on traces of spot markets, by replaying the traces. Writes bench/RESULTS.md and plots.

Three comparisons: a rigid cluster against an elastic one in one zone and in all zones (16 nodes), and jobs of one node
with a deadline. Windows are drawn at random, with a seed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.capacity_report import Compared, Deadlines, render
from bench.report import describe_machine, write_section
from spotrun.simulate.costs import Costs
from spotrun.simulate.optimum import Single, cheapest, relaxed
from spotrun.simulate.replay import Job
from spotrun.simulate.study import Case, Window, run_all, spread, windows
from spotrun.simulate.traces import load

TRACES = Path(__file__).parent / "data" / "traces"
HOUR = 3600.0
NODES, LEAST = 16, 4
WORK = 6 * HOUR  # seconds that the job of 16 nodes takes on all of them
LENGTH = 60 * HOUR  # of its windows
FRACTIONS = (0.6, 0.7, 0.8, 0.9)  # the work of a job of one node, as parts of its deadline
DEADLINE = 48 * HOUR
CHANGE = 720.0  # seconds from the order of a machine to the first step on it: 0.2 h
SINGLE = Costs(boot=CHANGE - 30.0, restart=12.0, restore=30.0)
ON_DEMAND = 3.0  # times the price of spot
DUEL = ("failover", "own")  # the policies that are compared with 16 nodes
RUNNERS = ("greedy", "uniform_progress", "own", "static")  # the policies that are compared with one node


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.capacity", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=300, help="of each comparison, at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--traces", type=Path, default=TRACES, help="a folder with h100-16 and v100-1")
    parser.add_argument("--out", type=Path, default=Path("bench/RESULTS.md"))
    parser.add_argument("--only", choices=("zone", "zones", "single"), help="one comparison, which is printed only")
    args = parser.parse_args()
    began = time.monotonic()
    found: dict[str, Compared | Deadlines] = {}
    took: dict[str, float] = {}
    measures: dict[str, Callable[[Path, int, int], Compared | Deadlines]] = {
        "zone": one_zone, "zones": all_zones, "single": single,
    }  # fmt: skip
    for name, measure in measures.items():
        if args.only in (None, name):
            start = time.monotonic()
            found[name] = measure(args.traces, args.windows, args.seed)
            took[name] = time.monotonic() - start
    about = f"{datetime.now(UTC).date()}, {describe_machine()}, {(time.monotonic() - began) / 60:.0f} minutes"
    with tempfile.TemporaryDirectory() as unused:
        plots = args.out.parent / "plots" if args.only is None else Path(unused)
        text = render(found, about, took, plots)
    if args.only is None:
        write_section(args.out, "capacity", text)
    print(text)
    return 0


def one_zone(traces: Path, count: int, seed: int) -> Compared:
    """16 nodes in one zone alone, each zone in turn that ever gave 16."""
    trace = load(traces / "h100-16")
    zones = [(zone.name,) for zone in trace.zones if zone.most >= NODES]
    return _duel(windows(traces / "h100-16", zones, LENGTH, -(-count // len(zones)), seed))


def all_zones(traces: Path, count: int, seed: int) -> Compared:
    """16 nodes, in all zones."""
    names = tuple(zone.name for zone in load(traces / "h100-16").zones)
    return _duel(windows(traces / "h100-16", [names], LENGTH, count, seed))


def single(traces: Path, count: int, seed: int) -> Deadlines:
    """One node with a deadline, spot machines of one zone and on-demand machines, each zone in turn."""
    trace = load(traces / "v100-1")
    drawn = windows(traces / "v100-1", [(z.name,) for z in trace.zones], DEADLINE, -(-count // len(trace.zones)), seed)
    flat = [Window(w.folder, w.zones, w.begin, w.length, 1.0, ON_DEMAND) for w in drawn]
    jobs = {f: Job(f * DEADLINE, deadline=DEADLINE) for f in FRACTIONS}
    cases = [Case(w, jobs[f], policy, SINGLE, 1) for f in FRACTIONS for policy in RUNNERS for w in flat]
    outcomes = iter(run_all(cases, _progress("single", len(cases))))
    found = {f: {policy: [next(outcomes) for _ in flat] for policy in RUNNERS} for f in FRACTIONS}
    bounds = spread(bound_of_one, flat, lambda _: None)
    return Deadlines(
        found, {f: [each[i] for each in bounds] for i, f in enumerate(FRACTIONS)}, [w.zones[0] for w in flat]
    )


def bound_of_one(window: Window) -> list[float]:
    """The least cost for each fraction of work."""
    problem = Single(window.trace().zones[0].counts, DEADLINE, 1.0, ON_DEMAND, CHANGE, SINGLE.boot)
    return cheapest(problem, [fraction * DEADLINE for fraction in FRACTIONS])


def bound_of_many(window: Window) -> tuple[float, float]:
    """The least cost and the earliest end."""
    return relaxed(window.trace(), Costs().rate(NODES) * WORK, LEAST, NODES, Costs(), window.length)


def _duel(drawn: Sequence[Window]) -> Compared:
    work = Costs().rate(NODES) * WORK
    jobs = {"failover": Job(work, NODES, NODES), "own": Job(work, LEAST, NODES)}
    cases = [Case(window, jobs[policy], policy, Costs()) for policy in DUEL for window in drawn]
    outcomes = run_all(cases, _progress("16 nodes", len(cases)))
    both = {policy: outcomes[i * len(drawn) : (i + 1) * len(drawn)] for i, policy in enumerate(DUEL)}
    return Compared(both, spread(bound_of_many, drawn, lambda _: None), [w.zones[0] for w in drawn], LENGTH, WORK)


def _progress(what: str, total: int) -> Callable[[int], None]:
    began = time.monotonic()

    def show(done: int) -> None:
        if done % 100 == 0:
            took = time.monotonic() - began
            print(f"{what}: {done} of {total} replays, {60 * done / took:.0f} a minute", file=sys.stderr, flush=True)

    return show


if __name__ == "__main__":
    sys.exit(main())
