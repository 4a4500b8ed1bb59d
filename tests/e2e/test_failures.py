"""What is not a preemption: user code that raises or hangs."""

from __future__ import annotations

from tests.e2e.harness import Harness


def test_user_code_that_raises(cluster: Harness) -> None:
    """FAILED after max_restarts, with the first failing rank's traceback; never taken for a preemption."""
    cluster.submit(nodes={"min": 2, "max": 2}, epochs=1, samples=600, fail="1@20", max_restarts=2)
    final = cluster.until_ended()
    assert (final["phase"], final["restarts"]) == ("failed", 3)
    assert 0 < final["checkpoint"] <= 20, "its newest snapshot is in the bucket"
    assert {each["kind"] for each in final["interruptions"]} == {"crash"}
    failure = final["failure"]
    assert (failure["kind"], failure["rank"]) == ("user", 1)
    assert "ValueError: bad luck at step 20" in failure["traceback"]
    assert "train.py" in failure["traceback"]


def test_a_script_that_hangs(cluster: Harness) -> None:
    """Noticed by its step counter; the stacks of all ranks are kept; restarted, and then it ends well."""
    job = cluster.submit(nodes={"min": 2, "max": 2}, epochs=1, samples=600, batch=4, hang="1@30", hang_timeout=20)
    status = cluster.until(lambda s: s["job"]["interruptions"], what="the hang is noticed")
    assert status["job"]["interruptions"][0]["kind"] == "hang"
    final = cluster.until_ended()
    assert (final["phase"], final["restarts"]) == ("succeeded", 1)
    logs = cluster.logs(job.id, generation=1)
    stacks = [text for key, text in logs.items() if key.endswith("stacks.log")]
    assert len(stacks) == 2  # one for each node
    assert all("most recent call first" in text and "train.py" in text for text in stacks)


def test_stop_and_relaunch(cluster: Harness) -> None:
    """Stopped at a step whose state is in the bucket; relaunched, it goes on from exactly there."""
    job = cluster.submit(nodes={"min": 2, "max": 2}, epochs=2, samples=800, batch=4, slow=40)
    cluster.until_step(30)
    cluster.ctl("stop")
    stopped = cluster.until_ended()
    assert stopped["phase"] == "stopped"
    assert stopped["checkpoint"] == stopped["step"] >= 30
    cluster.ctl("relaunch", "--job", job.id)
    resumed = cluster.until(lambda s: s["job"]["id"] == job.id and s["job"]["phase"] == "running", what="it runs on")
    assert resumed["job"]["step"] >= stopped["step"]
    job.go()
    final = cluster.until_ended()
    assert final["phase"] == "succeeded"
    assert final["step"] == 2 * 100
