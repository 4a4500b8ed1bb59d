"""A job that the head cannot read or plan: it is left as it is, and the others on the same machines go on."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from spotrun.errors import SpotrunError
from spotrun.head.job_queue import TRY_EVERY
from spotrun.spec import ClusterSpec
from spotrun.store import checkpoints_key, job_key
from tests.head.puppets import ROUND, Theatre
from tests.head.world import asked, phases, rewrite

PARKED = int(TRY_EVERY / ROUND) + 2  # rounds after which the head has tried again


def lie(stage: Theatre, job: str) -> None:
    """From now on, the reports about the job have numbers with which no head can plan."""
    for puppet in stage.puppets.values():
        puppet.lies.add(job)


def make_unreadable(stage: Theatre, job: str) -> None:
    """A new head finds a state that it cannot read."""
    rewrite(stage, job_key(job, "state.json"), lambda state: state | {"format": 2})
    stage.restart_head()


def make_unlistable(stage: Theatre, job: str) -> None:
    """The code of some job has written an object with a key that no other object can have."""
    path = odd(stage, job)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    stage.restart_head()


def odd(stage: Theatre, job: str) -> Path:
    return stage.root / checkpoints_key(job) / "g1-\x01"


def trouble(stage: Theatre) -> list[str]:
    """What operators are told about parked jobs."""
    return [event["text"] for event in stage.head.events.seen_from(None) if "is parked" in event["text"]]


@pytest.mark.parametrize("spoil", [lie, make_unreadable, make_unlistable])
async def test_the_others_on_the_machine_of_a_parked_job_go_on(tmp_path: Path, spoil: Any) -> None:
    """One of them ends, one is paused, two come and get the free devices; then the parked job continues."""
    stage = Theatre(tmp_path, machines=1, devices=4, total=60)
    bad, paused, *others = [await stage.queue_job(f"job-{index}", 1, devices=1) for index in range(4)]
    await stage.round(12)
    (node,) = stage.nodes(bad)
    work = stage.puppets[node].work[bad]
    good = stage.store.get(job_key(bad, "state.json"))
    spoil(stage, bad)
    await stage.round(5)
    assert list(stage.head.parked) == [bad]
    await stage.ask(lambda job, now: job.replace(paused="paused by the operator"), paused)
    others += [await stage.queue_job(f"later-{index}", 1, devices=1) for index in range(2)]
    await stage.round(2 * PARKED)
    assert (stage.puppets[node].work[bad] is work, work.generation, work.done) == (True, 1, True), "it trained on"
    stage.restart_head()
    await stage.round(2 * PARKED)
    assert [stage.written(job).phase for job in others] == ["succeeded"] * len(others)
    assert stage.written(paused).newest[1] == stage.written(paused).reached > 0
    assert len(trouble(stage)) == 1, "said once by each head"
    assert stage.head.status()["parked"]["text"] == trouble(stage)[0]
    (row,) = [each for each in await asked(stage, stage.head, "jobs") if each["id"] == bad]
    assert row["phase"] == "parked"
    assert row["reason"] in trouble(stage)[0]
    for puppet in stage.puppets.values():
        puppet.lies.clear()
    if spoil is make_unreadable:
        stage.store.put(job_key(bad, "state.json"), good)
    odd(stage, bad).unlink(missing_ok=True)
    await stage.ask(lambda job, now: job.replace(paused=""), paused)
    await stage.round(2 * PARKED + 60)
    assert [stage.written(job).phase for job in (bad, paused)] == ["succeeded"] * 2
    assert (stage.written(bad).generation, stage.lost([bad, paused, *others])) == (1, 0)


async def test_a_job_gets_a_machine_for_the_devices_that_a_parked_job_keeps(tmp_path: Path) -> None:
    """A machine with devices of a parked job does not count as one whose devices are all for others."""
    stage = Theatre(tmp_path, machines=3, devices=4)
    bad, *good = [await stage.queue_job(f"job-{index}", 1, devices=1) for index in range(4)]
    await stage.round(12)
    lie(stage, bad)
    await stage.round(5)
    assert (list(stage.head.parked), stage.cloud.size) == ([bad], {"p": 1})
    later = await stage.queue_job("later", 1, devices=1)
    await stage.round(15)
    assert stage.cloud.size == {"p": 2}
    assert [len(stage.nodes(job)) for job in (*good, later)] == [1, 1, 1, 1]


async def test_a_job_asks_another_zone_if_a_parked_job_keeps_the_machine_of_the_first_one(tmp_path: Path) -> None:
    stage = Theatre(tmp_path)
    pools = [{"name": name, "zone": f"local-{name}", "max": 1} for name in ("p", "q")]
    stage.cluster = ClusterSpec.model_validate({"name": "c", "cloud": "local", "pools": pools})
    stage.cloud.size, stage.cloud.price = {"p": 0, "q": 0}, {"p": 3.6, "q": 3.6}
    stage.restart_head()
    bad = await stage.queue_job("bad")
    await stage.round(10)
    assert stage.nodes(bad) == ["p-0"]
    lie(stage, bad)
    await stage.round(5)
    await stage.queue_job("good")
    await stage.round(5)
    assert (list(stage.head.parked), stage.cloud.size) == ([bad], {"p": 1, "q": 1})


async def test_an_urgent_job_does_not_get_the_machine_of_a_parked_job(tmp_path: Path) -> None:
    stage = Theatre(tmp_path, machines=2, total=10**6)
    bad, good = await stage.queue_job("bad", 1), await stage.queue_job("good", 1)
    await stage.round(10)
    (kept,), (other,) = stage.nodes(bad), stage.nodes(good)
    lie(stage, bad)
    await stage.round(3)
    urgent = await stage.queue_job("urgent", 1, priority=5)
    await stage.round(2 * PARKED)
    assert stage.nodes(urgent) == [other]
    assert stage.puppets[kept].work[bad].running
    assert stage.lost([good]) == 0


async def test_an_operator_stops_a_parked_job(tmp_path: Path) -> None:
    stage = Theatre(tmp_path, machines=1, devices=2)
    bad, good = [await stage.queue_job(name, 1, devices=1) for name in ("bad", "good")]
    await stage.round(10)
    lie(stage, bad)
    await stage.round(3)
    with pytest.raises(SpotrunError, match=f"{bad} is parked, with its machines: unexpected error in the head: Overfl"):
        await stage.ask(lambda job, now: job.replace(paused="paused"), bad)
    assert await asked(stage, stage.head, "stop", bad) == {"job": bad}
    await stage.round(5)
    assert stage.written(bad).phase == "stopped"
    assert await phases(stage, stage.head) == [(good, "running"), (bad, "stopped")]
    assert [list(puppet.work) for puppet in stage.puppets.values()] == [[good]]


async def test_a_parked_job_of_a_group_is_stopped_with_it(tmp_path: Path) -> None:
    """It would train on, and cost money, though the operator was told that the group stops."""
    stage = Theatre(tmp_path, machines=1, devices=2)
    bad, good = [await stage.queue_job(name, 1, devices=1, group="search") for name in ("bad", "good")]
    await stage.round(10)
    lie(stage, bad)
    await stage.round(3)
    assert list(stage.head.parked) == [bad]
    stopping = asyncio.create_task(asked(stage, stage.head, "stop", group="search"))
    while not stopping.done():
        await stage.round()
        await asyncio.sleep(0.01)
    assert await stopping == {"group": "search", "jobs": [good, bad]}
    await stage.round(20)
    assert [stage.written(job).phase for job in (bad, good)] == ["stopped", "stopped"]
    assert not any(puppet.work for puppet in stage.puppets.values())


async def test_a_change_of_a_job_that_is_parked_in_the_same_turn_is_refused(tmp_path: Path) -> None:
    stage = Theatre(tmp_path, machines=1)
    job = await stage.queue_job("job")
    await stage.round(10)
    lie(stage, job)
    stage.play()
    with pytest.raises(SpotrunError, match=f"{job} is parked"):
        await stage.ask(lambda state, now: state.replace(paused="paused"), job)
    assert stage.written(job).paused == ""


async def test_a_bucket_that_is_slow_for_one_job_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest of one job is not written for a long time. The other one saves, is moved, and ends."""
    stage = Theatre(tmp_path, machines=2, total=60)
    slow, good = [await stage.queue_job(name, 1, checkpoint_interval=1) for name in ("slow", "good")]
    answers, create = threading.Event(), stage.store.create

    def create_slowly(key: str, data: bytes) -> bool:
        if key.startswith(f"jobs/{slow}/checkpoints/"):
            assert answers.wait(60)
        return create(key, data)

    monkeypatch.setattr(stage.store, "create", create_slowly)
    monkeypatch.setattr(stage, "turn", lambda: stage.head._turn(stage.now))  # it awaits no manifest
    for _ in range(150):
        await stage.round()
        await asyncio.gather(*(task for job, task in stage.head.completions.tasks.items() if job == good))
    assert stage.written(good).phase == "succeeded"
    assert stage.written(good).newest[1] == 60
    assert (stage.written(slow).reached, stage.written(slow).checkpoints) == (60, ())
    answers.set()
    while tasks := stage.head.completions.tasks:
        await asyncio.gather(*tasks.values())
        await stage.round()
    await stage.round(5)
    assert (stage.written(slow).phase, stage.written(slow).newest[1]) == ("succeeded", 60)


async def test_a_bucket_that_is_slow_for_the_progress_of_one_job_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the other job is moved for an urgent one, and all of them end. Then the newest progress is written."""
    stage = Theatre(tmp_path, machines=2, total=60)
    slow, good = [await stage.queue_job(name, 1) for name in ("slow", "good")]
    await stage.round(10)
    before = stage.written(slow).progress.step
    answers, put = threading.Event(), stage.store.replace

    def replace_slowly(key: str, data: bytes, version: Any) -> Any:
        if key == job_key(slow, "state.json") and not answers.is_set():
            assert answers.wait(60)
        return put(key, data, version)

    monkeypatch.setattr(stage.store, "replace", replace_slowly)
    monkeypatch.setattr(stage, "turn", lambda: stage.head._turn(stage.now))  # it awaits no write of progress
    await stage.round(10)
    urgent = await stage.queue_job("urgent", 1, priority=5)
    stage.total = 35
    await stage.round(10)
    assert (stage.nodes(good), len(stage.nodes(urgent))) == ([], 1)
    assert (stage.written(slow).progress.step, list(stage.head.progress_writes.tasks)) == (before, [slow])
    assert stage.state(slow).progress.step > before
    answers.set()
    await stage.round(100)
    assert [stage.written(job).phase for job in (slow, good, urgent)] == ["succeeded"] * 3
    assert stage.lost([slow, good, urgent]) == 0


async def test_an_ended_job_that_cannot_be_read_is_listed(tmp_path: Path) -> None:
    """A later version has written its state. Its machines have gone, so it is not parked."""
    stage = Theatre(tmp_path, machines=1, total=10)
    job = await stage.queue_job("job", 1)
    await stage.round(40)
    assert stage.written(job).phase == "succeeded"
    rewrite(stage, job_key(job, "state.json"), lambda state: state | {"format": 2})
    stage.restart_head()
    await stage.round(2)
    (row,) = await asked(stage, stage.head, "jobs")
    assert (row["id"], row["phase"], list(stage.head.parked)) == (job, "unreadable", [])
    assert "this version of spotrun reads format 1" in row["reason"]
    with pytest.raises(SpotrunError, match=f"no job has run since this head began; name one of these: {job}"):
        await asked(stage, stage.head, "relaunch")
    rewrite(stage, job_key(job, "state.json"), lambda state: state | {"cluster": "another"})
    assert await asked(stage, stage.head, "jobs") == []
