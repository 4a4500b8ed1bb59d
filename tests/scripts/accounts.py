"""Jobs with accounts, and a bucket with such jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spotrun.head.costs.bill import Line
from spotrun.head.costs.job_totals import Idle
from spotrun.head.job_state import JobState
from spotrun.spec import JobSpec
from spotrun.store import Store, idle_key, job_key


def job(number: int, *lines: Line, **changes: Any) -> JobState:
    keys = {key: changes.pop(key) for key in ("budget", "group", "labels") if key in changes}
    values = {
        "id": f"train-20261122-00000{number}",
        "name": "train",
        "cluster": "c",
        "code": "x",
        "spec": JobSpec(script="train.py", **keys).model_dump(mode="json"),
        "submitted": float(number),
        "phase": "succeeded",
        "account": lines,
        "cost": sum(line.cost for line in lines),
        "node_seconds": sum(line.seconds for line in lines),
    }
    return JobState.model_validate({**values, **changes})


def store(folder: Path, *jobs: JobState, idle: Idle | None = None) -> Store:
    found = Store(folder.as_uri())
    for each in jobs:
        found.put(job_key(each.id, "state.json"), each.model_dump_json().encode())
    if idle:
        found.put(idle_key("c"), idle.model_dump_json().encode())
    return found
