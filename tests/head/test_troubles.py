"""Errors in what the head does for the whole cluster: it keeps what it decided last, says so, and tries again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from spotrun.errors import SpotrunError, StoreError
from spotrun.head import allocator, placer, presence, scaler, troubles
from spotrun.head.allocator import CONDITIONS, DEVICES
from spotrun.head.fenced import FencedStore
from spotrun.head.fleet.pools import Fleet
from spotrun.head.head import ACCOUNTS, TURN, Head
from spotrun.head.placer import PLACES
from spotrun.head.scaler import SIZES
from spotrun.head.troubles import BUCKET, READS
from spotrun.wire import Report
from tests.head.puppets import Theatre
from tests.head.world import World, asked
from tests.helpers import await_for


def fails(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("nobody expected this")


@pytest.mark.parametrize(
    ("where", "name", "what"),
    [
        (allocator, "classify", CONDITIONS),
        (allocator, "question", DEVICES),
        (scaler, "wish", SIZES),
    ],
)
@pytest.mark.parametrize("new", [False, True], ids=["the head that began the jobs", "a new head"])
async def test_jobs_train_on_while_the_head_cannot_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, what: str, new: bool
) -> None:
    """They keep their devices, end, and lose nothing. Status says what is wrong, and operators can stop a job."""
    stage = Theatre(tmp_path, machines=3, total=40)
    jobs = [await stage.queue_job("wide", 2), await stage.queue_job("stopped", 1)]
    await stage.round(10)
    before = [stage.nodes(job) for job in jobs]
    assert [len(nodes) for nodes in before] == [2, 1]
    with monkeypatch.context() as broken:
        broken.setattr(where, name, fails)
        if new:
            stage.restart_head()
        await stage.round(10)
        assert [stage.nodes(job) for job in jobs] == before
        (text,) = (await asked(stage, stage.head, "status"))["troubles"]
        assert text == f"unexpected error in the head: {what}: ZeroDivisionError('nobody expected this')"
        assert [each["text"] for each in stage.head.events.seen_from(None)].count(text) == 1, "said once"
        await asked_while_turning(stage, "stop", jobs[1])
        await stage.round(40)
        assert [stage.written(job).phase for job in jobs] == ["succeeded", "stopped"]
    later = await stage.queue_job("later", 3)
    await stage.round(60)
    assert stage.written(later).phase == "succeeded"
    assert stage.head.status()["troubles"] == []
    assert stage.lost([*jobs, later]) == 0


@pytest.mark.parametrize(
    ("new", "wanted"), [(False, [PLACES]), (True, [DEVICES, SIZES])], ids=["the same head", "a new head"]
)
async def test_jobs_keep_their_nodes_while_nobody_can_say_where_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: bool, wanted: list[str]
) -> None:
    """A new head knows no earlier places, so it decides nothing about devices and sizes."""
    stage = Theatre(tmp_path, machines=3, total=40)
    jobs = [await stage.queue_job("wide", 2), await stage.queue_job("narrow", 1)]
    await stage.round(10)
    before = [stage.nodes(job) for job in jobs]
    with monkeypatch.context() as broken:
        broken.setattr(placer, "place", fails)
        if new:
            stage.restart_head()
        await stage.round(60)
        texts = sorted((await asked(stage, stage.head, "status"))["troubles"])
        assert [text.split(": ")[1] for text in texts] == sorted(wanted)
        assert [stage.written(job).phase for job in jobs] == ["succeeded", "succeeded"]
    assert [len(nodes) for nodes in before] == [2, 1]
    later = await stage.queue_job("later", 3)
    await stage.round(60)
    assert stage.written(later).phase == "succeeded"
    assert stage.head.status()["troubles"] == []
    assert stage.lost([*jobs, later]) == 0


async def asked_while_turning(stage: Theatre, verb: str, job: str) -> None:
    """Ask the head's control socket, and let the head take turns until it has answered."""
    answer = asyncio.create_task(asked(stage, stage.head, verb, job))
    while not answer.done():
        await stage.turn()
        await asyncio.sleep(0)
    await answer


async def test_a_job_of_a_failing_allocation_gets_nothing_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An urgent job waits while nobody can say whose the devices are, and then gets what it should have."""
    stage = Theatre(tmp_path, machines=2)
    low = await stage.queue_job("low", 2)
    await stage.round(10)
    with monkeypatch.context() as broken:
        broken.setattr(allocator, "assign", fails)
        urgent = await stage.queue_job("urgent", 1, priority=5)
        await stage.round(10)
        assert (len(stage.nodes(low)), stage.nodes(urgent)) == (2, [])
    await stage.round(10)
    assert (stage.nodes(low), len(stage.nodes(urgent))) == ([], 1)
    assert stage.lost([low]) == 0


async def test_no_machine_is_replaced_on_conditions_of_an_earlier_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    await world.with_machines()
    for name in ("p-0", "p-1"):
        world.unfit(name)
    monkeypatch.setattr(allocator, "classify", fails)
    await world.turn(3)
    await world.head.replacements.answered()
    assert world.recreated == []
    monkeypatch.undo()
    await world.turn()
    await world.head.replacements.answered()
    assert sorted(world.recreated) == ["p-0", "p-1"]


async def test_machine_time_that_could_not_be_counted_is_counted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Theatre(tmp_path, machines=1)
    job = await stage.queue_job("job")
    await stage.round(10)
    began, before = stage.now, stage.state(job).node_seconds
    with monkeypatch.context() as broken:
        broken.setattr(stage.head.ledger, "count", fails)
        await stage.round(10)
        (text,) = stage.head.troubles.texts
        assert text.startswith(f"unexpected error in the head: {ACCOUNTS}")
        assert stage.state(job).node_seconds == before
    await stage.round()
    assert stage.state(job).node_seconds - before == pytest.approx(stage.now - began)
    assert len(stage.nodes(job)) == 1


async def test_a_head_that_cannot_read_yet_stays_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it ended, so would the next ones, and each of them leaves its number in the bucket."""
    world = World(tmp_path)
    job = await world.with_machines()
    refused, find = list[str](), FencedStore.find

    async def refuse(_: FencedStore, key: str) -> bytes | None:
        refused.append(key)
        raise StoreError(f"cannot read {key}: AccessDenied, try {len(refused)}")

    monkeypatch.setattr(troubles, "AGAIN", 0.01)
    monkeypatch.setattr(FencedStore, "find", refuse)
    head = world.new_head(2)
    running = asyncio.create_task(head.run())
    try:
        await await_for(lambda: len(refused) > 6, what="several tries")
        (text,) = head.troubles.texts
        assert text.startswith(f"{READS}: cannot read clusters/c/")
        with pytest.raises(SpotrunError, match=r"cannot read clusters/c/queue.json: AccessDenied"):
            await asked(world, head, "status")
        monkeypatch.setattr(FencedStore, "find", find)
        await await_for(lambda: job in head.states, what="the job")
        assert head.troubles.texts == []
        told = [each["text"] for each in head.events.seen_from(None) if READS in each["text"]]
        assert told == [text, f"over now: {text}"]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_bucket_that_refuses_is_told_and_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status says it once, though each error names another key. Requests end, and say what happens to their change."""
    world = World(tmp_path)
    monkeypatch.setattr(presence, "PATIENCE", 0.0)
    job = await world.with_machines()
    refused, put = [""], FencedStore.put

    async def put_or_refuse(store: FencedStore, key: str, data: bytes) -> None:
        if refused:
            refused.append(key)
            raise StoreError(f"cannot write {len(refused)}: no space left")
        await put(store, key, data)

    monkeypatch.setattr(FencedStore, "put", put_or_refuse)
    running = asyncio.create_task(world.head.run())
    try:
        with pytest.raises(
            StoreError, match=f"^{BUCKET}: .*no space left; the change is made when the bucket takes it$"
        ):
            await asyncio.wait_for(world.head.change(lambda job, _: job.replace(priority=7), job), 20)
        (text,) = (await asked(world, world.head, "status"))["troubles"]
        assert [each["text"] for each in world.events()].count(text) == 1 < len(refused)
        refused.clear()
        await until(lambda: BUCKET not in world.head.troubles)
        assert world.written(job).priority == 7
        assert world.events()[-1]["text"] == f"over now: {text}"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_change_that_no_turn_has_made_is_not_made_after_an_outage(tmp_path: Path) -> None:
    stage = Theatre(tmp_path, machines=1)
    job = await stage.queue_job("job")
    answer = stage.head.requests.add(lambda state, _: state.replace(priority=7), job)
    stage.head.requests.give_up("no space left")
    with pytest.raises(StoreError, match=r"^no space left; nothing was changed$"):
        await answer
    await stage.round()
    assert stage.state(job).priority is None


async def test_a_head_whose_turn_fails_serves_agents_and_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not end, and continues once its turns succeed."""
    world = World(tmp_path)
    fail, turn = asyncio.Event(), Head._turn

    async def turn_or_fail(head: Head, now: float, nodes: frozenset[str] | None = None) -> None:
        if fail.is_set():
            raise ZeroDivisionError
        await turn(head, now, nodes)

    monkeypatch.setattr(Head, "_turn", turn_or_fail)
    running = asyncio.create_task(world.head.run())
    try:
        fail.set()
        await until(lambda: TURN in world.head.troubles)
        world.receive("a")
        assert "a" in world.head.agents.known
        assert (await asked(world, world.head, "status"))["troubles"] == world.head.troubles.texts
        fail.clear()
        await until(lambda: TURN not in world.head.troubles)
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until(true: Callable[[], bool]) -> None:
    """Let other tasks run until it is so."""
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_the_cloud_is_asked_again_after_an_unexpected_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in a cloud's library that is no `SpotrunError` does not end the head either."""
    world = World(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(Fleet, "_list", fails)
        await world.look()
        assert SIZES in world.head.troubles
    await world.look()
    assert SIZES not in world.head.troubles
    assert world.head.fleet.instances == []


def test_a_report_with_more_devices_than_a_machine_can_have_is_refused() -> None:
    text = Report(node="n", boot="b", pool="p", zone="z", address="127.0.0.1", devices=8).model_dump_json()
    assert Report.model_validate_json(text).devices == 8
    with pytest.raises(ValidationError, match="devices"):
        Report.model_validate_json(text.replace('"devices":8', f'"devices":{10**30}'))


async def test_a_node_with_impossible_devices_costs_the_others_nothing(tmp_path: Path) -> None:
    """If such a report came through, nobody could say whose the devices are. The head goes on."""
    stage = Theatre(tmp_path, machines=2)
    jobs = [await stage.queue_job(name, 1) for name in ("good", "bad")]
    await stage.round(10)
    before = [stage.nodes(job) for job in jobs]
    liar = stage.puppets[before[1][0]]
    stage.head.receive(liar.report(stage.now).replace(devices=10**30), liar.send)
    await stage.turn(2)
    assert [DEVICES in stage.head.troubles, TURN in stage.head.troubles] == [True, False]
    await stage.round(5)
    assert stage.head.troubles.texts == []
    assert [stage.nodes(job) for job in jobs] == before
    assert stage.lost(jobs) == 0
