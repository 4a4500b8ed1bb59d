"""`run.fit`: a Trainer of PyTorch Lightning goes on after an interruption as if there had been none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from spotrun.state.control import ABLE, EXIT_DRAINED, EXIT_PEER
from tests.train.generations import Cluster, flatten
from tests.train.lightnings import EPOCHS
from tests.train.regroups import Regroups
from tests.train.scripts import SAMPLES

NODES = ["a", "b"]
STEPS = 4 * EPOCHS
INSTEAD = "write the loop with run.steps instead"


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


@pytest.mark.parametrize(
    ("die_in", "die_at", "interval", "base"),
    [
        ("", 6, 1, 6),
        ("", 6, 99, 6),
        ("", 2, 99, 2),
        ("", 11, 2, 11),
        ("validation", 3, 1, 3),
        ("validation", 3, 2, 2),
        ("validation", 11, 2, 10),
    ],
)
def test_a_peer_dies(job: Regroups, undisturbed: Cluster, die_in: str, die_at: int, interval: int, base: int) -> None:
    """The state comes from a snapshot, or from the survivor if its optimizer has not begun. base: the state's step."""
    plan = {"script": "lightnings.fitted"}
    job.begin("ab", interval, a=plan, b={**plan, "die_at": die_at, "die_in": die_in})
    spare = job.warm_up("c", interval, **plan)
    job.regroup([spare, *job.survivors()])
    assert job.end() == [0, 0], job.state_and_log()
    assert [each.control.base for each in job.members] == [base] * 2
    same(job.cluster, undisturbed)


@pytest.mark.parametrize("stop_at", [2, 3, 5])
@pytest.mark.parametrize("script", ["unusual", "stopping"])
def test_other_trainers(tmp_path: Path, script: str, stop_at: int) -> None:
    plan = {"script": f"lightnings.{script}"}
    cluster, undisturbed = Cluster(tmp_path / "after"), Cluster(tmp_path / "before")
    for each in (cluster, undisturbed):
        each.path.mkdir()
    assert undisturbed.run(NODES, **plan) == [0, 0], undisturbed.log()
    assert cluster.run(NODES, stop_at=stop_at, **plan) == [EXIT_DRAINED] * 2, cluster.log()
    assert cluster.run(NODES, **plan) == [0, 0], cluster.log()
    same(cluster, undisturbed)


@pytest.mark.parametrize("script", ["unusual", "plain", "with_workers"])
@pytest.mark.parametrize(("die_in", "die_at"), [("validation", 2), ("", 6)])
def test_a_peer_of_another_trainer_dies(job: Regroups, memory: Path, script: str, die_in: str, die_at: int) -> None:
    nodes = "abc"  # with three, DDP looks for unused parameters
    plan = {"script": f"lightnings.{script}", "keeps_loaders": script == "with_workers"}
    (memory / "whole").mkdir()
    whole = Regroups(memory / "whole")
    whole.begin(nodes, 1, **dict.fromkeys(nodes, plan))
    assert whole.end() == [0] * len(nodes), whole.state_and_log()
    job.begin(nodes, 1, **{**dict.fromkeys(nodes, plan), "b": {**plan, "die_at": die_at, "die_in": die_in}})
    spare = job.warm_up("d", 1, **plan)
    job.regroup([*job.survivors(), spare])
    assert job.end() == [0] * len(nodes), job.state_and_log()
    same(job.cluster, whole.cluster)


@pytest.mark.parametrize("die_at", [3, 6])
def test_what_a_newcomer_does_not_have(job: Regroups, die_at: int) -> None:
    """At the end of the epoch, no rank waits for the others to compute a metric. All train the layer that is thawed."""
    plan = {"script": "lightnings.rare"}
    job.begin("ab", 1, a=plan, b={**plan, "die_at": die_at})
    spare = job.warm_up("c", 1, **plan)
    job.regroup([spare, *job.survivors()])
    assert job.end() == [0, 0], job.state_and_log()
    found = [job.cluster.final(rank) for rank in (0, 1)]
    assert flatten(found[0]["model"]) == flatten(found[1]["model"])
    assert all("mean" in each["metrics"] and each["metrics"]["constant"] == 5 for each in found)


def test_a_layer_that_is_thawed(tmp_path: Path) -> None:
    """A restart in a later epoch goes on with it."""
    cluster, undisturbed = Cluster(tmp_path / "after"), Cluster(tmp_path / "before")
    for each in (cluster, undisturbed):
        each.path.mkdir()
    assert undisturbed.run(NODES, script="lightnings.rare") == [0, 0], undisturbed.log()
    assert cluster.run(NODES, stop_at=6, script="lightnings.rare") == [EXIT_DRAINED] * 2, cluster.log()
    assert cluster.run(NODES, script="lightnings.rare") == [0, 0], cluster.log()
    for rank in (0, 1):
        assert flatten(cluster.final(rank)["model"]) == flatten(undisturbed.final()["model"])


@pytest.mark.parametrize("stop_at", [7, -1])
def test_training_that_has_ended_does_not_go_on(tmp_path: Path, stop_at: int) -> None:
    """Neither after a stop in its last step, nor after a failure later in the script."""
    cluster, undisturbed = Cluster(tmp_path / "after"), Cluster(tmp_path / "before")
    for each in (cluster, undisturbed):
        each.path.mkdir()
    assert undisturbed.run(NODES, script="lightnings.stopping") == [0, 0], undisturbed.log()
    last = undisturbed.newest("a").step
    codes = cluster.run(NODES, script="lightnings.stopping", stop_at=last if stop_at > 0 else -1, fail_at=last)
    assert codes == ([1, 1] if stop_at < 0 else [EXIT_DRAINED] * 2), cluster.log()
    assert cluster.run(NODES, script="lightnings.stopping") == [0, 0], cluster.log()
    assert cluster.newest("a").step == last < STEPS
    same(cluster, undisturbed)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("sized", "reads trainer.world_size before run.track"),
        ("sized_by_strategy", "reads trainer.world_size before run.track"),
        ("with_sampler", "uses torch's DistributedSampler"),
    ],
)
def test_a_set_up_that_depends_on_the_number_of_workers(job: Regroups, script: str, why: str) -> None:
    """A new worker would have another learning rate or other samples, so all restart."""
    newcomer = job.warm_up("c", 1, end=EXIT_PEER, script=f"lightnings_refused.{script}")
    newcomer.process.join(60)
    assert newcomer.process.exitcode == EXIT_PEER
    assert f"the script {why}" in job.cluster.log()


def test_frozen_parameters_are_in_no_snapshot(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    assert cluster.run(["a"], script="lightnings.unusual") == [0], cluster.log()
    names = set(cluster.newest("a").state["objects"]["model"])
    assert names >= {"layers.1.weight", "layers.1.running_mean", "layers.3.bias", "mean.weight"}
    assert not names & {"layers.0.weight", "mean.bias"}


def test_without_other_workers(tmp_path: Path) -> None:
    """Under `python`, there is no process group. A test after training needs none."""
    code = "from tests.train import generations, lightnings; from pathlib import Path\n"
    code += f"lightnings.plain(generations.Plan({str(tmp_path)!r}), Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "final-0.pt").exists()


def test_another_number_of_workers(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    assert cluster.run(NODES, stop_at=1, script="lightnings.fitted") == [EXIT_DRAINED] * 2, cluster.log()
    assert cluster.run(NODES[:1], script="lightnings.fitted") == [1]
    assert "the saved state is of 2 workers, and there are 1 now" in cluster.log()


def test_what_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    assert cluster.run(["a"], script="lightnings_refused.refused") == [0], cluster.log()
    found = [line for line in cluster.log().splitlines() if line.startswith("refused: ")]
    assert [line.partition("run.fit")[2].lstrip(": ") for line in found] == [
        "takes a Trainer of Lightning, not spotrun.train.run.Run: write run.fit(trainer, module, …)",
        "takes a Trainer of Lightning, not transformers.trainer.Trainer: write run.train(trainer)",
        "takes a LightningModule of pytorch_lightning, not NoneType: write run.fit(trainer, module, …)",
        "takes a LightningModule of pytorch_lightning, not LightningModule: import the Trainer and the module from one "
        "package",
        "the Trainer has devices=2, and the number of workers on each node is 1: leave out devices and num_nodes, "
        "because the job file or torchrun decides",
        f"does not support reload_dataloaders_every_n_epochs ({INSTEAD})",
        "does not support a val_check_interval that is a time (give a number)",
        f"does not support StochasticWeightAveraging (leave it out, or {INSTEAD})",
        f"does not support BackboneFinetuning (leave it out, or {INSTEAD})",
        f"needs pytorch_lightning 99.5 or newer, not {version('pytorch-lightning')}",
        f"does not support manual optimization ({INSTEAD})",
        "leave out run.ddp, and give run.fit the module itself",
        "does not support run.track before it (leave run.track out)",
        "does not support a second call in a script",
        "this Trainer has trained. A script can have spotrun keep one training only",
    ]
    for script, message in (
        ("grouped", "does not support self.log('part', …, sync_dist_group=…)"),
        ("synchronized", "SyncBatchNorm expected input tensor to be on GPU"),
        ("without_a_length", f"does not support an IterableDataset for training ({INSTEAD})"),
        ("with_two_loaders", f"needs one DataLoader for training, not 2 ({INSTEAD})"),
        ("with_callbacks", "does not support StochasticWeightAveraging"),
        ("many", "training_step logs 259 metrics with on_epoch or sync_dist; at most 256 can be kept"),
    ):
        other = Cluster(tmp_path / script)
        other.path.mkdir()
        assert other.run(["a"], script=f"lightnings_refused.{script}") == [1]
        assert message in other.log()
    elastic = Cluster(tmp_path / "elastic", elastic=True)
    elastic.path.mkdir()
    assert elastic.run(["a"], script="lightnings.fitted") == [1]
    assert "give nodes one number in the job file" in elastic.log()
