"""The runs of a cluster as a table that can be filtered and sorted. It is made from the bucket alone.

A run is a job with what people and programs have written down about it. The columns are those of `row`.
"""

from __future__ import annotations

import difflib
import json
import math
import operator
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from scripts.columns import aligned, duration
from scripts.job_table import money
from spotrun.document import Kept
from spotrun.errors import JobNotFound, SpotrunError, TooLargeError, UnreadableError
from spotrun.head import status
from spotrun.head.costs import job_totals
from spotrun.head.job_state import JobState
from spotrun.head.journal import namesakes, stamped, state_keys
from spotrun.history.provenance import MOST, Provenance, Remarks
from spotrun.store import Store, job_key, provenance_key, remarks_key
from spotrun.store.threads import at_once
from spotrun.wire import problem

AT_ONCE = 32  # runs that are read at the same time
Row = dict[str, Any]
Found = TypeVar("Found", bound=Kept)
_CONDITION = re.compile(
    r"\s*([A-Za-z_][\w./ -]*?)\s*(!=|<=|>=|=|<|>|~)\s*(\"[^\"]*\"|'[^']*'|[^\s,]+)(?:\s*,\s*|\s+and\s+|\s+|$)"
)
METRICS = 3  # that are shown, if no more are asked for
_RESULT = re.compile(r"(?:^|[^a-z])(?:val|valid|validation|test|eval|acc|accuracy|loss)(?:$|[^a-z])", re.IGNORECASE)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}


def rows(store: Store, cluster: str) -> list[Row]:
    """One row for each run of the cluster, the newest first. Raises `StoreError`."""
    jobs = [job for _, _, job in stamped(state_keys(store))]
    found = at_once(lambda job: _row_of(store, cluster, job), jobs, AT_ONCE)
    return [each for each in found if each is not None]


def state(store: Store, cluster: str, job: str) -> JobState:
    """A job's state. Raises `JobNotFound`, or `UnreadableError` if it cannot be read."""
    data = store.find(job_key(job, "state.json"))
    if data is not None:
        try:
            found = JobState.model_validate_json(data)
        except ValueError as error:
            raise UnreadableError(f"{store.url}: {job_key(job, 'state.json')}: {problem(error)}") from None
        if found.cluster == cluster:
            return found
    raise JobNotFound(f"ID: {job!r}: cluster {cluster} has no such run{namesakes(store, job)}; `make runs` lists them")


def provenance(store: Store, job: str) -> Provenance | None:
    """Where a job came from; None if nobody has written it down, or it cannot be read."""
    return document(store, provenance_key(job), Provenance)


def remarks(store: Store, job: str) -> Remarks:
    """A job's tags and notes."""
    return document(store, remarks_key(job), Remarks) or Remarks()


def document(store: Store, key: str, kind: type[Found]) -> Found | None:
    """A document; None if there is none that this version can read."""
    try:
        data = store.find(key, MOST)
        return None if data is None else kind.model_validate_json(data)
    except (ValueError, TooLargeError):
        return None


def row(job: JobState, origin: Provenance | None, said: Remarks) -> Row:
    """A run's columns. Numbers that are not known are None. Texts of people are not changed."""
    git = origin.git if origin else None
    return {
        "id": job.id,
        "name": job.name,
        "group": job.spec.group or "",
        "phase": status.phase(job),
        "reason": job.reason,
        "tags": list(said.tags),
        "notes": len(said.notes),
        "note": said.notes[-1].text if said.notes else "",
        "user": origin.user if origin else "",
        "commit": git.commit[:12] if git else "",
        "changed": bool(git and (git.diff or git.untracked)),
        "rerun_of": origin.rerun_of if origin else "",
        "code": job.code[:12],
        "script": job.spec.script,
        "args": list(job.spec.args),
        "labels": job.spec.labels,
        "submitted": job.submitted,
        "ended": job.ended,
        "seconds": (job.ended - job.submitted) if job.ended else None,
        "step": job.reached,
        "generations": job.generation,
        "interruptions": len(job.interruptions),
        "steps_lost": sum(each.steps_lost or 0 for each in job.interruptions),
        "goodput": job_totals.goodput(job),
        "cost": job.cost,
        "metrics": job.progress.metrics,
    }


def filtered(found: Iterable[Row], where: str, sort: str) -> list[Row]:
    """The rows that fit all conditions of `where`, sorted. Raises `SpotrunError` for a text that cannot be read.

    where: phase=succeeded, loss<0.5, tag=best, args~lr, separated by spaces, commas or `and`. sort: a column, with - in
    front for the greatest first; rows without a value come last.
    """
    wanted = conditions(where)
    everything = list(found)
    _check_columns(everything, [name for name, _, _ in wanted], sort)
    kept = [each for each in everything if all(_fits(each, *condition) for condition in wanted)]
    if not sort:
        return kept
    name, back = sort.removeprefix("-"), sort.startswith("-")

    def known(each: Row) -> bool:
        value = _cell(each, name)
        return value is not None and value == value  # not NaN

    found = sorted(filter(known, kept), key=lambda each: _order(_cell(each, name)), reverse=back)
    return [*found, *(each for each in kept if not known(each))]


def conditions(where: str) -> list[tuple[str, str, str]]:
    """Column, comparison and value of each condition. Raises `SpotrunError`."""
    found, at = [], 0
    while where[at:].strip():
        match = _CONDITION.match(where, at)
        if match is None:
            raise SpotrunError(
                f"WHERE: {where[at:].strip()!r}: is not a condition; give a column, one of = != < <= > >= ~ and a"
                " value, such as WHERE='phase=succeeded loss<0.5 tag=best'"
            )
        found.append((match[1].strip(), match[2], match[3].strip("\"'")))
        at = match.end()
    return found


def _check_columns(found: Sequence[Row], asked: Sequence[str], sort: str) -> None:
    """Raise `SpotrunError` for a column that no run has."""
    if not found:
        return
    known = {name for each in found for name in (*each, *each["metrics"], *each["labels"])} | {"tag"}
    for variable, name in [*(("WHERE", name) for name in asked), *([("SORT", sort.removeprefix("-"))] if sort else [])]:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SpotrunError(f"{variable}: {name!r}: no run has such a column{hint or '; JSON=1 prints all columns'}")


def _cell(each: Row, name: str) -> Any:
    """A row's value: of a column, or else of a metric, or of a label."""
    if name == "tag":
        return each["tags"]
    for place in (each, each["metrics"], each["labels"]):
        if name in place:
            return place[name]
    return None


def _fits(each: Row, name: str, compare: str, wanted: str) -> bool:
    value = _cell(each, name)
    if value is None:
        return compare == "!="
    if isinstance(value, list):
        text = " ".join(map(str, value))
        if compare in ("=", "!="):
            return (wanted in map(str, value)) == (compare == "=")
        return compare == "~" and wanted.lower() in text.lower()
    if compare == "~":
        return wanted.lower() in str(value).lower()
    if isinstance(value, bool):
        value, right = str(value).lower(), wanted.lower()
        return _COMPARE[compare](value, right)
    if isinstance(value, int | float):
        try:
            return _COMPARE[compare](float(value), float(wanted))
        except ValueError:
            raise SpotrunError(f"WHERE: {name}: {wanted!r}: is not a number, as the values of {name} are") from None
    return _COMPARE[compare](str(value), wanted)


def _order(value: Any) -> tuple[int, Any]:
    """A key for sorting values of one column, whatever kinds they have."""
    if isinstance(value, bool | int | float):
        return (1, math.inf) if value != value else (0, value)
    return (2, str(value))


def text(found: Sequence[Row], now: float, asked: Sequence[str] = ()) -> str:
    """The rows as a table. now: epoch seconds. asked: names of columns; metrics among them are shown in any case."""
    if not found:
        return "no runs"
    names, more = _metric_names(found, asked)
    head = ["run", "phase", "submitted", "took", "step", "gen", "cost", *names, "by", "tags"]
    lines = [head]
    for each in found:
        numbers = [number(each["metrics"].get(name)) for name in names]
        first = [each["id"], each["phase"], *_times(each, now), str(each["step"])]
        rest = [each["user"], " ".join(each["tags"])]
        lines.append([*first, str(each["generations"]), money(each["cost"] or None), *numbers, *rest])
    table = aligned(lines, indent="")
    if more:
        told = ", ".join(more[:METRICS]) + (", …" if len(more) > METRICS else "")
        table += ["", f"also logged: {told}; SORT= or WHERE= with a name shows it, `make show ID=` shows all of a run"]
    return "\n".join(table)


def _metric_names(found: Sequence[Row], asked: Sequence[str]) -> tuple[list[str], list[str]]:
    """The metrics that are shown, and the others. Results come first, then the metrics that most runs have."""
    counts = Counter(name for each in found for name in each["metrics"])
    ordered = sorted(counts, key=lambda name: (name not in asked, not _RESULT.search(name), -counts[name]))
    shown = max(METRICS, sum(name in asked for name in counts))
    return sorted(ordered[:shown]), sorted(ordered[shown:])


def _times(each: Row, now: float) -> tuple[str, str]:
    """When a run was submitted, and how long it took; empty if the run cannot be read."""
    submitted, took = each["submitted"], each["seconds"]
    if submitted is None:
        return "", ""
    begun = time.strftime("%m-%d %H:%M", time.localtime(submitted))
    return begun, duration(max(0.0, now - submitted if took is None else took))


def number(value: float | None) -> str:
    """0.1234; empty if it is not known."""
    return "" if value is None else f"{value:.4g}"


def _row_of(store: Store, cluster: str, job: str) -> Row | None:
    data = store.find(job_key(job, "state.json"))
    if data is None:
        return None
    try:
        found = JobState.model_validate_json(data)
    except ValueError as error:
        if not _is_of(data, cluster):
            return None
        return _unreadable(job, problem(error))
    if found.cluster != cluster:
        return None
    return row(found, provenance(store, job), remarks(store, job))


def _unreadable(job: str, reason: str) -> Row:
    texts = dict.fromkeys(("name", "group", "note", "user", "commit", "rerun_of", "code", "script"), "")
    numbers = dict.fromkeys(("submitted", "ended", "seconds", "goodput", "cost"), None)
    counts = dict.fromkeys(("notes", "step", "generations", "interruptions", "steps_lost"), 0)
    places: Row = {"tags": [], "args": [], "labels": {}, "metrics": {}, "changed": False}
    return {"id": job, "phase": "unreadable", "reason": reason, **texts, **numbers, **counts, **places}


def _is_of(data: bytes, cluster: str) -> bool:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("cluster") == cluster
