"""Jobs that wait for others: the real head, and nodes that obey it without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotrun.errors import SpecError, SpotrunError
from spotrun.folders import FoldersRef, Input
from spotrun.head.allocation.demand import wish
from spotrun.head.job_state import JobState, Stop, apply
from spotrun.head.timeouts import TIMEOUTS
from spotrun.store import job_key
from tests.head.puppets import Puppet, Theatre


def stop(job: JobState, now: float) -> JobState:
    return apply(job, Stop("stopped by the operator"), now)


def reason(stage: Theatre, job: str) -> str:
    found = next(each["reason"] for each in stage.head.status()["jobs"] if each["id"] == job)
    assert isinstance(found, str)
    return found


@pytest.fixture
def stage(tmp_path: Path) -> Theatre:
    return Theatre(tmp_path, machines=3, total=30)


async def test_a_job_waits_until_the_jobs_before_it_have_succeeded(stage: Theatre) -> None:
    first, second = await stage.queue_job("first"), await stage.queue_job("second")
    last = await stage.queue_job("last", after=["first", second])
    assert stage.state(last).after == (first, second)
    await stage.round(10)
    assert stage.nodes(last) == []
    assert stage.cloud.size == {"p": 2}, "nothing is asked of the cloud for a job that waits for others"
    assert reason(stage, last) == f"waits for {first} to succeed and for {second} to succeed"
    await stage.round(100)
    assert [stage.written(job).phase for job in (first, second, last)] == ["succeeded"] * 3
    started, ended = stage.written(last).started, stage.written(second).ended
    assert started is not None
    assert ended is not None
    assert started >= ended
    assert any(event["text"] == "waits for no job any more" for event in await stage.head.journal.events(last))


@pytest.mark.parametrize(
    ("on", "phase", "why"),
    [
        ("success", "stopped", "which this job comes after, has been stopped: stopped by the operator"),
        ("end", "succeeded", ""),
    ],
)
async def test_a_job_after_one_that_was_stopped(stage: Theatre, on: str, phase: str, why: str) -> None:
    first = await stage.queue_job("first")
    last = await stage.queue_job("last", after=["first"], on=on)
    await stage.round(10)
    assert reason(stage, last) == f"waits for {first} to {'end' if on == 'end' else 'succeed'}"
    await stage.ask(stop, first)
    await stage.round(100)
    assert stage.written(first).phase == "stopped"
    assert (stage.written(last).phase, stage.written(last).reason) == (phase, why and f"{first}, {why}")


async def test_the_end_of_one_job_ends_all_that_come_after_it(stage: Theatre) -> None:
    first = await stage.queue_job("first")
    second = await stage.queue_job("second", after=["first"])
    third = await stage.queue_job("third", after=["second"])
    await stage.round(10)
    await stage.ask(stop, first)
    await stage.round(30)
    assert [stage.written(job).phase for job in (first, second, third)] == ["stopped"] * 3
    assert stage.written(third).reason.startswith(f"{second}, which this job comes after, has been stopped: {first}, ")


async def test_a_new_head_knows_what_a_job_waits_for(stage: Theatre) -> None:
    first = await stage.queue_job("first")
    last = await stage.queue_job("last", after=["first"])
    await stage.round(10)
    stage.restart_head()
    await stage.round(3)
    assert reason(stage, last) == f"waits for {first} to succeed"
    await stage.round(100)
    assert [stage.written(job).phase for job in (first, last)] == ["succeeded"] * 2


async def test_a_job_that_ended_long_ago_is_read_once(stage: Theatre, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await stage.queue_job("first")
    await stage.round(60)
    assert stage.written(first).phase == "succeeded"
    stage.restart_head()
    other = await stage.queue_job("other")
    last = await stage.queue_job("last", after=[first, other])
    read: list[str] = []
    find = stage.store.find

    def reading(key: str, *more: Any) -> bytes | None:
        read.append(key)
        return find(key, *more)

    monkeypatch.setattr(stage.store, "find", reading)
    await stage.round(10)
    assert read.count(job_key(first, "state.json")) == 1
    assert stage.state(last).after == (other,)
    await stage.round(100)
    assert stage.written(last).phase == "succeeded"


async def test_a_relaunched_job_is_waited_for_again(stage: Theatre) -> None:
    """It was stopped, so those after it were stopped too. Both are relaunched."""
    first, other = await stage.queue_job("first"), await stage.queue_job("other")
    last = await stage.queue_job("last", after=["first", "other"])
    await stage.ask(stop, first)
    await stage.round(10)
    assert stage.written(last).phase == "stopped"
    await stage.head.relaunch(first)
    await stage.head.relaunch(last)
    await stage.round(2)
    assert first in reason(stage, last)
    await stage.ask(lambda job, now: job.replace(paused="paused"), other)
    await stage.round(60)
    assert stage.written(first).phase == "succeeded"
    assert stage.state(last).after == (other,)
    assert reason(stage, last) == f"waits for {other} to succeed"
    await stage.ask(lambda job, now: job.replace(paused=""), other)
    await stage.round(200)
    assert [stage.written(job).phase for job in (first, other, last)] == ["succeeded"] * 3


async def test_a_relaunched_job_stops_again_if_the_one_before_it_still_has_not_succeeded(stage: Theatre) -> None:
    first = await stage.queue_job("first")
    last = await stage.queue_job("last", after=["first"])
    await stage.ask(stop, first)
    await stage.round(10)
    await stage.head.relaunch(last)
    await stage.round(10)
    assert stage.written(last).phase == "stopped"
    assert stage.written(last).generation == 0


async def test_a_job_whose_predecessor_was_deleted_or_cannot_be_read(stage: Theatre) -> None:
    first, second = await stage.queue_job("first"), await stage.queue_job("second")
    await stage.round(60)
    gone, unread = await stage.queue_job("gone", after=["first"]), await stage.queue_job("unread", after=["second"])
    stage.store.delete([job_key(first, "state.json")])
    stage.store.put(job_key(second, "state.json"), b"{")
    await stage.round(10)
    assert stage.written(gone).reason == f"{first}, which this job comes after, has been deleted"
    assert reason(stage, unread).startswith(f"waits for {second} to succeed (")
    assert "is not readable" in reason(stage, unread)


async def test_a_name_means_the_newest_job_of_this_cluster(stage: Theatre) -> None:
    await stage.queue_job("data")
    stage.now += 5
    newer = await stage.queue_job("data")
    await stage.queue_job("data-big")
    last = await stage.queue_job("last", after=["data"])
    assert stage.state(last).after == (newer,)
    other = stage.written(newer).replace(id="data-20300101-000000", cluster="another")
    await stage.head.journal.replace(other)
    last = await stage.queue_job("last", after=["data"])
    assert stage.state(last).after == (newer,)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"after": ["prepar"]}, "after: 'prepar': cluster c has no job of that name or id; did you mean prepare?"),
        ({"after": ["zzzzz"]}, "after: 'zzzzz': cluster c has no job of that name or id"),
    ],
    ids=["a name with a typing error", "a name like no other"],
)
async def test_a_job_after_one_that_does_not_exist_is_refused(
    stage: Theatre, keys: dict[str, Any], message: str
) -> None:
    await stage.queue_job("prepare")
    with pytest.raises(SpecError) as caught:
        await stage.queue_job("last", **keys)
    assert str(caught.value) == message
    assert len(stage.queue()) == 1


async def test_a_job_that_waits_for_others_is_stopped_and_is_not_restarted(stage: Theatre) -> None:
    await stage.queue_job("first")
    last = await stage.queue_job("last", after=["first"])
    await stage.round(5)
    with pytest.raises(SpotrunError, match="does not train now; it continues by itself"):
        await stage.head.relaunch(last)
    await stage.ask(stop, last)
    await stage.round(5)
    assert (stage.written(last).phase, stage.written(last).reason) == ("stopped", "stopped by the operator")


async def test_a_job_gets_the_folders_that_another_one_keeps(stage: Theatre) -> None:
    first = await stage.queue_job("first", nodes=2, keep=["out/data"])
    last = await stage.queue_job("last", inputs={"here": "first/out/data"})
    assert (stage.state(last).after, stage.state(last).spec.inputs) == ((first,), {"here": f"{first}/out/data"})
    await stage.round(150)
    assert [stage.written(job).phase for job in (first, last)] == ["succeeded"] * 2
    ref = FoldersRef(generation=1, sha256=first)
    assert stage.written(first).folders == ref
    assert stage.written(last).inputs == (Input(name="here", job=first, folder="out/data", ref=ref),)


async def finishing(stage: Theatre) -> tuple[str, str]:
    """A job whose script has ended, and its node. The folders to keep cannot be uploaded."""
    job = await stage.queue_job("job", keep=["out"])
    await stage.round(10)
    (node,) = stage.nodes(job)
    stage.puppets[node].work[job].trouble = "the bucket refuses"
    await stage.round(60)
    return job, node


async def test_a_job_does_not_end_before_its_folders_are_in_the_bucket(stage: Theatre) -> None:
    job, node = await finishing(stage)
    assert stage.state(job).phase == "finishing"
    assert stage.state(job).newest[1] == 30
    stage.restart_head()
    await stage.round(20)
    assert stage.state(job).phase == "finishing"
    stage.puppets[node].work[job].trouble = ""
    await stage.round(5)
    assert stage.written(job).phase == "succeeded"


async def test_the_machine_that_has_the_folders_is_kept_while_another_job_trains(stage: Theatre) -> None:
    job, node = await finishing(stage)
    other = await stage.queue_job("other")
    await stage.round(20)
    (another,) = stage.nodes(other)
    assert stage.state(job).phase == "finishing"
    view = stage.head.fleet_view(stage.now)
    assert wish(view, stage.cluster, stage.head.allocator.assignment.expected, {}).keep == {node, another}


async def test_a_job_whose_folder_is_not_there_fails(stage: Theatre) -> None:
    job = await stage.queue_job("job", keep=["out"])
    await stage.round(10)
    stage.puppets[stage.nodes(job)[0]].work[job].problem = "keep: out: does not exist when the script has ended"
    await stage.round(60)
    assert (stage.written(job).phase, stage.written(job).reason) == (
        "failed",
        "keep: out: does not exist when the script has ended",
    )


async def test_folders_that_never_get_into_the_bucket_fail_the_job(stage: Theatre) -> None:
    job, node = await finishing(stage)
    stage.now += TIMEOUTS.save
    stage.play()
    await stage.round(5)
    assert stage.written(job).reason == f"the folders of keep were not uploaded by {node} in time (the bucket refuses)"


async def test_a_machine_that_is_lost_with_the_folders_makes_the_script_end_once_more(stage: Theatre) -> None:
    job, node = await finishing(stage)
    stage.cloud.made[node] = stage.now
    stage.puppets[node] = Puppet(node, 1)
    stage.puppets[node].boot = "another"
    await stage.round(60)
    assert stage.written(job).phase == "succeeded"
    assert stage.written(job).folders == FoldersRef(generation=2, sha256=job)
    assert any("had the folders to keep" in event["text"] for event in await stage.head.journal.events(job))


async def test_a_folder_that_the_other_job_does_not_keep_is_refused(stage: Theatre) -> None:
    first = await stage.queue_job("first", keep=["out"])
    with pytest.raises(SpecError) as caught:
        await stage.queue_job("last", inputs={"here": "first/in"})
    assert str(caught.value) == f"inputs.here: first/in: {first} does not keep that folder; it keeps out"
