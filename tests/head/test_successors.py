"""What a head makes of what the last one has left: half of two writes, another clock, an outage. And if it wakes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from spotrun.cloud.base import Instance
from spotrun.head.costs import job_totals
from spotrun.head.costs.ledger import Ledger
from spotrun.head.fenced import FencedStore
from spotrun.head.fleet.record import Recreate, Replacement
from spotrun.head.fleet.replacements import Record
from spotrun.head.head import Head
from spotrun.head.job_state import Idle, Progress, Saving, Start, Stop, apply, by_clock
from spotrun.head.lease import claim_epoch
from spotrun.head.planner.plan import plan
from spotrun.head.server import certificate
from spotrun.head.server import serve as serving
from spotrun.head.timeouts import TIMEOUTS
from spotrun.store import epoch_key, head_key, idle_key, job_key, queue_key, replaced_key
from spotrun.wire import JobReport, Order, Report, StateRef
from tests.head.puppets import ROUND, Theatre
from tests.head.views import NOW, A, B, C, job, node, notice, spare, view
from tests.head.world import World, rewrite, stepping
from tests.helpers import await_for


class Killed(BaseException):
    """The head dies here."""


def die_at_the_queue(patch: pytest.MonkeyPatch) -> None:
    """From now on, the head dies when it is about to write the queue."""
    put = FencedStore.put

    async def put_or_die(store: FencedStore, key: str, data: bytes) -> None:
        if key == queue_key("c"):
            raise Killed
        await put(store, key, data)

    patch.setattr(FencedStore, "put", put_or_die)


def die_after_the_queue(patch: pytest.MonkeyPatch) -> None:
    """From now on, the head dies when it has written the queue."""
    put = FencedStore.put

    async def put_and_die(store: FencedStore, key: str, data: bytes) -> None:
        await put(store, key, data)
        if key == queue_key("c"):
            raise Killed

    patch.setattr(FencedStore, "put", put_and_die)


@pytest.mark.parametrize("die", [die_at_the_queue, die_after_the_queue])
async def test_a_head_that_dies_in_a_submission_leaves_no_job_that_never_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, die: Any
) -> None:
    stage = Theatre(tmp_path, machines=2, total=20)
    await stage.round(2)
    with monkeypatch.context() as patch:
        die(patch)
        with pytest.raises(Killed):
            await stage.queue_job("toy", 2)
    stage.restart_head()
    await stage.round(10)
    assert (await stage.head.journal.newest(5), stage.queue()) == ([], [])
    again = await stage.queue_job("toy", 2)
    await stage.round(60)
    assert stage.written(again).phase == "succeeded"


@pytest.mark.parametrize("die", [die_at_the_queue, die_after_the_queue])
async def test_a_head_that_dies_in_a_relaunch_leaves_the_job_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, die: Any
) -> None:
    stage = Theatre(tmp_path, machines=2, total=60)
    job = await stage.queue_job("toy", 2)
    await stage.round(20)
    await stage.ask(lambda state, now: apply(state, Stop("enough"), now), job)
    await stage.round(20)
    assert (stage.written(job).phase, stage.queue()) == ("stopped", [])
    with monkeypatch.context() as patch:
        die(patch)
        with pytest.raises(Killed):
            await stage.head.relaunch(job)
    stage.restart_head()
    await stage.round(10)
    assert (stage.written(job).phase, stage.queue()) == ("stopped", [])
    await stage.head.relaunch(job)
    await stage.round(100)
    assert stage.written(job).phase == "succeeded"


async def test_a_head_that_was_suspended_while_it_asked_the_cloud_scales_nothing(tmp_path: Path) -> None:
    """Meanwhile, another head has begun a job on the machines that the old one would remove."""
    stage = Theatre(tmp_path, machines=2)
    first = await stage.queue_job("first", 2)
    await stage.round(10)
    await stage.ask(lambda state, now: apply(state, Stop("enough"), now), first)
    while first in stage.queue():
        await stage.turn()
        stage.play()
        stage.now += ROUND
    stage.now += TIMEOUTS.last_logs + 1
    stage.play()
    old, nodes = stage.head, stage.cloud.nodes
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> list[Instance]:
        found = await nodes()
        asked.set()
        await go_on.wait()
        return found

    stage.cloud.nodes = slow  # type: ignore[method-assign]
    look = asyncio.ensure_future(_ends(old.scaler.look()))
    await asyncio.wait_for(asked.wait(), 60)
    stage.cloud.nodes = nodes  # type: ignore[method-assign]
    stage.store.create(epoch_key("c", 2), b"")
    head = stage.new_head(2)
    head.presence.began = head.presence.awake_since = head.presence._ticked_at = stage.now
    second = await stage.queue_job("second", 2)
    await stage.round(60)
    assert len(stage.nodes(second)) == 2
    stage.cloud.calls.clear()
    go_on.set()
    assert await look, "the old head ends"
    assert stage.cloud.calls == []


async def _ends(work: Any) -> bool:
    """Whether it ends this head."""
    try:
        await work
    except SystemExit:
        return True
    return False


async def test_a_head_gives_way_if_another_one_has_written_what_idle_devices_cost(tmp_path: Path) -> None:
    stage = Theatre(tmp_path, machines=2)
    await stage.queue_job("toy", 1)
    stage.cloud.size["p"] = 2
    await stage.round(40)
    assert stage.store.exists(idle_key("c"))
    stage.store.put(idle_key("c"), b"{}")
    ended = False
    for _ in range(100):
        stage.cloud.size["p"] = 2
        await stage.turn()
        ended = ended or await _ends(stage.look())
        stage.play()
        stage.now += ROUND
    assert ended


async def test_a_head_that_was_suspended_while_it_began_does_not_replace_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, loop = World(tmp_path), asyncio.get_running_loop()
    held, go_on, up = asyncio.Event(), asyncio.Event(), asyncio.Event()
    create = certificate.create

    def slow() -> Any:
        monkeypatch.setattr(certificate, "create", create)
        loop.call_soon_threadsafe(held.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(60)
        return create()

    monkeypatch.setattr(certificate, "create", slow)
    old = world.new_head(claim_epoch(world.store, "c"))
    first = asyncio.ensure_future(_ends(serving.serve(old, "127.0.0.1", tmp_path / "a.sock", port=0)))
    await asyncio.wait_for(held.wait(), 60)
    new = world.new_head(claim_epoch(world.store, "c"))
    serve = serving.serve(new, "127.0.0.2", tmp_path / "b.sock", port=0, on_serving=lambda _: up.set())
    second = asyncio.ensure_future(serve)
    await asyncio.wait_for(up.wait(), 60)
    go_on.set()
    assert await first, "the old head ends"
    record = json.loads(world.store.get(head_key("c")))
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert (record["epoch"], record["address"]) == (2, "127.0.0.2")


@pytest.mark.parametrize("outage", [0.0, 600.0])
def test_a_new_head_waits_for_the_newest_state_as_the_last_one_did(outage: float) -> None:
    """Only a node under notice holds it, and uploads it. Two other nodes are ready."""
    since = NOW - 4 - outage
    ref = StateRef(generation=1, step=300)
    saving = Saving(ref=ref, holders=(A,), since=since)
    begun = {"last": job(A).members, "generation": 1, "reached": 300, "pace": 1.0, "progress": Progress()}
    waiting = job(**begun, ordered_at=since, saving=saving)
    holder = node(A, phase="ready", workers=(), notice=notice(600), snapshot=ref)
    seen = view(waiting, holder, spare(B), spare(C), began=NOW - 2, awake_since=NOW - 2)
    assert not any(isinstance(each, Start) for each in plan(seen).actions)


@pytest.mark.parametrize("outage", [3.0, 90.6, 91.2])
async def test_a_drain_that_no_agent_knows_of_loses_no_step(tmp_path: Path, outage: float) -> None:
    """The head dies after it has written that the job drains, and before any agent has the order."""
    stage, lit = Theatre(tmp_path, machines=2), False
    low = await stage.queue_job("low", {"min": 1, "max": 2})
    await stage.round(20)
    for puppet in stage.puppets.values():

        def send(order: Order, real: Any = puppet.send) -> None:
            if lit and any(each.stop_at is not None for each in order.jobs):
                raise Killed
            real(order)

        puppet.send = send  # type: ignore[method-assign]
    await stage.round(2)
    await stage.queue_job("high", 1, priority=1)
    lit = True
    with pytest.raises(Killed):
        await stage.round(20)
    lit = False
    assert stage.written(low).draining is not None
    stage.restart_head()
    end = stage.now + outage
    while stage.now < end:  # training goes on without a head
        stage.now += ROUND
        stage._act(set())
    stage.restart_head()
    await stage.round(60)
    assert [each.kind for each in stage.state(low).interruptions] == ["move"]
    assert stage.lost([low]) == 0


def stage_at(tmp_path: Path, machines: int) -> Theatre:
    stage = Theatre(tmp_path, machines=machines)
    stage.now = 100_000.0
    stage.restart_head()
    return stage


BACK = pytest.mark.parametrize("back", [0, 3600])  # seconds by which the clock of the last head was ahead


@BACK
async def test_a_checkpoint_is_due_by_the_new_heads_clock(tmp_path: Path, back: float) -> None:
    stage = stage_at(tmp_path, 2)
    job = await stage.queue_job("toy", 2, checkpoint_interval=10)
    await stage.round(20)
    stage.now -= back
    stage.restart_head()
    await stage.round(200)
    state = stage.state(job)
    assert state.checkpoints or state.saving or state.given_up_at


@BACK
async def test_a_job_begins_with_its_min_by_the_new_heads_clock(tmp_path: Path, back: float) -> None:
    stage = stage_at(tmp_path, 4)
    stage.cloud.room["p"] = 2
    job = await stage.queue_job("toy", {"min": 2, "max": 4})
    await stage.turn()
    stage.now -= back
    stage.restart_head()
    await stage.round(200)
    assert stage.state(job).current is not None


@BACK
async def test_a_job_that_rests_asks_again_by_the_new_heads_clock(tmp_path: Path, back: float) -> None:
    stage = stage_at(tmp_path, 2)
    stage.cloud.room["p"] = 1
    job = await stage.queue_job("toy", 2, hold_idle=3.0)
    await stage.round(40)
    assert stage.state(job).resting
    stage.cloud.room["p"] = 2
    stage.now -= back
    stage.restart_head()
    await stage.round(400)
    assert stage.state(job).current is not None


@BACK
async def test_a_drain_that_hangs_is_given_up_by_the_new_heads_clock(tmp_path: Path, back: float) -> None:
    stage = stage_at(tmp_path, 2)
    job = await stage.queue_job("toy", 2)
    await stage.round(20)
    stage.puppets[stage.nodes(job)[0]].obey = lambda: None  # type: ignore[method-assign]
    stage._step = lambda job: None  # type: ignore[method-assign]
    await stage.ask(lambda state, _: state.replace(stopping="enough"), job)
    await stage.round(2)
    assert stage.state(job).draining
    stage.now -= back
    stage.restart_head()
    await stage.round(260)
    assert stage.state(job).current is None


async def test_a_machine_is_asked_about_again_by_the_new_heads_clock(tmp_path: Path) -> None:
    world = World(tmp_path)
    asked = Replacement(at=world.clock() + 3600, **dict(Recreate(node="p-0", pool="p", created=1.0)))
    record = Record(description=world.head.description, machines=(asked,))
    world.store.put(replaced_key("c"), record.model_dump_json().encode())
    await world.turn()
    assert world.head.replacements.replaced[0].at <= world.clock()


def test_times_that_are_not_set_stay_so() -> None:
    given = job(A, submitted=NOW + 60, started=None, idle=Idle(since=NOW + 50))
    found = by_clock(given, NOW)
    assert (found.submitted, found.started, found.idle) == (NOW, None, Idle(since=NOW))
    assert by_clock(found, NOW) is found


@pytest.mark.parametrize("connects", [True, False], ids=["its agent connects", "its agent is gone"])
async def test_idle_time_in_an_outage_is_counted(tmp_path: Path, connects: bool) -> None:
    """The head was away for ten minutes. The cluster pays for a machine that no job has."""
    world = World(tmp_path)
    world.cloud.size["p"] = 1
    await world.new_head(1).fleet.look()
    (machine,) = await world.cloud.nodes()
    before = job_totals.Idle(counted_at=world.clock() - 600, node_seconds=1000.0)
    world.store.put(idle_key("c"), before.model_dump_json().encode())
    head = world.new_head(2)
    if connects:
        world.receive(machine.name)
    loops = [asyncio.ensure_future(each) for each in (head.run(), head.scaler.run())]
    try:
        await await_for(lambda: head.ledger.idle.node_seconds >= 1600, what="600 s more")
    finally:
        for each in loops:
            each.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
    assert head.ledger.idle.node_seconds < 1700


async def test_what_earlier_heads_have_counted_is_added_once(tmp_path: Path) -> None:
    """The head's loop and the scaler begin at the same time, and both need it."""
    world = World(tmp_path)
    before = job_totals.Idle(counted_at=world.clock(), node_seconds=1000.0)
    world.store.put(idle_key("c"), before.model_dump_json().encode())
    ledger = Ledger(world.store, "c")
    await asyncio.gather(ledger.read(), ledger.write())
    assert ledger.idle.node_seconds == 1000


@pytest.mark.parametrize("delay", [0.0, 0.5], ids=["the cloud answers at once", "the cloud answers later"])
async def test_the_time_of_an_outage_is_paid(tmp_path: Path, delay: float) -> None:
    """The head was away for ten minutes. Its first turns come before the cloud's first answer."""
    world = World(tmp_path)
    world.cloud.size["p"] = 2
    job = await world.with_machines()
    for name in ("p-0", "p-1"):
        world.receive(name, job=job)
    await world.turn(2)
    before = world.written(job)
    rewrite(world, job_key(job, "state.json"), lambda state: state | {"counted_at": world.clock() - 600})
    nodes = world.cloud.nodes

    async def slow() -> list[Instance]:
        await asyncio.sleep(delay)
        return await nodes()

    world.cloud.nodes = slow  # type: ignore[method-assign]
    head = world.new_head(2)
    world.sends.clear()
    loops = [asyncio.ensure_future(each) for each in (head.run(), head.scaler.run())]

    def counted() -> bool:
        for name in ("p-0", "p-1"):
            world.receive(name, job=job, phase="running", generation=1, workers=stepping(4))
        return job in head.states and head.states[job].node_seconds - before.node_seconds > 1200

    try:
        await await_for(counted, what="1200 node-seconds")
    finally:
        for each in loops:
            each.cancel()
        await asyncio.gather(*loops, return_exceptions=True)


@pytest.mark.parametrize("dies", [False, True], ids=["the same head", "a new head"])
async def test_a_new_head_waits_for_the_last_logs_of_a_job(tmp_path: Path, dies: bool) -> None:
    stage = Theatre(tmp_path, machines=2, total=20)
    job = await stage.queue_job("toy", 2)
    while not stage.written(job).ended_already:
        await stage.round()
    await stage.head._turn(stage.now)
    assert not stage.queue()
    stage.cloud.calls.clear()
    if dies:
        stage.restart_head()
    for _ in range(6):
        stage.now += ROUND
        _upload_logs(stage.head, stage, job)
        await stage.head._turn(stage.now)
        await stage.look()
    assert stage.cloud.calls == []


def _upload_logs(head: Head, stage: Theatre, job: str) -> None:
    work = JobReport(job=job, phase="ready", generation=1, store="x:1")
    for name in ("p-0", "p-1"):
        boot = f"boot of {name}"
        report = Report(node=name, boot=boot, pool="p", zone="z", address="127.0.0.1", jobs=(work,))
        head.receive(report, stage.puppets[name].send)
