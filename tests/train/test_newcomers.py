"""What a newcomer must have in common with the survivors, which have run more of the script."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotrun.state import exit_note
from spotrun.state.control import ABLE, EXIT_DRAINED, EXIT_PEER
from tests.helpers import wait_for
from tests.train.generations import flatten
from tests.train.regroups import Regroups, undisturbed_final


@pytest.mark.parametrize(
    ("place", "name"),
    [("after run.track", "allreduce"), ("before the loop", "allreduce"), ("run.ddp", "run.ddp")],
)
def test_a_collective_that_a_newcomer_would_call_alone_needs_a_restart(job: Regroups, place: str, name: str) -> None:
    """The survivors are in the loop, so its collective would be paired with an exchange of their gradients."""
    plan = {"script": "summing", "collective": place}
    job.begin("ab", stop_at=2, a=plan, b=plan)
    assert job.end() == [EXIT_DRAINED] * 2, job.cluster.log()
    assert [each.control.able for each in job.members] == [0, 0]
    assert f"all workers will restart: the script calls {name} after run.track" in job.cluster.log()


@pytest.mark.parametrize("place", ["before run.track", "after the loop", "at the end"])
def test_a_collective_that_all_call_together_is_no_obstacle(tmp_path: Path, job: Regroups, place: str) -> None:
    plan = {"script": "summing", "collective": place}
    before = undisturbed_final(tmp_path / "before", "abc", 1, plan)
    job.begin("abc", 1, a=plan, b={"die_at": 8, **plan}, c=plan)
    survivors = job.survivors()
    assert [each.control.able for each in survivors] == [ABLE] * 2
    job.regroup([*survivors, job.warm_up("d", 1, **plan)])
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert flatten(job.cluster.final()) == flatten(before)


@pytest.mark.parametrize("die_at", [8, 12])
def test_layers_that_are_frozen_again(tmp_path: Path, job: Regroups, die_at: int) -> None:
    """In the epoch in which they are trained, and in the next one."""
    plan = {"script": "refrozen"}
    before = undisturbed_final(tmp_path / "before", "abc", 1, plan)
    job.begin("abc", 1, a=plan, b={"die_at": die_at, **plan}, c=plan)
    job.regroup([*job.survivors(), job.warm_up("d", 1, **plan)])
    assert job.end() == [0, 0, 0], job.cluster.log()
    for rank in range(3):
        assert flatten(job.cluster.final(rank)) == flatten(before)


def test_a_shared_buffer_of_another_size_needs_a_restart(job: Regroups) -> None:
    plan = {"script": "caching"}
    job.begin("ab", 1, a=plan, b={"die_at": 3, **plan})
    members = [*job.survivors(), job.warm_up("d", 1, **plan)]
    job.regroup(members)
    wait_for(lambda: all(each.control.left == EXIT_PEER for each in members), 60)
    for each in members:
        assert "other parameters or buffers" in exit_note.path_for(each.context.control).read_text()


def test_survivors_with_a_shared_buffer_of_another_size_go_on(job: Regroups) -> None:
    plan = {"script": "caching"}
    job.begin("abc", 1, a=plan, b={"die_at": 3, **plan}, c=plan)
    job.regroup(job.survivors())
    assert job.end() == [0, 0], job.cluster.log()


def test_a_peer_that_dies_before_the_second_forward_pass(tmp_path: Path, job: Regroups) -> None:
    """With two workers, DDP has a collective there."""
    before = undisturbed_final(tmp_path / "before", "ab", 1, {})
    job.begin("ab", 1, b={"die_at": 1, "die_in": "first"})
    survivors = job.survivors()
    wait_for(lambda: survivors[0].control.left == EXIT_PEER, 60)
    job.regroup([*survivors, job.warm_up("d", 1)])
    assert job.end() == [0, 0], job.cluster.log()
    assert flatten(job.cluster.final()) == flatten(before)
