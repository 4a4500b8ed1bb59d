"""A pool whose machines are not what their type says: replaced a few times, no more, while others train."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from scripts.home import home
from spotrun.cloud.local.layout import Layout
from spotrun.head.fleet.record import LIMIT, Replacement
from spotrun.head.fleet.replacements import Record
from spotrun.spec import ClusterSpec
from spotrun.store import Store, replaced_key, unfit_key
from spotrun.wire import UnfitRecord
from tests.e2e.harness import Harness

pytestmark = pytest.mark.clouds  # it takes minutes, most of which are the times that a machine gets before a verdict
# A type with more GPUs than any computer that this may run on.
SPEC = {
    "name": "unfit",
    "cloud": "local",
    "pools": [
        {"name": "bad", "zone": "local-a", "machine": "a2-megagpu-16g", "max": 1},
        {"name": "good", "zone": "local-a", "max": 1},
    ],
    "local": {"boot_delay": 0.1, "recreate_delay": 0.5},
}
WHY = "a2-megagpu-16g has 16 GPUs, but nvidia-smi does not list them"


def test_machines_that_are_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTRUN_HOME", str(tmp_path / "home"))
    spec = ClusterSpec.model_validate(SPEC)
    before = replaced_before(spec)
    cluster = Harness(tmp_path, spec)
    try:
        # Two are wanted, one will do: so the bad one stays wanted while the good one trains.
        job = cluster.submit(nodes={"min": 1, "max": 2}, epochs=1, samples=4000, batch=2, slow=2)
        cluster.until_step(1)
        assert cluster.members() == ["good-0"]
        status = cluster.until(lambda s: asked(s) == 1, what="a replacement")
        record = UnfitRecord.model_validate_json(cluster.access.store.get(unfit_key("unfit", "bad-0")))
        assert (record.node, record.pool, record.type) == ("bad-0", "bad", "a2-megagpu-16g")
        assert record.problems[0].startswith(WHY)
        # What was asked is known to the next head.
        cluster.kill_head()
        before_kill = status["head"]["epoch"]
        cluster.until(lambda s: s["head"]["epoch"] > before_kill, what="a new head")
        status = cluster.until(lambda s: "no more are replaced before" in problem(s), what="the end of the replacing")
        assert WHY in problem(status)
        # Its successor is no better: none is asked for in its place, and the pool is given up.
        status = cluster.until(lambda s: pool(s)["target"] == 0 and not nodes(s), what="the pool closed", timeout=180)
        assert sum(event["text"].startswith(f"bad-0 takes no job: {WHY}") for event in status["events"]) >= 2
        assert asked(status) <= 1, "the killed head's newest events may be lost"
        assert [each.node for each in recorded(cluster).machines] == [each.node for each in before] + ["bad-0"]
        job.go()
        assert cluster.until_ended()["phase"] == "succeeded"
    finally:
        cluster.close()


def replaced_before(spec: ClusterSpec) -> list[Replacement]:
    """All but one of those that the pool may have replaced, as if for an earlier job: this test's time is for one."""
    ago = [time.time() - 60.0 * number for number in range(LIMIT, 1, -1)]
    before = [Replacement(node=f"bad-{at:.0f}", pool="bad", why=WHY, at=at) for at in ago]
    record = Record(description=spec.digest, machines=tuple(before))
    bucket = Store(str(Layout.of(home(), spec.name).bucket))
    bucket.put(replaced_key(spec.name), record.model_dump_json().encode())
    return before


def recorded(cluster: Harness) -> Record:
    return Record.model_validate_json(cluster.access.store.get(replaced_key("unfit")))


def asked(status: dict) -> int:
    return sum("asked the cloud to replace it" in event["text"] for event in status["events"])


def pool(status: dict) -> dict:
    (found,) = [pool for pool in status["pools"] if pool["name"] == "bad"]
    return dict(found)


def problem(status: dict) -> str:
    return str(pool(status)["problem"])


def nodes(status: dict) -> list[str]:
    return [node["name"] for node in status["nodes"] if node["pool"] == "bad"]
