"""What a head answers when it is asked for the status."""

from __future__ import annotations

from typing import Any

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
