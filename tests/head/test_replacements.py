"""Machines that are replaced: what is asked of the cloud, when, and what survives a kill."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from spotrun.errors import StoreError
from spotrun.head.fleet.record import LIMIT, Replacement
from spotrun.head.fleet.replacements import Record
from spotrun.head.job_state import Stop, apply
from spotrun.head.timeouts import TIMEOUTS
from spotrun.store import epoch_key, replaced_key
from spotrun.wire import Notice
from tests.head.world import CODE, JOB, World, stepping


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_an_unfit_machine_is_replaced(world: World) -> None:
    """Said once, asked for once; what was asked for is in the bucket, so that a new head goes on counting."""
    job = await world.with_machines()
    assert world.cloud.size == {"p": 2, "q": 0}
    world.unfit("p-0", "900 MiB are free")
    world.receive("p-0", phase="unfit", unfit=["899 MiB are free"], store="")
    world.receive("p-1", job=job)
    await world.turn()
    await world.head.replacements.answered()
    await world.turn(2)
    assert world.recreated == ["p-0"]
    assert [(each.node, each.pool, each.why) for each in world.replaced()] == [("p-0", "p", "899 MiB are free")]
    texts = [event["text"] for event in world.events()]
    assert [text for text in texts if "takes no job" in text] == ["p-0 takes no job: 900 MiB are free"]
    assert texts.count("p-0: 899 MiB are free: asked the cloud to replace it") == 1
    pools = {pool["name"]: pool for pool in world.head.status()["pools"]}
    assert (pools["p"]["problem"], pools["q"]["problem"]) == ("p-0 takes no job: 899 MiB are free", None)
    await world.look()
    assert world.cloud.size == {"p": 2, "q": 0}, "another is on its way, so nobody stands in"

    world.new_head()
    await world.look()
    world.unfit("p-0")
    world.receive("p-1", job=job)
    await world.turn(3)
    assert world.recreated == ["p-0"]


@pytest.mark.parametrize(
    ("between", "made_again", "expected"),
    [("checking", False, ["p-0"]), ("idle", False, []), ("checking", True, [])],
    ids=["restarts", "fit in between", "its successor"],
)
async def test_an_unfit_machine_whose_agent_keeps_restarting_is_replaced(
    world: World, between: str, made_again: bool, expected: list[str]
) -> None:
    """Each time it is checked, and is unfit for less long than the head waits."""
    await world.with_machines()
    world.receive("p-0", boot="b0", phase="checking", store="")
    world.receive("p-0", boot="b0", phase="unfit", unfit=["no driver"], store="")
    seen = world.head.agents.known["p-0"]
    seen.since -= TIMEOUTS.unfit
    seen.unfit_since -= TIMEOUTS.unfit
    if made_again:
        world.cloud.made["p-0"] = time.time() - 1
        await world.look()
    for boot in ("b1", "b2"):
        world.receive("p-0", boot=boot, phase=between, store="")
        world.receive("p-0", boot=boot, phase="unfit", unfit=["no driver"], store="")
    await world.turn()
    await world.head.replacements.answered()
    assert world.recreated == expected


async def test_a_machine_that_does_not_join_is_replaced_though_turns_take_long(world: World) -> None:
    """Such a turn makes a gap: the head waits until agents could report again, not for another boot."""
    job = await world.with_machines()
    world.receive("p-1", job=job)
    world.head.presence.began = time.time() - TIMEOUTS.boot - 1
    world.head.presence.awake_since = time.time() - TIMEOUTS.rejoin - 1
    await world.turn()
    await world.head.replacements.answered()
    assert world.recreated == ["p-0"]


async def test_orders_do_not_wait_for_the_cloud(world: World) -> None:
    """A notice comes while the cloud takes its time with machines that will be replaced."""
    job = await world.started()
    world.cloud.size["p"] = 3
    await world.head.fleet.look()
    world.cloud.hold.clear()
    for name in ("p-0", "p-1", "p-2"):
        world.unfit(name)
    async with asyncio.timeout(120):
        await world.turn()
    for name in ("a", "b"):
        world.receive(name, job=job.id, phase="running", generation=1, workers=stepping(5))
    notice = Notice(kind="preempt", deadline=time.time() + 30)
    world.receive("a", job=job.id, phase="running", generation=1, workers=stepping(5), notice=notice)
    async with asyncio.timeout(120):
        await world.turn(2)
    assert world.orders["a"][-1].jobs[0].stop_at is not None
    assert sorted(set(world.recreated)) == ["p-0", "p-1", "p-2"]
    world.cloud.hold.set()
    await world.head.replacements.answered()


async def test_what_a_cloud_refuses_does_not_count(world: World) -> None:
    job = await world.with_machines()
    world.cloud.refusal = "Rate exceeded"
    world.receive("p-1", job=job)
    began = time.time()
    for seconds in (0, 1, 61, 182, 423):
        world.unfit("p-0")
        world.head.agents.known["p-0"].reported_at = world.head.agents.known["p-1"].reported_at = began + seconds
        await world.head._turn(began + seconds)
        await world.head.replacements.answered()
        await world.head._turn(began + seconds)
    assert world.recreated == ["p-0"] * 4
    assert [each.refused for each in world.replaced()] == ["Rate exceeded"]
    pools = {pool["name"]: pool["problem"] for pool in world.head.status()["pools"]}
    assert pools["p"] == "p-0 takes no job: no driver; the cloud does not replace it: Rate exceeded"
    refusal = "p-0: no driver: the cloud does not replace it: Rate exceeded"
    assert [e["text"] for e in world.events() if e["kind"] == "cloud"] == [refusal] * 4


async def test_whatever_comes_out_of_a_call_is_a_refusal(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Libraries of clouds raise what they like: that must not end the head."""
    await world.with_machines()
    world.cloud.refusal = KeyError("Instances")
    world.unfit("p-0")
    await world.turn()
    await world.head.replacements.answered()
    await world.turn()
    assert [each.refused for each in world.replaced()] == ["KeyError: 'Instances'"]
    assert "Traceback" in caplog.text


async def test_the_cloud_is_not_asked_before_that_is_in_the_bucket(world: World) -> None:
    """Heads are killed, one after another, before they could write down what they mean to ask."""
    await world.with_machines()
    in_the_way = world.root / "clusters" / "c" / "replaced.json"
    for _ in range(4):
        world.new_head()
        await world.look()
        await world.turn()
        in_the_way.mkdir()  # an object that cannot be written
        world.unfit("p-0")
        for _ in range(2):
            with pytest.raises(StoreError):
                await world.turn()
        in_the_way.rmdir()
    assert (world.recreated, world.replaced()) == ([], [])
    await world.turn()
    await world.head.replacements.answered()
    assert (world.recreated, len(world.replaced())) == (["p-0"], 1)


async def recovers(world: World, name: str) -> None:
    world.receive(name, phase="idle")


async def has_a_successor(world: World, name: str) -> None:
    world.cloud.made[name] = time.time()
    await world.head.fleet.look()


NOT_WANTED = pytest.mark.parametrize("meanwhile", [recovers, has_a_successor])
Meanwhile = Callable[[World, str], Awaitable[None]]


@NOT_WANTED
async def test_a_machine_that_came_to_be_fit_while_the_bucket_was_away_stays(
    world: World, meanwhile: Meanwhile
) -> None:
    """What was asked about it before counts as it did."""
    await world.with_machines()
    refused = Replacement(node="p-0", pool="p", why="no driver", created=1.0, at=time.time() - 600, refused="no quota")
    world.head.replacements.replaced = (refused,)
    await world.turn()
    assert world.replaced() == [refused]
    record = world.root / "clusters" / "c" / "replaced.json"
    aside = record.rename(record.with_name("aside"))
    record.mkdir()  # an object that cannot be written
    world.unfit("p-0")
    with pytest.raises(StoreError):
        await world.turn()
    assert world.head.replacements.replaced == (refused,)
    await meanwhile(world, "p-0")
    record.rmdir()
    aside.rename(record)
    await world.turn()
    await world.head.replacements.answered()
    assert (world.recreated, world.replaced(), world.head.replacements.replaced) == ([], [refused], (refused,))


@NOT_WANTED
async def test_a_machine_that_came_to_be_fit_while_others_were_asked_about_stays(
    world: World, meanwhile: Meanwhile
) -> None:
    await world.with_machines()
    world.cloud.hold.clear()
    world.head.replacements.at_once = 1
    for name in ("p-0", "p-1"):
        world.unfit(name)
    await world.turn()
    while not world.recreated:
        await asyncio.sleep(0)
    assert [each.node for each in world.replaced()] == ["p-0"]
    await meanwhile(world, "p-1")
    world.cloud.hold.set()
    await world.head.replacements.answered()
    await world.turn()
    assert (world.recreated, [each.node for each in world.replaced()]) == (["p-0"], ["p-0"])


async def test_a_head_killed_between_writing_and_asking_loses_nothing(world: World) -> None:
    """The next one asks, once the cloud has had its time, and that counts once."""
    await world.with_machines()
    world.unfit("p-0")
    await world.turn()
    await world.head.replacements.close()  # before the call was made
    assert (world.recreated, len(world.replaced())) == ([], 1)
    world.new_head()
    await world.look()
    world.unfit("p-0")
    await world.turn()
    assert world.recreated == []
    await world.head._turn(time.time() + TIMEOUTS.retry)
    await world.head.replacements.answered()
    assert world.recreated == ["p-0"]
    assert [(each.node, each.tries) for each in world.replaced()] == [("p-0", 2)]


async def test_the_cloud_has_its_time_from_the_answer_of_a_long_call(world: World) -> None:
    await world.with_machines()
    world.cloud.hold.clear()
    world.unfit("p-0")
    began = time.time()
    await world.head._turn(began)
    while not world.recreated:
        await asyncio.sleep(0)
    world.cloud.hold.set()
    await world.head.replacements.answered()
    for _ in range(2):
        world.head.agents.known["p-0"].reported_at = began + 200
        await world.head._turn(began + 200)
        await world.head.replacements.answered()
    assert world.recreated == ["p-0"]
    assert [each.at for each in world.replaced()] == [began + 200]


async def test_a_machine_that_a_change_of_sizes_removes_is_not_replaced(world: World) -> None:
    await world.with_machines()
    world.unfit("p-0")
    world.head.scaler.removing = frozenset({"p-0"})
    await world.turn(2)
    assert (world.recreated, world.replaced()) == ([], [])


async def test_a_superseded_head_asks_the_cloud_for_nothing(world: World) -> None:
    await world.with_machines()
    world.unfit("p-0")
    world.store.create(epoch_key("c", 2), b"")
    with pytest.raises(SystemExit):
        await world.turn()
    assert (world.recreated, world.replaced()) == ([], [])


async def test_calls_under_way_end_with_the_head(world: World) -> None:
    await world.with_machines()
    world.cloud.hold.clear()
    world.unfit("p-0")
    running = asyncio.create_task(world.head.run())
    while not world.recreated:
        async with world.head.published:
            await world.head.published.wait()
    (call,) = world.head.replacements._asking
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert call.cancelled()


async def test_the_limit_is_the_clusters_not_each_jobs(world: World) -> None:
    first = await world.with_machines()
    for number in range(LIMIT):
        world.cloud.made["p-0"] = 2.0 + number
        await world.look()
        world.unfit("p-0")
        await world.turn()
        await world.head.replacements.answered()
        await world.turn()
    asked = asyncio.create_task(world.head.change(lambda j, now: apply(j, Stop("enough"), now), first))
    await asyncio.sleep(0)
    second = await world.head.submit(JOB, CODE)
    await world.turn(8)
    await asked
    for head in (world.head, world.new_head()):
        await world.look()
        world.unfit("p-1")
        await world.turn(2)
        assert head.job is not None
        assert head.job.id == second
        assert world.recreated == ["p-0"] * LIMIT


async def test_a_cluster_described_again_begins_a_new_count(world: World) -> None:
    """With another image, say."""
    await world.with_machines()
    world.unfit("p-0")
    await world.turn()
    await world.head.replacements.answered()
    assert len(world.replaced()) == 1
    head = world.new_head()
    await world.turn()
    assert len(head.replacements.replaced) == 1
    world.cluster = world.cluster.model_copy(update={"image": "another"})
    head = world.new_head()
    await world.turn()
    assert head.replacements.replaced == ()


@pytest.mark.parametrize("junk", [b"[", b"{}", b'{"description": "x", "machines": [1]}', b"\xff\xfe"])
async def test_junk_about_replacements_is_passed_over(world: World, junk: bytes) -> None:
    world.store.put(replaced_key("c"), junk)
    await world.started()
    assert world.head.replacements.replaced == ()


async def test_a_machine_that_is_being_checked_is_there_and_takes_no_part(world: World) -> None:
    job = await world.with_machines(min=1, max=2)
    world.receive("p-0", job=job)
    notice = Notice(kind="preempt", deadline=time.time() + 30)
    world.receive("p-1", phase="checking", store="", job=job)
    world.head.agents.ready_at.clear()
    await world.head._turn(time.time() + 20)
    assert world.head.job is not None
    assert world.head.job.current is None or len(world.head.job.current.members) == 1
    await world.turn()
    assert [node["phase"] for node in world.head.status()["nodes"]] == ["ready", "checking"]
    await world.look()
    assert world.cloud.size == {"p": 2, "q": 0}
    world.receive("p-1", phase="checking", store="", notice=notice)
    await world.look()
    assert world.cloud.size == {"p": 3, "q": 0}, "its notice counts"


async def test_a_pool_that_had_its_replacements_is_given_up_for_a_while(world: World) -> None:
    job = await world.with_machines(min=1, max=1)
    ago = [Replacement(node="p-0", pool="p", why="no driver", at=time.time() - age) for age in (900, 600, 300)]
    record = Record(description=world.cluster.digest, machines=tuple(ago))
    world.store.put(replaced_key("c"), record.model_dump_json().encode())
    world.new_head()
    await world.turn()
    await world.look()
    world.unfit("p-0")
    await world.turn(2)
    await world.look()
    assert world.recreated == []
    assert ("remove", ("p-0",)) in world.cloud.calls
    assert world.cloud.size["q"] == 1
    said = [event["text"] for event in world.events() if event["kind"] == "cloud"]
    assert len(said) == 1
    assert said[0].startswith("pool p: 3 machines took no job and were replaced, the last one because: no driver;")
    assert world.written(job).phase == "queued"
