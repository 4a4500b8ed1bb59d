"""The real head on a bucket in a folder, with a cloud in memory; nodes are reports, orders are what it sends back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from spotrun.cloud.base import Instance, Problem
from spotrun.errors import CloudError, PartialError, SpotrunError, StoreError
from spotrun.head import repair
from spotrun.head.errands import Record
from spotrun.head.head import Head
from spotrun.head.health import REJOIN
from spotrun.head.state import Cause, Hold, JobState, Replacement, Stop, apply
from spotrun.spec import ClusterSpec
from spotrun.store import Store, epoch_key, job_key, queue_key, replaced_key
from spotrun.wire import Failure, Notice, Order, Report, Worker

T = TypeVar("T")

CODE = "0" * 64
JOB = {"name": "toy", "script": "train.py", "nodes": {"min": 2, "max": 2}}


class MemoryCloud:
    """Two pools; a resize is carried out at once, a recreate never is. refuse: pools that cannot be resized. out:
    pools whose zone does not answer: why. made: when machines were, of those that were made anew."""

    def __init__(self) -> None:
        self.size = {"p": 0, "q": 0}
        self.refuse: set[str] = set()
        self.out: dict[str, str] = {}
        self.made: dict[str, float] = {}
        self.silent: set[str] = set()  # what cannot be asked: prices, problems
        self.price: dict[str, float] = {"p": 1.0, "q": 2.0}
        self.refusal: str | Exception = ""  # what a recreate is refused with
        self.hold = asyncio.Event()  # a recreate waits for it
        self.hold.set()
        self.calls: list[tuple[str, Any]] = []

    async def nodes(self) -> list[Instance]:
        names = [(pool, f"{pool}-{i}") for pool, size in self.size.items() for i in range(size)]
        found = [Instance(n, pool, "z", "127.0.0.1", "running", "spot", self.made.get(n, 1.0), n) for pool, n in names]
        return self.told([each for each in found if each.pool not in self.out])

    async def sizes(self) -> dict[str, int]:
        return self.told({pool: size for pool, size in self.size.items() if pool not in self.out})

    def told(self, known: T) -> T:
        if self.out:
            raise PartialError(known, self.out)
        return known

    async def resize(self, pool: str, size: int) -> None:
        self.calls.append(("resize", (pool, size)))
        assert pool not in self.out
        if pool in self.refuse:
            raise CloudError(f"pool {pool}: no quota")
        self.size[pool] = size

    async def remove(self, names: Sequence[str]) -> None:
        self.calls.append(("remove", tuple(names)))

    async def recreate(self, names: Sequence[str]) -> None:
        self.calls.append(("recreate", tuple(names)))
        await self.hold.wait()
        if self.refusal:
            raise self.refusal if isinstance(self.refusal, Exception) else CloudError(self.refusal)

    async def preempt(self, name: str, notice: float | None = None) -> None:
        self.calls.append(("preempt", name))

    async def prices(self) -> dict[str, float]:
        self.throttle("prices")
        return dict(self.price)

    async def problems(self) -> list[Problem]:
        self.throttle("problems")
        return []

    def throttle(self, what: str) -> None:
        if what in self.silent:
            raise CloudError(f"{what}: Rate exceeded")

    async def close(self) -> None:
        pass


class World:
    """A bucket, a cloud, and the head of the moment. Turns are made one by one: nothing here waits for a clock."""

    def __init__(self, root: Path) -> None:
        pools = [{"name": name, "zone": "local-a", "max": 4} for name in ("p", "q")]
        self.cluster = ClusterSpec.model_validate({"name": "c", "cloud": "local", "pools": pools})
        self.store = Store(str(root))
        self.cloud = MemoryCloud()
        self.root = root
        self.orders: dict[str, list[Order]] = {}
        self.sends: dict[str, Callable[[Order], None]] = {}
        self.head = self.new_head()

    def new_head(self, epoch: int = 1) -> Head:
        self.head = Head(self.cluster, self.store, self.cloud, epoch)
        self.head._began = self.head._awake_since = time.time() - 100
        return self.head

    def hear(self, name: str, link: str = "", **values: Any) -> None:
        report = {"node": name, "boot": "b", "pool": "p", "zone": "z", "address": "127.0.0.1", "store": f"{name}:1"}
        heard = self.orders.setdefault(name + link, [])
        send = self.sends.setdefault(name + link, heard.append)
        self.head.hear(Report.model_validate({**report, "phase": "ready", **values}), send)

    def unfit(self, name: str, why: str = "no driver") -> None:
        """It has said for long enough that it is unfit."""
        self.hear(name, phase="unfit", unfit=[why], store="")
        self.head.agents.seen[name].since -= repair.GRACE

    @property
    def recreated(self) -> list[str]:
        """Machines about which the cloud was asked."""
        return [name for call, names in self.cloud.calls if call == "recreate" for name in names]

    def replaced(self) -> list[Replacement]:
        """What the bucket says of them."""
        data = self.store.find(replaced_key("c"))
        return list(Record.model_validate_json(data).machines) if data else []

    async def with_machines(self, **nodes: int) -> str:
        """A job whose machines are there, as the head knows; none has been heard."""
        job = await self.head.submit({**JOB, **({"nodes": nodes} if nodes else {})}, CODE)
        await self.turn()
        await self.look()
        await self.look()
        return job

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
    with pytest.raises(SpotrunError, match="job toy: budget: 5: could not be held: what machines of pool q cost"):
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
    assert world.head.agents.seen["b"].report.boot == "b2"
    world.head.lose("b", world.sends["b"])
    assert world.head.agents.seen["b"].send is world.sends["b2"]


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


@pytest.mark.parametrize("what", ["problems", "prices"])
async def test_machines_are_known_though_the_cloud_does_not_say_all(world: World, what: str) -> None:
    await world.head.fleet.look()
    world.cloud.size["p"] = 1

    async def throttled() -> Any:
        raise CloudError("Rate exceeded")

    setattr(world.cloud, what, throttled)
    assert await world.head.fleet.look() == []
    assert world.head.fleet.names() == {"p-0"}
    assert world.head.fleet.prices == world.cloud.price


OUT = {"p": "machines in z: Google does not answer"}


async def test_the_next_pool_stands_in_for_a_zone_that_does_not_answer(world: World) -> None:
    """The members there are kept. What is not heard there does not count, but nothing of it is removed or replaced."""
    job = await world.with_machines(min=1, max=2)
    assert world.cloud.size == {"p": 2, "q": 0}
    world.hear("p-0", job=job)
    world.hear("p-1", job=job)
    await world.turn(2)
    world.cloud.out = OUT
    await world.look()
    assert world.cloud.size == {"p": 2, "q": 0}, "all that the generation counts on"
    nodes = {node.name: node for node in world.head.agents.nodes(world.head.fleet)}
    assert (nodes["p-0"].cloud, nodes["p-1"].cloud) == (None, None)
    assert world.head.fleet.names() == {"p-0", "p-1"}
    machines = world.head.agents.machines(world.head.fleet)
    assert [each.state for each in machines] == ["unknown", "unknown"]
    pools = {pool["name"]: pool for pool in world.head.status()["pools"]}
    assert pools["p"]["problem"] == "zone local-a does not answer: machines in z: Google does not answer"
    assert (pools["p"]["target"], pools["q"]["problem"]) == (2, None)
    world.cloud.out = {"p": "machines in z: other words"}
    await world.look()
    assert sum("does not answer" in event["text"] for event in world.head.events) == 1

    # One is lost: silent, and the other says so as well.
    world.head.lose("p-1", world.sends["p-1"])
    world.head.agents.seen["p-1"].heard -= 60
    failure = Failure(kind="peer", rank=0, message="reset", at=time.time())
    world.hear("p-0", job=job, phase="ready", generation=1, failure=failure)
    await world.turn(2)
    assert world.head.job is not None
    assert [m.node for m in world.head.job.last] == ["p-0"]
    await world.look()
    assert world.cloud.size == {"p": 2, "q": 1}
    assert not [call for call in world.cloud.calls if call[0] != "resize"]

    world.cloud.out = {}
    await world.head.fleet.look()
    assert world.head.fleet.problems == []
    assert {node.cloud for node in world.head.agents.nodes(world.head.fleet)} == {"running"}


async def test_a_head_that_has_never_known_a_zone(world: World) -> None:
    """It does not take the members there for gone, nor anybody of another zone for there."""
    job = await world.started()
    world.new_head()
    world.cloud.out = OUT
    world.cloud.size["q"] = 1
    await world.head.fleet.look()
    assert world.head.fleet.names() == {"q-0"}
    assert world.head.fleet.state_of("p-0", 2.0) is None, "who knows whose it is"
    assert world.head.fleet.state_of("p-0", 2.0, "p") is None
    assert world.head.fleet.state_of("q-1", 2.0, "q") == "gone"
    assert world.head.fleet.state_of("q-0", 2.0) == "running"
    await world.turn()
    assert world.head.job is not None
    assert world.head._view(time.time()).vanished == frozenset()
    world.hear("p-0", job=job.id)
    world.head.lose("p-0", world.sends["p-0"])
    world.head._forget()
    assert "p-0" in world.head.agents.seen
    assert world.head.job.current == job.current
    await world.look()
    assert world.cloud.size == {"p": 0, "q": 2}


async def test_what_was_known_of_a_zone_outlasts_an_outage_of_all(world: World) -> None:
    world.cloud.size["p"] = 2
    await world.head.fleet.look()

    async def refuse() -> Any:
        raise CloudError("no way")

    told, world.cloud.nodes = world.cloud.nodes, refuse  # type: ignore[method-assign]
    with pytest.raises(CloudError, match="no way"):
        await world.head.fleet.look()
    assert world.head.fleet.state_of("p-0", 2.0) is None
    world.cloud.nodes, world.cloud.out = told, OUT  # type: ignore[method-assign]
    await world.head.fleet.look()
    assert world.head.fleet.names() == {"p-0", "p-1"}
    assert world.head.fleet.sizes == {"p": 2, "q": 0}


async def test_machines_of_a_zone_that_did_not_answer_go_once_it_does(world: World) -> None:
    await world.head.journal.read_queue()
    world.cloud.size["p"] = 2
    await world.head.fleet.look()
    world.cloud.out = OUT
    await world.look()
    assert world.cloud.calls == []
    world.cloud.out = {}
    await world.look()
    assert world.cloud.size == {"p": 0, "q": 0}


async def test_an_unfit_machine_is_replaced(world: World) -> None:
    """Said once, asked for once; what was asked for is in the bucket, so that a new head goes on counting."""
    job = await world.with_machines()
    assert world.cloud.size == {"p": 2, "q": 0}
    world.unfit("p-0", "900 MiB are free")
    world.hear("p-0", phase="unfit", unfit=["899 MiB are free"], store="")
    world.hear("p-1", job=job)
    await world.turn()
    await world.head.errands.answered()
    await world.turn(2)
    assert world.recreated == ["p-0"]
    assert [(each.node, each.pool, each.why) for each in world.replaced()] == [("p-0", "p", "899 MiB are free")]
    texts = [event["text"] for event in world.head.events]
    assert [text for text in texts if "takes no job" in text] == ["p-0 takes no job: 900 MiB are free"]
    assert texts.count("p-0: 899 MiB are free: asked the cloud for another in its place") == 1
    pools = {pool["name"]: pool for pool in world.head.status()["pools"]}
    assert (pools["p"]["problem"], pools["q"]["problem"]) == ("p-0 takes no job: 899 MiB are free", None)
    await world.look()
    assert world.cloud.size == {"p": 2, "q": 0}, "another is on its way, so nobody stands in"

    world.new_head()
    await world.look()
    world.unfit("p-0")
    await world.turn(3)
    assert world.recreated == ["p-0"]


@pytest.mark.parametrize(
    ("between", "made_anew", "expected"),
    [("checking", False, ["p-0"]), ("idle", False, []), ("checking", True, [])],
    ids=["restarts", "fit in between", "its successor"],
)
async def test_an_unfit_machine_whose_agent_keeps_restarting_is_replaced(
    world: World, between: str, made_anew: bool, expected: list[str]
) -> None:
    """Each time it is checked, and is unfit for less long than the head waits."""
    await world.with_machines()
    world.hear("p-0", boot="b0", phase="checking", store="")
    world.hear("p-0", boot="b0", phase="unfit", unfit=["no driver"], store="")
    seen = world.head.agents.seen["p-0"]
    seen.since -= repair.GRACE
    seen.unfit_since -= repair.GRACE
    if made_anew:
        world.cloud.made["p-0"] = time.time() - 1
        await world.look()
    for boot in ("b1", "b2"):
        world.hear("p-0", boot=boot, phase=between, store="")
        world.hear("p-0", boot=boot, phase="unfit", unfit=["no driver"], store="")
    await world.turn()
    await world.head.errands.answered()
    assert world.recreated == expected


async def test_a_machine_that_does_not_join_is_replaced_though_turns_take_long(world: World) -> None:
    """Such a turn makes a gap: the head waits until agents could be heard again, not for another boot."""
    job = await world.with_machines()
    world.hear("p-1", job=job)
    world.head._began = time.time() - repair.BOOT_TIMEOUT - 1
    world.head._awake_since = time.time() - REJOIN - 1
    await world.turn()
    await world.head.errands.answered()
    assert world.recreated == ["p-0"]


async def test_orders_do_not_wait_for_the_cloud(world: World) -> None:
    """A notice comes while the cloud takes its time with machines that are to be replaced."""
    job = await world.started()
    world.cloud.size["p"] = 3
    await world.head.fleet.look()
    world.cloud.hold.clear()
    for name in ("p-0", "p-1", "p-2"):
        world.unfit(name)
    async with asyncio.timeout(30):
        await world.turn()
    for name in ("a", "b"):
        world.hear(name, job=job.id, phase="running", generation=1, workers=stepping(5))
    notice = Notice(kind="preempt", deadline=time.time() + 30)
    world.hear("a", job=job.id, phase="running", generation=1, workers=stepping(5), notice=notice)
    async with asyncio.timeout(30):
        await world.turn(2)
    assert world.orders["a"][-1].stop_at is not None
    assert sorted(set(world.recreated)) == ["p-0", "p-1", "p-2"]
    world.cloud.hold.set()
    await world.head.errands.answered()


async def test_what_a_cloud_refuses_does_not_count(world: World) -> None:
    job = await world.with_machines()
    world.cloud.refusal = "Rate exceeded"
    world.hear("p-1", job=job)
    began = time.time()
    for seconds in (0, 1, 61, 182, 423):
        world.unfit("p-0")
        world.head.agents.seen["p-0"].heard = world.head.agents.seen["p-1"].heard = began + seconds
        await world.head._turn(began + seconds)
        await world.head.errands.answered()
        await world.head._turn(began + seconds)
    assert world.recreated == ["p-0"] * 4
    assert [each.refused for each in world.replaced()] == ["Rate exceeded"]
    pools = {pool["name"]: pool["problem"] for pool in world.head.status()["pools"]}
    assert pools["p"] == "p-0 takes no job: no driver; the cloud does not replace it: Rate exceeded"
    refusal = "p-0: no driver: the cloud does not put another in its place: Rate exceeded"
    assert [e["text"] for e in world.head.events if e["kind"] == "cloud"] == [refusal] * 4


async def test_whatever_comes_out_of_a_call_is_a_refusal(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Libraries of clouds raise what they like: that must not end the head."""
    await world.with_machines()
    world.cloud.refusal = KeyError("Instances")
    world.unfit("p-0")
    await world.turn()
    await world.head.errands.answered()
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
    await world.head.errands.answered()
    assert (world.recreated, len(world.replaced())) == (["p-0"], 1)


async def recovers(world: World, name: str) -> None:
    world.hear(name, phase="idle")


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
    world.head.errands.replaced = (refused,)
    await world.turn()
    assert world.replaced() == [refused]
    record = world.root / "clusters" / "c" / "replaced.json"
    content = record.read_bytes()
    record.unlink()
    record.mkdir()  # an object that cannot be written
    world.unfit("p-0")
    with pytest.raises(StoreError):
        await world.turn()
    assert [each.tries for each in world.head.errands.replaced] == [2]
    await meanwhile(world, "p-0")
    record.rmdir()
    record.write_bytes(content)
    await world.turn()
    await world.head.errands.answered()
    assert (world.recreated, world.replaced(), world.head.errands.replaced) == ([], [refused], (refused,))


@NOT_WANTED
async def test_a_machine_that_came_to_be_fit_while_others_were_asked_about_stays(
    world: World, meanwhile: Meanwhile
) -> None:
    await world.with_machines()
    world.cloud.hold.clear()
    world.head.errands._at_once = asyncio.Semaphore(1)
    for name in ("p-0", "p-1"):
        world.unfit(name)
    await world.turn()
    while not world.recreated:
        await asyncio.sleep(0)
    assert len(world.replaced()) == 2
    await meanwhile(world, "p-1")
    world.cloud.hold.set()
    await world.head.errands.answered()
    await world.turn()
    assert (world.recreated, [each.node for each in world.replaced()]) == (["p-0"], ["p-0"])


async def test_a_head_killed_between_writing_and_asking_loses_nothing(world: World) -> None:
    """The next one asks, once the cloud has had its time, and that counts once."""
    await world.with_machines()
    world.unfit("p-0")
    await world.turn()
    await world.head.errands.close()  # before the call was made
    assert (world.recreated, len(world.replaced())) == ([], 1)
    world.new_head()
    await world.look()
    world.unfit("p-0")
    await world.turn()
    assert world.recreated == []
    await world.head._turn(time.time() + repair.AGAIN)
    await world.head.errands.answered()
    assert world.recreated == ["p-0"]
    assert [(each.node, each.tries) for each in world.replaced()] == [("p-0", 2)]


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
    (call,) = world.head.errands._asking
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert call.cancelled()


async def test_the_limit_is_the_clusters_not_each_jobs(world: World) -> None:
    await world.with_machines()
    for number in range(repair.LIMIT):
        world.cloud.made["p-0"] = 2.0 + number
        await world.look()
        world.unfit("p-0")
        await world.turn()
        await world.head.errands.answered()
        await world.turn()
    asked = asyncio.create_task(world.head.change(lambda j, now: apply(j, Stop("enough"), now)))
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
        assert world.recreated == ["p-0"] * repair.LIMIT


async def test_a_cluster_described_anew_begins_to_count_anew(world: World) -> None:
    """With another image, say."""
    await world.with_machines()
    world.unfit("p-0")
    await world.turn()
    await world.head.errands.answered()
    assert len(world.replaced()) == 1
    head = world.new_head()
    await world.turn()
    assert len(head.errands.replaced) == 1
    world.cluster = world.cluster.model_copy(update={"image": "another"})
    head = world.new_head()
    await world.turn()
    assert head.errands.replaced == ()


@pytest.mark.parametrize("junk", [b"[", b"{}", b'{"description": "x", "machines": [1]}', b"\xff\xfe"])
async def test_junk_about_replacements_is_passed_over(world: World, junk: bytes) -> None:
    world.store.put(replaced_key("c"), junk)
    await world.started()
    assert world.head.errands.replaced == ()


async def test_a_machine_that_is_being_checked_is_there_and_takes_no_part(world: World) -> None:
    job = await world.with_machines(min=1, max=2)
    world.hear("p-0", job=job)
    notice = Notice(kind="preempt", deadline=time.time() + 30)
    world.hear("p-1", phase="checking", store="", job=job)
    world.head.agents.ready_at = 0.0
    await world.head._turn(time.time() + 20)
    assert world.head.job is not None
    assert world.head.job.current is None or len(world.head.job.current.members) == 1
    assert [node["phase"] for node in world.head.status()["nodes"]] == ["ready", "checking"]
    await world.look()
    assert world.cloud.size == {"p": 2, "q": 0}
    world.hear("p-1", phase="checking", store="", notice=notice)
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
    said = [event["text"] for event in world.head.events if event["kind"] == "cloud"]
    assert len(said) == 1
    assert said[0].startswith("pool p: 3 machines took no job and were replaced, the last since: no driver; no more")
    assert world.written(job).phase == "queued"
