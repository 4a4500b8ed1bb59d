"""What `make cost` says is what the local cloud would bill, to the cent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotrun.dashboard import runs
from spotrun.dashboard.records import Records
from spotrun.spec import ClusterSpec
from tests.e2e import billing
from tests.e2e.harness import Harness

# Dear machines, so that a cent is less than two seconds of one of them.
SPEC: dict[str, Any] = {
    "name": "cost",
    "cloud": "local",
    "pools": [
        {"name": "spot", "zone": "local-a", "max": 3},
        {"name": "steady", "zone": "local-b", "market": "on-demand", "max": 1},
        {"name": "parts", "zone": "local-c", "max": 1, "devices": 2},
    ],
    "local": {
        "boot_delay": 0.1,
        "recreate_delay": 0.5,
        "market": [
            {"where": "spot", "price": 4.0},
            {"where": "parts", "price": 8.0},
            {"where": "steady", "price": 20.0},
        ],
    },
}
EACH: dict[str, Any] = {"epochs": 1, "samples": 4800, "batch": 4, "pause": 0.005, "heartbeat_timeout": 60, "slow": 10}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    folder = tmp_path_factory.mktemp("cost")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPOTRUN_HOME", str(folder / "home"))
        file = folder / "cluster.yaml"
        file.write_text(json.dumps(SPEC))  # YAML, too
        harness = Harness(folder, ClusterSpec.model_validate(SPEC))
        try:
            yield harness
        finally:
            harness.close()


def test_the_cost_of_all_jobs_is_what_the_cloud_bills(cluster: Harness) -> None:
    """With a kill, a preemption, a pause, idle devices, and prices that change while machines run."""
    labels = {"team": "vision"}
    first = cluster.submit(**EACH, nodes=2, pools=("spot",), labels=labels, budget=50.0)
    cluster.until_step(5)
    part = cluster.submit(**EACH, devices=1, pools=("parts",))
    cluster.until_step(5)
    cluster.watch(first.id)
    cluster.fault("kill", cluster.members()[1])
    cluster.until(lambda s: s["job"]["interruptions"] and s["job"]["phase"] == "running", "the kill is over")
    cluster.cloud(lambda cloud: cloud.market("spot", price=12.0))
    cluster.cloud(lambda cloud: cloud.preempt(cluster.members()[0], 3.0))
    cluster.until(lambda s: len(s["job"]["interruptions"]) > 1 and s["job"]["phase"] == "running", "a preemption")
    cluster.cloud(lambda cloud: cloud.market("parts", price=16.0))
    cluster.ctl("pause", "--job", first.id)
    cluster.until(lambda s: s["job"]["phase"] == "paused", "a pause")
    steady = cluster.submit(**{**EACH, "slow": 0}, pools=("steady",), labels=labels)
    cluster.until_ended()
    cluster.ctl("resume", "--job", first.id)
    running = billing.cost(cluster, "--id", part.id)
    assert running["jobs"][0]["hourly"] == pytest.approx(8.0), "half of the machine, at the new price"
    for job in (first, part):
        job.go()
        cluster.watch(job.id)
        assert cluster.until_ended()["phase"] == "succeeded"
    found = billing.check(cluster)
    assert found["idle"]["cost"] > 0.01, "half of a machine was idle"
    by_pool = {row["pool"]: row for row in found["pools"]}
    assert by_pool["steady"]["saved"] == pytest.approx(0.0)

    owners = {row["job"]: row["cost"] for row in found["jobs"]}
    assert owners.keys() == {first.id, part.id, steady.id}
    assert found["labels"]["team"]["vision"]["cost"] == pytest.approx(owners[first.id] + owners[steady.id])
    months = {line["month"] for row in found["jobs"] for line in row["lines"]}
    parts = [billing.cost(cluster, "--month", month)["total"]["cost"] for month in months]
    assert sum(parts) == pytest.approx(found["total"]["cost"], abs=1e-6)
    for job in owners:  # what the dashboard draws
        page = runs.timeline(Records(cluster.access.store, cluster.spec.name), job, {})
        assert page["cost"] == pytest.approx(owners[job])
        assert sum(page["node_time"].values()) == pytest.approx(page["node_seconds"])
        assert page["goodput"] == pytest.approx(page["node_time"]["counted"] / page["node_seconds"])
        drawn = sum((end - start) * share for bar in page["bars"] for _, start, end, share in bar["spans"])
        assert drawn + page["missing"] == pytest.approx(page["node_seconds"], rel=1e-3)
        assert page["missing"] < 1.0


def test_machines_are_measured_and_compared(cluster: Harness, tmp_path: Path) -> None:
    """Each pool runs the benchmark for a moment; a table and a plot compare machines, counts and markets."""
    vit = ["--job", str(billing.ROOT / "examples/vit/job.yaml")]
    found = billing.answer(cluster, "advise", *vit, "--measure", "2s", "--out", str(tmp_path))
    options = {(each["pool"], each["nodes"]): each for each in found["options"]}
    assert options.keys() == {("spot", 1), ("spot", 2), ("spot", 3), ("steady", 1), ("parts", 1)}
    assert {key: each["source"] for key, each in options.items() if key[1] == 1} == {
        ("spot", 1): "measured",
        ("steady", 1): "measured",
        ("parts", 1): "measured",
    }
    assert options["spot", 3]["source"] == "scaled"
    assert all(each["cost"] > 0 for each in options.values())
    costs = [each["cost"] for each in found["options"]]
    assert costs == sorted(costs)
    table = (tmp_path / "machines.md").read_text()
    assert table.count("\n| 1 x local") == 3
    assert (tmp_path / "machines.svg").read_text().startswith("<svg")
    again = billing.answer(cluster, "advise", *vit)
    assert {each["source"] for each in again["options"]} == {"measured", "scaled"}, "from the recorded runs"
