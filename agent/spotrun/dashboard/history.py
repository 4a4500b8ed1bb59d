"""The overview of a cluster whose head does not answer: from the bucket. Callers in an event loop use a thread."""

from __future__ import annotations

from typing import Any

from spotrun.dashboard.records import Records
from spotrun.document import FORMAT
from spotrun.errors import SpotrunError
from spotrun.head.capacity.history import Histories
from spotrun.head.costs.job_totals import Idle
from spotrun.head.events import Event, merged, read_events
from spotrun.head.overview import EVENTS, job_row, overview
from spotrun.head.status import held
from spotrun.spec import ClusterSpec
from spotrun.store import history_key, idle_key, job_key, queue_key
from spotrun.wire import read_queue

JOBS = 50  # unended jobs that are read
RECORD = 4 << 20  # bytes of a record that are read at most
TAIL = 64 << 10  # bytes at the end of a job's events that are read


def read(records: Records, cluster: ClusterSpec) -> dict[str, Any]:
    """The overview as far as the bucket has it: no nodes, no sizes and no prices. Raises `StoreError`."""
    store, name = records.store, cluster.name
    queue = _parsed(read_queue, store.find(queue_key(name), RECORD))
    idle = _parsed(Idle.model_validate_json, store.find(idle_key(name), RECORD))
    histories = _parsed(Histories.model_validate_json, store.find(history_key(name), RECORD))
    waiting = list(queue.held) if queue else []
    rows, told = list[dict[str, Any]](), dict[str, list[Event]]()
    unended = [*(queue.jobs if queue else ()), *waiting]
    for job in unended[:JOBS]:
        rows.append(_row(records, job, job in waiting))
        told[job] = events(records, job, TAIL)
    document = {
        "format": FORMAT,
        "cluster": name,
        "head": None,
        "jobs": rows,
        "nodes": [],
        "pools": [],
        "parked": None,
        "held": waiting,
        "troubles": [],
        "idle_cost": idle.cost if idle else None,
        "counted_at": idle.counted_at if idle else None,
    }
    found = overview(document, cluster, {}, merged(told)[-EVENTS:], histories=histories)
    return found | {"hourly": None, "unpriced": None, "jobs_left_out": max(0, len(unended) - JOBS)}


def events(records: Records, job: str, tail: int | None = None) -> list[Event]:
    """The events of a job, oldest first. tail: bytes to read at the end."""
    key, store = job_key(job, "events.jsonl"), records.store
    try:
        size = store.size(key)
        start = max(0, size - tail) if tail else 0
        return read_events(store.part(key, start, size) if size else b"")
    except SpotrunError:  # a job that has not begun has none
        return []


def _row(records: Records, job: str, waits: bool) -> dict[str, Any]:
    """waits: whether the job is held."""
    try:
        row = job_row(records.state(job))
    except SpotrunError as error:
        return {"id": job, "phase": "unreadable", "reason": str(error)}
    return row | held(job) if waits else row


def _parsed(parse: Any, data: bytes | None) -> Any:
    """The record in these bytes; None if there is no record, or if the record is not readable."""
    try:
        return parse(data) if data is not None else None
    except ValueError:
        return None
