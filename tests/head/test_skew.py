"""Versions: head, agents and operators of spotrun may differ by one, while a job runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from scripts import display
from spotrun.errors import SpecError, UnreadableError
from spotrun.head import job_queue
from spotrun.head.boot import until_changed
from spotrun.head.costs.ledger import Ledger
from spotrun.head.head import Head
from spotrun.head.identity import ClusterIdentity
from spotrun.head.job_state import JobState
from spotrun.head.server.agent_server import _report
from spotrun.spec import ClusterSpec, JobSpec, described, digest, load_job
from spotrun.state import checkpoints
from spotrun.store import Store, checkpoint_key, cluster_key, idle_key, job_key, queue_key, replaced_key
from spotrun.wire import (
    FORMAT,
    Bundle,
    Document,
    HeadRecord,
    HostRecord,
    JobOrder,
    JobReport,
    Manifest,
    Order,
    Report,
    UnfitRecord,
    read_queue,
)
from tests.head.world import CODE, JOB, World, asked, phases, rewrite, stepping

NEWER = {"from_tomorrow": {"deep": [1]}, "another": None}


def maps(model: type[BaseModel]) -> set[str]:
    """Keys whose value is a map by names (`metrics`, `env`), and no document of its own."""
    kinds = {name: field.annotation for name, field in model.model_fields.items()}
    found = {name for name, kind in kinds.items() if get_origin(kind) is dict and get_args(kind)[1] is not object}
    return found.union(*(maps(each) for each in model.__subclasses__()))


MAPS = {"env", "labels", "capacity", "inputs"} | maps(Document)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def grown(value: Any) -> Any:
    """A document as a newer version may write it: every object in it has keys that are unknown today."""
    if isinstance(value, dict):
        return {**{key: each if key in MAPS else grown(each) for key, each in value.items()}, **NEWER}
    return [grown(each) for each in value] if isinstance(value, list) else value


def running(world: World, job: JobState, step: int) -> None:
    """Both members train on; each report has unknown keys, as of a newer agent."""
    for name in ("a", "b"):
        work = JobReport(job=job.id, phase="running", generation=1, store=f"{name}:1", workers=stepping(step))
        report = Report(node=name, boot="b", pool="p", zone="z", address="127.0.0.1", jobs=(work,))
        received = _report(json.dumps(grown(report.model_dump(mode="json"))))
        assert isinstance(received, Report), received
        assert received == report
        world.head.receive(received, world.orders.setdefault(name, []).append)


async def test_a_job_runs_on_under_an_older_head(world: World) -> None:
    """State, queue, list of replaced machines and reports have unknown keys: the same generation trains on."""
    job = await world.started()
    running(world, job, 5)
    await world.turn()
    world.cloud.size["p"] = 2
    world.store.put(replaced_key("c"), b'{"description": "x", "machines": []}')
    for key in (job_key(job.id, "state.json"), queue_key("c"), replaced_key("c")):
        rewrite(world, key, grown)
    world.orders.clear()
    world.sends.clear()
    world.new_head()
    await world.turn()
    running(world, job, 9)
    await world.turn()
    await world.look()
    assert world.head.job is not None
    assert (world.head.job.id, world.head.job.generation, world.head.job.reached) == (job.id, 1, 9)
    assert [each.generation.number for order in world.orders["a"] for each in order.jobs if each.generation] == [1]
    assert world.cloud.calls == []
    assert world.queue() == [job.id]


async def test_an_older_head_keeps_the_unknown_keys_of_a_job_file(world: World) -> None:
    """A newer head that takes up the job again reads them, and newer agents read them in their orders."""
    job = await world.started()
    rewrite(world, job_key(job.id, "state.json"), lambda state: state | {"spec": grown(state["spec"])})
    expected = json.loads(world.store.get(job_key(job.id, "state.json")))["spec"]
    assert expected["nodes"]["another"] is None
    world.new_head(2)
    await world.turn()
    running(world, job, 5)
    await world.turn()
    state = json.loads(world.store.get(job_key(job.id, "state.json")))
    assert (state["epoch"], state["spec"]) == (2, expected)
    assert world.orders["a"][-1].jobs[0].bundle.job == expected


async def test_an_older_head_says_which_keys_of_a_state_it_drops(world: World) -> None:
    """Such as a limit that an operator has set with a newer version."""
    job = await world.started()
    rewrite(world, job_key(job.id, "state.json"), lambda state: state | {"limit": 5.0, "another": None})
    for epoch in (2, 3):
        world.new_head(epoch)
        await world.turn()
        said = [each["text"] for each in world.head.events.of(job.id) if "version" in each["text"]]
        assert said == ["this head is of another version, and ignores another, limit"], "once"


async def test_a_newer_head_reads_what_an_older_one_kept(world: World) -> None:
    """Documents of spotrun 0.1 have no format, and its queue is a list."""
    job = await world.started()
    rewrite(world, job_key(job.id, "state.json"), lambda state: {k: v for k, v in state.items() if k != "format"})
    rewrite(world, queue_key("c"), lambda queue: queue["jobs"])
    world.new_head()
    await world.turn()
    assert world.head.job is not None
    assert (world.head.job.id, world.head.job.current) == (job.id, job.current)


async def test_a_head_with_a_new_key_in_job_files_disturbs_no_running_job(world: World) -> None:
    """Agents end the workers of a job whose file has changed. So what they get stays as it was, for later heads too."""
    job = await world.started()
    generation = world.orders["a"][-1].jobs[0].generation
    rewrite(world, job_key(job.id, "state.json"), lambda state: state | {"spec": without_the_newest_key(state["spec"])})
    before = json.loads(world.store.get(job_key(job.id, "state.json")))["spec"]
    assert before["nodes"] == job.spec.nodes.model_dump(mode="json")
    for number in (2, 3):
        world.orders.clear()
        world.sends.clear()
        world.new_head(number)
        await world.turn()
        running(world, job, 5)
        await world.turn()
        found = world.orders["a"][-1].jobs[0]
        assert found.generation == generation
        assert found.bundle.job == before


def without_the_newest_key(spec: dict[str, Any]) -> dict[str, Any]:
    """As a head wrote it before this key existed."""
    assert "keep_on_failure" in spec
    return {key: value for key, value in spec.items() if key != "keep_on_failure"}


def test_an_order_of_a_newer_head_is_read() -> None:
    bundle = Bundle(id="j", code=CODE, job=JobSpec(script="a.py").model_dump(mode="json"))
    order = Order(epoch=3, jobs=(JobOrder(bundle=bundle),))
    read = Order.model_validate_json(json.dumps(grown(order.model_dump(mode="json"))))
    assert read.epoch == 3
    assert JobSpec.kept(read.jobs[0].bundle.job) == JobSpec(script="a.py")


@pytest.mark.parametrize(
    "record",
    [
        HeadRecord(epoch=1, address="a", port=1, fingerprint="f", token="t"),
        HostRecord(node="n", address="a", port=1, keys=("k",)),
        UnfitRecord(node="n", boot="b", pool="p", zone="z", type="t", machine="m", at=1.0, problems=()),
        Manifest(job="j", generation=1, step=2, created=1.0, files=()),
    ],
    ids=lambda record: type(record).__name__,
)
def test_what_is_kept_has_a_format(record: Any) -> None:
    values = record.model_dump(mode="json")
    assert values["format"] == FORMAT
    assert type(record).model_validate(grown(values)) == record
    del values["format"]
    assert type(record).model_validate(values) == record, "as spotrun 0.1 wrote it"
    with pytest.raises(ValueError, match=f"has format 2; this version of spotrun reads format {FORMAT}: update it"):
        type(record).model_validate(values | {"format": 2})


async def test_a_description_with_unknown_keys_is_read(tmp_path: Path) -> None:
    """The head reads it, tells it from others by all of its keys, and ends for a change of a key that it ignores."""
    spec = ClusterSpec.model_validate(
        {"name": "c", "cloud": "local", "pools": [{"name": "p", "zone": "local-a"}], "local": {"boot_delay": 1}}
    )
    assert described(spec.document().encode()) == spec
    assert described(spec.model_dump_json().encode()) == spec, "as spotrun 0.1 wrote it"
    document = json.dumps({**grown(json.loads(spec.document())), "format": FORMAT}).encode()
    assert described(document) == spec
    assert digest(document) != spec.digest
    store = Store(str(tmp_path))
    store.put(cluster_key("c"), document)
    looking = asyncio.create_task(
        until_changed(store, ClusterIdentity("c", "file:///bucket", "gcp", "local", "local"), digest(document), 0.0)
    )
    await asyncio.sleep(0)
    assert not looking.done()
    store.put(cluster_key("c"), document.replace(b"from_tomorrow", b"from_next_week"))
    await asyncio.wait_for(looking, 60)
    with pytest.raises(SpecError, match="it has format 2; this version of spotrun reads format 1: update it"):
        described(b'{"format": 2}')


def test_what_a_person_wrote_is_strict(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text("script: train.py\nfrom_tomorrow: 1\n")
    with pytest.raises(SpecError, match="from_tomorrow: 1: unknown key"):
        load_job(tmp_path / "job.yaml")


async def test_a_newer_operator_submits_a_job(world: World) -> None:
    job = await world.head.submit(JOB | {"hold_longer": 5.0}, CODE)
    assert world.written(job).spec.name == "toy"
    said = [event["text"] for event in world.events() if event["kind"] == "job"]
    assert said == [f"{job}: this head is of another version, and ignores hold_longer"]


async def test_operators_read_status_of_another_version(world: World) -> None:
    await world.started()
    document = world.head.status()
    assert document["format"] == FORMAT
    assert "starting" in display.text(grown(document))
    older = {key: value for key, value in document.items() if key not in ("format", "parked")}
    assert "starting" in display.text(older)


UNREADABLE = {
    "newer format": (lambda state: state | {"format": 2}, "format: has format 2; this version of spotrun reads"),
    "spec": (lambda state: state | {"spec": {"nodes": 3}}, "script: Field required"),
    "phase": (lambda state: state | {"phase": "tomorrow"}, "phase: Input should be 'queued'"),
}


@pytest.mark.parametrize(("change", "reason"), UNREADABLE.values(), ids=UNREADABLE.keys())
async def test_a_job_that_cannot_be_read_is_parked(world: World, change: Callable[[Any], Any], reason: str) -> None:
    """It keeps its place and its machines, its agents get no order, and operators are told."""
    job = await world.started()
    behind = await world.head.submit(JOB, CODE)
    world.cloud.size["p"] = 2
    good = world.store.get(job_key(job.id, "state.json"))
    rewrite(world, job_key(job.id, "state.json"), change)
    bad = world.store.get(job_key(job.id, "state.json"))
    head = world.new_head()
    world.orders.clear()
    world.sends.clear()
    for name in ("a", "b"):
        world.receive(name, job=job.id, phase="running", generation=1, workers=stepping(3))
    await world.turn(3)
    await world.look()
    assert world.orders == {"a": [], "b": []}
    assert world.cloud.calls == [("resize", ("p", 4))], "the next one gets machines of its own"
    assert world.queue() == [job.id, behind]
    assert head.job is not None
    assert (head.job.id, head.job.current) == (behind, None), "the next one needs other machines"
    assert world.store.get(job_key(job.id, "state.json")) == bad
    said = [event["text"] for event in world.events() if event["kind"] == "job"]
    assert len(said) == 1, "said once"
    assert f"{job.id} is parked, with its machines: " in said[0]
    assert reason in said[0]
    assert head.status()["parked"]["text"] == said[0]
    assert job.id in display.text(head.status())
    assert await phases(world, head) == [
        (job.id, "parked"),
        (behind, "queued"),
    ]
    with pytest.raises(UnreadableError, match="is parked"):
        await head.load(job.id)

    world.store.put(job_key(job.id, "state.json"), good)
    await turn_later(head)
    assert (head.parked, head.status()["parked"]) == ({}, None)
    assert head.job is not None
    assert (head.job.id, head.job.current) == (job.id, job.current)


async def test_a_parked_job_can_be_taken_out_of_the_queue(world: World) -> None:
    job = (await world.started()).id
    behind = await world.head.submit(JOB, CODE)
    rewrite(world, job_key(job, "state.json"), lambda state: state | {"format": 2})
    bad = world.store.get(job_key(job, "state.json"))
    head = world.new_head()
    await world.turn()
    assert await asked(world, head, "stop", job) == {"job": job}
    await world.turn()
    assert head.job is not None
    assert (head.job.id, head.parked, world.queue()) == (behind, {}, [behind])
    assert world.store.get(job_key(job, "state.json")) == bad


async def test_a_job_that_waits_can_be_stopped(world: World) -> None:
    active = await world.started()
    waiting = await world.head.submit(JOB, CODE)
    assert await asked(world, world.head, "stop", waiting) == {"job": waiting}
    await world.turn()
    assert world.queue() == [active.id]
    assert world.written(waiting).phase == "stopped"
    assert world.head.job is not None
    assert world.head.job.current == active.current


async def test_a_queue_of_a_newer_format_keeps_a_job_that_cannot_be_read(world: World) -> None:
    job = (await world.started()).id
    rewrite(world, job_key(job, "state.json"), lambda state: state | {"format": 2})
    rewrite(world, queue_key("c"), lambda queue: queue | {"format": 2})
    head = world.new_head()
    await world.turn()
    assert head.jobs == [job]
    assert list(head.parked) == [job]


async def test_a_checkpoint_of_a_newer_format_parks_its_job_and_stays(world: World) -> None:
    """Else the job would go on from an older one, and the newest would be pruned."""
    job = (await world.started()).id
    for step, more in ((10, {"format": 2}), (5, {})):
        manifest = Manifest(job=job, generation=1, step=step, created=1.0, files=()).model_dump(mode="json")
        world.store.put(checkpoint_key(job, step), json.dumps(manifest | more).encode())
    head = world.new_head()
    await world.turn()
    assert "0000000010/manifest.json is not a manifest: format: has format 2" in head.parked[job].reason
    checkpoints.prune(world.store, job, 1)
    assert world.store.exists(checkpoint_key(job, 10))
    assert [ref.step for ref in checkpoints.list_complete(world.store, job)] == [5]


@pytest.mark.parametrize("format", [1, 2])
async def test_a_count_of_a_newer_format_stays(tmp_path: Path, format: int) -> None:
    """The cost of idle devices: a head of that version goes on from there."""
    store, key = Store(str(tmp_path)), idle_key("c")
    store.put(key, text := json.dumps({"format": format, "counted_at": 100.0, "node_seconds": 60.0}).encode())
    ledger = Ledger(store, "c")
    await ledger.read()
    assert ledger.idle.node_seconds == (60.0 if format == 1 else 0.0)
    ledger.idle = ledger.idle.replace(counted_at=200.0, node_seconds=ledger.idle.node_seconds + 100)
    await ledger.write()
    assert (store.get(key) == text) == (format == 2)


def test_a_queue_is_read() -> None:
    assert read_queue(None).jobs == ()
    assert read_queue(b'["a", "b"]').jobs == ("a", "b")
    assert read_queue(b'{"format": 1, "jobs": ["a"], "other": {}}').jobs == ("a",)
    for junk in (b"", b"{}", b"[1]", b'{"jobs": 1}', b'{"format": 2, "jobs": []}'):
        with pytest.raises(ValueError, match=r"\S"):
            read_queue(junk)


async def turn_later(head: Head) -> None:
    """A turn at which the head tries again to read a parked job."""
    at = time.time() - 2 * job_queue.TRY_EVERY
    head.parked = {job: replace(each, tried=at) for job, each in head.parked.items()}
    await head._turn(time.time())
