"""A job's code runs on nodes, so a node's report may say anything. It costs no other job, and not the head."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from spotrun.head.completions import manifests
from spotrun.head.job_state import Start, apply, saved
from spotrun.head.server import agent_server
from spotrun.store import checkpoint_key
from spotrun.wire import Failure, JobReport, Manifest, Part, Report, StateRef
from tests.head.puppets import Theatre
from tests.head.views import NOW, job
from tests.head.world import World

SECRET = {"env": {"TOKEN": "of-another-job"}}


def tell(stage: Theatre, node: str, *lies: JobReport) -> None:
    """The node reports what it does, and lies about other jobs."""
    puppet = stage.puppets[node]
    report = puppet.report(stage.now)
    stage.head.receive(report.replace(jobs=(*report.jobs, *lies)), puppet.send)


async def two_jobs(stage: Theatre, **victim: Any) -> tuple[str, str, str]:
    """A job that trains, and has two checkpoints; another job; and the node of the other job."""
    jobs = [await stage.queue_job("victim", 1, **victim), await stage.queue_job("other", 1)]
    await stage.round(10)
    for step in (5, 6):
        await save(stage, jobs[0], step)
    return jobs[0], jobs[1], stage.nodes(jobs[1])[0]


async def save(stage: Theatre, job: str, step: int) -> None:
    """The job's own node puts a checkpoint into the bucket."""
    (node,) = stage.nodes(job)
    stage.puppets[node].work[job].parts = {step: checkpoint(1, step)}
    await stage.round(3)
    assert stage.state(job).checkpoints[0].step == step


def checkpoint(generation: int, step: int) -> Part:
    return Part(step=step, generation=generation, index=0, parts=1, files=(), whole="x")


async def test_it_neither_ends_a_job_nor_removes_its_checkpoints(tmp_path: Path) -> None:
    stage = Theatre(tmp_path, machines=2)
    victim, _, stranger = await two_jobs(stage)
    before, last = stage.state(victim), 10**6
    for number in range(1, 4):
        lie = JobReport(job=victim, generation=last + number, parts=(checkpoint(last + number, last + number),))
        for _ in range(3):
            await stage.round(without=[stranger])
            tell(stage, stranger, lie)
    after = stage.state(victim)
    assert (after.generation, after.interruptions) == (before.generation, ())
    assert not any(stage.store.exists(checkpoint_key(victim, last + number)) for number in range(1, 4))
    assert after.checkpoints == before.checkpoints
    assert all(stage.store.exists(checkpoint_key(victim, each.step)) for each in before.checkpoints)
    await save(stage, victim, 7)


async def test_it_is_not_told_about_a_job(tmp_path: Path) -> None:
    stage = Theatre(tmp_path, machines=2)
    victim, other, stranger = await two_jobs(stage, **SECRET)
    newest = StateRef(generation=10**6, step=10**6)
    for _ in range(5):
        await stage.round(without=[stranger])
        tell(stage, stranger, JobReport(job=victim, snapshot=newest, phase="idle"))
    assert {each.bundle.id for order in stage.puppets[stranger].orders for each in order.jobs} == {other}


async def test_it_cannot_say_that_a_job_cannot_be_set_up(tmp_path: Path) -> None:
    """No machine is there for that job yet."""
    stage = Theatre(tmp_path, machines=1)
    other = await stage.queue_job("other", 1)
    await stage.round(10)
    (stranger,) = stage.nodes(other)
    victim = await stage.queue_job("victim", 1)
    failure = Failure(kind="setup", rank=0, at=stage.now, message="boom", repeats=True)
    for _ in range(5):
        await stage.round(without=[stranger])
        tell(stage, stranger, JobReport(job=victim, phase="failed", failure=failure))
    assert stage.state(victim).phase == "queued"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("parts", [{"generation": -1}], id="a generation before the first one"),
        pytest.param("parts", [{"files": [{"name": "g1-x", "size": -1, "xxh3": "0"}]}], id="a file of negative size"),
        pytest.param("workers", [{"total_steps": 10**400}], id="more steps than a job can have"),
    ],
)
async def test_impossible_numbers(tmp_path: Path, key: str, value: list[dict[str, Any]]) -> None:
    """They would get into the job's state or a manifest, and stop this head and all later ones."""
    stage = Theatre(tmp_path, machines=3)
    good, bad = [await stage.queue_job(name, 1) for name in ("good", "bad")]
    await stage.round(10)
    liar = stage.puppets[stage.nodes(bad)[0]]
    liar.work[bad].parts = {5: checkpoint(1, 5)}
    report = json.loads(liar.report(stage.now).model_dump_json())
    report["jobs"][0][key] = [before | lie for before, lie in zip(report["jobs"][0][key], value, strict=True)]
    found = agent_server._report(json.dumps(report))
    if isinstance(found, Report):
        stage.head.receive(found, liar.send)
    nodes = stage.nodes(good)
    await stage.round(5, without=[liar.name])
    later = await stage.queue_job("later", 1)
    await stage.round(10, without=[liar.name])
    assert stage.head.troubles.texts == []
    assert (stage.nodes(good), len(stage.nodes(later))) == (nodes, 1)


def test_a_number_of_parts_that_no_memory_holds() -> None:
    work = JobReport(job="j", parts=(checkpoint(1, 60).replace(parts=10**6),))
    tracemalloc.start()
    try:
        assert manifests(job("a"), [work], NOW) == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_nodes_that_may_hold_a_state() -> None:
    """Those of earlier generations count until there is a newer checkpoint."""
    one = job("a", "b", generation=1)
    two = apply(one, Start(one.members[:1], "a:2"), NOW)
    assert two.involved == {"a", "b"}
    manifest = Manifest(job=two.id, generation=two.generation, step=9, created=NOW, files=())
    assert saved(two, (), manifest, NOW).involved == {"a"}
    old = manifest.replace(generation=1)
    assert saved(two, (), old, NOW).involved == {"a", "b"}


@pytest.mark.parametrize("devices", [10**6, 1e6, 10**30, None, [], "many"], ids=str)
def test_a_report_of_version_1_with_impossible_devices(devices: object) -> None:
    """It is refused, and not expanded first: a number of nine digits would use up the head's memory."""
    report = {"node": "a", "boot": "b", "pool": "p", "zone": "z", "address": "127.0.0.1", "job": "j-1"}
    text = json.dumps({**report, "phase": "running", "devices": devices})
    peaks = []
    for _ in range(5):  # a thread that another test has left may use memory, but not each time
        tracemalloc.start()
        try:
            assert isinstance(agent_server._report(text), str)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert min(peaks) < 1 << 20


def test_what_a_node_says_takes_little_memory(tmp_path: Path) -> None:
    """Reports of 100 kB each, and about other jobs each time."""
    world = World(tmp_path)
    tracemalloc.start()
    try:
        for number in range(1000):
            failure = {"kind": "setup", "rank": 0, "at": 1.0, "message": ""}
            job = {"job": f"{number}{'j' * 50_000}", "phase": "ready", "failure": failure}
            world.receive("a", phase="unfit", unfit=[f"{'x' * number}{'y' * 50_000}"], jobs=[job])
        assert tracemalloc.get_traced_memory()[1] < 80 << 20
    finally:
        tracemalloc.stop()
