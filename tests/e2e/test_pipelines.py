"""Jobs that come after others: over SSH, on the local cloud, with machines that are taken meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotrun.errors import SpotrunError
from tests.e2e.harness import Harness, digest_of, sample_ids, undisturbed
from tests.helpers import wait_for


def events_of(cluster: Harness, job: str) -> list[str]:
    """The keys of the event files of a job's script."""
    return cluster.access.store.list(f"jobs/{job}/logs/tensorboard")


def test_three_steps_of_which_the_middle_one_loses_a_machine(cluster: Harness, tmp_path: Path) -> None:
    """Prepare on one node, train on two, evaluate on one. All are submitted at once; a killed head forgets nothing."""
    small = {"epochs": 1, "samples": 40, "batch": 4, "pause": 0.0}
    with pytest.raises(SpotrunError, match="has no job of that name or id"):
        cluster.submit(after=["prepare"], **small)
    prepare = cluster.submit(leave="data", keep=["data"], **small)
    train = cluster.submit(
        nodes=2,
        inputs={"in": f"{prepare.id}/data"},
        find="in",
        leave="model/last",
        keep=["model"],
        epochs=1,
        samples=400,
        batch=4,
        slow=20,
        snapshot_interval=5,
    )
    evaluate = cluster.submit(inputs={"trained": f"{train.id}/model"}, find="trained/last", **small)
    rows = {row["id"]: row for row in cluster.ctl("jobs")}
    assert rows[evaluate.id]["reason"] == f"waits for {train.id} to succeed"
    cluster.watch(train.id)
    cluster.until_step(22)
    victim = cluster.members()[1]
    written = f"jobs/{train.id}/logs/tensorboard/{victim}/model/last/events.out.tfevents."
    wait_for(lambda: any(key.startswith(written) for key in events_of(cluster, train.id)), what="its event file")
    cluster.fault("kill", victim)
    cluster.until(lambda s: any(i["seconds"] for i in s["job"]["interruptions"]), "the recovery")
    cluster.kill_head()
    train.go()
    assert cluster.until_ended()["phase"] == "succeeded"
    cluster.watch(evaluate.id)
    assert cluster.until_ended()["phase"] == "succeeded"
    assert sample_ids(train.out, 1) == {0: list(range(400))}
    (tmp_path / "undisturbed").mkdir()
    assert digest_of(train.out) == undisturbed(tmp_path / "undisturbed", 2, epochs=1, samples=400, batch=4)
    jobs = [cluster.access.store.get(f"jobs/{job.id}/state.json") for job in (prepare, train, evaluate)]
    assert all(b'"succeeded"' in job for job in jobs)
    assert len(events_of(cluster, train.id)) >= 3, "files of both nodes, and of the one that is gone"
    assert (train.out / "found").read_text() == digest_of(prepare.out)
    assert (evaluate.out / "found").read_text() == digest_of(train.out)
