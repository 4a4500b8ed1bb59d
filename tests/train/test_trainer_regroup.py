"""`run.train` when the members change: the Trainer goes on in the same process, and a newcomer joins it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from spotrun.state.control import ABLE, EXIT_DRAINED, EXIT_PEER, NEEDS_RELEASE
from spotrun.train.changing import Changing
from tests.helpers import wait_for
from tests.train.generations import Cluster, flatten
from tests.train.regroups import Regroups, release, undisturbed_final
from tests.train.trainers import EPOCHS

STEPS = 4 * EPOCHS
ON_GPU = {"on_gpu": True}  # the plan of a worker whose device counts as a GPU
EXACT = {"exact": True, **ON_GPU}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    cluster = Cluster(tmp_path_factory.mktemp("undisturbed"))
    assert cluster.run(["a", "b"], script="trained") == [0, 0], cluster.log()
    return cluster


def same(job: Regroups, undisturbed: Cluster) -> None:
    """All workers have ended well, with the same results as undisturbed ones. Each one ran the set-up once."""
    assert job.end() == [0, 0], job.state_and_log()
    assert [each.control.pid for each in job.members] == job.pids()
    for rank in (0, 1):
        assert flatten(job.cluster.final(rank)) == flatten(undisturbed.final(rank))
    assert job.cluster.seen() == undisturbed.seen()
    assert job.cluster.log().count("set up by") == len(job.all)


@pytest.mark.parametrize("stop_at", [3, 4, 7, STEPS])
@pytest.mark.parametrize(("options", "able"), [({}, ABLE), (ON_GPU, NEEDS_RELEASE)], ids=["on the CPU", "on a GPU"])
def test_a_planned_change(
    job: Regroups, undisturbed: Cluster, stop_at: int, options: dict[str, Any], able: int
) -> None:
    """In the middle of an epoch, at its end, and at the end of training."""
    plan = {"script": "trained", **options}
    job.begin("ab", stop_at=stop_at, a=plan, b=plan)
    first, second = job.members
    job.regroup([second, first])
    same(job, undisturbed)
    assert [each.control.able for each in job.members] == [able] * 2
    assert [each.control.base for each in job.members] == [stop_at] * 2


def test_a_newcomer_takes_the_place_of_one_that_leaves(job: Regroups, undisturbed: Cluster) -> None:
    plan = {"script": "trained"}
    job.begin("ab", stop_at=5, a=plan, b=plan)
    leaves, stays = job.members
    job.regroup([job.warm_up("c", **plan), stays], stop_at=9)
    job.regroup([job.warm_up("d", **plan), job.members[0]])
    same(job, undisturbed)
    assert leaves.control.left == EXIT_DRAINED


@pytest.mark.parametrize(("die_in", "die_at"), [("", 6), ("evaluation", 3), ("", 11), ("evaluation", 11)])
@pytest.mark.parametrize("options", [{}, ON_GPU, EXACT], ids=["on the CPU", "on a GPU", "exact"])
def test_a_peer_that_dies(
    job: Regroups, undisturbed: Cluster, options: dict[str, Any], die_in: str, die_at: int
) -> None:
    """In training, and in an evaluation, which may be the last one. The newcomer becomes rank 0."""
    interval = 2  # so the newest snapshot may be a step older
    plan = {"script": "trained", **options}
    job.begin("ab", interval, a=plan, b={**plan, "die_at": die_at, "die_in": die_in})
    (survivor,) = job.survivors()
    spare = job.warm_up("c", interval, **plan)
    if options:
        release(survivor, job.cluster.generation)
    job.regroup([spare, survivor])
    same(job, undisturbed)


def test_a_peer_that_dies_while_it_loads_data(job: Regroups, undisturbed: Cluster) -> None:
    """The step before counts."""
    plan = {"script": "meeting"}
    job.begin("ab", 5, a=plan, b={**plan, "die_at": 7, "die_in": "loading"})
    (survivor,) = job.survivors()
    job.regroup([survivor, job.warm_up("c", 5, **plan)])
    same(job, undisturbed)
    assert [each.control.base for each in job.members] == [7] * 2


def test_a_tracker_on_a_worker_that_becomes_rank_0(job: Regroups, undisturbed: Cluster) -> None:
    plan = {"script": "tracked"}
    job.begin("ab", stop_at=5, a=plan, b=plan)
    job.regroup(job.members[::-1])
    same(job, undisturbed)


def test_kernels_that_take_the_place_of_the_models_forward_pass(job: Regroups) -> None:
    plan = {"script": "fused"}
    job.begin("ab", stop_at=5, a=plan, b=plan)
    job.regroup(job.members[::-1])
    assert job.end() == [0, 0], job.state_and_log()
    assert job.cluster.log().count("Liger's kernels") == 2


def test_a_layer_that_was_unfrozen_after_the_saved_state() -> None:
    """Its values of then are nowhere. In a new process, the script makes them."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    changing = Changing(model)
    saved = changing.state_dict()
    assert "0.weight" not in saved
    changing.begin()
    model[0].requires_grad_(True)
    with pytest.raises(dist.DistError, match="must start again"):
        changing.load_state_dict(saved)


@pytest.mark.parametrize(
    "script", ["adapted", "averaging", "counted", "counting", "stopping", "stopped", "unusual", "weighted"]
)
def test_other_trainers(tmp_path: Path, job: Regroups, script: str) -> None:
    """After a planned change, and a death."""
    plan = {"script": script}
    before = undisturbed_final(tmp_path / "before", "ab", 1, plan)
    job.begin("ab", 1, stop_at=2, a=plan, b=plan)
    job.regroup(job.members, stop_at=4)
    stays, leaves = job.members
    spare = job.warm_up("c", 1, die_at=4, **plan)
    job.regroup([stays, spare])
    (survivor,) = job.survivors()
    job.regroup([survivor, job.warm_up("d", 1, **plan)])
    assert job.end() == [0, 0], job.state_and_log()
    assert leaves.control.left == EXIT_DRAINED
    assert flatten(job.cluster.final()) == flatten(before)


def test_a_peer_that_dies_while_it_loads_samples(tmp_path: Path, job: Regroups) -> None:
    """The others are between two steps. No step is done again, although there is no snapshot."""
    plan = {"script": "meeting"}
    before = undisturbed_final(tmp_path / "before", "ab", 1, plan)
    job.begin("ab", a=plan, b={**plan, "die_at": 3, "die_in": "loading"})
    (survivor,) = job.survivors()
    job.regroup([survivor, job.warm_up("c", die_at=8, die_in="loading", **plan)])
    (survivor,) = job.survivors()
    assert survivor.control.base == 3
    job.regroup([survivor, job.warm_up("d", **plan)])
    assert job.end() == [0, 0], job.state_and_log()
    assert [each.control.base for each in job.members] == [8, 8]
    assert flatten(job.cluster.final()) == flatten(before)


@pytest.mark.parametrize("stop_at", [5, 6])
def test_loaders_that_stay_after_their_epoch(tmp_path: Path, job: Regroups, stop_at: int) -> None:
    """Each worker has another rank after the change. So it trains and evaluates with other samples."""
    plan = {"script": "keeping_loaders", "keeps_loaders": True}
    before = undisturbed_final(tmp_path / "before", "ab", 1, plan)
    job.begin("ab", 1, stop_at=stop_at, a=plan, b=plan)
    job.regroup(job.members[::-1])
    assert job.end() == [0, 0], job.state_and_log()
    assert flatten(job.cluster.final()) == flatten(before)


@pytest.mark.parametrize(("script", "sent"), [("equal_base", 2), ("random_base", 4)])
def test_frozen_parameters_are_sent_only_if_a_newcomer_has_others(job: Regroups, script: str, sent: int) -> None:
    plan = {"script": script}
    job.begin("ab", 1, stop_at=2, a=plan, b=plan)
    job.regroup([job.members[0], job.warm_up("c", 1, **plan)])
    assert job.end() == [0, 0], job.state_and_log()
    assert flatten(job.cluster.final(0)) == flatten(job.cluster.final(1))
    assert job.cluster.log().count("the model is sent") == sent


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("dependent", "gradient_accumulation_steps is 4 in this new worker, and 2 in the others"),
        ("decaying", "weight_decay is 0.5 in this new worker, and 1.0 in the others"),
    ],
)
def test_a_newcomer_whose_steps_are_others(job: Regroups, script: str, message: str) -> None:
    plan = {"script": script}
    job.begin("ab", 1, stop_at=2, a=plan, b=plan)
    job.regroup([job.members[0], job.warm_up("c", 1, **plan)])
    survivor, newcomer = job.members
    newcomer.process.join(60)
    assert newcomer.process.exitcode == 1
    assert message in job.cluster.log()
    wait_for(lambda: survivor.control.left == EXIT_PEER, 60)
