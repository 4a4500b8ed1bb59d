"""What the page of one run shows: from the bucket, so that a run can be looked at when its machines are long gone.

Each function takes the records, a job's id and the query of the request, and returns JSON values. It waits for the
bucket: callers in an event loop use a thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from spotrun.dashboard import bars, history, logs
from spotrun.dashboard.records import Records
from spotrun.head import timeline as heads
from spotrun.head.overview import extras
from spotrun.head.status import job_status
from spotrun.store.keys import JOBS, job_key

FILES = 2000  # files that are listed; the rest is counted
_PART = re.compile(r"(?P<folder>checkpoints/[0-9]+|metrics/[0-9]+|system/[^/]+|kept/[0-9]+)/")

Query = Mapping[str, str]
Answer = Callable[[Records, str, Query], Any]


def run(records: Records, job: str, _: Query) -> dict[str, Any]:
    """A job's status, its job file and its code."""
    state = records.state(job)
    found = job_status(state) | {key: value for key, value in extras(state).items() if key in ("in_time", "paused")}
    spec = state.spec.model_dump(mode="json", exclude_defaults=True)
    return found | {"cluster": state.cluster, "spec": spec, "code": state.code, "counted_at": state.counted_at}


def events(records: Records, job: str, _: Query) -> list[dict[str, Any]]:
    """The job's events, oldest first."""
    records.state(job)
    return history.events(records, job)


def files(records: Records, job: str, _: Query) -> dict[str, Any]:
    """The job's objects in the bucket: folders of many objects as one row with their number and bytes."""
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


ANSWERS: dict[str, Answer] = {
    "": run,
    "events": events,
    "files": files,
    "logs": logs.listed,
    "log": logs.read,
    "timeline": timeline,
}
