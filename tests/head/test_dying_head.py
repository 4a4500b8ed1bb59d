"""A head that dies while machines move between jobs: the real head, and nodes that obey it without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotrun.head.fenced import FencedStore
from spotrun.head.timeouts import TIMEOUTS
from tests.head.fuse import Fuse, Killed
from tests.head.puppets import ROUND, Theatre

CHANGES: dict[str, tuple[int, list[dict[str, Any]], dict[str, Any]]] = {
    "a job shrinks, then grows again": (1, [{"nodes": {"min": 1, "max": 3}}], {"nodes": 2}),
    "a job makes room for all of another one": (1, [{"nodes": {"min": 2, "max": 3}}], {"nodes": 2}),
    "two jobs leave a machine that they share": (2, [{"nodes": {"min": 2, "max": 3}, "devices": 1}] * 2, {"nodes": 1}),
}


@pytest.mark.parametrize("regroups", [False, True], ids=["with restarts", "without restarts"])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_head_that_dies_at_any_point_while_machines_move_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, regroups: bool
) -> None:
    """It dies before each write and order, from the submission of an urgent job until the others have all back.

    No device is ordered for two jobs meanwhile: the puppets would find out.
    """
    fuse, number = Fuse(), 0
    monkeypatch.setattr(FencedStore, "put", fuse.put(FencedStore.put))
    while fuse.left <= 0:  # until a head comes through
        number += 1
        kinds = await die_while_machines_move(tmp_path / f"{number}", fuse, number, regroups, *CHANGES[change])
        assert "move" in kinds
    assert number > 30


async def die_while_machines_move(
    root: Path,
    fuse: Fuse,
    number: int,
    regroups: bool,
    devices: int,
    jobs: list[dict[str, Any]],
    urgent: dict[str, Any],
) -> set[str]:
    """The kinds of interruptions of the lower jobs."""
    stage = Theatre(root, machines=3, devices=devices, total=25, eager=True, regroups=regroups)
    low = [await stage.queue_job(f"low-{index}", **job) for index, job in enumerate(jobs)]
    await stage.round(8)
    sizes = [len(stage.nodes(job)) for job in low]
    high = await stage.queue_job("high", priority=1, **urgent)
    for puppet in stage.puppets.values():
        puppet.send = fuse.send(puppet.send)
    fuse.left, fuse.lit = number, True
    for _ in range(300):
        try:
            await stage.round()
        except Killed:
            stage.restart_head()
        fuse.lit = high in stage.head.states or [len(stage.nodes(job)) for job in low] != sizes
        if not stage.queue():
            break
    assert [stage.written(job).phase for job in (*low, high)] == ["succeeded"] * (len(low) + 1)
    assert stage.lost([*low, high]) == 0
    return {each.kind for job in low for each in stage.written(job).interruptions}


async def test_a_new_head_waits_for_all_nodes_before_a_lower_job_gets_its_machine_back(tmp_path: Path) -> None:
    """An urgent job is about to begin on a machine that a lower job has left and on another one, when the head dies.

    The agent of the other machine finds the new head a little later. The lower job must not begin and drain again.
    """
    stage = Theatre(tmp_path, machines=2)
    low = await stage.queue_job("low", 1)
    await stage.round(10)
    (taken,) = stage.nodes(low)
    high = await stage.queue_job("high", 2, priority=5)
    while stage.state(low).current is not None:
        await stage.round()
    (other,) = stage.puppets.keys() - {taken}
    assert stage.nodes(high) == []
    await restart_without(stage, other, rounds=10)
    assert (stage.state(low).generation, stage.nodes(high)) == (1, [])
    await stage.round(5)
    assert (stage.state(low).generation, sorted(stage.nodes(high))) == (1, sorted([taken, other]))


async def test_a_new_head_waits_no_longer_than_agents_need_to_find_it(tmp_path: Path) -> None:
    """The agent of a machine on which no job trains has died with the head, and the cloud still lists the machine."""
    stage = Theatre(tmp_path, machines=2)
    low, high = await stage.queue_job("low", 1), await stage.queue_job("high", 1)
    await stage.round(10)
    (away,) = stage.nodes(high)
    await stage.ask(lambda job, now: job.replace(stopping="stopped"), high)
    while high in stage.queue():
        await stage.round()
    urgent = await stage.queue_job("urgent", 1, priority=5)
    await restart_without(stage, away, rounds=int(TIMEOUTS.rejoin / ROUND) - 1)
    assert (len(stage.nodes(low)), stage.nodes(urgent)) == (1, [])
    await stage.round(10, without={away})
    assert (stage.nodes(low), len(stage.nodes(urgent))) == ([], 1)


async def restart_without(stage: Theatre, away: str, rounds: int) -> None:
    """The head dies. The agent of one node does not find the new head in so many rounds."""
    stage.restart_head()
    await stage.round(rounds, without={away})


async def test_workers_that_wait_stay_until_a_new_head_sees_all_nodes(tmp_path: Path) -> None:
    """They wait for a machine that comes, and their snapshot is not in the bucket. Their agents find it one by one."""
    stage = Theatre(tmp_path, machines=3, regroups=True)
    job = await stage.queue_job("a", 3)
    await stage.round(20)
    stage.kill("p-1")
    while stage.state(job).current is not None:
        await stage.round(without={"p-1"})
    stage.restart_head()
    for away in ({"p-1", "p-2"}, {"p-1"}):
        await stage.round(5, without=away)
        assert all(stage.puppets[name].work[job].running for name in ("p-0", "p-2")), away
    await stage.round(int(TIMEOUTS.rejoin / ROUND) + 5)
    begun = stage.state(job).current
    assert begun is not None
    assert (begun.regroup, len(begun.members)) == (True, 3)
