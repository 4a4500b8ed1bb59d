"""Which jobs a turn of the head plans: all of them, or only those that have news."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotrun.head.news import News
from tests.head.puppets import Theatre


async def test_a_failure_on_one_node_is_planned_without_the_jobs_of_other_nodes(tmp_path: Path) -> None:
    """Their machine time waits for the next turn that plans them."""
    stage = Theatre(tmp_path, machines=2)
    jobs = [await stage.queue_job(name) for name in ("one", "two")]
    await stage.round(8)
    first, second = (stage.state(job) for job in jobs)
    await stage.turn()
    counted = {job: stage.state(job).counted_at for job in jobs}
    stage.now += 1.0
    stage.head.news.take()
    stage.fail(jobs[0], stage.nodes(jobs[0])[0])
    stage.report(stage.nodes(jobs[0])[0])
    other = stage.state(jobs[1])
    await stage.head._turn(stage.now, stage.head.news.take())
    assert stage.state(jobs[0]).restarts == first.restarts + 1
    assert stage.state(jobs[0]).counted_at == counted[jobs[0]] + 1.0
    assert stage.state(jobs[1]) is other
    stage.now += 1.0
    await stage.turn()
    last = stage.state(jobs[1])
    assert last.node_seconds - other.node_seconds == pytest.approx(2.0)
    assert last.generation == second.generation


async def test_a_job_that_gets_devices_because_of_another_jobs_node_is_planned(tmp_path: Path) -> None:
    """A machine is put under notice. The job that trains there takes the place of one of lower priority."""
    stage = Theatre(tmp_path, machines=2)
    low, high = await stage.queue_job("low"), await stage.queue_job("high", priority=1)
    await stage.round(8)
    (node,) = stage.nodes(high)
    report = stage.puppets[node].report(stage.now)
    noticed = report.model_validate({**report.model_dump(), "notice": {"kind": "preempt", "deadline": stage.now + 60}})
    stage.head.news.take()
    stage.head.receive(noticed, stage.puppets[node].send)
    await stage.head._turn(stage.now, stage.head.news.take())
    assert stage.state(low).phase == "draining"


async def test_news_of_nodes_and_of_all() -> None:
    news = News()
    assert news.take() is None  # a head that begins
    news.of_nodes("a")
    news.of_nodes("b", "c")
    assert news.changed.is_set()
    assert (news.take(), news.changed.is_set()) == ({"a", "b", "c"}, False)
    news.of_nodes("a")
    news.of_all()
    assert news.take() is None
    news.of_nodes("a")
    assert await news.wait() is None  # a turn about all jobs is due


async def test_a_turn_about_some_jobs_does_not_put_off_the_turn_about_all() -> None:
    news = News()
    news.take()
    news.planned(None, took=0.0, active=True)
    found = []
    while None not in found:
        news.of_nodes("a")
        found.append(await news.wait())
        news.planned(found[-1], took=0.01, active=True)
    assert found[0] == {"a"}
