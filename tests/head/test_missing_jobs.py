"""Jobs of which the state and the queue differ: a head was killed between two writes, or somebody deleted an object."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scripts import queue
from scripts.control import Unfinished
from spotrun.head.journal import Journal
from spotrun.head.lease import claim_epoch
from spotrun.store import Store, job_key, queue_key
from tests.head.world import CODE, JOB, World, asked, phases


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def missing(world: World) -> str:
    """A stopped job; the head that relaunched it was killed after it had written the job's state."""
    job = await world.head.submit(JOB, CODE)
    await asked(world, world.head, "stop", job)
    state = await world.head.journal.read(job)
    await Journal(world.store, "c").replace(state.model_copy(update={"phase": "queued", "ended": None}))
    world.new_head()
    await world.turn()
    assert world.queue() == []
    assert await phases(world, world.head) == [(job, "queued")]
    return job


async def test_a_job_that_is_not_in_the_queue_can_be_relaunched(world: World) -> None:
    job = await missing(world)
    await asyncio.wait_for(world.head.relaunch(job), 60)
    assert world.queue() == [job]
    await world.turn()
    assert world.head.job is not None
    assert world.head.job.id == job


async def test_a_job_that_is_not_in_the_queue_can_be_stopped(world: World) -> None:
    job = await missing(world)
    assert await asyncio.wait_for(asked(world, world.head, "stop", job), 60) == {"job": job}
    assert await phases(world, world.head) == [(job, "stopped")]


async def test_two_relaunches_at_once_queue_the_job_once(world: World) -> None:
    job = await world.head.submit(JOB, CODE)
    await asked(world, world.head, "stop", job)
    found = await asyncio.gather(*(world.head.journal.enqueue(job) for _ in range(2)))
    assert (found, world.queue()) == ([None, None], [job])


async def test_a_job_without_a_state_hides_no_other_and_can_be_taken_out(world: World) -> None:
    first, second = [await world.head.submit(JOB, CODE) for _ in range(2)]
    world.store.delete([job_key(second, "state.json")])
    world.new_head()
    assert await phases(world, world.head) == [
        (first, "queued"),
        (second, "gone"),
    ]
    assert await asked(world, world.head, "stop", second) == {"job": second}
    assert world.queue() == [first]


def test_a_state_that_is_nested_too_deeply_counts_as_one_that_may_run(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.put(queue_key("c"), b'["toy-20260101-000000"]')
    store.put(job_key("toy-20260101-000000", "state.json"), b"[" * 100_000)
    assert queue.unfinished(store, "c", "make down FORCE=1") == [Unfinished("toy-20260101-000000")]


async def test_a_queue_that_was_deleted_is_rebuilt(world: World) -> None:
    """A rule of the bucket may delete what was not written for long. The nodes would end the job that trains."""
    claim_epoch(world.store, "c")
    running = await world.started()
    waiting, stopped = [await world.head.submit(JOB, CODE) for _ in range(2)]
    await asked(world, world.head, "stop", stopped)
    world.store.delete([queue_key("c")])
    claim_epoch(world.store, "c")
    world.new_head(2)
    await world.turn()
    assert world.queue() == [running.id, waiting]
    assert set(world.head.states) == {running.id, waiting}


async def test_the_first_head_writes_a_queue_and_reads_no_jobs(world: World) -> None:
    """Other clusters may have thousands of jobs in the same bucket. From then on, a missing queue was deleted."""
    world.store.put(job_key("toy-20260101-000000", "state.json"), b"{")
    claim_epoch(world.store, "c")
    await world.turn()
    assert (world.queue(), world.store.exists(queue_key("c"))) == ([], True)
