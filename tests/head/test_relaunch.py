"""Relaunching a job that has ended: the real head, and nodes that obey it without processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotrun.errors import SpotrunError
from tests.head.puppets import Theatre


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
        " set a larger budget in the job file, and submit it as a new job, which begins at step 0: `make train JOB=`"
    )


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
    await stage.round(60)
    assert stage.written(job).phase == "succeeded"
