"""What the page of one run shows: from the bucket, so that a run can be looked at when its machines are long gone.

Each function takes the records, a job's id and the query of the request, and returns JSON values. It waits for the
bucket: callers in an event loop use a thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from spotrun.dashboard import bars, history, logs
from spotrun.dashboard.records import AT_ONCE, Records
from spotrun.document import Kept
from spotrun.errors import TooLargeError
from spotrun.head import timeline as heads
from spotrun.head.events import Event
from spotrun.head.overview import extras
from spotrun.head.status import job_status
from spotrun.history.provenance import MOST, RECORD, NodeRecord, Provenance, Remarks
from spotrun.store.keys import JOBS, job_key, provenance_key, remarks_key, system_folder

FILES = 2000  # files that are listed; the rest is counted
NODES = 64  # nodes whose records are read
_PART = re.compile(r"(?P<folder>checkpoints/[0-9]+|metrics/[0-9]+|system/[^/]+|kept/[0-9]+)/")

Found = TypeVar("Found", bound=Kept)
Query = Mapping[str, str]
Answer = Callable[[Records, str, Query], Any]


def run(records: Records, job: str, _: Query) -> dict[str, Any]:
    """A job's status, its job file and its code."""
    state = records.state(job)
    found = job_status(state) | {key: value for key, value in extras(state).items() if key in ("in_time", "paused")}
    spec = state.spec.model_dump(mode="json", exclude_defaults=True)
    return found | {"cluster": state.cluster, "spec": spec, "code": state.code, "counted_at": state.counted_at}


def events(records: Records, job: str, _: Query) -> list[Event]:
    """The job's events, oldest first."""
    records.state(job)
    return history.events(records, job)


def files(records: Records, job: str, _: Query) -> dict[str, Any]:
    """The job's objects in the bucket. A folder of many objects is one row, with their number and bytes."""
    records.state(job)
    root = f"{JOBS}{job}/"
    rows: dict[str, list[int]] = {}
    for key, size in records.store.sizes(root.rstrip("/")).items():
        name = key.removeprefix(root)
        match = _PART.match(name)
        row = rows.setdefault(f"{match['folder']}/" if match else name, [0, 0])
        row[0], row[1] = row[0] + 1, row[1] + size
    listed = [{"name": name, "objects": count, "bytes": size} for name, (count, size) in sorted(rows.items())]
    left = len(listed) - FILES
    return {"where": f"{records.store.url}/{root}", "files": listed[:FILES], "left_out": max(0, left)}


def timeline(records: Records, job: str, _: Query) -> dict[str, Any]:
    """What each node's time went into: see `bars`."""
    state = records.state(job)
    return bars.document(state, heads.read(records.store.find(job_key(job, "timeline.json"))))


def origin(records: Records, job: str, _: Query) -> dict[str, Any]:
    """Where the run came from: who submitted what, what people say about it, and what its nodes had."""
    records.state(job)
    store = records.store
    found = _document(records, provenance_key(job), Provenance, MOST)
    said = _document(records, remarks_key(job), Remarks, MOST)
    keys = [key for key in store.list(system_folder(job)) if "/about-" in key]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        nodes = [
            each for each in pool.map(lambda key: _document(records, key, NodeRecord, RECORD), keys[:NODES]) if each
        ]
    return {
        "provenance": found.model_dump(mode="json") if found else None,
        "remarks": (said or Remarks()).model_dump(mode="json"),
        "nodes": [each.model_dump(mode="json") for each in sorted(nodes, key=lambda each: each.at)],
        "left_out": max(0, len(keys) - NODES),
    }


def _document(records: Records, key: str, kind: type[Found], most: int) -> Found | None:
    """A document; None if there is none that can be read: a job's code can write those of its nodes."""
    try:
        data = records.store.find(key, most)
        return None if data is None else kind.model_validate_json(data)
    except (ValueError, TooLargeError):
        return None


ANSWERS: dict[str, Answer] = {
    "": run,
    "events": events,
    "files": files,
    "logs": logs.listed,
    "origin": origin,
    "log": logs.read,
    "timeline": timeline,
}
