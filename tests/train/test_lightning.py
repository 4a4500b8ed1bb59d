"""`run.fit`: a Trainer of PyTorch Lightning goes on after an interruption as if there had been none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from spotrun.state.control import ABLE, EXIT_DRAINED
from tests.train.generations import Cluster, flatten
from tests.train.lightnings import EPOCHS
from tests.train.regroups import Regroups
from tests.train.scripts import SAMPLES

NODES = ["a", "b"]
STEPS = 4 * EPOCHS


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    cluster = Cluster(tmp_path_factory.mktemp("undisturbed"))
    assert cluster.run(NODES, script="lightnings.fitted") == [0, 0], cluster.log()
    return cluster


def logged(cluster: Cluster) -> list[Any]:
    """What rank 0 has logged, of a step done twice only in the later generation."""
    found: dict[Any, Any] = {}
    for path in sorted((cluster.path / "out").glob("seen-*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if "logged" in entry and entry["rank"] == 0:
                key = (entry["logged"]["at"], *sorted(entry["logged"]))
                if entry["generation"] >= found.get(key, (0,))[0]:
                    found[key] = (entry["generation"], entry["logged"])
    return [each for _, (_, each) in sorted(found.items(), key=lambda item: (item[0][0], item[0]))]


def same(cluster: Cluster, undisturbed: Cluster) -> None:
    for rank in range(len(list((undisturbed.path / "out").glob("final-*.pt")))):
        assert flatten(cluster.final(rank)) == flatten(undisturbed.final(rank))
    assert cluster.seen() == undisturbed.seen()
    found, expected = logged(cluster), logged(undisturbed)
    assert [each for each in found if each not in expected] == [each for each in expected if each not in found] == []
    assert found == expected


def test_every_sample_once(undisturbed: Cluster) -> None:
    assert all(sorted({*ids}) == list(range(SAMPLES)) for ids in undisturbed.seen().values())
    assert len(undisturbed.seen()) == EPOCHS


@pytest.mark.parametrize("stop_at", [3, 4, 7, STEPS])
def test_a_restart_changes_no_bit(tmp_path: Path, undisturbed: Cluster, stop_at: int) -> None:
    cluster = Cluster(tmp_path)
    assert cluster.run(NODES, stop_at=stop_at, script="lightnings.fitted") == [EXIT_DRAINED] * 2, cluster.log()
    shutil.rmtree(cluster.slots("b"))
    assert cluster.run(NODES, script="lightnings.fitted") == [0, 0], cluster.log()
    same(cluster, undisturbed)


@pytest.mark.parametrize("stop_at", [3, 4, 7, STEPS])
def test_a_planned_change(job: Regroups, undisturbed: Cluster, stop_at: int) -> None:
    plan = {"script": "lightnings.fitted"}
    job.begin("ab", stop_at=stop_at, a=plan, b=plan)
    job.regroup(job.members)
    assert job.end() == [0, 0], job.state_and_log()
    assert [each.control.able for each in job.members] == [ABLE] * 2
    same(job.cluster, undisturbed)


@pytest.mark.parametrize("interval", [1, 2, 99])
@pytest.mark.parametrize(("die_in", "die_at"), [("", 6), ("", 2), ("validation", 3), ("", 11), ("validation", 11)])
def test_a_peer_dies(job: Regroups, undisturbed: Cluster, die_in: str, die_at: int, interval: int) -> None:
    plan = {"script": "lightnings.fitted"}
    job.begin("ab", interval, a=plan, b={**plan, "die_at": die_at, "die_in": die_in})
    spare = job.warm_up("c", interval, **plan)
    job.regroup([spare, *job.survivors()])
    assert job.end() == [0, 0], job.state_and_log()
    same(job.cluster, undisturbed)


@pytest.mark.parametrize("stop_at", [2, 3, 5])
@pytest.mark.parametrize("script", ["unusual", "stopping"])
def test_other_trainers(tmp_path: Path, script: str, stop_at: int) -> None:
    plan = {"script": f"lightnings.{script}"}
    cluster, undisturbed = Cluster(tmp_path / "after"), Cluster(tmp_path / "before")
    for each in (cluster, undisturbed):
        each.path.mkdir()
    assert undisturbed.run(NODES, **plan) == [0, 0], undisturbed.log()
    assert cluster.run(NODES, stop_at=stop_at, **plan) in ([EXIT_DRAINED] * 2,), cluster.log()
    assert cluster.run(NODES, **plan) == [0, 0], cluster.log()
    same(cluster, undisturbed)


@pytest.mark.parametrize("script", ["unusual", "plain"])
@pytest.mark.parametrize(("die_in", "die_at"), [("validation", 2), ("", 6)])
def test_a_peer_of_another_trainer_dies(job: Regroups, memory: Path, script: str, die_in: str, die_at: int) -> None:
    nodes = "abc"  # with three, DDP looks for unused parameters
    plan = {"script": f"lightnings.{script}"}
    (memory / "whole").mkdir()
    whole = Regroups(memory / "whole")
    whole.begin(nodes, 1, **dict.fromkeys(nodes, plan))
    assert whole.end() == [0] * len(nodes), whole.state_and_log()
    job.begin(nodes, 1, **{**dict.fromkeys(nodes, plan), "b": {**plan, "die_at": die_at, "die_in": die_in}})
    spare = job.warm_up("d", 1, **plan)
    job.regroup([*job.survivors(), spare])
    assert job.end() == [0] * len(nodes), job.state_and_log()
    same(job.cluster, whole.cluster)
