"""The report: tables of medians, the goals, and which part dominates. Pure but for `describe_machine`."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from bench.phases import PARTS, Phases, medians
from bench.systems import BOOT_DELAY, NODES, NOTICE, SCENARIOS
from bench.torchrun import PLAIN, STOCK, TUNED

SYSTEMS = ("plain", "tuned", "spotrun")
# Why a part takes what it takes: (system or "", part) → reason.
WHY = {
    ("plain", "rendezvous"): "a survivor's agent waits until the lost agent's keep-alives have run out (3 x 5 s), and "
    "another 30 s (`last_call_timeout`) for more nodes, if there are fewer than the maximum",
    ("tuned", "rendezvous"): "the same wait, 3 x 1 s",
    ("plain", "detection"): "a frozen peer closes no connection, so the survivor learns of it when the lost agent's "
    "keep-alives have run out",
    ("tuned", "detection"): "a frozen peer closes no connection, so the survivor learns of it from the keep-alives or "
    "from the process group's timeout",
    (
        "spotrun",
        "detection",
    ): "a killed peer breaks its connections at once, and the survivor's worker must leave; a frozen peer must miss "
    "heartbeats for `heartbeat_timeout` (3 s); with notice, training runs on to its stop step",
    ("spotrun", "rendezvous"): "if enough nodes are ready, the head only has to decide; otherwise a new machine must "
    "boot, start its agent and import torch once",
    ("", "process_start"): "a new interpreter and its imports, of torch above all",
    ("", "process_group"): "the ranks wait for the last of them",
    ("", "state_restored"): "model, optimizer and state are built and read",
    ("", "first_step"): "the first step pays for what is set up lazily",
}


class RunLike(Protocol):
    @property
    def system(self) -> str: ...
    @property
    def scenario(self) -> str: ...
    @property
    def phases(self) -> Phases | None: ...


@dataclass(frozen=True)
class Goal:
    """What a scenario must reach: spotrun's `number` at most `limit` (times another system's total, if named)."""

    scenario: str
    text: str
    number: str
    limit: float
    of: str = ""


GOALS = (
    Goal("spare", "total at most 1/6 of plain", "total", 1 / 6, "plain"),
    Goal("spare", "total at most 1/3 of tuned", "total", 1 / 3, "tuned"),
    Goal("shrink", "total at most 1/12 of plain", "total", 1 / 12, "plain"),
    Goal("notice", "pause under 1.5 s", "pause", 1.5),
    Goal("notice", "no step lost", "steps_lost", 0),
    Goal("fixed", "pause under 0.5 s", "pause", 0.5),
    Goal("fixed", "no step lost", "steps_lost", 0),
)


def describe_machine() -> str:
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    memory = int(next(line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))) / 2**20
    return (
        f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GiB memory, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, torch {version('torch')}"
    )


def render(runs: Sequence[RunLike], machine: str, day: date, timeout: float, stock_timeout: float) -> str:
    """The section on recovery."""
    table = summarize(runs)
    scenarios = [name for name in SCENARIOS if any(scenario == name for scenario, _ in table)]
    lines = ["# Recovery after a lost machine", "", f"{day.isoformat()}. {machine}.", "", *_method(timeout), ""]
    lines += ["## Medians", "", *_medians(runs, table, scenarios), "", "## Goals", "", *_goals(table), ""]
    lines += ["## Which part dominates", "", *_dominant(table, scenarios), ""]
    lines += _stock([run for run in runs if run.system == "stock"], stock_timeout)
    return "\n".join(lines)


def write_section(path: Path, name: str, text: str) -> None:
    """Replace the section of that name in the results. The rest of the file stays."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before = path.read_text() if path.exists() else ""
    head, _, rest = before.partition(begin)
    tail = rest.partition(end)[2]
    path.write_text(f"{head}{begin}{text.rstrip()}\n{end}{tail}")


def summarize(runs: Sequence[RunLike]) -> dict[tuple[str, str], Phases]:
    """(scenario, system) → medians over the runs that went on. A pair without such a run is left out."""
    pairs = dict.fromkeys((run.scenario, run.system) for run in runs)
    found = {pair: [run.phases for run in runs if (run.scenario, run.system) == pair and run.phases] for pair in pairs}
    return {pair: medians(list(values)) for pair, values in found.items() if values and pair[1] in SYSTEMS}


def dominant(phases: Phases) -> tuple[str, float]:
    """The longest part and its share of all parts."""
    part = max(PARTS, key=lambda name: float(getattr(phases, name)))
    whole = sum(float(getattr(phases, name)) for name in PARTS)
    return part, float(getattr(phases, part)) / whole if whole else 0.0


def _method(timeout: float) -> list[str]:
    return [
        f"One job of {NODES} nodes, or of {NODES + 1} if the scenario says so, one process each, on one machine: the "
        "same model (1.1 M parameters, AdamW), batch "
        "and pace (steps of at least 50 ms) in each system. One node is lost, never the one that has torchrun's "
        "store. Time counts from the fault to the end of the first step after it. In each system, if the lost node is "
        f"replaced, its replacement begins to start {BOOT_DELAY:g} s after the interruption, and a notice is "
        f"{NOTICE:g} s long. For torchrun, a notice is a SIGTERM to the node's agent, as the clouds' shutdown scripts "
        "send it. All times are in seconds. "
        "Each number is the median of its own column, so the parts need not add up to the total. A hang is "
        f"{timeout:g} s without a step, and is not in the medians.",
        "",
        f"* plain: {PLAIN.what}; a checkpoint by `torch.save` every 20 steps",
        f"* tuned: {TUNED.what}",
        "* spotrun: its defaults, on the local cloud",
    ]


def _stock(runs: Sequence[RunLike], timeout: float) -> list[str]:
    if not runs:
        return []
    hangs = sum(run.phases is None for run in runs)
    return [
        "## torchrun without the variable",
        "",
        f"{STOCK.what[0].upper()}{STOCK.what[1:]}: {hangs} of {len(runs)} runs of "
        f"“{SCENARIOS[runs[0].scenario].title}” made no step within {timeout:g} s. torchrun's handler keeps one "
        "TCPStore for all attempts, so the workers of an attempt read the addresses of the attempt before it (pytorch "
        "issues 135712 and 167302).",
        "",
    ]


def _medians(runs: Sequence[RunLike], table: dict[tuple[str, str], Phases], scenarios: list[str]) -> list[str]:
    heads = ["scenario", "system", *PARTS, "total", "(range)", "pause", "steps lost", "runs", "hangs"]
    lines = [_row([head.replace("_", " ") for head in heads]), _row(["---"] * len(heads))]
    for scenario in scenarios:
        for system in SYSTEMS:
            own = [run.phases for run in runs if (run.scenario, run.system) == (scenario, system)]
            if not own:
                continue
            cells = _cells(table.get((scenario, system)), [phases.total for phases in own if phases])
            lines.append(_row([SCENARIOS[scenario].title, system, *cells, str(len(own)), str(own.count(None))]))
    return lines


def _cells(found: Phases | None, totals: list[float]) -> list[str]:
    if found is None:
        return ["-"] * (len(PARTS) + 4)
    parts = [f"{getattr(found, name):.2f}" for name in PARTS]
    span = f"{min(totals):.2f} to {max(totals):.2f}"
    return [*parts, f"**{found.total:.2f}**", span, f"{found.pause:.2f}", f"{found.steps_lost:g}"]


def _goals(table: dict[tuple[str, str], Phases]) -> list[str]:
    lines = [_row(["scenario", "goal", "measured", "held"]), _row(["---"] * 4)]
    for goal in GOALS:
        ours, other = table.get((goal.scenario, "spotrun")), table.get((goal.scenario, goal.of))
        if ours is None or (goal.of and other is None):
            lines.append(_row([SCENARIOS[goal.scenario].title, goal.text, "not measured", "-"]))
            continue
        value = float(getattr(ours, goal.number))
        text = f"{value:.2f}" if goal.number != "steps_lost" else f"{value:g}"
        if other is not None:
            theirs = float(getattr(other, goal.number))
            value, text = value / theirs, f"{text} / {theirs:.2f} = 1/{theirs / value:.1f}"
        lines.append(_row([SCENARIOS[goal.scenario].title, goal.text, text, "yes" if value <= goal.limit else "no"]))
    return lines


def _dominant(table: dict[tuple[str, str], Phases], scenarios: list[str]) -> list[str]:
    lines = []
    for scenario in scenarios:
        for system in SYSTEMS:
            if (scenario, system) in table:
                part, share = dominant(table[scenario, system])
                why = WHY.get((system, part)) or WHY.get(("", part), "")
                name = part.replace("_", " ")
                lines.append(
                    f"* {SCENARIOS[scenario].title}, {system}: {name}, {share:.0%}" + (f": {why}." if why else ".")
                )
    return lines


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
