"""What operators ask of the head about its jobs: list, pause, resume, stop, change priorities."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from spotrun.errors import SpotrunError
from tests.head.world import CODE, JOB, World, asked, stepping


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def told(world: World, verb: str, **body: Any) -> Any:
    """The answer to a request that the head carries out in its next turn."""
    asking = asyncio.create_task(asked(world, world.head, verb, **body))
    async with asyncio.timeout(60):
        while not asking.done():
            await world.turn()
            await asyncio.sleep(0)
    return await asking


async def submitted(world: World, **keys: Any) -> str:
    job = await world.head.submit(JOB | keys, CODE)
    await world.turn()
    return job


async def rows(world: World) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in await asked(world, world.head, "jobs")}


async def test_a_list_of_jobs_has_what_operators_want_to_know(world: World) -> None:
    job = await submitted(world, priority=3, group="search", devices=1)
    (found,) = await asked(world, world.head, "jobs")
    assert found.pop("reason")
    assert found.pop("submitted") > 0
    assert found == {
        "job": job, "id": job, "name": "toy", "group": "search", "priority": 3, "phase": "queued", "nodes": [],
        "min": 2, "max": 2, "step": 0, "total_steps": 0, "eta": None, "cost": None, "kept": None,
        "conditions": [],
    }  # fmt: skip


async def test_the_newest_jobs_that_have_ended_are_listed_after_the_others(world: World) -> None:
    first, second = await submitted(world), await submitted(world)
    assert await told(world, "stop", job=first) == {"job": first}
    await world.turn(2)
    found = await asked(world, world.head, "jobs")
    assert [(row["id"], row["phase"]) for row in found] == [(second, "queued"), (first, "stopped")]
    assert found[1].keys() == found[0].keys()


async def test_a_paused_job_is_resumed(world: World) -> None:
    job = await submitted(world)
    assert await told(world, "pause", job=job) == {"job": job}
    found = (await rows(world))[job]
    assert (found["phase"], found["reason"]) == ("paused", "paused by the operator")
    assert await told(world, "pause", job=job) == {"job": job}, "again"
    assert await told(world, "resume", job=job) == {"job": job}
    assert (await rows(world))[job]["phase"] == "queued"
    with pytest.raises(SpotrunError, match=f"job {job} is not paused"):
        await told(world, "resume", job=job)


async def test_a_pause_outlives_the_head(world: World) -> None:
    job = await submitted(world)
    await told(world, "pause", job=job)
    world.new_head()
    await world.turn()
    assert (await rows(world))[job]["phase"] == "paused"


async def test_a_job_that_is_about_to_end_is_not_paused(world: World) -> None:
    job = await world.started()
    for name in ("a", "b"):
        world.receive(name, job=job.id, phase="running", generation=1, workers=stepping(3))
    await told(world, "stop", job=job.id)
    with pytest.raises(SpotrunError, match="is about to end"):
        await told(world, "pause", job=job.id)


async def test_a_new_priority_counts_at_once_and_outlives_the_head(world: World) -> None:
    job = await submitted(world, priority=1)
    assert await told(world, "priority", job=job, to=-7) == {"job": job}
    assert (await rows(world))[job]["priority"] == -7
    world.new_head()
    await world.turn()
    assert (await rows(world))[job]["priority"] == -7


@pytest.mark.parametrize("wrong", [1001, -1001, "5", 1.5, True, None])
async def test_priorities_that_no_job_can_have(world: World, wrong: object) -> None:
    job = await submitted(world)
    with pytest.raises(SpotrunError, match="is not allowed: give a whole number from -1000 to 1000"):
        await told(world, "priority", job=job, to=wrong)


async def test_a_new_budget_counts_at_once_and_outlives_the_head(world: World) -> None:
    job = await submitted(world)
    await world.head.fleet.look()
    assert await told(world, "budget", job=job, to=250) == {"job": job}
    assert await told(world, "budget", to=120.5) == {"job": job}
    world.new_head()
    await world.turn()
    assert world.head.status(job)["job"]["budget"] == 120.5


async def test_a_budget_needs_prices(world: World) -> None:
    job = await submitted(world)
    with pytest.raises(SpotrunError, match=f"job {job}: budget: 5: cannot be kept: what machines cost is not known"):
        await told(world, "budget", job=job, to=5)


@pytest.mark.parametrize("wrong", [0, -1, "5", True, None, float("nan"), float("inf")])
async def test_budgets_that_no_job_can_have(world: World, wrong: object) -> None:
    job = await submitted(world)
    with pytest.raises(SpotrunError, match="is not allowed: give dollars, a number more than zero"):
        await told(world, "budget", job=job, to=wrong)


async def test_a_name_in_place_of_an_id_is_answered_with_the_ids(world: World) -> None:
    jobs = [await submitted(world) for _ in range(2)]
    with pytest.raises(SpotrunError, match=f"toy is the name of a job; give the job's id: {', '.join(jobs)}"):
        await told(world, "pause", job="toy")
    with pytest.raises(SpotrunError, match="job yot has ended, or is not a job of this cluster; `make jobs` lists the"):
        await told(world, "pause", job="yot")


async def test_a_group_is_stopped_as_one(world: World) -> None:
    jobs = [await submitted(world, group=group) for group in ("search", "search", "other")]
    assert await told(world, "stop", group="search") == {"group": "search", "jobs": jobs[:2]}
    await world.turn(2)
    found = await rows(world)
    assert [found[job]["phase"] for job in jobs] == ["stopped", "stopped", "queued"]
    with pytest.raises(SpotrunError, match="group search has no job that has not ended; `make jobs` lists the groups"):
        await told(world, "stop", group="search")


@pytest.mark.parametrize("verb", ["stop", "pause", "resume", "relaunch"])
async def test_one_of_several_jobs_must_be_named(world: World, verb: str) -> None:
    first, second = await submitted(world), await submitted(world)
    with pytest.raises(SpotrunError, match=f"2 jobs have not ended: {first}, {second}; name one of them"):
        await told(world, verb, job=None)
