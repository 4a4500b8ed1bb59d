"""A job's code runs on nodes, so a node's report may say anything. It costs no other job, and not the head."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from spotrun.head.completions import manifests
from spotrun.head.server import agent_server
from spotrun.wire import JobReport, Part, Report
from tests.head.puppets import Theatre
from tests.head.views import NOW, job
from tests.head.world import World


def checkpoint(generation: int, step: int) -> Part:
    return Part(step=step, generation=generation, index=0, parts=1, files=(), whole="x")


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


@pytest.mark.parametrize("devices", [10**6, 1e6, 10**30, None, [], "many"], ids=str)
def test_a_report_of_version_1_with_impossible_devices(devices: object) -> None:
    """It is refused, and not expanded first: a number of nine digits would use up the head's memory."""
    report = {"node": "a", "boot": "b", "pool": "p", "zone": "z", "address": "127.0.0.1", "job": "j-1"}
    text = json.dumps({**report, "phase": "running", "devices": devices})
    tracemalloc.start()
    try:
        assert isinstance(agent_server._report(text), str)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


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
