"""The real head on a bucket in a folder, with a cloud in memory; nodes are reports, orders are what it sends back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spotrun.cloud.base import Instance, Problem
from spotrun.errors import CloudError, SpotrunError
from spotrun.head.head import Head
from spotrun.head.state import Cause, Hold, JobState, Replacement, Stop, apply
from spotrun.spec import ClusterSpec
from spotrun.store import Store, epoch_key, job_key, queue_key
from spotrun.wire import Failure, Order, Report, Worker

CODE = "0" * 64
JOB = {"name": "toy", "script": "train.py", "nodes": {"min": 2, "max": 2}}


class MemoryCloud:
    """Two pools; a resize is carried out at once. refuse: pools that cannot be resized."""

    def __init__(self) -> None:
        self.size = {"p": 0, "q": 0}
        self.refuse: set[str] = set()
        self.price: dict[str, float] = {"p": 1.0, "q": 2.0}
        self.calls: list[tuple[str, Any]] = []

    async def nodes(self) -> list[Instance]:
        names = [(pool, f"{pool}-{i}") for pool, size in self.size.items() for i in range(size)]
        return [Instance(n, pool, "z", "127.0.0.1", "running", "spot", 1.0, n) for pool, n in names]

    async def sizes(self) -> dict[str, int]:
        return dict(self.size)

    async def resize(self, pool: str, size: int) -> None:
        self.calls.append(("resize", (pool, size)))
        if pool in self.refuse:
            raise CloudError(f"pool {pool}: no quota")
        self.size[pool] = size

    async def remove(self, names: Sequence[str]) -> None:
        self.calls.append(("remove", tuple(names)))

    async def recreate(self, names: Sequence[str]) -> None:
        self.calls.append(("recreate", tuple(names)))

    async def preempt(self, name: str, notice: float | None = None) -> None:
        self.calls.append(("preempt", name))

    async def prices(self) -> dict[str, float]:
        return dict(self.price)

    async def problems(self) -> list[Problem]:
        return []

    async def close(self) -> None:
        pass


class World:
    """A bucket, a cloud, and the head of the moment. Turns are made one by one: nothing here waits for a clock."""

    def __init__(self, root: Path) -> None:
        pools = [{"name": name, "zone": "local-a", "max": 4} for name in ("p", "q")]
        self.cluster = ClusterSpec.model_validate({"name": "c", "cloud": "local", "pools": pools})
        self.store = Store(str(root))
        self.cloud = MemoryCloud()
        self.orders: dict[str, list[Order]] = {}
        self.sends: dict[str, Callable[[Order], None]] = {}
        self.head = self.new_head()

    def new_head(self, epoch: int = 1) -> Head:
        self.head = Head(self.cluster, self.store, self.cloud, epoch)
        self.head._awake_since = time.time() - 100
        return self.head

    def hear(self, name: str, link: str = "", **values: Any) -> None:
        report = {"node": name, "boot": "b", "pool": "p", "zone": "z", "address": "127.0.0.1", "store": f"{name}:1"}
        heard = self.orders.setdefault(name + link, [])
        send = self.sends.setdefault(name + link, heard.append)
        self.head.hear(Report.model_validate({**report, "phase": "ready", **values}), send)

    async def turn(self, times: int = 1) -> None:
        for _ in range(times):
            await self.head._turn(time.time())

    async def look(self) -> None:
        """One look of `watch_cloud`."""
        looked = asyncio.Event()
        self.head._changed = looked
        task = asyncio.create_task(self.head.watch_cloud())
        waiting = asyncio.create_task(looked.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        task.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)

    async def started(self) -> JobState:
        """A job whose first generation runs on a and b."""
        job = await self.head.submit(JOB, CODE)
        await self.turn()
        for name in ("a", "b"):
            self.hear(name, job=job)
        await self.turn()
        assert self.head.job is not None
        assert self.head.job.current is not None
        return self.head.job

    def written(self, job: str) -> JobState:
        return JobState.model_validate_json(self.store.get(job_key(job, "state.json")))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def stepping(step: int) -> tuple[Worker, ...]:
    return (Worker(rank=0, pid=1, step=step, base=0, stepped_at=time.time()),)


async def test_what_is_ordered_is_in_the_bucket(world: World) -> None:
    job = await world.started()
    assert world.written(job.id).generation == 1
    assert [order.generation.number for order in world.orders["a"] if order.generation] == [1]


async def test_no_machine_goes_before_the_queue_is_read(world: World) -> None:
    """A new head looks at the cloud before the bucket has answered: it does not know yet that a job runs."""
    await world.started()
    world.cloud.size["p"] = 2
    world.new_head()
    await world.look()
    assert world.cloud.calls == []
    assert world.cloud.size["p"] == 2


async def test_a_budget_needs_prices(world: World) -> None:
    del world.cloud.price["q"]
    await world.head.fleet.look()
    with pytest.raises(SpotrunError, match="job toy: budget: 5: what machines of pool q cost is not known"):
        await world.head.submit(JOB | {"budget": 5.0}, CODE)
    assert await world.head.submit(JOB, CODE)


async def test_a_job_submitted_before_the_queue_is_read_joins_it(world: World) -> None:
    first = await world.head.submit(JOB, CODE)
    world.new_head()
    second = await world.head.submit(JOB, CODE)
    assert json.loads(world.store.get(queue_key("c"))) == [first, second]


async def test_many_submits_at_once_are_all_queued(world: World) -> None:
    jobs = await asyncio.gather(*(world.head.submit(JOB, CODE) for _ in range(8)))
    assert sorted(json.loads(world.store.get(queue_key("c")))) == sorted(jobs)


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
    assert [e["kind"] for e in world.head.events if e["kind"] == "generation"] == ["generation"]


async def test_a_job_file_that_cannot_be_read_ends_nothing(world: World) -> None:
    first, second = [await world.head.submit(JOB, CODE) for _ in range(2)]
    state = json.loads(world.store.get(job_key(first, "state.json")))
    world.store.put(job_key(first, "state.json"), json.dumps(state | {"spec": {"nodes": 3}}).encode())
    world.new_head()
    await world.turn(2)
    assert world.head.job is not None
    assert world.head.job.id == second


async def test_a_job_that_cannot_be_set_up_does_not_fail_the_next(world: World) -> None:
    first, second = [await world.head.submit(JOB, CODE) for _ in range(2)]
    await world.turn()
    failure = Failure(kind="setup", rank=0, at=1.0, message="no such package")
    world.hear("a", job=first, phase="failed", failure=failure)
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
    with pytest.raises(SpotrunError, match="is not active"):
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
    asked = asyncio.create_task(world.head.change(lambda j, now: apply(j, Hold(cause=Cause(kind="relaunch")), now)))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await world.turn()
    assert world.head.job is not None
    assert world.head.job.id == world.head.jobs[0], "the loop goes on with its job"


async def test_steps_alone_do_not_rewrite_the_state(world: World) -> None:
    job = await world.started()
    world.hear("a", job=job.id, phase="running", generation=1, workers=stepping(1))
    world.hear("b", job=job.id, phase="running", generation=1, workers=stepping(1))
    await world.turn()
    before = world.store.get(job_key(job.id, "state.json"))
    now = world.head.journal._written_at
    for step in range(2, 6):
        world.hear("a", job=job.id, phase="running", generation=1, workers=stepping(step))
        await world.head._turn(now + 0.1 * step)
    assert world.head.job is not None
    assert world.head.job.reached == 5
    assert world.store.get(job_key(job.id, "state.json")) == before


async def test_a_superseded_head_orders_nothing_more(world: World) -> None:
    job = await world.started()
    world.store.create(epoch_key("c", 2), b"")
    orders = {name: len(sent) for name, sent in world.orders.items()}
    world.head._requests.append((lambda j, now: apply(j, Hold(), now), asyncio.get_running_loop().create_future()))
    with pytest.raises(SystemExit):
        await world.head._turn(time.time())
    assert world.written(job.id).current == job.current
    assert {name: len(sent) for name, sent in world.orders.items()} == orders


async def test_a_generation_that_another_head_gave_out_is_not_given_out_again(world: World) -> None:
    job = await world.started()
    for name in ("a", "b"):
        world.hear(name, job=job.id, phase="running", generation=4)
    await world.turn(2)
    assert world.head.job is not None
    assert world.head.job.generation == 5


async def test_what_a_dead_link_still_brings_is_not_heard(world: World) -> None:
    job = await world.started()
    world.hear("b", link="2", job=job.id, boot="b2")
    world.hear("b", job=job.id, boot="b", phase="running", generation=1)
    assert world.head._agents["b"].report.boot == "b2"
    world.head.lose("b", world.sends["b"])
    assert world.head._agents["b"].send is world.sends["b2"]


async def test_a_new_head_gives_up_members_whose_machines_are_gone(world: World) -> None:
    job = await world.started()
    world.new_head()
    world.cloud.size["p"] = 2
    await world.head.fleet.look()
    await world.turn()
    for name in ("p-0", "p-1"):
        world.hear(name, job=job.id)
    await world.turn()
    assert world.head.job is not None
    assert world.head.job.current is not None
    assert [m.node for m in world.head.job.current.members] == ["p-0", "p-1"]


async def test_the_next_job_does_not_begin_with_the_last_ones_events(world: World) -> None:
    first = await world.started()
    second = await world.head.submit(JOB, CODE)
    asked = asyncio.create_task(world.head.change(lambda j, now: apply(j, Stop("enough"), now)))
    await asyncio.sleep(0)
    await world.turn(8)
    await asked
    assert world.written(first.id).phase == "stopped"
    assert world.head.job is not None
    assert world.head.job.id == second
    assert "generation" not in [event["kind"] for event in world.head.events]


async def test_a_pool_that_refuses_does_not_hold_up_the_others(world: World) -> None:
    world.cloud.refuse.add("p")
    await world.head.submit(JOB, CODE)
    await world.turn()
    await world.look()
    await world.look()
    assert world.cloud.size == {"p": 0, "q": 2}


async def test_a_cancelled_head_ends_though_something_changed(world: World) -> None:
    tasks = [asyncio.create_task(work) for work in (world.head.run(), world.head.watch_cloud())]
    for _ in range(20):
        async with world.head.published:
            await world.head.published.wait()
        world.head._changed.set()
        world.head._look_now.set()
    for task in tasks:
        task.cancel()
    world.head._changed.set()
    world.head._look_now.set()
    done, _ = await asyncio.wait(tasks, timeout=10)
    assert done == set(tasks)


async def test_while_the_cloud_is_asked_its_last_answer_counts(world: World) -> None:
    world.cloud.size["p"] = 1
    await world.head.fleet.look()
    asked = asyncio.Event()

    async def slow() -> dict[str, int]:
        asked.set()
        await asyncio.Event().wait()
        return {}

    world.cloud.sizes = slow  # type: ignore[method-assign]
    looking = asyncio.create_task(world.head.fleet.look())
    await asked.wait()
    await world.head.fleet.preempt("p-0", None)
    assert world.cloud.calls == [("preempt", "p-0")]
    looking.cancel()


async def test_an_unfit_machine_is_replaced_and_another_pool_stands_in(world: World) -> None:
    """Said once, asked for once; what was asked for is in the bucket, so that a new head goes on counting."""
    job = await world.head.submit(JOB, CODE)
    await world.turn()
    await world.look()
    assert world.cloud.size == {"p": 2, "q": 0}
    await world.look()  # those two are there now
    world.hear("p-0", phase="unfit", unfit=["no driver"], store="")
    world.hear("p-1", job=job)
    await world.turn(3)
    assert world.cloud.calls.count(("recreate", ("p-0",))) == 1
    assert [(each.node, each.pool, each.why) for each in world.written(job).replaced] == [("p-0", "p", "no driver")]
    texts = [event["text"] for event in world.head.events]
    assert texts.count("p-0 takes no job: no driver") == 1
    assert texts.count("p-0: no driver: asked the cloud for another in its place") == 1
    pools = {pool["name"]: pool for pool in world.head.status()["pools"]}
    assert (pools["p"]["problem"], pools["q"]["problem"]) == ("p-0 takes no job: no driver", None)
    await world.look()
    assert world.cloud.size == {"p": 2, "q": 1}

    world.new_head()
    await world.look()
    world.hear("p-0", phase="unfit", unfit=["no driver"], store="")
    await world.turn(3)
    assert world.cloud.calls.count(("recreate", ("p-0",))) == 1


async def test_a_pool_that_had_its_replacements_is_given_up_for_a_while(world: World) -> None:
    job = await world.head.submit({**JOB, "nodes": {"min": 1, "max": 1}}, CODE)
    await world.turn()
    await world.look()
    await world.look()
    world.hear("p-0", phase="unfit", unfit=["no driver"], store="")
    ago = [Replacement(node="p-0", pool="p", why="no driver", at=time.time() - age) for age in (900, 600, 300)]
    assert world.head.job is not None
    world.head.job = world.head.job.model_copy(update={"replaced": tuple(ago)})
    await world.turn(2)
    await world.look()
    assert not [call for call in world.cloud.calls if call[0] == "recreate"]
    assert ("remove", ("p-0",)) in world.cloud.calls
    assert world.cloud.size["q"] == 1
    said = [event["text"] for event in world.head.events if event["kind"] == "cloud"]
    assert len(said) == 1
    assert said[0].startswith("pool p: 3 machines took no job and were replaced, the last since: no driver; no more")
    assert world.written(job).phase == "queued"
