"""Plots of the rate of steps around a fault, beside other systems. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.plots import Line, plot
from bench.systems import SCENARIOS, Run, Workload
from spotrun.simulate.statistics import Estimate

BEFORE, AFTER, BIN = -5.0, 25.0, 1.0  # seconds


def plots(runs: Sequence[Run]) -> dict[str, str]:
    """The text of an SVG file for each scenario and workload that more than one system was measured in, by name."""
    found = {}
    for scenario, workload in dict.fromkeys((run.scenario, run.workload) for run in runs):
        own = [run for run in runs if (run.scenario, run.workload) == (scenario, workload) and run.usual]
        systems = list(dict.fromkeys(run.system for run in own))
        if len(systems) > 1 and scenario != "join":
            lines = [Line(name, curve([run for run in own if run.system == name])) for name in systems]
            title = f"{SCENARIOS[scenario].title}, {workload.size.removesuffix('M')} M parameters: share of steps"
            text = plot(title, "seconds since the fault", "steps / steps before the fault", lines)
            found[_file(scenario, workload)] = text
    return found


def curve(runs: Sequence[Run]) -> list[tuple[float, Estimate]]:
    """(middle of a second, steps in it / steps of a usual second): median of the runs, with least and most.

    A run is not drawn beyond the time for which it was followed.
    """
    points = []
    for index in range(round((AFTER - BEFORE) / BIN)):
        begin = BEFORE + index * BIN
        shares = [share for run in runs if (share := _share(run, begin)) is not None]
        if shares:
            points.append((begin + BIN / 2, Estimate(median(shares), min(shares), max(shares))))
    return points


def _share(run: Run, begin: float) -> float | None:
    if not run.steps or run.steps[-1] < begin + BIN:
        return None
    steps = sum(begin <= at < begin + BIN for at in run.steps)
    usual = sum(BEFORE <= at < 0 for at in run.steps) / -BEFORE
    return steps / (usual * BIN) if usual else None


def _file(scenario: str, workload: Workload) -> str:
    setup = f"-{workload.setup:g}s" if workload.setup else ""
    return f"recovery-{scenario}-{workload.size}{setup}.svg"
