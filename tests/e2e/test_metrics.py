"""Curves of interrupted jobs: what counts is what an undisturbed job has logged."""

from __future__ import annotations

import json
import os
import signal

import pytest

from spotrun.history.curves import Points
from spotrun.history.reader import Reader
from tests.e2e.harness import Harness, Job, closed

EPOCHS, SAMPLES, BATCH, NODES = 3, 600, 2, 2
STEPS = EPOCHS * SAMPLES // (BATCH * NODES)


def submit(cluster: Harness, **pace: float) -> Job:
    return cluster.submit(
        nodes={"min": NODES, "max": NODES, "spares": 1},
        epochs=EPOCHS,
        samples=SAMPLES,
        batch=BATCH,
        snapshot_interval=50,  # so that the faults lose steps: none of them comes shortly after a snapshot
        **pace,
    )


def pid_of_rank_0(job: Job) -> int:
    """Of the newest generation."""
    lines = [json.loads(line) for path in job.out.glob("steps-*.jsonl") for line in path.read_text().splitlines()]
    newest = max((line for line in lines if line["rank"] == 0), key=lambda line: (line["generation"], line["step"]))
    return int(newest["pid"])


def history(cluster: Harness, job: Job) -> Reader:
    reader = Reader(cluster.access.store, job.id)
    reader.update()
    assert not reader.problems
    return reader


def bits(found: Points) -> list[tuple[int, int, float, str]]:
    return list(zip(found.steps, found.epochs, found.samples, map(float.hex, found.values), strict=True))


@pytest.fixture(scope="module")
def undisturbed(_cluster: Harness) -> Reader:
    job = submit(_cluster, pause=0.0)
    assert _cluster.until_ended()["phase"] == "succeeded"
    return history(_cluster, job)


def test_the_curve_of_an_interrupted_job_is_that_of_an_undisturbed_one(cluster: Harness, undisturbed: Reader) -> None:
    """Bit for bit, after rank 0's node was preempted, then its process was killed, then its machine was lost."""
    job = submit(cluster, slow=50, step=0.1)
    live = Reader(cluster.access.store, job.id)
    for number, step in enumerate((60, 180, 300)):
        cluster.until_step(step)
        live.update()
        match number:
            case 0:
                cluster.fault("preempt", cluster.members()[0])
            case 1:
                os.kill(pid_of_rank_0(job), signal.SIGKILL)
            case 2:
                cluster.fault("kill", cluster.members()[0])
        cluster.until(lambda status, number=number: len(closed(status)) > number, what=f"recovery {number}")  # type: ignore[misc]
    job.go()
    final = cluster.until_ended()
    assert final["phase"] == "succeeded", final
    whole = history(cluster, job)
    assert whole.names == ["loss", "norm", "weight"]
    assert list(undisturbed.curve("loss").counting().steps) == list(range(1, STEPS + 1))
    for name in ("norm", "weight"):  # equal on all ranks
        assert bits(whole.curve(name).counting()) == bits(undisturbed.curve(name).counting())
    # The loss is another one on each rank. A substitute's last values may stand for those that rank 0 has lost.
    pairs = zip(bits(whole.curve("loss").counting()), bits(undisturbed.curve("loss").counting()), strict=True)
    differing = [mine[0] for mine, wanted in pairs if mine != wanted]
    assert all(150 < step <= max(header.base for header in whole.headers.values()) for step in differing), differing
    assert len(whole.headers) >= 4
    curve = whole.curve("loss")
    lost = sum(each["steps_lost"] for each in final["interruptions"])
    assert 0 < sum(curve.void) <= lost + 2, "what was lost is marked; a step under way may have been logged"
    live.update()
    assert bits(live.curve("loss").points) == bits(curve.points), "a live reader ends with the same"
    assert live.curve("loss").void == curve.void
