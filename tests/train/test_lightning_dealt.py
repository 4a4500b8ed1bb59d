"""`run.fit(trainer, module, global_batch=…)`: the number of workers may change, and the steps stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.generations import Cluster, flatten
from tests.train.lightnings import EPOCHS
from tests.train.regroups import Regroups, release, undisturbed_final
from tests.train.scripts import SAMPLES

EXACT = {"exact": True, "on_gpu": True}


def nearly(found: Any, wanted: Any) -> None:
    """The same weights but for rounding, the same schedules and metrics."""
    for name in ("layers.0.weight", "layers.3.weight"):
        assert (found["model"][name] - wanted["model"][name]).norm() < 1e-5 * wanted["model"][name].norm(), name
    assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-2)
    assert found["metrics"]["samples"] == SAMPLES
    done = found["validations"]  # a worker that has restarted has only its own
    assert done == wanted["validations"][-len(done) :]
    for one, other in zip(found["schedulers"], wanted["schedulers"], strict=True):
        assert (one["last_epoch"], one["_last_lr"]) == (other["last_epoch"], pytest.approx(other["_last_lr"]))


@pytest.mark.parametrize("script", ["dealt", "weighted", "batched"])
def test_the_number_of_workers_does_not_matter(tmp_path: Path, script: str) -> None:
    """Of three workers, two only repeat samples in a part of the steps. The last step of an epoch is shorter."""
    plan = {"script": f"lightnings_dealt.{script}", "global_batch": 40, "keeps_loaders": script == "weighted"}
    whole = undisturbed_final(tmp_path / "one", "a", 0, plan)
    assert whole["schedulers"][0]["last_epoch"] == -(-SAMPLES // 40) * EPOCHS
    for nodes in ("ab", "abc"):
        nearly(undisturbed_final(tmp_path / nodes, nodes, 0, plan), whole)


@pytest.mark.parametrize("options", [{}, EXACT], ids=["on the CPU", "exact on a GPU"])
@pytest.mark.parametrize("script", ["dealt", "weighted", "batched"])
def test_fewer_workers_and_then_more(job: Regroups, tmp_path: Path, script: str, options: dict[str, Any]) -> None:
    """In the middle of an epoch, without a restart."""
    plan = {
        "script": f"lightnings_dealt.{script}",
        "global_batch": 16,
        "keeps_loaders": script == "weighted",
        **options,
    }
    job.begin("abc", 2, a=plan, b={**plan, "die_at": 6}, c=plan)
    survivors = job.survivors()
    for each in survivors if options else ():
        release(each, job.cluster.generation)
    job.regroup(survivors, stop_at=7)
    job.regroup([*survivors, job.warm_up("d", 2, **plan)])
    assert job.end() == [0, 0, 0], job.state_and_log()
    assert [each.control.pid for each in job.members] == job.pids()
    nearly(job.cluster.final(), undisturbed_final(tmp_path / "one", "a", 2, {**plan, "die_at": -1}))


@pytest.mark.parametrize(("die_in", "die_at"), [("", 4), ("validation", 3)])
def test_a_peer_dies_and_nobody_replaces_it(job: Regroups, tmp_path: Path, die_in: str, die_at: int) -> None:
    plan = {"script": "lightnings_dealt.dealt", "global_batch": 32}
    job.begin("ab", 1, a=plan, b={**plan, "die_at": die_at, "die_in": die_in})
    job.regroup(job.survivors())
    assert job.end() == [0], job.state_and_log()
    nearly(job.cluster.final(), undisturbed_final(tmp_path / "one", "a", 1, plan))


def test_a_restart_with_another_number_of_workers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"script": "lightnings_dealt.dealt", "global_batch": 32}
    wanted = undisturbed_final(tmp_path / "whole", "ab", 0, options)
    cluster = Cluster(tmp_path, elastic=True)
    cluster.run(["a", "b"], stop_at=3, **options)
    cluster.run(["a", "b", "c"], stop_at=5, **options)
    assert cluster.run(["a"], **options) == [0], cluster.log()
    nearly(cluster.final(), wanted)


@pytest.mark.parametrize(("before", "now"), [(32, 16), (32, None), (None, 32)])
def test_a_restart_with_another_size_of_steps(tmp_path: Path, before: int | None, now: int | None) -> None:
    cluster = Cluster(tmp_path)
    cluster.run(["a"], stop_at=3, script="lightnings_dealt.dealt", global_batch=before)
    assert cluster.run(["a"], script="lightnings_dealt.dealt", global_batch=now) == [1]
    assert f"the saved state is of global_batch={before}, and this script has global_batch={now}" in cluster.log()


def test_a_restart_changes_no_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"script": "lightnings_dealt.dealt", "global_batch": 32}
    wanted = undisturbed_final(tmp_path / "whole", "ab", 0, options)
    cluster = Cluster(tmp_path)
    cluster.run(["a", "b"], stop_at=5, **options)
    assert cluster.run(["a", "b"], **options) == [0, 0], cluster.log()
    assert flatten(cluster.final()["model"]) == flatten(wanted["model"])


def test_what_does_not_fit(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    assert cluster.run(["a"], script="lightnings_dealt.refused") == [0], cluster.log()
    assert [line for line in cluster.log().splitlines() if line.startswith("refused: ")] == [
        f"refused: run.fit(…, global_batch={each}"
        for each in (
            "0): give a number above 0",
            "1.5): give a whole number",
            "32): leave out accumulate_grad_batches: global_batch sets it",
            "32): leave out limit_train_batches and fast_dev_run",
            "32): leave out limit_train_batches and fast_dev_run",
            "32): leave out overfit_batches",
            "32): leave out check_val_every_n_epoch=None",
            "12): give a multiple of the DataLoader's batch_size, 8",
            "32): val_check_interval=5 counts steps, and an epoch has only 4: give a smaller number, or "
            "check_val_every_n_epoch",
            "32): leave out the DistributedSampler: Lightning makes what is needed",
            "32): leave out the DistributedSampler: Lightning makes what is needed",
            "32): list, the batch_sampler, needs a batch_size",
            "32): Endless, the sampler, needs a length",
        )
    ]
