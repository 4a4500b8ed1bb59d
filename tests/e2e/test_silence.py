"""Every node of a job is silent: its machines are replaced, or a stop ends it, in bounded time."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.harness import Harness, digest_of, sample_ids, undisturbed

EPOCHS, SAMPLES = 2, 320
QUICK = {"heartbeat_timeout": 1.5, "hang_timeout": 12.0}  # silent for 15 s: lost


def test_a_frozen_job_of_one_node_gets_another_machine(cluster: Harness, tmp_path: Path) -> None:
    """The default job. It ends with the weights of an undisturbed run."""
    job = cluster.submit(nodes=1, epochs=EPOCHS, samples=SAMPLES, batch=4, slow=20, checkpoint_interval=1.0, **QUICK)
    cluster.until(lambda s: s["job"]["step"] >= 22 and (s["job"]["checkpoint"] or 0) >= 10, "steps and a checkpoint")
    (victim,) = cluster.members()
    cluster.fault("freeze", victim)
    status = cluster.until(lambda s: s["job"]["phase"] == "silent", "the display says that it is silent")
    assert status["job"]["samples_per_second"] == 0
    assert {node["name"]: node["phase"] for node in status["nodes"]}[victim] == "silent"
    cluster.until(lambda s: any(e["kind"] == "silence" for e in s["events"]), "operators are told")
    job.go()
    final = cluster.until_ended()
    assert final["phase"] == "succeeded", final
    assert "silent" in [each["kind"] for each in final["interruptions"]]
    assert sample_ids(job.out, EPOCHS) == {epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)}
    plain = undisturbed(tmp_path, ranks=1, epochs=EPOCHS, samples=SAMPLES, batch=4)
    assert digest_of(job.out) == plain


def test_a_stop_of_a_frozen_job_ends(cluster: Harness) -> None:
    """It does not wait for the nodes; the reason says what is lost."""
    cluster.submit(nodes=1, epochs=EPOCHS, samples=SAMPLES, batch=4, slow=20, **QUICK)
    cluster.until(lambda s: s["job"]["step"] >= 22 and s["job"]["snapshot"], "steps and a snapshot")
    cluster.fault("freeze", cluster.members()[0])
    cluster.until(lambda s: s["job"]["phase"] == "silent", "it is silent")
    cluster.ctl("stop")
    final = cluster.until_ended()
    assert final["phase"] == "stopped"
    assert "is lost" in final["reason"]
    assert "there is no checkpoint" in final["reason"]
