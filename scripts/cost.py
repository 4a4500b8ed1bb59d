"""What jobs have cost, and will cost, by pool and market: from the states of the jobs in the bucket.

No head is needed, so this also works while the cluster is down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.columns import aligned, duration
from scripts.job_table import money
from scripts.make_command import LOCAL, make_command
from spotrun.document import problem
from spotrun.errors import SpotrunError
from spotrun.head.costs.bill import Line, merged
from spotrun.head.costs.job_totals import Idle
from spotrun.head.job_state import JobState
from spotrun.head.journal import STATE_KEY, state_keys
from spotrun.head.status import cost_to_end
from spotrun.store import Store, idle_key, job_key
from spotrun.text import tidy

Sums = dict[str, Any]
MISSING = "The head's machine, disks, network traffic and the bucket are not counted."


@dataclass(frozen=True)
class Books:
    """The accounts of one cluster."""

    jobs: tuple[JobState, ...]  # in order of submission
    idle: Idle  # devices that no job held
    unreadable: tuple[str, ...] = ()  # ids of jobs whose states cannot be read
    no_idle: str = ""  # why the account of devices that no job held is not known; empty: it is


def read(store: Store, cluster: str, job: str | None = None, file: str = LOCAL) -> Books:
    """The accounts in the bucket. Raises `SpotrunError` if there is no such job.

    job: of this job alone. file: the cluster file, which messages name.
    """
    found, unreadable = [], []
    keys = [job_key(job, "state.json")] if job else state_keys(store)
    for match in filter(None, map(STATE_KEY.fullmatch, keys)):
        data = store.find(match[0])
        try:
            state = JobState.model_validate_json(data) if data is not None else None
        except ValueError:
            unreadable.append(match["id"])
            continue
        if state is not None and state.cluster == cluster:
            found.append(state)
    if job and not found:
        why = "its state in the bucket cannot be read" if unreadable else "there is no such job of this cluster"
        raise SpotrunError(f"ID: {job!r}: {why}; `{make_command(file, 'jobs')}` lists the jobs")
    idle, no_idle, data = Idle(), "", store.find(idle_key(cluster))
    try:
        idle = Idle.model_validate_json(data) if data is not None else idle
    except ValueError as error:
        no_idle = f"Devices that no job held are missing: {store.url}: {idle_key(cluster)}: {problem(error)}"
    return Books(tuple(sorted(found, key=lambda each: (each.submitted, each.id))), idle, tuple(unreadable), no_idle)


def document(
    books: Books,
    cluster: str,
    job: str | None = None,
    month: str = "",
    group: str | None = None,
    warning: str = "",
    file: str = LOCAL,
) -> Sums:
    """What `make cost JSON=1` prints.

    job: only this job. month: only this month of UTC, such as 2026-11. group: only the jobs of this group. warning:
    about the age of the shipped prices. file: the cluster file, which messages name.
    """
    states = [each for each in books.jobs if not group or each.spec.group == group]
    if group and not states:
        jobs = make_command(file, "jobs")
        raise SpotrunError(f"GROUP: {group!r}: no job of cluster {cluster} is in this group; `{jobs}` lists the groups")
    rows = [_row(each, month) for each in states]
    if month:
        rows = [row for row in rows if row["seconds"] or row["job"] == job]
    idle = None if job or group else _idle(books.idle, month)
    everything = [*rows, *([idle] if idle else [])]
    labels: dict[str, dict[str, list[Sums]]] = {}
    for row in rows:
        for key, value in row["labels"].items():
            labels.setdefault(key, {}).setdefault(value, []).append(row)
    lines = merged(Line.model_validate({**line, "month": ""}) for row in everything for line in row["lines"])
    return {
        "cluster": cluster,
        "month": month or None,
        "group": group or None,
        "jobs": rows,
        "idle": idle,
        "pools": [{"pool": line.pool, "market": line.market, **sums([line])} for line in _sorted(lines)],
        "labels": {key: {value: _total(mine) for value, mine in found.items()} for key, found in labels.items()},
        "total": _total(everything),
        "unreadable": list(books.unreadable),
        "warnings": [each for each in (warning, "" if job or group else books.no_idle) if each],
    }


def sums(lines: Iterable[Line]) -> Sums:
    """The sums of an account. `saved` counts only lines for which both prices are known."""
    lines = list(lines)
    both = [line for line in lines if not line.unpriced and not line.unlisted]
    saved = sum(line.on_demand - line.cost for line in both)
    found = {key: sum(getattr(line, key) for line in lines) for key in ("seconds", "cost", "on_demand")}
    without = {key: sum(getattr(line, key) for line in lines) for key in ("unpriced", "unlisted")}
    return {**found, "saved": saved, **without}


def text(found: Sums) -> str:
    """The document for a person."""
    found = tidy(found)
    period = f"in {found['month']} (UTC)" if found["month"] else "so far"
    whose = f", group {found['group']}" if found["group"] else ""
    if not found["jobs"] and not (found["idle"] and found["idle"]["seconds"]):
        return "\n".join([f"cluster {found['cluster']}{whose}: nothing has been paid {period}", *found["warnings"]])
    ends = not found["month"] and any(row["to_end"] is not None or row["budget"] for row in found["jobs"])
    head = ["", "machine time", "cost", "on-demand", "saved", *(["at the end", "budget"] if ends else [])]
    rows = [[f"job {row['job']}", *_cells(row), *(_ends(row) if ends else [])] for row in found["jobs"]]
    if found["idle"] and found["idle"]["seconds"]:
        rows.append(["devices that no job held", *_cells(found["idle"])])
    if len(rows) > 1:
        rows.append(["total", *_cells(found["total"])])
    pools = [[f"{row['pool']} ({row['market']})", *_cells(row)] for row in found["pools"]]
    blocks = [[f"cluster {found['cluster']}{whose}, {period}:"], aligned([head, *rows])]
    blocks.append(aligned([["pool", *head[1:5]], *pools]) if pools else [])
    for key, values in found["labels"].items():
        named = [[value, *_cells(row)] for value, row in sorted(values.items())]
        blocks.append(aligned([[f"label {key}", *head[1:5]], *named]))
    blocks.append(
        [
            *notes(found["pools"], found["total"]["unsplit"], found["month"]),
            *_unread(found),
            MISSING,
            *found["warnings"],
        ]
    )
    return "\n\n".join("\n".join(block) for block in blocks if block).replace(":\n\n", ":\n", 1)


def by_pool(account: Sequence[Mapping[str, Any]], budget: float | None = None) -> list[str]:
    """A job's account as a head sends it, for the closing report. Heads up to version 0.1 send none."""
    lines = merged(Line.model_validate({**line, "month": ""}) for line in account)
    if not lines:
        return []
    pools = [{"pool": line.pool, "market": line.market, **sums([line])} for line in _sorted(lines)]
    rows = [[f"{row['pool']} ({row['market']})", *_cells(row)] for row in pools]
    if len(rows) > 1:
        rows.append(["total", *_cells(sums(lines))])
    used = f"  budget {money(budget)}: {sum(row['cost'] for row in pools) / budget:.0%} used" if budget else ""
    shown = aligned([["pool", "machine time", "cost", "on-demand", "saved"], *rows])
    return [*shown, *([used] if used else []), *(f"  {note}" for note in notes(pools))]


def notes(pools: Sequence[Mapping[str, Any]], unsplit: float = 0.0, month: str | None = None) -> list[str]:
    """Lines about what the sums lack."""
    found = []
    for row in pools:
        if row["unpriced"]:
            found.append(
                f"pool {row['pool']}: the price of {duration(row['unpriced'])} is not known; the cost lacks that time"
            )
        if row["unlisted"]:
            found.append(
                f"pool {row['pool']}: what {duration(row['unlisted'])} would have cost on-demand is not known;"
                " the columns on-demand and saved lack that time"
            )
    if unsplit >= 0.005:
        what = "this month may have a part of it" if month else "it is in the cost, but in no pool"
        found.append(f"An older version of the head counted {money(unsplit)} without pools and months: {what}.")
    return found


def _row(job: JobState, month: str) -> Sums:
    lines = [line for line in job.account if month in ("", line.month)]
    unsplit = max(0.0, job.cost - sum(line.cost for line in job.account))
    found = sums(lines)
    return {
        "job": job.id,
        "name": job.name,
        "group": job.spec.group,
        "labels": job.spec.labels,
        "phase": job.phase,
        **found,
        **({} if month else {"seconds": job.node_seconds, "cost": job.cost}),
        "unsplit": 0.0 if unsplit < 1e-6 else unsplit,
        "budget": job.cost_limit,
        "hourly": 0.0 if job.over else job.hourly,
        "to_end": cost_to_end(job),
        "lines": [line.model_dump() for line in _sorted(lines)],
    }


def _idle(idle: Idle, month: str) -> Sums:
    lines = [line for line in idle.account if month in ("", line.month)]
    unsplit = max(0.0, idle.cost - sum(line.cost for line in idle.account))
    whole = {} if month else {"seconds": idle.node_seconds, "cost": idle.cost}
    dumped = [line.model_dump() for line in _sorted(lines)]
    return {**sums(lines), **whole, "unsplit": 0.0 if unsplit < 1e-6 else unsplit, "lines": dumped}


def _total(rows: Iterable[Sums]) -> Sums:
    rows, keys = list(rows), ("seconds", "cost", "on_demand", "saved", "unpriced", "unlisted", "unsplit")
    return {key: sum(row[key] for row in rows) for key in keys}


def _cells(row: Mapping[str, Any]) -> list[str]:
    known = row["seconds"] > row["unlisted"] or not row["seconds"]
    share = f" ({row['saved'] / row['on_demand']:.0%})" if row["on_demand"] and not row["unlisted"] else ""
    saved = money(row["saved"]) + share if known else "not known"
    listed = money(row["on_demand"]) if known else "not known"
    cost = money(row["cost"]) if row["seconds"] > row["unpriced"] or not row["seconds"] else "not known"
    return [duration(row["seconds"]), cost, listed, saved]


def _ends(row: Mapping[str, Any]) -> list[str]:
    ended = row["phase"] in ("succeeded", "failed", "stopped")
    end = "" if ended else "not known" if row["to_end"] is None else f"about {money(row['to_end'])}"
    used = f" ({row['cost'] / row['budget']:.0%} used)" if row["budget"] else ""
    return [end, money(row["budget"]) + used]


def _unread(found: Sums) -> list[str]:
    if not found["unreadable"]:
        return []
    return [f"The states of these jobs cannot be read, so they are missing: {', '.join(found['unreadable'])}"]


def _sorted(lines: Iterable[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: (line.month, line.pool, line.market))
