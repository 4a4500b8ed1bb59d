"""A pool whose machines are not what their type says: replaced a few times, no more, while others train."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotrun.head.repair import LIMIT
from spotrun.spec import ClusterSpec
from spotrun.store import unfit_key
from spotrun.wire import UnfitRecord
from tests.e2e.harness import Harness

# A type with more GPUs than any computer that this may run on.
SPEC = {
    "name": "unfit",
    "cloud": "local",
    "pools": [
        {"name": "bad", "zone": "local-a", "machine": "a2-megagpu-16g", "max": 1},
        {"name": "good", "zone": "local-b", "max": 1},
    ],
    "local": {"boot_delay": 0.1, "recreate_delay": 0.5},
}


def test_machines_that_are_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTRUN_HOME", str(tmp_path / "home"))
    cluster = Harness(tmp_path, ClusterSpec.model_validate(SPEC))
    try:
        # Two are wanted, one will do: so the bad one stays wanted while the good one trains.
        job = cluster.submit(nodes={"min": 1, "max": 2}, epochs=1, samples=1000, batch=2, slow=5)
        cluster.until_step(1)
        assert cluster.members() == ["good-0"]
        status = cluster.until(
            lambda s: "no more are before" in problem(s), what="the end of the replacing", timeout=180
        )
        texts = [event["text"] for event in status["events"]]
        assert sum("asked the cloud for another in its place" in text for text in texts) == LIMIT
        why = "a2-megagpu-16g has 16 GPUs, but nvidia-smi does not list them"
        assert why in problem(status)
        assert sum(text.startswith(f"bad-0 takes no job: {why}") for text in texts) >= LIMIT
        record = UnfitRecord.model_validate_json(cluster.access.store.get(unfit_key("unfit", "bad-0")))
        assert (record.node, record.pool, record.type) == ("bad-0", "bad", "a2-megagpu-16g")
        assert record.problems[0].startswith(why)
        job.go()
        assert cluster.until_ended()["phase"] == "succeeded"
    finally:
        cluster.close()


def problem(status: dict) -> str:
    (pool,) = [pool for pool in status["pools"] if pool["name"] == "bad"]
    return str(pool["problem"])
