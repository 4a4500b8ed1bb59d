"""The head's loop, the queue and the job's state in the bucket."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from spotrun.errors import SpotrunError
from spotrun.head.job_state import Cause, EndGeneration, Stop, apply
from spotrun.store import epoch_key, job_key, queue_key
from spotrun.wire import Failure, Notice
from tests.head.puppets import Theatre
from tests.head.world import CODE, JOB, World, asked, rewrite, stepping


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_what_is_ordered_is_in_the_bucket(world: World) -> None:
    job = await world.started()
    assert world.written(job.id).generation == 1
    assert [each.generation.number for order in world.orders["a"] for each in order.jobs if each.generation] == [1]


async def test_no_machine_goes_before_the_queue_is_read(world: World) -> None:
    """A new head looks at the cloud before the bucket has answered: it does not know yet that a job runs."""
    await world.started()
    world.cloud.size["p"] = 2
    world.new_head()
    await world.look()
    assert world.cloud.calls == []
    assert world.cloud.size["p"] == 2


async def test_nodes_go_on_to_prepare_a_job_while_a_new_head_waits_for_others(world: World) -> None:
    """Otherwise they would begin again: fetch its code, install its packages, import torch."""
    await world.started()
    second = await world.head.submit({**JOB, "nodes": 1}, CODE)
    world.receive("c")
    await world.turn()
    assert world.orders["c"][-1].job(second) is not None
    head = world.new_head()
    head.presence.began = head.presence.awake_since = world.clock()
    world.receive("c", link="2", job=second)
    await world.turn()
    (order,) = world.orders["c2"]
    assert (order.jobs, second in order.parked) == ((), True)
    for name in ("a", "b"):
        world.receive(name, link="2", job=head.jobs[0], generation=1)
    await world.turn()
    order = world.orders["c2"][-1]
    assert (order.job(second) is not None, order.parked) == (True, ())


async def test_a_budget_needs_prices(world: World) -> None:
    del world.cloud.price["q"]
    await world.head.fleet.look()
    with pytest.raises(SpotrunError, match="job toy: budget: 5: cannot be kept: what machines of pool q cost"):
        await world.head.submit(JOB | {"budget": 5.0}, CODE)
    assert await world.head.submit(JOB, CODE)


async def test_a_budget_waits_for_prices(world: World) -> None:
    with pytest.raises(
        SpotrunError, match="what machines cost is not known yet: the cloud has not been asked yet; try"
    ):
        await world.head.submit(JOB | {"budget": 5.0}, CODE)
    world.cloud.silent = {"prices"}
    await world.head.fleet.look()
    with pytest.raises(SpotrunError, match="what machines cost is not known yet: prices: Rate exceeded; try again"):
        await world.head.submit(JOB | {"budget": 5.0}, CODE)
    assert await world.head.submit(JOB, CODE)
    world.cloud.silent = {"problems"}
    await world.head.fleet.look()
    assert await world.head.submit(JOB | {"budget": 5.0}, CODE)


async def test_a_job_submitted_before_the_queue_is_read_joins_it(world: World) -> None:
    first = await world.head.submit(JOB, CODE)
    world.new_head()
    second = await world.head.submit(JOB, CODE)
    assert world.queue() == [first, second]


async def test_many_submits_at_once_are_all_queued(world: World) -> None:
    jobs = await asyncio.gather(*(world.head.submit(JOB, CODE) for _ in range(8)))
    assert sorted(world.queue()) == sorted(jobs)


@pytest.mark.parametrize("junk", [b"[", b"{}", b"[1]", b"\xff\xfe"])
async def test_a_junk_queue_is_rebuilt_from_the_jobs(world: World, junk: bytes) -> None:
    running = (await world.started()).id
    waiting = await world.head.submit(JOB, CODE)
    world.store.put(queue_key("c"), junk)
    world.new_head()
    await world.turn()
    assert world.head.jobs == [running, waiting]


async def test_junk_events_are_passed_over(world: World) -> None:
    job = await world.started()
    key = job_key(job.id, "events.jsonl")
    world.store.put(key, world.store.get(key) + b'{"at": }\n{"kind": "x"}\n{\xff}\n')
    world.new_head()
    await world.turn()
    assert world.head.job is not None
    assert [e["kind"] for e in world.events() if e["kind"] == "generation"] == ["generation"]


async def test_a_job_whose_state_is_gone_is_passed_over(world: World) -> None:
    first, second = [await world.head.submit(JOB, CODE) for _ in range(2)]
    world.store.delete([job_key(first, "state.json")])
    world.new_head()
    await world.turn(2)
    assert world.head.jobs == [second]


async def test_a_job_that_cannot_be_set_up_does_not_fail_the_next(world: World) -> None:
    first, second = [await world.head.submit(JOB, CODE) for _ in range(2)]
    for name in ("a", "b"):
        world.receive(name)
    await world.turn()
    failure = Failure(kind="setup", rank=0, at=1.0, message="no such package")
    for name in ("a", "b"):
        world.receive(name, job=first, phase="failed", failure=failure)
    await world.turn(4)
    assert world.written(first).phase == "failed"
    assert world.head.job is not None
    assert (world.head.job.id, world.head.job.phase) == (second, "queued")


async def test_relaunch_of_a_waiting_job_leaves_the_active_one_alone(world: World) -> None:
    active = await world.started()
    waiting = await world.head.submit(JOB, CODE)
    asked = asyncio.create_task(world.head.relaunch(waiting))
    while not asked.done():
        await world.turn()
    with pytest.raises(SpotrunError, match="does not train now"):
        await asked
    assert world.head.job is not None
    assert world.head.job.current == active.current


async def test_an_answer_is_given_once_it_is_written(world: World) -> None:
    job = await world.started()
    seen: list[str] = []
    asked = asyncio.create_task(world.head.change(lambda j, now: apply(j, Stop("enough"), now)))
    asked.add_done_callback(lambda _: seen.append(world.written(job.id).stopping))
    await asyncio.sleep(0)
    await world.turn()
    await asked
    assert seen == ["enough"]


async def test_an_asker_that_has_gone_is_no_harm(world: World) -> None:
    await world.started()
    asked = asyncio.create_task(
        world.head.change(lambda j, now: apply(j, EndGeneration(cause=Cause(kind="relaunch")), now))
    )
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await world.turn()
    assert world.head.job is not None
    assert world.head.job.id == world.head.jobs[0], "the loop goes on with its job"


async def test_steps_alone_do_not_rewrite_the_state(world: World) -> None:
    job = await world.started()
    world.receive("a", job=job.id, phase="running", generation=1, workers=stepping(1))
    world.receive("b", job=job.id, phase="running", generation=1, workers=stepping(1))
    await world.turn()
    before = world.store.get(job_key(job.id, "state.json"))
    now = world.head.journal._written[job.id].at
    for step in range(2, 6):
        world.receive("a", job=job.id, phase="running", generation=1, workers=stepping(step))
        await world.head._turn(now + 0.1 * step)
    assert world.head.job is not None
    assert world.head.job.reached == 5
    assert world.store.get(job_key(job.id, "state.json")) == before


async def test_a_superseded_head_orders_nothing_more(world: World) -> None:
    job = await world.started()
    world.store.create(epoch_key("c", 2), b"")
    orders = {name: len(sent) for name, sent in world.orders.items()}
    world.head.requests.add(lambda j, now: apply(j, EndGeneration(), now), job.id)
    with pytest.raises(SystemExit):
        await world.head._turn(time.time())
    assert world.written(job.id).current == job.current
    assert {name: len(sent) for name, sent in world.orders.items()} == orders


async def test_a_generation_that_another_head_gave_out_is_not_given_out_again(world: World) -> None:
    job = await world.started()
    for name in ("a", "b"):
        world.receive(name, job=job.id, phase="running", generation=4)
    await world.turn(2)
    assert world.head.job is not None
    assert world.head.job.generation == 5


async def test_reports_of_a_dead_connection_are_ignored(world: World) -> None:
    job = await world.started()
    world.receive("b", link="2", job=job.id, boot="b2")
    world.receive("b", job=job.id, boot="b", phase="running", generation=1)
    assert world.head.agents.known["b"].report.boot == "b2"
    world.head.disconnect("b", world.sends["b"])
    assert world.head.agents.known["b"].send is world.sends["b2"]


async def test_a_new_head_gives_up_members_whose_machines_are_gone(world: World) -> None:
    job = await world.started()
    world.new_head()
    world.cloud.size["p"] = 2
    await world.head.fleet.look()
    await world.turn()
    for name in ("p-0", "p-1"):
        world.receive(name, job=job.id)
    await world.turn()
    assert world.head.job is not None
    assert world.head.job.current is not None
    assert [m.node for m in world.head.job.current.members] == ["p-0", "p-1"]


async def test_the_next_job_does_not_begin_with_the_last_ones_events(world: World) -> None:
    first = await world.started()
    second = await world.head.submit(JOB, CODE)
    asked = asyncio.create_task(world.head.change(lambda j, now: apply(j, Stop("enough"), now), first.id))
    await asyncio.sleep(0)
    await world.turn(8)
    await asked
    assert world.written(first.id).phase == "stopped"
    assert world.head.job is not None
    assert world.head.job.id == second
    assert "generation" not in [event["kind"] for event in world.events()]


async def test_a_waiting_job_says_for_what(world: World) -> None:
    job = await world.with_machines(min=2, max=3)
    assert reason(world) == "0 of 2 to 3 nodes ready; waiting for p-0 to boot; p-1 to boot; p-2 to boot"
    world.receive("p-0", job=job, phase="preparing", store="")
    world.receive("p-1", job=job)
    await world.turn()
    assert reason(world) == "1 of 2 to 3 nodes ready; waiting for p-0 to prepare; p-2 to boot"
    for name in ("p-0", "p-2"):
        world.receive(name, job=job)
    await world.turn()
    assert reason(world) == ""
    for name in ("p-1", "p-2"):
        world.receive(name, job=job, phase="preparing", store="")
    world.receive("p-0", job=job, notice=Notice(kind="preempt", deadline=time.time() + 30))
    world.head.states[job] = apply(world.written(job), EndGeneration(cause=Cause(kind="preempt", node="p-0")), 1.0)
    assert reason(world) == "0 of 2 to 3 nodes ready; waiting for p-1 to prepare; p-2 to prepare"
    world.new_head().fleet.instances = []
    await world.turn()
    world.head.states[job] = apply(world.written(job), EndGeneration(cause=Cause(kind="kill", node="p-0")), 1.0)
    assert reason(world) == "0 of 2 to 3 nodes ready; waiting for machines"


async def test_the_notice_after_a_rebalance_recommendation_is_news(world: World) -> None:
    """EC2 recommends first in most cases, and may leave the machine for days after that."""
    job = await world.with_machines(min=2, max=2)
    later = time.time() + 120

    def after(kind: str) -> tuple[list[str], object, bool]:
        world.head.scaler.look_now.clear()
        world.receive("p-0", job=job, notice=Notice(kind=kind, deadline=later))
        said = [event["text"] for event in world.events() if event["kind"] == "notice"]
        nodes = {node["name"]: node["notice"] for node in world.head.status()["nodes"]}
        return said, nodes["p-0"], world.head.scaler.look_now.is_set()

    assert after("rebalance") == (["p-0 may soon be taken: rebalance"], None, False)
    assert after("rebalance") == (["p-0 may soon be taken: rebalance"], None, False)
    assert after("preempt") == (["p-0 may soon be taken: rebalance", "p-0 will be taken: preempt"], later, True)


async def test_the_status_says_what_a_node_does_before_it_is_ready(world: World) -> None:
    job = await world.with_machines(min=2, max=2)
    world.receive("p-0", job=job)
    began = time.time() - 4
    world.receive("p-1", job=job, phase="preparing", store="", doing="importing torch", doing_since=began)
    await world.turn()
    found = str(world.head.status()["job"]["reason"])
    assert re.search(r"^1 of 2 nodes ready; waiting for p-1 \(importing torch, [3-9] s\)", found)
    assert {node["name"]: node["doing"] for node in world.head.status()["nodes"]}["p-1"] == "importing torch"


def reason(world: World) -> str:
    """What the job waits for, without the seconds that it has waited."""
    return re.sub(r", \d+ (s|min)", "", str(world.head.status()["job"]["reason"]))


async def test_a_queued_job_is_not_shown_with_the_active_ones_events(world: World) -> None:
    """A person who followed it saw the failures of another person's job."""
    first = await world.started()
    world.head.add_event("failure", "p-0 rank 0: ValueError: the first one's", first.id)
    second = await world.head.submit(JOB, CODE)
    third = await world.head.submit(JOB, CODE)
    await world.turn()
    for name, before in ((second, first.id), (third, second)):
        shown = await asked(world, world.head, f"status?job={name}")
        assert "failure" not in [event["kind"] for event in shown["events"]]
        assert f"behind {before} (" in shown["job"]["reason"]
    asking = asyncio.create_task(world.head.change(lambda job, now: apply(job, Stop("enough"), now), first.id))
    await asyncio.sleep(0)
    await world.turn(8)
    await asking
    assert world.head.job is not None
    assert world.head.job.id == second
    shown = await asked(world, world.head, f"status?job={first.id}")
    assert "failure" in [event["kind"] for event in shown["events"]], "its own, from the bucket"


async def test_a_failed_job_is_not_told_to_wait_for_nodes(world: World) -> None:
    job = await world.head.submit({**JOB, "nodes": 1, "max_restarts": 0}, CODE)
    await world.turn()
    world.receive("a", job=job)
    await world.turn()
    failure = Failure(kind="user", rank=0, at=time.time(), message="ValueError: no", traceback="")
    world.receive("a", job=job, generation=1, phase="failed", failure=failure)
    await world.turn()
    texts = [event["text"] for event in world.events()]
    told = ["a joined", "1: 1 node (a)", "a rank 0: ValueError: no", "failed: ValueError: no"]
    assert texts == ["asks p, q in local-a", *told]


async def test_a_pool_that_refuses_does_not_hold_up_the_others(world: World) -> None:
    world.cloud.refuse.add("p")
    await world.head.submit(JOB, CODE)
    await world.turn()
    await world.look()
    await world.look()
    assert world.cloud.size == {"p": 0, "q": 2}


async def test_a_cancelled_head_ends_though_something_changed(world: World) -> None:
    tasks = [asyncio.create_task(work) for work in (world.head.run(), world.head.scaler.run())]
    for _ in range(20):
        async with world.head.published:
            await world.head.published.wait()
        world.head.news.changed.set()
        world.head.scaler.look_now.set()
    for task in tasks:
        task.cancel()
    world.head.news.changed.set()
    world.head.scaler.look_now.set()
    done, _ = await asyncio.wait(tasks, timeout=100)
    assert done == set(tasks)


@pytest.mark.parametrize(("phase", "reason"), [("succeeded", ""), ("failed", "ValueError: no")])
async def test_stop_of_an_ended_job_says_how_it_ended(world: World, phase: str, reason: str) -> None:
    job = await world.head.submit(JOB, CODE)
    rewrite(world, job_key(job, "state.json"), lambda state: state | {"phase": phase, "reason": reason, "ended": 5.0})
    how = f"{phase} ({reason})" if reason else phase
    for _ in range(2):  # while it is still in the queue, and after that
        with pytest.raises(SpotrunError, match=re.escape(f"job {job} has already ended: {how}")):
            await asked(world, world.head, "stop", job)
        await world.turn(2)
    assert world.queue() == []


async def test_a_closed_connection_wakes_the_loop_only_together_with_a_second_sign(world: World) -> None:
    job = await world.started()
    world.head.news.changed.clear()
    world.head.disconnect("b", world.sends["b"])
    assert world.head.scaler.look_now.is_set()  # the cloud's answer wakes the loop
    assert not world.head.news.changed.is_set()
    world.receive("b", job=job.id)
    gone = {"kind": "peer", "rank": 0, "at": 1.0, "message": "a peer is gone"}
    world.receive("a", job=job.id, phase="failed", generation=1, failure=gone)
    world.head.news.changed.clear()
    world.head.disconnect("b", world.sends["b"])
    assert world.head.news.changed.is_set()


async def test_a_silent_agent_gets_no_order_until_it_reports(tmp_path: Path) -> None:
    """Its first report is news, so that it gets its order at once."""
    stage = Theatre(tmp_path, machines=2)
    job = await stage.queue_job("a", 2)
    await stage.round(20)
    assert len(stage.nodes(job)) == 2
    silent, other = stage.nodes(job)
    await stage.round(12, without={silent})
    got = {name: len(puppet.orders) for name, puppet in stage.puppets.items()}
    stops = asyncio.create_task(stage.head.change(lambda state, _: state.replace(stopping="by the operator"), job))
    await asyncio.sleep(0)
    await stage.round(without={silent})
    await stops
    assert len(stage.puppets[other].orders) > got[other]
    assert len(stage.puppets[silent].orders) == got[silent]
    stage.head.news.take()
    stage.report(silent)
    assert stage.head.news.take() == {silent}
    await stage.turn()
    assert len(stage.puppets[silent].orders) > got[silent]


@pytest.mark.parametrize(
    ("change", "nodes"),
    [
        ({}, set()),
        ({"made": {"p-1": 2.0}}, {"p-1"}),
        ({"room": {"p": 1}}, {"p-1"}),
        ({"size": {"p": 3, "q": 0}}, {"p-2"}),
        ({"out": {"p": "no answer"}}, {"p-0", "p-1"}),
    ],
    ids=["nothing", "a machine is made again", "a machine is gone", "a machine is new", "a zone does not answer"],
)
async def test_a_look_at_the_cloud_is_news_of_the_machines_that_have_changed(
    world: World, change: dict[str, Any], nodes: set[str]
) -> None:
    await world.with_machines()
    world.head.news.take()
    for name, value in change.items():
        setattr(world.cloud, name, value)
    await world.look()
    assert world.head.news.take() == nodes


async def test_a_jobs_state_and_its_events_are_written_at_the_same_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await world.started()
    both, put = Barrier(2), world.store.replace

    def replace(key: str, *given: Any) -> Any:
        if key.startswith(f"jobs/{job.id}/"):
            both.wait(30)  # one after the other would wait here until the time is over
        return put(key, *given)

    monkeypatch.setattr(world.store, "replace", replace)
    world.head.add_event("job", "something has happened", job=job.id)
    await world.head.journal.write(job.replace(dumping=True), world.head.events.of(job.id), world.clock())
    assert world.written(job.id).dumping
    assert "something has happened" in "".join([event.line for event in await world.head.journal.events(job.id)])
