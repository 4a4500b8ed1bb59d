"""A job of fixed size trains on during a notice: until a successor has warmed up, or for as long as it is safe."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Harness, Job, closed, digest_of, final_pids, sample_ids, setups, undisturbed
from tests.helpers import once

EPOCHS, SAMPLES, BATCH = 2, 600, 2
SET_UP = 4.0  # seconds that the script's set-up takes
LONG = 5.0  # seconds of a step, of which a notice has room for few
STOP = re.compile(r"all stop after step (\d+)")
JOB = {"nodes": {"min": 3, "max": 3}, "epochs": EPOCHS, "samples": SAMPLES, "batch": BATCH, "late": SET_UP, "slow": 20}

Status = dict[str, Any]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the final state of an undisturbed run: plain torchrun, three ranks."""
    out = tmp_path_factory.mktemp("undisturbed")
    return once("notices", lambda: undisturbed(out, ranks=3, epochs=EPOCHS, samples=SAMPLES, batch=BATCH))


def last_step(out: Path) -> float:
    """When the last step of the first generation began."""
    lines = [json.loads(line) for path in out.glob("steps-*.jsonl") for line in path.read_text().splitlines()]
    return max(float(each["at"]) for each in lines if each["generation"] == 1)


def take(cluster: Harness) -> tuple[str, int]:
    """Have the cloud take a member, with the usual notice. Its name, and the step before the notice."""
    step = cluster.until_step(30)["job"]["step"]
    victim = cluster.members()[1]
    cluster.fault("preempt", victim)
    return victim, step


def trains_on(status: Status) -> bool:
    return status["job"]["phase"] == "running" and "training goes on until" in status["job"]["reason"]


def finish(cluster: Harness, job: Job, expected: str) -> Status:
    """Let the job end. All of its work is done once, and its state is that of a run that nothing disturbed."""
    job.go()
    final = cluster.until_ended()
    assert final["phase"] == "succeeded", final
    assert digest_of(job.out) == expected
    assert sample_ids(job.out, EPOCHS) == {epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)}
    return final


def test_training_goes_on_until_the_successor_has_warmed_up(cluster: Harness, expected: str) -> None:
    job = cluster.submit(**JOB)
    victim, before = take(cluster)
    members, old = cluster.members(), setups(job.out)
    status = cluster.until(
        lambda s: trains_on(s) and any("warming up" in node["doing"] for node in s["nodes"]), what="a warm-up"
    )
    assert re.search(r"training goes on until spot-\d has warmed up, for at most \d+ s", status["job"]["reason"])
    assert status["job"]["members"] == members
    assert status["job"]["step"] > before
    status = cluster.until(closed, what="the next generation")
    (interruption,) = status["job"]["interruptions"]
    assert interruption["kind"] == "preempt"
    assert interruption["node"] == victim
    assert interruption["steps_lost"] == 0
    assert interruption["step"] > before + 5, "steps were made during the notice"
    finish(cluster, job, expected)
    (successor,) = setups(job.out).keys() - old.keys()
    assert last_step(job.out) > float((job.out / f"set-up-{successor}").read_text()), "nobody waited for the set-up"
    assert set(setups(job.out).values()) == {1}
    assert len(final_pids(job.out) & set(old)) == 2, "the survivors are the same processes"


def test_a_machine_that_goes_earlier_than_it_said(cluster: Harness, expected: str) -> None:
    """It costs what it would without notice: at most a snapshot interval."""
    job = cluster.submit(**{**JOB, "late": 15.0}, snapshot_interval=5)
    victim, before = take(cluster)
    old = setups(job.out)
    cluster.until(lambda s: trains_on(s) and s["job"]["step"] > before + 2, what="steps during the notice")
    cluster.fault("kill", victim)
    status = cluster.until(closed, what="the next generation")
    (interruption,) = status["job"]["interruptions"]
    assert interruption["node"] == victim
    assert interruption["steps_lost"] <= 5
    finish(cluster, job, expected)
    assert len(final_pids(job.out) & set(old)) == 2, "the survivors are the same processes"


def test_no_successor_comes(cluster: Harness, expected: str) -> None:
    """The state is in the bucket before the machine ends, although training went on during the notice."""
    job = cluster.submit(**{**JOB, "late": 0.0})
    cluster.until_step(25)
    cluster.fault("stockout", "local-a")
    victim, before = take(cluster)
    cluster.until(lambda s: trains_on(s) and s["job"]["checkpoint"], what="a checkpoint that measures the upload")
    status = cluster.until(
        lambda s: s["job"]["interruptions"] and s["job"]["checkpoint"] == s["job"]["interruptions"][-1]["step"],
        what="the last state in the bucket",
    )
    assert any(node["name"] == victim and node["notice"] for node in status["nodes"]), "after the machine's end"
    (interruption,) = status["job"]["interruptions"]
    assert interruption["step"] > before + 5, "steps were made during the notice"
    cluster.fault("restock", "local-a")
    final = finish(cluster, job, expected)
    assert final["interruptions"][-1]["steps_lost"] == 0


def test_steps_become_slow_after_the_stop_was_ordered(cluster: Harness) -> None:
    """After the ordered step, the notice would be over. So all stop after an earlier one, and nothing is lost."""
    job = cluster.submit(
        nodes=2, epochs=2, samples=8000, batch=2, snapshot_interval=1000, slow=20, step=0.02, drag=LONG
    )
    cluster.until_step(100)
    cluster.fault("preempt", cluster.members()[1])
    status = cluster.until(closed, what="the next generation")
    (interruption,) = status["job"]["interruptions"]
    assert (interruption["kind"], interruption["steps_lost"]) == ("preempt", 0)
    ordered = [int(found[1]) for event in status["events"] if (found := STOP.search(event["text"]))]
    assert ordered == sorted(ordered, reverse=True)
    assert interruption["step"] in ordered[1:], "the last order can come too late: then the one before counts"
    job.go()
    cluster.ctl("stop")
    cluster.until_ended()
