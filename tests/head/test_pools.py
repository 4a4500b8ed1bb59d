"""What the head knows of machines: while the cloud is asked, says part of it, or has a zone that is out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spotrun.cloud.base import Advice, Problem, Said
from spotrun.errors import CloudError
from spotrun.head.fleet.surplus import LINGER
from spotrun.store import idle_key
from spotrun.wire import Failure
from tests.head.world import CODE, JOB, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_while_the_cloud_is_asked_its_last_answer_counts(world: World) -> None:
    world.cloud.size["p"] = 1
    await world.head.fleet.look()
    asked = asyncio.Event()

    async def slow() -> dict[str, int]:
        asked.set()
        await asyncio.Event().wait()
        return {}

    world.cloud.sizes = slow  # type: ignore[method-assign]
    looking = asyncio.create_task(world.head.fleet.look())
    await asked.wait()
    await world.head.fleet.preempt("p-0", None)
    assert world.cloud.calls == [("preempt", "p-0")]
    looking.cancel()


@pytest.mark.parametrize("what", ["problems", "prices"])
async def test_machines_are_known_though_the_cloud_does_not_say_all(world: World, what: str) -> None:
    await world.head.fleet.look()
    world.cloud.size["p"] = 1

    async def throttled() -> Any:
        raise CloudError("Rate exceeded")

    setattr(world.cloud, what, throttled)
    assert await world.head.fleet.look() == []
    assert world.head.fleet.names() == {"p-0"}
    assert world.head.fleet.prices == world.cloud.price


OUT = {"p": "machines in z: Google does not answer"}


async def test_the_next_pool_stands_in_for_a_zone_that_does_not_answer(world: World) -> None:
    """The members there are kept. Machines that do not report do not count, but none is removed or replaced."""
    job = await world.with_machines(min=1, max=2)
    assert world.cloud.size == {"p": 2, "q": 0}
    world.receive("p-0", job=job)
    world.receive("p-1", job=job)
    await world.turn(2)
    world.cloud.out = OUT
    await world.look()
    assert world.cloud.size == {"p": 2, "q": 0}, "all that the generation counts on"
    nodes = {node.name: node for node in world.head.agents.nodes(world.head.fleet)}
    assert (nodes["p-0"].cloud, nodes["p-1"].cloud) == (None, None)
    assert world.head.fleet.names() == {"p-0", "p-1"}
    machines = world.head.agents.machines(world.head.fleet)
    assert [each.state for each in machines] == ["unknown", "unknown"]
    pools = {pool["name"]: pool for pool in world.head.status()["pools"]}
    assert pools["p"]["problem"] == "zone local-a does not answer: machines in z: Google does not answer"
    assert (pools["p"]["target"], pools["q"]["problem"]) == (2, None)
    world.cloud.out = {"p": "machines in z: other words"}
    await world.look()
    assert sum("does not answer" in event["text"] for event in world.events()) == 1

    # One is lost: silent, and the other says so as well.
    world.head.disconnect("p-1", world.sends["p-1"])
    world.head.agents.known["p-1"].reported_at -= 60
    failure = Failure(kind="peer", rank=0, message="reset", at=time.time())
    world.receive("p-0", job=job, phase="ready", generation=1, failure=failure)
    await world.turn(2)
    assert world.head.job is not None
    assert [m.node for m in world.head.job.last] == ["p-0"]
    await world.look()
    assert world.cloud.size == {"p": 2, "q": 1}
    assert not [call for call in world.cloud.calls if call[0] != "resize"]

    world.cloud.out = {}
    await world.head.fleet.look()
    assert world.head.fleet.problems == []
    assert {node.cloud for node in world.head.agents.nodes(world.head.fleet)} == {"running"}


async def test_a_head_that_has_never_known_a_zone(world: World) -> None:
    """It does not take the members there for gone, nor anybody of another zone for there."""
    job = await world.started()
    world.new_head()
    world.cloud.out = OUT
    world.cloud.size["q"] = 1
    await world.head.fleet.look()
    assert world.head.fleet.names() == {"q-0"}
    assert world.head.fleet.state_of("p-0", 2.0) is None, "who knows whose it is"
    assert world.head.fleet.state_of("p-0", 2.0, "p") is None
    assert world.head.fleet.state_of("q-1", 2.0, "q") == "gone"
    assert world.head.fleet.state_of("q-0", 2.0) == "running"
    await world.turn()
    assert world.head.job is not None
    assert world.head.job.current == job.current, "who knows whether its members are gone"
    world.receive("p-0", job=job.id)
    world.head.disconnect("p-0", world.sends["p-0"])
    world.head.scaler.forget()
    assert "p-0" in world.head.agents.known
    assert world.head.job.current == job.current
    await world.look()
    assert world.cloud.size == {"p": 0, "q": 2}


async def test_what_was_known_of_a_zone_outlasts_an_outage_of_all(world: World) -> None:
    world.cloud.size["p"] = 2
    await world.head.fleet.look()

    async def refuse() -> Any:
        raise CloudError("no way")

    told, world.cloud.nodes = world.cloud.nodes, refuse  # type: ignore[method-assign]
    with pytest.raises(CloudError, match="no way"):
        await world.head.fleet.look()
    assert world.head.fleet.state_of("p-0", 2.0) is None
    world.cloud.nodes, world.cloud.out = told, OUT  # type: ignore[method-assign]
    await world.head.fleet.look()
    assert world.head.fleet.names() == {"p-0", "p-1"}
    assert world.head.fleet.sizes == {"p": 2, "q": 0}


async def test_machines_of_a_zone_that_did_not_answer_go_once_it_does(world: World) -> None:
    await world.head.journal.read_queue()
    world.cloud.size["p"] = 2
    await world.head.fleet.look()
    world.cloud.out = OUT
    await world.look()
    assert world.cloud.calls == []
    world.cloud.out = {}
    await world.look()
    assert world.cloud.size == {"p": 0, "q": 0}


async def test_what_the_cloud_says_about_the_market_is_asked_after_each_look(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Without an answer the last one counts, and the log says so once."""
    fleet = world.head.fleet
    following = asyncio.create_task(fleet.follow_market())

    async def look() -> None:
        await fleet.look()
        for _ in range(5):  # the follower's turns on the loop
            await asyncio.sleep(0)

    await asyncio.sleep(0)
    world.cloud.said = {"p": Advice(obtainability=Said(0.5, 1.0, "test"))}
    await look()
    assert fleet.advice == world.cloud.said
    world.cloud.silent.add("advice")
    await look()
    await look()
    assert fleet.advice == world.cloud.said
    assert [record.message for record in caplog.records] == ["advice: advice: Rate exceeded"]
    following.cancel()


async def test_what_idle_machines_cost_is_kept_while_a_pool_refuses_its_size(tmp_path: Path) -> None:
    """No job wants the machine, and the cloud refuses to end it."""
    world, now = World(tmp_path), 1000.0
    world.clock = lambda: now
    world.new_head()
    world.cloud.size["p"], world.cloud.made["p-0"], world.cloud.refuse = 1, now, {"p"}
    await world.head.journal.read_queue()
    for _ in range(30):
        now += 1.0
        await world.turn()
        await world.look()
    assert ("resize", ("p", 0)) in world.cloud.calls
    found = json.loads(world.store.get(idle_key("c")))
    assert found["node_seconds"] > 10


async def test_a_pool_that_took_its_size_though_the_answer_was_lost_is_not_short(world: World) -> None:
    """Otherwise it would count as short until its next size, and other pools would stand in for each lost machine."""
    resize = world.cloud.resize

    async def lose(pool: str, size: int) -> None:
        await resize(pool, size)
        raise CloudError(f"pool {pool}: Google does not answer")

    world.cloud.resize = lose  # type: ignore[method-assign]
    await world.with_machines(min=1, max=2)
    assert world.cloud.size == {"p": 2, "q": 0}
    assert [pool.supply for pool in world.head.fleet.pools()] == ["open", "open"]


async def test_a_refusal_is_forgotten_once_the_pool_is_asked_for_nothing(world: World) -> None:
    await world.with_machines(min=1, max=2)
    world.cloud.refuse = {"p"}
    with pytest.raises(CloudError):
        await world.head.fleet.scale({"p": 3})
    assert [pool.supply for pool in world.head.fleet.pools()] == ["short", "open"]
    await world.look()  # the job wants two machines, which are there
    assert [pool.supply for pool in world.head.fleet.pools()] == ["open", "open"]
    assert world.cloud.size == {"p": 2, "q": 0}


async def test_a_machine_that_its_group_does_not_count_is_told(world: World) -> None:
    """A person took it out of its group. It is left alone, once it is told; no pool is short because of it."""
    now = world.clock()
    world.clock = lambda: now
    world.new_head()
    world.cloud.loose = {"q-9": "q"}
    await world.look()
    now += LINGER / 2
    await world.look()
    assert (told(world), problems(world)["q"]) == ([], None), "the cloud may still be ending it"
    now += LINGER / 2
    for _ in range(2):
        await world.look()
    said = (
        "1 machine more than the pool's size has run for over 10 min: q-9; a group may have lost a machine that still"
        " costs money: put it back into its group, or end it"
    )
    assert (told(world), problems(world)["q"]) == ([f"pool q: {said}"], said), "told once"
    assert [pool.supply for pool in world.head.fleet.pools()] == ["open", "open"]
    assert world.cloud.calls == []
    world.cloud.lacks = [Problem("q", "stockout", "no machines", 1.0), Problem("q", "quota", "too small", 1.0)]
    await world.look()
    assert problems(world)["q"] == f"no machines; too small; {said}", "nothing hides the others"
    world.cloud.lacks = []
    world.cloud.out = {"q": "machines in z: Google does not answer"}
    await world.look()
    assert "does not answer" in str(problems(world)["q"]), "whether it still runs is not known"
    world.cloud.out, world.cloud.loose = {}, {}
    await world.look()
    assert problems(world)["q"] is None


async def test_operators_read_why_a_pool_does_not_take_its_size(world: World) -> None:
    """Otherwise a job waits for machines, and only the head's log says why none come."""
    world.cloud.refuse = {"p", "q"}
    await world.head.submit(JOB, CODE)
    await world.turn()
    for _ in range(3):
        await world.look()
    assert problems(world) == {"p": "no quota", "q": "no quota"}
    [first] = [each for each in world.head.fleet.problems if each.pool == "p"]
    assert first.kind == "other"
    assert told(world) == ["pool p: no quota", "pool q: no quota"], "once, not at each look"
    world.cloud.refuse = {"p"}
    await world.look()
    assert problems(world) == {"p": "no quota", "q": None}
    assert first in world.head.fleet.problems
    world.cloud.refuse = set()
    await world.look()
    await world.look()
    assert problems(world) == {"p": None, "q": None}


async def test_operators_read_why_machines_are_not_removed(world: World) -> None:
    """They cost money until the cloud deletes them."""

    async def refuse(names: Sequence[str]) -> None:
        raise CloudError(f"pool p: remove {', '.join(names)}: you may not")

    world.cloud.remove = refuse  # type: ignore[method-assign]
    world.cloud.size["p"] = 2
    await world.with_machines(min=1, max=1)
    await world.look()
    assert told(world) == ["machines are not removed: pool p: remove p-1: you may not"]


def problems(world: World) -> dict[str, str | None]:
    return {pool["name"]: pool["problem"] for pool in world.head.status()["pools"]}


def told(world: World) -> list[str]:
    return [event["text"] for event in world.events() if event["kind"] == "cloud"]
