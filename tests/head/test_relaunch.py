"""Continuing a job that has ended or is paused: the real head, and nodes that obey it without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from scripts import queue
from spotrun.errors import SpotrunError, StoreError
from spotrun.head import job_queue
from spotrun.head.journal import Journal
from tests.head.puppets import Puppet, Theatre
from tests.head.world import asked
from tests.helpers import await_for


@pytest.fixture
def stage(tmp_path: Path) -> Theatre:
    return Theatre(tmp_path, machines=1, total=30)


async def refusal(stage: Theatre, job: str) -> str:
    """The message that a relaunch gets. The job's state and the queue stay as they are."""
    before = stage.written(job)
    with pytest.raises(SpotrunError) as caught:
        await stage.head.relaunch(job)
    assert (stage.written(job), stage.queue()) == (before, [])
    return str(caught.value)


async def test_a_job_whose_budget_is_spent_is_refused(stage: Theatre) -> None:
    stage.total = 10**6
    await stage.look()
    job = await stage.queue_job("job", budget=0.02)  # a machine costs $0.001 a second; a stop may take 10 s
    await stage.round(60)
    ended = stage.written(job)
    assert (ended.phase, ended.cost < 0.02) == ("stopped", True)
    assert await refusal(stage, job) == (
        f"job {job} cannot be continued: $0.01 of the budget of $0.02 are spent; the rest pays for saving its state;"
        f" first, `make budget ID={job} TO=` gives it more money"
    )


async def test_the_budget_of_a_job_keeps_a_reserve_for_its_own_devices_only(tmp_path: Path) -> None:
    """A quarter of the machine costs $0.00025 a second. A stop may take 10 s."""
    stage = Theatre(tmp_path, machines=1, devices=4)
    await stage.look()
    job = await stage.queue_job("job", devices=1, budget=0.008)
    await stage.round(100)
    ended = stage.written(job)
    assert (ended.phase, 0.005 < ended.cost < 0.008) == ("stopped", True)
    await job_queue.set_budget(stage.head, job, ended.cost + 0.005)
    await stage.head.relaunch(job)


@pytest.mark.parametrize(
    ("verb", "why", "ends_as"),
    [
        ("stop", "is about to end; `make relaunch ID=job-.*` may continue it after that", "stopped"),
        ("pause", "is paused; `make resume ID=job-.*` continues it", "waiting"),
    ],
)
async def test_a_job_that_is_about_to_stop_is_not_relaunched(stage: Theatre, verb: str, why: str, ends_as: str) -> None:
    """Otherwise steps would be lost, and the job would not go on."""
    stage.total = 10**6
    await stage.look()
    job = await stage.queue_job("job")
    await stage.round(8)
    await command(stage, verb, job)
    step = stage.state(job).progress.step
    assert step > 0
    with pytest.raises(SpotrunError, match=f"job {job} {why}"):
        await stage.head.relaunch(job)
    await stage.round(20)
    ended = stage.written(job)
    assert (ended.phase, [each.kind for each in ended.interruptions]) == (ends_as, [verb])
    assert ended.newest[1] >= step


async def test_a_job_whose_budget_is_spent_is_continued_with_more_money(stage: Theatre) -> None:
    stage.total = 10**6
    await stage.look()
    job = await stage.queue_job("job", budget=0.02)
    await stage.round(60)
    before = stage.written(job)
    with pytest.raises(SpotrunError, match=r"has cost \$0.01 already; give it a larger budget than that"):
        await job_queue.set_budget(stage.head, job, before.cost)
    assert stage.written(job) == before
    assert await job_queue.set_budget(stage.head, job, 0.05) == job
    stage.restart_head()
    await stage.look()
    await stage.head.journal.read_queue()
    await stage.head.relaunch(job)
    await stage.round(15)
    again = stage.state(job)
    assert (again.phase, again.cost_limit) == ("running", 0.05)
    assert again.progress.step > before.newest[1] > 0
    await stage.round(100)
    ended = stage.written(job)
    assert (ended.phase, 0.02 < ended.cost < 0.05) == ("stopped", True)


async def test_a_job_that_has_succeeded_is_refused(stage: Theatre) -> None:
    job = await stage.queue_job("job")
    await stage.round(60)
    assert stage.written(job).phase == "succeeded"
    said = f"job {job} has succeeded: nothing is left to do; `make rerun ID={job}` runs it as a new job"
    assert await refusal(stage, job) == said


async def test_a_job_that_was_stopped_within_its_budget_is_continued(stage: Theatre) -> None:
    await stage.look()
    job = await stage.queue_job("job", budget=1.0)
    await stage.round(15)
    await stage.ask(lambda state, _: state.replace(stopping="enough"), job)
    await stage.round(20)
    assert stage.written(job).phase == "stopped"
    await stage.head.relaunch(job)
    assert stage.written(job).new_workers, "no node's warm-up is waited for"
    await stage.round(60)
    assert stage.written(job).phase == "succeeded"


async def test_a_job_whose_end_does_not_get_into_the_bucket_is_not_waited_for_without_end(
    stage: Theatre, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: object, job: str) -> None:
        raise StoreError(f"{job}: no answer")

    job = await stage.queue_job("job")
    await stage.round(15)
    await stage.ask(lambda state, _: state.replace(stopping="enough"), job)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "dequeue", fail)
        with pytest.raises(StoreError):
            await stage.round(20)
        assert (stage.state(job).phase, stage.queue()) == ("stopped", [job])
        patch.setattr(job_queue, "WRITTEN", 0.05)
        for change in (stage.head.relaunch(job), job_queue.set_budget(stage.head, job, 1e6)):
            with pytest.raises(StoreError, match=f"the end of job {job} is not in the bucket yet; try again"):
                await asyncio.wait_for(change, 60)
    await stage.round(20)
    await stage.head.relaunch(job)
    await stage.round(60)
    assert stage.written(job).phase == "succeeded"


async def command(stage: Theatre, verb: str, job: str) -> None:
    """What an operator's command does, while the head goes on."""
    answer = asyncio.create_task(asked(stage, stage.head, verb, job))
    await await_for(lambda: stage.head.requests._new, what="the request")
    await stage.round()
    await answer


async def stopped_and_relaunched(stage: Theatre, job: str) -> None:
    await command(stage, "stop", job)
    await stage.round(10)
    stage.now += 3600.0
    await stage.head.relaunch(job)


async def paused_and_resumed(stage: Theatre, job: str) -> None:
    await command(stage, "pause", job)
    await stage.round(10)
    stage.now += 3600.0
    await command(stage, "resume", job)


async def held_and_relaunched(stage: Theatre, job: str) -> None:
    queue.hold(stage.store, "c")
    stage.now += 3600.0
    for name in stage.puppets:  # the machines went with the cluster
        stage.cloud.made[name], stage.puppets[name] = stage.now, Puppet(name, 1)
        stage.puppets[name].boot = "another"
    stage.restart_head()
    await stage.round()
    await stage.head.relaunch(job)


@pytest.mark.parametrize("meanwhile", [stopped_and_relaunched, paused_and_resumed, held_and_relaunched])
async def test_a_recovery_is_counted_from_when_the_job_could_go_on(
    stage: Theatre, meanwhile: Callable[[Theatre, str], Awaitable[None]]
) -> None:
    job = await stage.queue_job("job")
    await stage.round(15)
    await meanwhile(stage, job)
    await stage.round(100)
    state = stage.written(job)
    assert state.phase == "succeeded"
    (each,) = state.interruptions
    assert each.seconds is not None
    assert each.seconds > 3600.0
    assert each.recovery is not None
    assert 0.0 < each.recovery < 30.0
    (said,) = [event["text"] for event in await stage.head.journal.events(job) if event["kind"] == "recovered"]
    assert said.startswith(f"after {each.recovery:.1f} s, ")
