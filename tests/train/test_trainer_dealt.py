"""`run.train(trainer, global_batch=…)`: the number of workers may change, and the steps stay the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from spotrun.train.dealt import Dealt, Epoch
from spotrun.train.hugging_face.dealt import Deal
from spotrun.train.rng import reseed
from tests.train.generations import Cluster, flatten
from tests.train.regroups import Regroups, release, undisturbed_final
from tests.train.scripts import SAMPLES
from tests.train.trainers import EPOCHS
from tests.train.trainers_dealt import layers

EXACT = {"exact": True, "on_gpu": True}


def nearly(found: Any, wanted: Any) -> None:
    """The same weights but for rounding, and the same log.

    In the log, `epoch` is the part of this rank's batches that is done. So it differs a little within an epoch.
    """
    first = layers().state_dict()
    for name in ("0.weight", "3.weight"):
        moved = (wanted["model"][f"layers.{name}"] - first[name]).norm()
        assert (found["model"][f"layers.{name}"] - wanted["model"][f"layers.{name}"]).norm() < 0.01 * moved, name
    assert len(found["history"]) == len(wanted["history"])
    for one, other in zip(found["history"], wanted["history"], strict=True):
        assert {**one, "epoch": 0} == pytest.approx({**other, "epoch": 0}, rel=1e-2)


@pytest.mark.parametrize("script", ["dealt", "tokens"])
def test_the_number_of_workers_does_not_matter(tmp_path: Path, script: str) -> None:
    """Of three workers, two only repeat samples in a part of the steps. The last step of an epoch is shorter.

    Some samples get noise when they are loaded.
    """
    plan = {"script": f"trainers_dealt.{script}", "global_batch": 40}
    whole = undisturbed_final(tmp_path / "one", "a", 0, plan)
    assert whole["history"][-1]["step"] == 3 * EPOCHS
    for nodes in ("ab", "abc"):
        nearly(undisturbed_final(tmp_path / nodes, nodes, 0, plan), whole)


@pytest.mark.parametrize("options", [{}, EXACT], ids=["on the CPU", "exact on a GPU"])
@pytest.mark.parametrize("script", ["dealt", "tokens"])
def test_fewer_workers_and_then_more(job: Regroups, tmp_path: Path, script: str, options: dict[str, Any]) -> None:
    """In the middle of an epoch, without a restart."""
    plan = {"script": f"trainers_dealt.{script}", "global_batch": 32, **options}
    job.begin("abc", 2, a=plan, b={**plan, "die_at": 6}, c=plan)
    survivors = job.survivors()
    for each in survivors if options else ():
        release(each, job.cluster.generation)
    job.regroup(survivors, stop_at=9)
    job.regroup([*survivors, job.warm_up("d", 2, **plan)])
    assert job.end() == [0, 0, 0], job.state_and_log()
    assert [each.control.pid for each in job.members] == job.pids()
    assert all({*ids} == {*range(SAMPLES)} for ids in job.cluster.seen().values())
    nearly(job.cluster.final(), undisturbed_final(tmp_path / "one", "a", 2, {**plan, "die_at": -1}))


def test_a_training_step_of_its_own(tmp_path: Path) -> None:
    """It knows neither of weights nor of repeated samples. An epoch that ends early begins the next one's steps."""
    plan = {"script": "trainers_dealt.own", "global_batch": 40}
    whole = undisturbed_final(tmp_path / "one", "a", 0, plan)
    assert whole["history"][-1]["step"] == 3 * EPOCHS - 1
    nearly(undisturbed_final(tmp_path / "three", "abc", 0, plan), whole)


def test_an_order_that_follows_from_the_size_of_a_step(job: Regroups, tmp_path: Path) -> None:
    """And a loader that stays when the workers change."""
    plan = {"script": "trainers_dealt.grouped", "global_batch": 32}
    job.begin("ab", stop_at=5, a=plan, b=plan)
    job.regroup(job.members[:1], stop_at=7)
    job.regroup([*job.members, job.warm_up("c", **plan)])
    assert job.end() == [0, 0], job.state_and_log()
    assert all({*ids} == {*range(SAMPLES)} for ids in job.cluster.seen().values())
    nearly(job.cluster.final(), undisturbed_final(tmp_path / "one", "a", 0, plan))


def test_a_loader_that_stays_with_its_process(job: Regroups, tmp_path: Path) -> None:
    """When the workers become more, it has other batches."""
    plan = {"script": "trainers_dealt.staying", "global_batch": 32, "keeps_loaders": True}
    job.begin("a", stop_at=5, a=plan)
    job.regroup([*job.members, job.warm_up("b", **plan)])
    assert job.end() == [0, 0], job.state_and_log()
    assert all({*ids} == {*range(SAMPLES)} for ids in job.cluster.seen().values())
    nearly(job.cluster.final(), undisturbed_final(tmp_path / "one", "a", 0, plan))


def test_a_restart_changes_no_bit(tmp_path: Path) -> None:
    """With two workers, also from a state of three."""
    wanted = undisturbed_final(tmp_path / "whole", "ab", 0, {"script": "trainers_dealt.dealt", "global_batch": 32})
    cluster = Cluster(tmp_path)
    options: dict[str, Any] = {"script": "trainers_dealt.dealt", "global_batch": 32}
    cluster.run(["a", "b"], stop_at=6, **options)
    assert cluster.run(["a", "b"], **options) == [0, 0], cluster.log()
    assert flatten(cluster.final()) == flatten(wanted)


def test_what_does_not_fit(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    assert cluster.run(["a"], script="trainers_dealt.refused") == [0], cluster.log()
    assert [line for line in cluster.log().splitlines() if line.startswith("refused: ")] == [
        "refused: run.train(trainer, global_batch=32): leave out gradient_accumulation_steps: global_batch sets it",
        "refused: run.train(trainer, global_batch=12): give a multiple of per_device_train_batch_size, 8",
        "refused: run.train(trainer, global_batch=0): give a multiple of per_device_train_batch_size, 8",
        "refused: run.train(trainer, global_batch=1.5): give a whole number",
        "refused: run.train(trainer, global_batch=32): leave out split_batches and dispatch_batches",
    ]
    for script, message in (
        ("silent", "global_batch needs a training_step that calls accelerator.backward(loss)"),
        ("counting_itself", "global_batch needs a get_batch_samples that calls _get_num_items_in_batch"),
    ):
        assert cluster.run(["a"], script=f"trainers_dealt.{script}") == [0], cluster.log()
        assert cluster.log().splitlines()[-1] == f"refused: run.train: {message}"


@pytest.mark.parametrize(("total", "last", "count"), [(13, 8, 4), (13, 3, 4), (12, 5, 4), (1, 2, 3), (7, 8, 1)])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_mean_over_all_ranks_is_that_over_all_samples(total: int, last: int, count: int, world: int) -> None:
    whole = [[at] * (last if at == total - 1 else 8) for at in range(total)]
    ranks = [list(Dealt(whole, count, world, rank)) for rank in range(world)]
    assert {len(each) for each in ranks} == {len(Dealt(whole, count, world, 0))}
    weights = torch.zeros(total)
    for rank, given in enumerate(ranks):
        epoch, batches = Epoch(8 * (total - 1) + last, 8, 8 * count, world, rank), iter(given)
        steps = -(-total // count)
        for step in range(steps):
            rounds = -(-min(count, total - step * count) // world)
            for number in range(rounds):
                (at, *_) = next(batches)
                weights[at] += epoch.factor(step, number) / rounds / world
        assert next(batches, None) is None
    for step in range(-(-total // count)):
        samples = [len(each) for each in whole[step * count :][:count]]
        found = weights[step * count :][:count].tolist()
        assert found == pytest.approx([each / sum(samples) for each in samples])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_compute_loss_func_whose_items_are_not_counted(world: int) -> None:
    """The Trainer does not divide its loss by the number of the worker's batches (transformers 5.24)."""
    losses = []
    for rank in range(world):
        deal, given = Deal.__new__(Deal), list[torch.Tensor]()
        deal._trainer = SimpleNamespace(
            loss_is_scaled_for_ga=None,
            model_accepts_loss_kwargs=False,
            compute_loss_func=print,
            state=SimpleNamespace(global_step=0),
        )
        deal._start, deal._epoch, deal._backward = 0, Epoch(32, 8, 32, world, rank), given.append
        deal._train = lambda *_, deal=deal: [torch.ones(()), deal._weighted_backward(torch.ones(()))][0]
        for deal.number in range(4 // world):
            deal._weighted_step(None, None, None)
        losses.append(sum(given) / world)
    assert sum(losses) == 1


class Late:
    """A batch sampler that draws when it is asked for a batch."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            yield [random.getrandbits(32), int(numpy.random.randint(2**31)), int(torch.randint(2**31, ()))]

    def __len__(self) -> int:
        return 7


def test_a_sampler_that_draws_late_gives_all_ranks_one_order() -> None:
    """The batches have seeds of their own, and draw, too."""
    reseed("an epoch")
    wanted = list(Late())
    for rank in range(2):
        reseed("an epoch")
        drawn = {}
        for batch in Dealt(Late(), 2, 2, rank, lambda at: reseed("batch", at)):
            drawn[wanted.index(batch)] = random.random(), float(numpy.random.rand()), float(torch.rand(()))
        assert [*drawn] == ([0, 2, 4, 6], [1, 3, 5, 6])[rank]  # the last one is repeated
        for at, numbers in drawn.items():
            reseed("batch", at)
            assert numbers == (random.random(), float(numpy.random.rand()), float(torch.rand(())))
