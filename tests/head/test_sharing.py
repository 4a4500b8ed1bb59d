"""Several jobs on one cluster: the real head, and nodes that obey it without processes."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from spotrun.errors import SpotrunError
from spotrun.head.job_state import Stop, apply
from tests.head.puppets import ROUND, Theatre


async def test_two_jobs_train_side_by_side(tmp_path: Path) -> None:
    stage = Theatre(tmp_path, machines=3, total=40)
    first, second = await stage.queue_job("one", 1), await stage.queue_job("two", 2)
    await stage.round(8)
    assert stage.cloud.size == {"p": 3}, "both jobs ask for machines"
    assert len(stage.nodes(first)) == 1
    assert len(stage.nodes(second)) == 2
    assert not set(stage.nodes(first)) & set(stage.nodes(second))
    await stage.round(60)
    assert [stage.written(job).phase for job in (first, second)] == ["succeeded", "succeeded"]
    await stage.round(60)
    assert stage.cloud.size == {"p": 0}


async def test_no_machine_runs_that_no_job_can_use(tmp_path: Path) -> None:
    stage = Theatre(tmp_path, machines=3, total=40)
    jobs = [await stage.queue_job("one", 2), await stage.queue_job("two", 2)]
    for _ in range(150):
        await stage.round()
        assert stage.cloud.size["p"] <= 2
    assert [stage.written(job).phase for job in jobs] == ["succeeded", "succeeded"]


async def test_a_job_gets_the_spare_of_a_more_important_one(tmp_path: Path) -> None:
    """Otherwise it would wait for as long as the other job trains."""
    stage = Theatre(tmp_path, machines=3)
    first = await stage.queue_job("first", {"min": 1, "max": 1, "spares": 1}, priority=1)
    await stage.round(10)
    second = await stage.queue_job("second", 2)
    await stage.round(20)
    assert [len(stage.nodes(job)) for job in (first, second)] == [1, 2]
    assert stage.lost([first, second]) == 0


async def test_an_urgent_job_takes_machines_and_gives_them_back(tmp_path: Path) -> None:
    stage = Theatre(tmp_path, machines=3, total=120)
    long = await stage.queue_job("long", {"min": 1, "max": 3})
    await stage.round(20)
    assert len(stage.nodes(long)) == 3
    urgent = await stage.queue_job("urgent", 2, priority=5)
    await stage.round(12)
    assert (len(stage.nodes(long)), len(stage.nodes(urgent))) == (1, 2)
    assert stage.state(long).interruptions[-1].kind == "move"
    assert stage.lost([long]) == 0
    await stage.round(200)
    assert stage.written(urgent).phase == "succeeded"
    assert stage.written(long).phase == "succeeded"
    assert stage.lost([long, urgent]) == 0


async def test_a_job_that_gets_no_machine_waits_with_its_state_in_the_bucket(tmp_path: Path) -> None:
    stage = Theatre(tmp_path, machines=2, total=60)
    low = await stage.queue_job("low", 2)
    await stage.round(15)
    step = stage.state(low).reached
    assert step > 3
    high = await stage.queue_job("high", 2, priority=1)
    await stage.round(15)
    waiting = stage.state(low)
    assert waiting.current is None
    assert waiting.newest[1] >= step, "its state is in the bucket"
    assert len(stage.nodes(high)) == 2
    row = next(each for each in stage.head.status()["jobs"] if each["id"] == low)
    assert "behind" in row["reason"]
    assert high in row["reason"]
    await stage.round(300)
    assert [stage.written(job).phase for job in (low, high)] == ["succeeded", "succeeded"]
    assert stage.lost([low, high]) == 0


async def test_a_paused_job_gives_its_machines_away_and_continues(tmp_path: Path) -> None:
    stage = Theatre(tmp_path, machines=2, total=100)
    first, second = await stage.queue_job("one", 2), await stage.queue_job("two", 2)
    await stage.round(12)
    assert (len(stage.nodes(first)), stage.nodes(second)) == (2, [])
    await stage.ask(lambda job, now: job.replace(paused="paused by the operator"), first)
    await stage.round(12)
    assert (stage.nodes(first), len(stage.nodes(second))) == ([], 2)
    row = next(each for each in stage.head.status()["jobs"] if each["id"] == first)
    assert (row["phase"], row["reason"]) == ("paused", "paused by the operator")
    stage.restart_head()
    await stage.round(40)
    assert stage.nodes(first) == []
    await stage.ask(lambda job, now: job.replace(paused=""), first)
    await stage.round(400)
    assert [stage.written(job).phase for job in (first, second)] == ["succeeded", "succeeded"]
    assert stage.lost([first, second]) == 0


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "paused"])
async def test_the_only_job_keeps_its_machines_until_its_state_is_in_the_bucket(tmp_path: Path, stopped: bool) -> None:
    stage = Theatre(tmp_path, machines=1)
    job = await stage.queue_job("one")
    await stage.round(10)
    change = Stop("enough")
    await stage.ask(lambda job, now: apply(job, change, now) if stopped else job.replace(paused="paused"), job)
    await stage.round(12)
    state = stage.state(job)
    assert state.newest[1] == state.reached > 0
    assert state.reason == ("enough" if stopped else "")
    await stage.round(40)
    assert stage.cloud.size == {"p": 0}


async def test_a_job_that_has_not_begun_is_stopped(tmp_path: Path) -> None:
    stage = Theatre(tmp_path, machines=1)
    first, second = await stage.queue_job("one"), await stage.queue_job("two")
    await stage.round(10)
    with pytest.raises(SpotrunError, match="2 jobs have not ended"):
        await stage.ask(lambda job, now: apply(job, Stop("enough"), now), None)  # type: ignore[arg-type]
    await stage.ask(lambda job, now: apply(job, Stop("enough"), now), second)
    await stage.round(3)
    assert stage.written(second).phase == "stopped"
    assert len(stage.nodes(first)) == 1


async def test_jobs_share_machines_by_their_devices(tmp_path: Path) -> None:
    """Ten jobs of one device on two machines of four; one machine goes; each job ends."""
    stage = Theatre(tmp_path, machines=2, devices=4, total=30)
    jobs = [await stage.queue_job(f"trial-{index}", 1, devices=1) for index in range(10)]
    await stage.round(12)
    held = [(m.node, m.devices) for job in jobs for m in stage.state(job).members]
    assert len(held) == len(set(held)) == 8
    assert all(len(devices) == 1 for _, devices in held)
    stage.kill("p-1")
    await stage.round(400)
    assert [stage.written(job).phase for job in jobs] == ["succeeded"] * 10


async def test_a_job_gets_a_machine_if_others_leave_it_only_parts_of_machines(tmp_path: Path) -> None:
    """Half of each of two machines is free. The other halves could be one machine, but no job moves for that."""
    stage = Theatre(tmp_path, machines=3, devices=4)
    jobs = [await stage.queue_job(f"half-{index}", 1, devices=2) for index in range(3)]
    await stage.round(8)
    await stage.ask(lambda job, now: apply(job, Stop("enough"), now), jobs[0])
    await stage.round(60)
    assert sorted(stage.nodes(job) for job in jobs[1:]) == [["p-0"], ["p-1"]]
    large = await stage.queue_job("large", 1, devices=4)
    await stage.round(12)
    assert stage.nodes(large) == ["p-2"]


async def test_a_node_on_which_a_job_cannot_be_set_up_is_left_to_others(tmp_path: Path) -> None:
    stage = Theatre(tmp_path, machines=2, total=200)
    job = await stage.queue_job("one", 1)
    await stage.round(8)
    (bad,) = stage.nodes(job)
    stage.puppets[bad].misfits.add(job)
    other = await stage.queue_job("two", 1)
    await stage.round(25)
    assert [*stage.nodes(job), *stage.nodes(other)] == [name for name in ("p-0", "p-1") if name != bad] + [bad]
    assert stage.state(job).restarts == 0


@pytest.mark.parametrize("eager", [False, True], ids=["turns about all jobs", "turns about some jobs"])
async def test_what_all_pay_is_what_the_machines_cost(tmp_path: Path, eager: bool) -> None:
    """Two one-device jobs on a machine of four, then a job alone; the rest is the cluster's own."""
    stage = Theatre(tmp_path, machines=2, devices=4, total=60, eager=eager)
    jobs = [await stage.queue_job(f"trial-{index}", 1, devices=1) for index in range(2)]
    bill = 0.0
    for turn in range(150):
        if turn == 40:
            jobs.append(await stage.queue_job("alone", 1))
        bill += stage.cloud.size["p"] * ROUND * 3.6 / 3600  # until the next turn counts it
        await stage.round()
    paid = [stage.state(job).cost for job in jobs]
    idle = stage.head.status()["idle_cost"]
    assert [stage.written(job).phase for job in jobs] == ["succeeded"] * 3
    assert all(paid)
    assert idle > 0
    assert sum(paid) + idle == pytest.approx(bill, rel=0.02)


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_each_job_ends_and_moves_lose_nothing(tmp_path: Path, seed: int) -> None:
    """Jobs of any size and priority come; machines and heads die; jobs are paused, resumed, and change priority."""
    dice = random.Random(seed)
    stage = Theatre(tmp_path, machines=4, devices=2, total=40, eager=seed % 2 > 0)
    jobs: list[str] = []
    for turn in range(700):
        if turn % 20 == 0 and len(jobs) < 8:
            least = dice.randint(1, 3)
            more = {"devices": 1} if dice.random() < 0.5 else {}
            nodes = {"min": least, "max": dice.randint(least, 4), "spares": dice.randint(0, 1)}
            jobs.append(await stage.queue_job(f"job-{len(jobs)}", nodes, priority=dice.randint(0, 2), **more))
        chance = dice.random() if turn < 400 else 1.0
        unended = [job for job in jobs if job in stage.head.states]
        if chance < 0.02 and stage.puppets:
            stage.kill(dice.choice(sorted(stage.puppets)))
        elif chance < 0.03:
            stage.restart_head()
        elif chance < 0.06 and unended:
            why = dice.choice(["", "paused by the operator"])
            await maybe(stage, dice.choice(unended), paused=why)
        elif chance < 0.09 and unended:
            rank = dice.randint(0, 2)
            await maybe(stage, dice.choice(unended), priority=rank)
        if turn == 400:
            for job in unended:
                await maybe(stage, job, paused="")
        await stage.round()
        if turn > 400 and not stage.queue():
            break
    assert [stage.written(job).phase for job in jobs] == ["succeeded"] * len(jobs)
    for job in jobs:
        for each in stage.written(job).interruptions:
            if set(each.kind.split("+")) <= {"move", "pause", "grow", "preempt"}:
                assert each.steps_lost == 0, (job, each)


async def maybe(stage: Theatre, job: str, **changes: object) -> None:
    """Change a job, unless it has ended meanwhile."""
    with contextlib.suppress(SpotrunError):
        await stage.ask(lambda state, now: state.replace(**changes), job)
