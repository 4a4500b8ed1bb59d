"""How often the head takes turns: reports of mere progress cause none, and looks take a limited part of a core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotrun.head import turn_timing
from spotrun.head.view import Misfit
from spotrun.wire import StateRef
from tests.head.world import World, stepping


@pytest.mark.parametrize(
    ("active", "took", "seconds"),
    [
        pytest.param(True, 0.0, 0.25, id="a job, a short turn: a quarter of a second"),
        pytest.param(True, 0.05, 0.25, id="a job, a turn of a fifth of that: the same"),
        pytest.param(True, 0.2, 1.0, id="a job, a long turn: a fifth of a core at the most"),
        pytest.param(False, 0.2, 2.0, id="no job: seldom"),
    ],
)
def test_the_time_between_two_looks(active: bool, took: float, seconds: float) -> None:
    assert turn_timing.tick(active, took) == seconds


@pytest.mark.parametrize(
    ("took", "seconds"),
    [
        pytest.param(0.0, 0.0, id="a short turn: none"),
        pytest.param(0.2, 0.2, id="a long turn: as long, so that connections are served"),
        pytest.param(9.0, 1.0, id="a very long turn: a second"),
    ],
)
def test_the_time_without_a_turn_whatever_changes(took: float, seconds: float) -> None:
    assert turn_timing.gap(took) == seconds
    assert turn_timing.gap(took) < min(turn_timing.tick(True, took), turn_timing.tick(False, took))


@pytest.mark.parametrize(
    ("took", "seconds"),
    [
        pytest.param(0.0, 0.2, id="a small document: as fast as a person reads"),
        pytest.param(0.1, 1.0, id="a large document: a tenth of a core at the most"),
    ],
)
def test_the_time_between_two_status_documents_of_a_follower(took: float, seconds: float) -> None:
    assert turn_timing.follow(took) == pytest.approx(seconds)


PROGRESS: dict[str, dict[str, Any]] = {
    "another step": {"workers": stepping(9)},
    "a newer snapshot": {"snapshot": StateRef(generation=1, step=5)},
    "the number of the newest order": {"order": 3},
}
MORE: dict[str, dict[str, Any]] = {
    "another phase": {"phase": "drained"},
    "a failure": {"failure": {"kind": "peer", "rank": 0, "at": 1.0, "message": "a peer is gone"}},
    "a step that came too late": {"late": 4},
    "a notice": {"notice": {"kind": "preempt", "deadline": 9e9}},
    "another start of the agent": {"boot": "b2"},
    "another connection": {"link": "2"},
}


@pytest.mark.parametrize("change", [*PROGRESS, *MORE])
async def test_a_report_wakes_the_head_if_it_says_more_than_progress(tmp_path: Path, change: str) -> None:
    world = World(tmp_path)
    job = (await world.started()).id
    trains: dict[str, Any] = {"job": job, "phase": "running", "generation": 1, "workers": stepping(1)}
    world.receive("a", **trains)
    world.head.news.changed.clear()
    world.receive("a", **trains | PROGRESS.get(change, {}) | MORE.get(change, {}))
    assert world.head.news.changed.is_set() == (change in MORE)


async def test_the_next_turn_sees_progress_that_caused_none(tmp_path: Path) -> None:
    world = World(tmp_path)
    job = (await world.started()).id
    for step in (1, 9):
        world.receive("a", job=job, phase="running", generation=1, workers=stepping(step))
        world.receive("b", job=job, phase="running", generation=1, workers=stepping(step))
    await world.turn()
    assert world.head.states[job].progress.step == 9


async def test_a_set_up_that_failed_counts_from_its_newest_report(tmp_path: Path) -> None:
    """Also if nothing else is new: the job does not go back to a node on which its set-up keeps failing."""
    world = World(tmp_path)
    job = (await world.started()).id
    failed: dict[str, Any] = {"kind": "setup", "rank": 0, "at": 1.0, "message": "no such package"}
    now = 5000.0
    world.head.clock = lambda: now
    world.receive("a", job=job, phase="failed", failure=failed)
    now = 5050.0
    world.receive("a", job=job, phase="failed", failure=failed)
    misfit = world.head.fleet_view(now).misfits[job]["a"]
    assert misfit == Misfit(at=5050.0, times=1)
    assert [misfit.over(5100.0), misfit.over(5120.0)] == [False, True]
