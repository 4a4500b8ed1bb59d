"""What operators are told about the connections of nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotrun.head.job_state import Finish, apply
from tests.head.puppets import Theatre
from tests.head.world import World


def told(world: World) -> list[str]:
    return [event["text"] for event in world.head.events.seen_from(None) if event["kind"] in ("connection", "node")]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_node_that_is_back_is_told(world: World) -> None:
    job = await world.started()
    world.head.disconnect("b", world.sends["b"])
    for _ in range(2):
        world.receive("b", link="2", job=job.id)
    assert told(world)[-2:] == ["b is not connected", "b is connected again"]


async def test_a_node_with_a_new_connection_beside_the_old_one_was_never_away(world: World) -> None:
    job = await world.started()
    world.receive("b", link="2", job=job.id)
    world.head.disconnect("b", world.sends["b"])
    assert told(world) == ["a joined", "b joined"]


async def test_a_new_agent_on_a_node_joins(world: World) -> None:
    job = await world.started()
    world.head.disconnect("b", world.sends["b"])
    world.receive("b", link="2", job=job.id, boot="another")
    assert told(world)[-2:] == ["b is not connected", "b joined"]


async def test_a_node_that_is_back_after_its_job_has_ended_is_not_told(world: World) -> None:
    job = await world.started()
    world.receive("b", job=job.id, phase="running", generation=1)
    world.head.disconnect("b", world.sends["b"])
    world.head.states[job.id] = apply(job, Finish("stopped", "enough"), world.clock())
    await world.turn(2)
    world.receive("b", link="2")
    assert told(world)[-1] == "b is not connected"


async def test_the_end_of_machines_that_no_job_wants_is_not_told(tmp_path: Path) -> None:
    stage = Theatre(tmp_path, machines=3, total=30)
    for name in ("first", "second"):
        await stage.queue_job(name, nodes=2 if name == "first" else 1)
    await stage.round(100)
    assert (stage.cloud.size, stage.puppets) == ({"p": 0}, {})
    assert told(stage) == ["p-0 joined", "p-1 joined", "p-2 joined"]


async def test_the_end_of_a_machine_that_the_cloud_takes_is_told(tmp_path: Path) -> None:
    stage = Theatre(tmp_path, machines=3)
    await stage.queue_job("job", nodes=2)
    await stage.round(10)
    stage.kill("p-0")
    await stage.round(3)
    assert told(stage)[-2:] == ["p-0 is not connected", "p-0 joined"]
