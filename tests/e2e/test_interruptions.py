"""Nodes are taken in every way a cloud knows, and training goes on: nothing lost that need not be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.footprint import assert_small
from tests.e2e.harness import Harness, begun, closed, digest_of, final_pids, sample_ids, setups, undisturbed
from tests.helpers import once

EPOCHS, SAMPLES, BATCH = 3, 600, 2
LOST_AFTER = 3.0  # seconds after which a frozen machine is lost, rather than only late


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the final state of an undisturbed run: plain torchrun, three ranks."""
    out = tmp_path_factory.mktemp("undisturbed")
    return once("undisturbed", lambda: undisturbed(out, ranks=3, epochs=EPOCHS, samples=SAMPLES, batch=BATCH))


@pytest.mark.parametrize("sequence", [("preempt", "kill", "preempt"), ("freeze", "cut")], ids="-".join)
def test_final_weights_are_those_of_an_undisturbed_run(
    cluster: Harness, expected: str, sequence: tuple[str, ...]
) -> None:
    """Bit for bit, when every lost node is replaced by one; 0 steps lost with notice, else the interval at most."""
    job = cluster.submit(
        nodes={"min": 3, "max": 3, "spares": 1},
        epochs=EPOCHS,
        samples=SAMPLES,
        batch=BATCH,
        snapshot_interval=5,
        slow=30,
        step=0.15,
        heartbeat_timeout=LOST_AFTER,
    )
    for number, fault in enumerate(sequence):
        cluster.until_step(40 + 70 * number)
        victim = cluster.members()[number % 3]
        cluster.fault(fault, victim)
        cluster.until(functools.partial(has_more, closed, number), what=f"recovery from {fault} of {victim}")
    job.go()
    final = cluster.until_ended()
    assert final["phase"] == "succeeded", final
    assert digest_of(job.out) == expected
    assert sample_ids(job.out, EPOCHS) == {epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)}
    for fault, each in zip(sequence, final["interruptions"], strict=True):
        kind = {"cut": "silent", "freeze": "silent"}.get(fault, fault)
        assert each["kind"] == kind
        assert each["steps_lost"] <= (0 if fault == "preempt" else 5)
    assert 0 < final["goodput"] < 1


Status = dict[str, Any]


def has_more(found: Callable[[Status], list[Any]], number: int, status: Status) -> bool:
    return len(found(status)) > number


def takes_part(node: str, status: Status) -> bool:
    return node in status["job"]["members"] and status["job"]["phase"] == "running"


def test_every_sample_once_though_the_number_of_nodes_changes(cluster: Harness) -> None:
    """Shrinks from 3 to 2 without notice, grows back to 3: each sample still once an epoch.

    With three nodes again, head and agents are small.
    """
    job = cluster.submit(
        nodes={"min": 1, "max": 3}, epochs=2, samples=2401, batch=4, snapshot_interval=7, grow_interval=3, slow=100
    )
    cluster.until_step(30)
    # It begins with fewer, and grows, if a machine boots much later than the others.
    status = cluster.until(lambda s: len(s["job"]["members"]) == 3 and s["job"]["phase"] == "running", "three nodes")
    grown = len(closed(status))
    cluster.fault("stockout", "local-a")  # otherwise a new machine may come before two nodes train: gloo can hang
    cluster.fault("kill", cluster.members()[0])
    cluster.until(lambda s: len(closed(s)) > grown and len(s["job"]["members"]) == 2, what="two nodes train")
    cluster.fault("restock", "local-a")
    cluster.until(lambda s: len(s["job"]["members"]) == 3 and s["job"]["phase"] == "running", what="three again")
    assert_small(cluster, agents=3)
    job.go()
    cluster.fault("preempt", cluster.members()[1])
    final = cluster.until_ended()
    assert final["phase"] == "succeeded"
    assert sample_ids(job.out, 2) == {epoch: list(range(2401)) for epoch in range(2)}
    assert [each["kind"] for each in final["interruptions"]][: grown + 2] == ["grow"] * grown + ["kill", "grow"]
    assert all(each["steps_lost"] == 0 for each in final["interruptions"] if each["kind"] in ("grow", "preempt"))


def test_a_node_that_comes_back_does_not_disturb(cluster: Harness) -> None:
    """Recovered when it is silent; thawed or joined again, its old workers end and it serves in a later generation.

    Epochs are short, so the others are in a later one when it is back. They go on in their processes.
    """
    epochs, samples = 200, 120
    job = cluster.submit(
        nodes={"min": 2, "max": 3},
        epochs=epochs,
        samples=samples,
        batch=4,
        grow_interval=5,
        slow=20,  # so the fault usually comes between two steps, and the others are in the same epoch
        heartbeat_timeout=LOST_AFTER,
    )
    cluster.until_step(30)
    before, first = 0, begun(job.out)[cluster.members()[0]]
    for number, (fault, end) in enumerate((("freeze", "thaw"), ("cut", "join"))):
        victim = cluster.members()[1]
        cluster.fault(fault, victim)
        status = cluster.until(functools.partial(has_more, silences, number), what=f"recovery from {fault} of {victim}")
        assert [each["node"] for each in silences(status)[number:]] == [victim]
        before = status["job"]["generation"]
        cluster.fault(end, victim)
        cluster.until(functools.partial(takes_part, victim), what="it takes part again")
    job.go()
    final = cluster.until_ended()
    assert final["phase"] == "succeeded"
    assert final["generation"] > before
    assert all(each["kind"] in ("silent", "grow") for each in final["interruptions"])
    assert setups(job.out)[first] == 1
    assert first in final_pids(job.out)
    assert sample_ids(job.out, epochs) == {epoch: list(range(samples)) for epoch in range(epochs)}


def silences(status: Status) -> list[dict[str, Any]]:
    return [each for each in closed(status) if each["kind"] == "silent"]


def test_all_nodes_killed_at_once(cluster: Harness) -> None:
    """Resumes from the newest complete checkpoint."""
    job = cluster.submit(nodes={"min": 2, "max": 2}, epochs=2, samples=1200, batch=4, checkpoint_interval=20, slow=60)
    cluster.until(lambda s: s["job"]["checkpoint"] and s["job"]["step"] > s["job"]["checkpoint"], what="a step more")
    for fault in ("freeze", "kill"):  # frozen first: one that outlives another for a moment saves its state
        for member in cluster.members():
            cluster.fault(fault, member)
    status = cluster.until(closed, what="recovery")
    job.go()
    (interruption,) = closed(status)
    assert interruption["steps_lost"] > 0
    final = cluster.until_ended()
    assert final["phase"] == "succeeded"
    assert sample_ids(job.out, 2) == {epoch: list(range(1200)) for epoch in range(2)}


def saved_to_the_end(status: dict[str, Any]) -> bool:
    """Whether the bucket has the state of the last step."""
    job = status["job"]
    return bool(job["checkpoint"] and job["checkpoint"] == job["interruptions"][-1]["step"])


def test_fewer_than_min_nodes(cluster: Harness) -> None:
    """The state is in the bucket before the notice ends; the job goes on by itself when machines return."""
    job = cluster.submit(nodes={"min": 2, "max": 2}, epochs=2, samples=1200, batch=4, slow=40)
    cluster.until_step(30)
    zones = {node["zone"] for node in cluster.status()["nodes"]}
    for zone in zones:
        cluster.fault("stockout", zone)
    victim = cluster.members()[1]
    cluster.fault("preempt", victim)
    status = cluster.until(lambda s: s["job"]["phase"] == "waiting" and saved_to_the_end(s), what="state is safe")
    assert any(node["name"] == victim and node["notice"] for node in status["nodes"]), "after the notice ended"
    job.go()
    for zone in zones:
        cluster.fault("restock", zone)
    final = cluster.until_ended()
    assert final["phase"] == "succeeded"
    assert final["interruptions"][-1]["steps_lost"] == 0
