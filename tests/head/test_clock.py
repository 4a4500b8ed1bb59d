"""The head's clock, and decisions while the wall clock of the head's machine steps back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from spotrun.head.clock import Clock
from spotrun.store import job_key
from tests.head.world import World, rewrite, stepping

HOUR = 3600.0


class Hands:
    """A wall clock and a monotonic clock that move when a test says so."""

    def __init__(self) -> None:
        self.wall, self.monotonic = time.time(), 50.0
        self.clock = Clock(lambda: self.wall, lambda: self.monotonic)

    def wait(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


@pytest.fixture
def hands() -> Hands:
    return Hands()


def test_the_clock_follows_the_wall_clock_forward(hands: Hands) -> None:
    hands.wait(5)
    assert hands.clock() == hands.wall
    hands.wall += HOUR
    assert hands.clock() == hands.wall


def test_the_clock_runs_at_half_speed_after_a_step_back(hands: Hands) -> None:
    before = hands.clock()
    hands.wall -= HOUR
    assert hands.clock() == before
    hands.wait(10)
    assert hands.clock() == before + 5
    for _ in range(2):
        hands.wait(HOUR)
    assert hands.clock() == hands.wall, "the wall clock has caught up"


@pytest.mark.parametrize("step_back", [0.0, HOUR], ids=["the clock is right", "the clock has stepped back"])
async def test_a_frozen_node_is_noticed(tmp_path: Path, hands: Hands, step_back: float) -> None:
    world = World(tmp_path)
    world.clock = hands.clock
    world.new_head()
    job = await world.started()
    for name in ("a", "b"):
        world.receive(name, job=job.id, phase="running", generation=1, workers=stepping(5))
    await world.turn()
    hands.wall -= step_back
    for _ in range(80):
        hands.wait(1)
        world.receive("a", job=job.id, phase="running", generation=1, workers=stepping(5))
        await world.turn()
    (interruption,) = world.written(job.id).interruptions
    assert (interruption.kind, interruption.node) == ("silent", "b")


@pytest.mark.parametrize("over", ["the same head", "the next head"])
async def test_a_checkpoint_is_taken_after_the_wall_clock_has_stepped_back(
    tmp_path: Path, hands: Hands, over: str
) -> None:
    world = World(tmp_path)
    world.clock = hands.clock
    world.new_head()
    job = await world.started()
    if over == "the next head":
        times = dict.fromkeys(("saved_at", "given_up_at", "ordered_at"), hands.wall + HOUR)
        rewrite(world, job_key(job.id, "state.json"), lambda state: state | times)
        world.new_head()
    else:
        hands.wall -= HOUR
    for step in range(5, 25):
        hands.wait(40)
        for name in ("a", "b"):
            world.receive(name, job=job.id, phase="running", generation=1, workers=stepping(step))
        await world.turn()
        assert world.head.job is not None
        if world.head.job.saving:
            break
    assert world.head.job.saving, "no checkpoint was begun within 800 s; the interval is 300 s"
