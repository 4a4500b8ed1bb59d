"""Whole jobs whose workers copy each snapshot together."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from spotrun.state import slots
from spotrun.state.control import EXIT_DRAINED, EXIT_PEER
from tests.train.generations import Cluster
from tests.train.section_node import FILES


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Final state of two workers of one node that nothing happened to, without shared snapshots."""
    cluster = Cluster(tmp_path_factory.mktemp("undisturbed"))
    assert cluster.run(["a"], per_node=2) == [0, 0], cluster.log()
    return cluster.final()


def same(one: Any, other: Any) -> bool:
    return repr(leaves(one)) == repr(leaves(other))


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in value for leaf in [key, *leaves(value[key])]]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value.tolist()] if isinstance(value, torch.Tensor) else [value]


def test_a_drain_after_shared_snapshots_changes_no_bit(tmp_path: Path, undisturbed: Any) -> None:
    cluster = Cluster(tmp_path)
    codes = cluster.run(["a"], interval=3, per_node=2, stop_at=14, together=True)
    assert codes == [EXIT_DRAINED] * 2, cluster.log()
    assert cluster.controls[1].section == 12
    assert cluster.newest("a").step == 14
    assert cluster.run(["a"], interval=3, per_node=2, together=True) == [0, 0], cluster.log()
    assert cluster.controls[1].section == 21
    assert same(cluster.final(), undisturbed)
    assert {path.name for path in cluster.slots("a").iterdir()} <= FILES


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_killed_after_its_copy_leaves_the_snapshot_before(tmp_path: Path, undisturbed: Any, rank: int) -> None:
    """Its own copy of step 9 is complete. The other one copies too, and nobody says that the snapshot counts."""
    cluster = Cluster(tmp_path)
    plans = {rank: {"die_copied": 9}}
    codes = cluster.run(["a"], plans, interval=3, per_node=2, together=True)
    assert codes[rank] == -signal.SIGKILL, cluster.log()
    assert codes[1 - rank] == EXIT_PEER, cluster.log()
    assert cluster.newest("a").step == 6
    assert {path.name for path in cluster.slots("a").iterdir()} <= FILES
    assert cluster.run(["a"], interval=3, per_node=2, together=True) == [0, 0], cluster.log()
    assert cluster.controls[1].section == 21
    assert same(cluster.final(), undisturbed)


def test_a_snapshot_that_the_agent_asks_for_is_shared(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.launch(["a"], interval=3, per_node=2, stop_at=14, together=True) as processes:
        for control in cluster.controls:
            control.snapshot_at = 11
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [EXIT_DRAINED] * 2, cluster.log()
    assert cluster.controls[1].section == 11
    assert [record.step for _, record in slots.newest(cluster.slots("a"), "job")] == [14, 11]
