"""What a head answers when it is asked for the status."""

from __future__ import annotations

from typing import Any

SUCCEEDED = {"phase": "succeeded", "step": 100, "ended": 190.0, "goodput": 0.912, "samples_per_second": 0.0}
FAILURE = {
    "kind": "user", "rank": 1, "node": "spot-1", "message": "ValueError: no", "traceback": "Traceback\n  line\n",
    "stacks": None,
}  # fmt: skip


def status(**job: Any) -> dict[str, Any]:
    """A status document with a job, or with none if nothing is given."""
    base = {
        "id": "digits-1", "name": "digits", "phase": "running", "reason": "", "generation": 1, "step": 10,
        "members": ["spot-0", "spot-1"], "total_steps": 100, "samples_per_second": 812.4, "metrics": {"loss": 0.31234},
        "snapshot": 9, "checkpoint": 5, "restarts": 0, "max_restarts": 3, "started": 100.0, "ended": None,
        "failure": None, "interruptions": [], "goodput": None, "node_seconds": 12.0, "cost": None,
    }  # fmt: skip
    node = {"pool": "spot", "zone": "local-a", "address": "127.0.0.1", "state": "running", "notice": None, "step": 10}
    return {
        "cluster": "c",
        "head": {"epoch": 1},
        "job": {**base, **job} if job else None,
        "nodes": [{"name": "spot-1", "phase": "running", **node}],
        "pools": [{"name": "spot", "target": 2, "running": 1, "max": 2, "problem": "no such machine in local-a now"}],
        "events": [{"at": 100.0, "kind": "node", "text": "spot-1 joined"}],
    }


def row(job: str, **keys: Any) -> dict[str, Any]:
    """What a head says of a job in the list of all jobs."""
    base = {
        "id": job, "name": job.rpartition("-")[0], "group": None, "priority": 0, "phase": "running", "reason": "",
        "nodes": [{"node": "spot-1", "devices": [0]}], "min": 1, "max": 1, "step": 10, "total_steps": 100, "eta": None,
        "cost": None, "submitted": 100.0,
    }  # fmt: skip
    return {**base, **keys}


def shared() -> dict[str, Any]:
    """A status document of a cluster with four jobs, of which two share a machine."""
    found = status(step=10)
    nodes = [{"node": "spot-1", "devices": [0, 1]}, {"node": "spot-2", "devices": [0, 1]}]
    wait = "waits for 2 devices on 1 node, behind trial-1"
    trial = {"group": "search", "priority": -5}
    found["jobs"] = [
        row("digits-1", nodes=nodes, min=1, max=3, cost=0.5),
        row("trial-1", **trial, nodes=[{"node": "spot-1", "devices": [2]}], step=7, total_steps=0, cost=0.125),
        row("eval-1", nodes=[], min=2, max=2, step=0, total_steps=0, phase="paused", reason="paused by the operator"),
        row("trial-2", **trial, nodes=[], step=0, total_steps=0, phase="queued", reason=wait),
    ]
    (node,) = found["nodes"]
    digits = {"job": "digits-1", "devices": [0, 1], "phase": "running", "step": 10}
    other = {"job": "trial-1", "devices": [2], "phase": "starting", "step": -1}
    found["nodes"] = [
        {**node, "devices": 4, "jobs": [digits, other]},
        {**node, "name": "spot-2", "devices": 2, "jobs": [digits]},
        {**node, "name": "spot-3", "devices": 2, "jobs": [], "phase": "ready", "step": None},
    ]
    return {**found, "idle_cost": 0.25}
