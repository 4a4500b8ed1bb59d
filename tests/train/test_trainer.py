"""`run.train`: a Trainer of Hugging Face goes on after an interruption as if there had been none."""

from __future__ import annotations

import shutil
import signal
from importlib.metadata import version
from pathlib import Path

import pytest

from spotrun.state.control import EXIT_DRAINED, EXIT_PEER
from tests.train.generations import Cluster, flatten
from tests.train.scripts import SAMPLES
from tests.train.trainers import EPOCHS

NODES = ["a", "b"]
STEPS = 4 * EPOCHS


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    cluster = Cluster(tmp_path_factory.mktemp("undisturbed"))
    assert cluster.run(NODES, script="trained") == [0, 0], cluster.log()
    return cluster


@pytest.mark.parametrize("stop_at", [4, 7, STEPS])
def test_a_restart_changes_no_bit(tmp_path: Path, undisturbed: Cluster, stop_at: int) -> None:
    cluster = Cluster(tmp_path)
    assert cluster.run(NODES, stop_at=stop_at, script="trained") == [EXIT_DRAINED] * 2, cluster.log()
    shutil.rmtree(cluster.slots("b"))
    assert cluster.run(NODES, script="trained") == [0, 0], cluster.log()
    for rank in (0, 1):
        assert flatten(cluster.final(rank)) == flatten(undisturbed.final(rank))
    assert cluster.seen() == undisturbed.seen()
    assert all(sorted({*ids}) == list(range(SAMPLES)) for ids in undisturbed.seen().values())


def test_the_time_in_which_a_worker_waits_for_none(undisturbed: Cluster) -> None:
    """An evaluation is no part of it."""
    for each in undisturbed.controls:
        assert 0 < each.alone < each.stepping


@pytest.mark.parametrize("stop_at", [6, -1])
def test_training_that_has_ended_does_not_go_on(tmp_path: Path, stop_at: int) -> None:
    """Neither after a stop in its last step, nor after a failure later in the script."""
    cluster, undisturbed = Cluster(tmp_path / "after"), Cluster(tmp_path / "before")
    for each in (cluster, undisturbed):
        each.path.mkdir()
    assert undisturbed.run(NODES, script="stopped") == [0, 0], undisturbed.log()
    codes = cluster.run(NODES, script="stopped", stop_at=stop_at, fail_at=6)
    assert codes == ([1, 1] if stop_at < 0 else [EXIT_DRAINED] * 2), cluster.log()
    assert cluster.run(NODES, script="stopped") == [0, 0], cluster.log()
    assert cluster.newest("a").step == 6
    for rank in (0, 1):
        assert flatten(cluster.final(rank)) == flatten(undisturbed.final(rank))
    results = {line for each in (cluster, undisturbed) for line in each.log().splitlines() if "result: 6" in line}
    assert len(results) == 1


def test_frozen_parameters_are_in_no_snapshot(tmp_path: Path) -> None:
    cluster = compare(tmp_path, "adapted", ["a"], 9)
    names = set(cluster.newest("a").state["objects"]["model"])
    assert names >= {"layers.1.weight", "layers.1.running_mean", "layers.3.bias"}
    assert not any(name.startswith("layers.0.") for name in names)


def test_a_frozen_parameter_that_changes(tmp_path: Path) -> None:
    cluster = compare(tmp_path, "averaging", ["a"], 9)
    names = set(cluster.newest("a").state["objects"]["model"])
    assert "mean.weight" in names
    assert not names & {"mean.bias", "still.weight"}


@pytest.mark.parametrize(("script", "last"), [("part_of_an_epoch", 5), ("stopping", 6)])
def test_an_interruption_after_the_last_step(tmp_path: Path, script: str, last: int) -> None:
    """The Trainer does no step more, though its epoch has some."""
    cluster = compare(tmp_path, script, ["a"], last)
    assert cluster.newest("a").step == last


def test_an_unusual_trainer(tmp_path: Path) -> None:
    cluster = compare(tmp_path, "unusual", NODES, 5)
    assert all(sorted({*ids}) == list(range(SAMPLES)) for ids in cluster.seen().values())


def test_all_nodes_end_with_the_best_model(tmp_path: Path) -> None:
    cluster = compare(tmp_path, "choosing", NODES, 6)
    assert flatten(cluster.final(1)["model"]) == flatten(cluster.final()["model"])
    records = [cluster.newest(node) for node in NODES]
    assert (records[0].xxh3, records[0].state) == (records[1].xxh3, records[1].state)


def compare(path: Path, script: str, nodes: list[str], stop_at: int) -> Cluster:
    """Interrupt the script after this step. Its results must be those of an undisturbed one."""
    cluster, undisturbed = Cluster(path / "after"), Cluster(path / "before")
    for each in (cluster, undisturbed):
        each.path.mkdir()
    done, left = [0] * len(nodes), [EXIT_DRAINED] * len(nodes)
    assert undisturbed.run(nodes, script=script) == done, undisturbed.log()
    assert cluster.run(nodes, stop_at=stop_at, script=script) == left, cluster.log()
    assert cluster.run(nodes, script=script) == done, cluster.log()
    assert flatten(cluster.final()) == flatten(undisturbed.final())
    assert cluster.seen() == undisturbed.seen()
    return cluster


@pytest.mark.parametrize(("die_in", "die_at", "newest"), [("", 6, 6), ("evaluation", 3, 2)])
def test_a_peer_that_dies(tmp_path: Path, undisturbed: Cluster, die_in: str, die_at: int, newest: int) -> None:
    """The survivor ends as one whose peer is gone, and the Trainer goes on from the newest snapshot."""
    cluster = Cluster(tmp_path)
    codes = cluster.run(NODES, {1: {"die_at": die_at, "die_in": die_in}}, interval=2, script="trained")
    assert codes == [EXIT_PEER, -signal.SIGKILL], cluster.log()
    assert cluster.newest("a").step == newest
    assert cluster.run(NODES, script="trained") == [0, 0], cluster.log()
    assert flatten(cluster.final()) == flatten(undisturbed.final())
    assert cluster.seen() == undisturbed.seen()


def test_another_number_of_workers(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    assert cluster.run(NODES, stop_at=1, script="trained") == [EXIT_DRAINED] * 2, cluster.log()
    assert cluster.run(NODES[:1], script="trained") == [1]
    assert "the saved state is of 2 workers, and there are 1 now" in cluster.log()


def test_what_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    assert cluster.run(["a"], script="refused") == [0], cluster.log()
    found = [line for line in cluster.log().splitlines() if line.startswith("refused: ")]
    without = "Leave out resume_from_checkpoint=True: after an interruption, run.train goes on without it"
    assert found.pop(2) == f"refused: run.train: {cluster.path / 'out' / 'trainer'} has no checkpoint. {without}"
    assert [line.partition("run.train")[2].lstrip(": ") for line in found] == [
        "takes a transformers.Trainer, not spotrun.train.run.Run: write run.train(trainer)",
        "takes a transformers.Trainer, not lightning.pytorch.trainer.trainer.Trainer: write run.fit(trainer, module, "
        "…)",
        "does not support model_init (give the Trainer model= instead)",
        "does not support auto_find_batch_size (set per_device_train_batch_size)",
        "does not support enable_jit_checkpoint (leave it out: spotrun keeps the state)",
        "does not support a second call in a script",
        "this Trainer has trained. A script can have spotrun keep one training only",
    ]
    assert "the script reads run.world_size" not in cluster.log()
    after = Cluster(tmp_path / "after")
    after.path.mkdir()
    assert after.run(["a"], script="refused_after") == [0], after.log()
    assert [line for line in after.log().splitlines() if line.startswith("refused: ")] == [
        f"refused: run.train needs transformers 99.5 or newer, not {version('transformers')}: name "
        "transformers>=99.5 in requirements",
        "refused: run.train: leave out run.ddp, and give the Trainer the module itself",
        "refused: run.train does not support run.track before it (leave run.track out)",
    ]
    elastic = Cluster(tmp_path / "elastic", elastic=True)
    elastic.path.mkdir()
    assert elastic.run(["a"], script="trained") == [1]
    assert "give nodes one number in the job file" in elastic.log()
    early = Cluster(tmp_path / "early")
    early.path.mkdir()
    assert early.run(NODES, script="too_early") == [0, 0], early.log()
    assert early.log().count("refused: run.train: there are 2 workers, and the Trainer knows of 1") == 2
