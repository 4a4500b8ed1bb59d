"""Survivors go on in the same process: the script's set-up runs once for each process, however long it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Harness, begun, closed, digest_of, final_pids, sample_ids, setups, undisturbed

EPOCHS, SAMPLES, BATCH = 2, 600, 2


@pytest.mark.parametrize(
    ("gpu", "exact"),
    [(False, False), (True, False), (True, True)],
    ids=["on CPUs", "as on GPUs", "as on GPUs, exact"],
)
@pytest.mark.parametrize("fault", ["kill", "preempt", "freeze"])
def test_the_set_up_of_a_survivor_runs_once(
    cluster: Harness, tmp_path: Path, fault: str, gpu: bool, exact: bool
) -> None:
    """Even its process is the same, and a spare that has warmed up takes the lost node's place: bit for bit."""
    job = cluster.submit(
        nodes={"min": 2, "max": 2, "spares": 1},
        epochs=EPOCHS,
        samples=SAMPLES,
        batch=BATCH,
        snapshot_interval=1000 if exact else 5,
        exact=exact,
        late=3,
        slow=60,
        gpu=gpu,
        **({"heartbeat_timeout": 5} if fault == "freeze" else {}),
    )
    cluster.until_step(30)
    cluster.until(lambda _: len(setups(job.out)) >= 3, what="the spare's warm-up")
    before = setups(job.out)
    cluster.fault(fault, cluster.members()[1])
    status = cluster.until(closed, what="recovery")
    (interruption,) = status["job"]["interruptions"]
    # On a busy machine, the connection of the frozen one may end before it counts as silent.
    assert interruption["kind"] in {"freeze": ("silent", "kill")}.get(fault, (fault,))
    assert interruption["steps_lost"] <= (0 if fault == "preempt" else 1 if exact else 5)
    job.go()
    final = cluster.until_ended()
    assert (final["phase"], final["restarts"]) == ("succeeded", 0)
    assert set(setups(job.out).values()) == {1}
    assert final_pids(job.out) <= set(before), "both were there before the fault"
    assert sample_ids(job.out, EPOCHS) == {epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)}
    (tmp_path / "undisturbed").mkdir()
    wanted = undisturbed(tmp_path / "undisturbed", ranks=2, epochs=EPOCHS, samples=SAMPLES, batch=BATCH)
    assert digest_of(job.out) == wanted


def test_a_set_up_goes_on_when_the_only_member_is_lost(cluster: Harness) -> None:
    """A spare has begun the set-up. It takes the lost node's place with the worker that it has, and the job goes on."""
    job = cluster.submit(
        nodes={"min": 1, "max": 1, "spares": 1}, epochs=1, samples=SAMPLES, batch=BATCH, late=20, slow=20, step=0.1
    )
    (lost,) = cluster.members()
    cluster.until(lambda _: len(begun(job.out)) == 2, what="two set-ups under way")
    (spare,) = (pid for node, pid in begun(job.out).items() if node != lost)
    cluster.fault("kill", lost)
    cluster.until(closed, what="recovery")
    job.go()
    final = cluster.until_ended()
    assert (final["phase"], final["restarts"]) == ("succeeded", 0)
    assert final_pids(job.out) == {spare}
    assert sample_ids(job.out, 1) == {0: list(range(SAMPLES))}


def test_peers_of_a_machine_that_is_cut_off_and_replaced_at_once(cluster: Harness) -> None:
    """No connection of theirs ends, and another machine has its name before it counts as silent: they are told."""
    job = cluster.submit(nodes={"min": 2, "max": 2}, epochs=1, samples=SAMPLES, batch=BATCH, slow=20, step=0.1)
    cluster.until_step(30)
    lost = cluster.members()[1]
    cluster.fault("cut", lost)
    cluster.fault("kill", lost)
    status = cluster.until(closed, what="recovery")
    assert [(each["kind"], each["node"]) for each in status["job"]["interruptions"]] == [("kill", lost)]
    assert any("the workers leave the generation" in each["text"] for each in status["events"])
    job.go()
    final = cluster.until_ended()
    assert (final["phase"], final["restarts"]) == ("succeeded", 0)
    assert set(setups(job.out).values()) == {1}
    assert sample_ids(job.out, 1) == {0: list(range(SAMPLES))}


@pytest.mark.parametrize("gpu", [False, True], ids=["on CPUs", "as on GPUs"])
def test_another_machine_is_lost_before_the_first_step(cluster: Harness, tmp_path: Path, gpu: bool) -> None:
    """Clouds often take several machines within seconds. The survivor goes on after each loss, bit for bit."""
    job = cluster.submit(
        nodes={"min": 2, "max": 2, "spares": 2},
        epochs=EPOCHS,
        samples=SAMPLES,
        batch=BATCH,
        snapshot_interval=5,
        late=3,
        slow=1,
        step=1.0,  # the head waits for survivors for some steps
        gpu=gpu,
    )
    cluster.until_step(8)
    cluster.until(lambda _: len(setups(job.out)) >= 4, what="the spares' warm-up")
    before = setups(job.out)
    first, generation = cluster.members()[1], cluster.status()["job"]["generation"]
    job.hold_first_step(generation)
    cluster.fault("kill", first)
    second = cluster.until(lambda s: _in_first_step(s, generation), "the first step")["job"]["members"][1]
    cluster.fault("kill", second)
    job.let_first_step_go()
    status = cluster.until(closed, what="recovery")
    (interruption,) = status["job"]["interruptions"]
    assert (interruption["kind"], interruption["node"]) == ("kill", f"{first}, {second}"), "both before a step"
    job.go()
    final = cluster.until_ended()
    assert (final["phase"], final["restarts"]) == ("succeeded", 0)
    assert set(setups(job.out).values()) == {1}
    assert json.loads((job.out / "final-0.json").read_text())["pid"] in before, "the survivor is rank 0"
    assert sample_ids(job.out, EPOCHS) == {epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)}
    (tmp_path / "undisturbed").mkdir()
    wanted = undisturbed(tmp_path / "undisturbed", ranks=2, epochs=EPOCHS, samples=SAMPLES, batch=BATCH)
    assert digest_of(job.out) == wanted


def _in_first_step(status: dict[str, Any], generation: int) -> bool:
    """Whether all members of a later generation have the state. They make no step until `Job.let_first_step_go`."""
    job, phases = status["job"], {node["name"]: node["phase"] for node in status["nodes"]}
    return job["generation"] > generation and {phases.get(name) for name in job["members"]} == {"running"}
