"""The jobs of a cluster as a table, by group: from the rows of `ctl jobs` and of the status document. Pure.

A head of spotrun 0.1 sends only a job's id and phase. So each key that is missing leaves its cell empty.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from scripts import kept

Row = dict[str, Any]  # of one job
COLOURS = {
    **{"running": "green", "succeeded": "green", "failed": "red", "waiting": "yellow", "draining": "yellow"},
    **{"checking": "yellow", "unfit": "red"},  # nodes
    **{"paused": "yellow", "kept": "yellow"},
    "silent": "red",  # a job and its nodes
    "unreadable": "red",
}
_NUMBERS = ("priority", "nodes", "devices", "step", "cost")  # columns that are aligned to the right
_DAY = 86400.0
_MOST = 1024  # devices of a node that are shown: a document may be wrong


def table(rows: Iterable[Row], now: float) -> Table:
    """One line for each job, in the order of the rows. The jobs of a group follow a line that counts them.

    now: epoch seconds, to tell whether an end is today.
    """
    found = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("job", "priority", "phase", "nodes", "devices", "step", "end", "cost", "why"):
        # An id that is cut off, or on two lines, could not be copied.
        found.add_column(title, justify="right" if title in _NUMBERS else "left", no_wrap=title == "job")
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row.get("group") or ""), []).append(row)
    for name in sorted(groups, key=lambda name: name != ""):  # stable: jobs without a group first
        if name:
            found.add_row(*_sum(name, groups[name]), style="bold")
        for row in groups[name]:
            found.add_row(*_cells(row, "  " if name else "", now))
    return found


def job_id(row: Row) -> str:
    """The job of a row. A head of spotrun 0.1 calls it `job`."""
    return str(row["id"] if "id" in row else row["job"])


def holds(jobs: Sequence[Row], devices: int) -> list[tuple[Row | None, str]]:
    """Each job on a node, with the numbers of its devices there; and None, with the devices that no job holds."""
    found: list[tuple[Row | None, str]] = [(job, _listed(job.get("devices", ()))) for job in jobs]
    held = {each for job in jobs for each in job.get("devices", ())}
    free = [each for each in range(min(devices, _MOST)) if each not in held]
    return [*found, *([(None, _listed(free))] if free else [])]


def money(dollars: float | None) -> str:
    """$1.20; empty if the amount is not known."""
    return "" if dollars is None else f"${dollars:.2f}"


def steps(job: Row) -> str:
    """120/400; 120 if the number of all steps is not known."""
    return f"{job['step']}/{job['total_steps']}" if job.get("total_steps") else str(job.get("step", ""))


def phases(rows: Iterable[Row]) -> str:
    """2 running, 1 queued"""
    return ", ".join(f"{count} {phase}" for phase, count in Counter(str(row["phase"]) for row in rows).items())


def _cells(row: Row, indent: str, now: float) -> list[str | Text]:
    phase = str(row["phase"])
    priority = row.get("priority")
    return [
        indent + job_id(row),
        "" if priority is None else str(priority),
        Text(phase, style=COLOURS.get(phase, "")),
        _size(row),
        str(_devices(row) or ""),
        steps(row),
        _when(row.get("eta"), now),
        money(row.get("cost")),
        "; ".join(filter(None, [str(row.get("reason") or ""), kept.short(row)])),
    ]


def _sum(group: str, rows: list[Row]) -> list[str]:
    """The line that counts the jobs of a group as one."""
    costs = [row["cost"] for row in rows if row.get("cost") is not None]
    nodes = len({each["node"] for row in rows for each in row.get("nodes", ())})
    devices = sum(_devices(row) for row in rows)
    cost = money(sum(costs) if costs else None)
    return [group, "", "", str(nodes or ""), str(devices or ""), "", "", cost, phases(rows)]


def _size(row: Row) -> str:
    """2 of 2-4: the nodes that the job has, and its limits."""
    if "nodes" not in row:
        return ""
    least, most = row.get("min"), row.get("max")
    limits = "" if least is None else f" of {least}" if most in (least, None) else f" of {least}-{most}"
    return f"{len(row['nodes'])}{limits}"


def _devices(row: Row) -> int:
    return sum(len(each.get("devices", ())) for each in row.get("nodes", ()))


def _listed(devices: Iterable[int]) -> str:
    """0-2,5"""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and runs[-1][-1] == device - 1:
            runs[-1][1:] = [device]
        else:
            runs.append([device])
    return ",".join("-".join(map(str, run)) for run in runs)


def _when(at: float | None, now: float) -> str:
    """A time of day in the operator's time zone; with the date if it is a day or more away."""
    if at is None:
        return ""
    try:
        return time.strftime("%H:%M:%S" if abs(at - now) < _DAY else "%Y-%m-%d %H:%M", time.localtime(at))
    except (ValueError, OverflowError, OSError):
        return ""
