"""The head is killed at every awkward moment; the group recreates it, and the job ends as it should."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.harness import Harness, sample_ids


def check(final: dict, out: Path, samples: int) -> None:
    assert final["phase"] == "succeeded", final
    assert sample_ids(out, 2) == {epoch: list(range(samples)) for epoch in range(2)}


def test_during_training_and_checkpoints(cluster: Harness) -> None:
    """Training does not stop: the same generation goes on under each new head.

    Killed in a checkpoint, too: no checkpoint that is not complete counts, and later ones follow.
    """
    job = cluster.submit(nodes={"min": 2, "max": 2}, epochs=2, samples=3200, batch=8, checkpoint_interval=1, slow=40)
    before = cluster.until_step(40)
    cluster.kill_head()
    after = cluster.until(lambda s: s["head"]["epoch"] > before["head"]["epoch"], what="a new head")
    assert after["job"]["generation"] == before["job"]["generation"]
    for _ in range(2):
        status = cluster.until(lambda s: s["job"]["saving"] is not None, what="a checkpoint under way")
        cluster.kill_head()
        taken = status["job"]["checkpoint"] or 0
        cluster.until_checkpoint_after(taken, "a later checkpoint")
    job.go()
    final = cluster.until_ended()
    assert final["interruptions"] == []
    assert final["generation"] == before["job"]["generation"]
    check(final, job.out, 3200)


def test_during_a_drain(cluster: Harness) -> None:
    """With a long step, the head dies between choosing the stop step and reaching it."""
    job = cluster.submit(nodes={"min": 2, "max": 3}, epochs=2, samples=2400, batch=8, slow=10, step=1.0)
    cluster.until(lambda s: s["job"]["step"] >= 20 and len(s["job"]["members"]) == 3, what="steps on three nodes")
    cluster.fault("preempt", cluster.members()[2])
    cluster.until(lambda s: s["job"]["phase"] == "draining", what="a drain")
    cluster.kill_head()
    cluster.until(lambda s: any(each["seconds"] for each in s["job"]["interruptions"]), what="the next generation")
    job.go()
    final = cluster.until_ended()
    preempted = [each for each in final["interruptions"] if "preempt" in each["kind"]]
    assert [each["steps_lost"] for each in preempted] == [0]
    check(final, job.out, 2400)


def test_during_a_start(cluster: Harness) -> None:
    """The number of the generation is out, its members are about to meet."""
    job = cluster.submit(nodes={"min": 2, "max": 2}, epochs=2, samples=400, batch=4, late=2)
    cluster.until(lambda s: s["job"]["phase"] == "starting", what="the start")
    cluster.kill_head()
    check(cluster.until_ended(), job.out, 400)
