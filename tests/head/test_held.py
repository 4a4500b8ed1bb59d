"""Bringing a cluster up starts no job by itself, and taking it down ends none unasked."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import display, queue
from scripts import site as sites
from spotrun.cloud.local.layout import Layout, base_environment
from spotrun.errors import SpotrunError, StoreError
from spotrun.head import job_queue
from spotrun.head.job_state import Stop, apply
from spotrun.spec import ClusterSpec
from spotrun.store import Store, job_key, queue_key, up_key
from spotrun.wire import read_queue
from tests.head.puppets import Theatre
from tests.head.world import CODE, JOB, World, asked, phases, rewrite
from tests.helpers import await_for, wait_for

SPEC = ClusterSpec.model_validate({"name": "c", "cloud": "local", "pools": [{"name": "p", "zone": "local-a"}]})


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_recreated_head_goes_on_with_its_queue(world: World) -> None:
    first = await world.started()
    waiting = await world.head.submit(JOB, CODE)
    queue.hold(world.store, "c")
    world.new_head()
    await world.turn()
    assert (world.head.jobs, world.head.status()["held"]) == ([], [first.id, waiting])
    third = await world.head.submit(JOB, CODE)
    for _ in range(2):
        world.new_head()
        await world.turn()
        assert (world.head.jobs, world.head.status()["held"]) == ([third], [first.id, waiting]), "the same bring-up"


async def test_a_new_cluster_holds_nothing(world: World) -> None:
    queue.hold(world.store, "c")
    assert not world.store.exists(up_key("c"))
    job = await world.head.submit(JOB, CODE)
    world.new_head()
    await world.turn()
    assert (world.head.jobs, world.head.journal.held) == ([job], [])


async def test_held_jobs_get_no_machine_and_hold_up_nobody(world: World) -> None:
    job = await world.started()
    queue.hold(world.store, "c")
    world.cloud.size["p"] = 2  # of the time before
    head = world.new_head()
    await world.turn()
    await world.look()
    await world.look()
    assert (head.job, world.cloud.size) == (None, {"p": 0, "q": 0})
    status = head.status()
    assert f"{job.id}: held since the cluster was brought up; `make relaunch ID={job.id}` continues it" in display.text(
        status
    )
    assert await phases(world, head) == [(job.id, "held")]
    listed = (await asked(world, head, "jobs"))[0]
    assert (listed["name"], listed["nodes"]) == ("toy", [])
    assert listed["reason"] == f"held since the cluster was brought up; `make relaunch ID={job.id}` continues it"
    with pytest.raises(SpotrunError, match=f"have been held since the cluster was brought up: {job.id}; name one"):
        await asked(world, head, "relaunch", "")
    another = await head.submit(JOB, CODE)
    await world.turn()
    assert head.job is not None
    assert head.job.id == another


async def test_held_jobs_are_listed_while_the_bucket_does_not_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await world.started()
    queue.hold(world.store, "c")
    head = world.new_head()
    await world.turn()

    def down(*_: object) -> bytes:
        raise StoreError("the bucket does not answer")

    monkeypatch.setattr(Store, "get", down)
    assert (await job_queue.brief(head, job.id))["phase"] == "held"


async def test_a_held_job_runs_on_when_it_is_relaunched(world: World) -> None:
    job = await world.started()
    queue.hold(world.store, "c")
    head = world.new_head()
    await world.turn()
    assert await asked(world, head, "relaunch", job.id) == {"job": job.id}
    await world.turn()
    assert head.job is not None
    assert (head.job.id, head.job.generation) == (job.id, 1)
    assert (world.queue(), head.journal.held) == ([job.id], [])
    world.new_head()
    await world.turn()
    assert world.head.jobs == [job.id]


async def test_a_held_job_that_is_relaunched_and_stopped_at_once_says_what_it_waits_for(world: World) -> None:
    """The head began a moment ago, so the job's nodes may still report. It does not give up their state yet."""
    job = await world.started()
    queue.hold(world.store, "c")
    head = world.new_head()
    head.presence.began = head.presence.awake_since = world.clock()
    await world.turn()
    await asked(world, head, "relaunch", job.id)
    await world.turn()
    answer = asyncio.create_task(asked(world, head, "stop", job.id))
    await await_for(lambda: head.requests._new, what="the request")
    await world.turn(3)
    await answer
    listed = (await asked(world, head, "jobs"))[0]
    reason = "waiting for a, b to report to the head, which began a moment ago"
    assert (listed["phase"], listed["reason"]) == ("waiting", reason)


async def test_held_jobs_are_stopped_with_their_group(world: World) -> None:
    jobs = [await world.head.submit(JOB | {"group": group}, CODE) for group in ("search", "other", "search")]
    lost = await world.head.submit(JOB | {"group": "search"}, CODE)
    queue.hold(world.store, "c")
    head = world.new_head()
    await world.turn()
    world.store.put(job_key(lost, "state.json"), b"junk")
    answer = await asked(world, head, "stop", group="search")
    assert answer == {"group": "search", "jobs": [jobs[0], jobs[2]]}
    assert head.journal.held == [jobs[1], lost]
    assert [(await head.load(job)).phase for job in jobs] == ["stopped", "queued", "stopped"]
    with pytest.raises(SpotrunError, match="group search has no job that has not ended"):
        await asked(world, head, "stop", group="search")


async def test_a_name_in_place_of_a_held_jobs_id_is_answered_with_the_ids(world: World) -> None:
    job = await world.started()
    queue.hold(world.store, "c")
    head = world.new_head()
    await world.turn()
    with pytest.raises(SpotrunError, match=f"there is no job toy in .*; toy is a job's name; give an id: {job.id}"):
        await asked(world, head, "relaunch", "toy")
    with pytest.raises(SpotrunError, match=r"there is no job yot in [^;]*\}$"):
        await asked(world, head, "relaunch", "yot")


async def test_operators_are_told_before_the_first_turn(world: World) -> None:
    job = await world.started()
    queue.hold(world.store, "c")
    assert (await asked(world, world.new_head(), "status"))["held"] == [job.id]


async def test_a_held_job_can_be_stopped(world: World) -> None:
    job = await world.started()
    queue.hold(world.store, "c")
    head = world.new_head()
    await world.turn()
    assert await asked(world, head, "stop", job.id) == {"job": job.id}
    stopped = world.written(job.id)
    assert (stopped.phase, stopped.reason, stopped.current) == ("stopped", "stopped by the operator", None)
    assert read_queue(world.store.find(queue_key("c"))).held == ()


@pytest.mark.parametrize("verb", ["pause", "resume", "priority"])
async def test_a_held_job_that_is_asked_for_is_said_to_be_held(world: World, verb: str) -> None:
    job = await world.started()
    queue.hold(world.store, "c")
    head = world.new_head()
    await world.turn()
    answer = asyncio.create_task(asked(world, head, verb, job.id, **({"to": 5} if verb == "priority" else {})))
    await await_for(lambda: head.requests._new, what="the request")
    await world.turn()
    with pytest.raises(SpotrunError, match=f"job {job.id} has been held since .* `make relaunch ID={job.id}`"):
        await answer


async def test_a_held_job_gets_another_budget_and_stays_held(world: World) -> None:
    job = await world.started()
    queue.hold(world.store, "c")
    head = world.new_head()
    await world.turn()
    await head.fleet.look()
    assert await asked(world, head, "budget", job.id, to=20) == {"job": job.id}
    assert (world.written(job.id).cost_limit, head.journal.held) == (20, [job.id])


async def test_a_job_that_had_ended_is_not_held(world: World) -> None:
    """The head was killed after it had written the end, and before it took the job out of the queue."""
    job = await world.started()
    rewrite(world, job_key(job.id, "state.json"), lambda state: state | {"phase": "succeeded", "ended": 5.0})
    queue.hold(world.store, "c")
    world.new_head()
    await world.turn()
    assert (world.head.jobs, world.head.journal.held) == ([], [])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPOTRUN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def bucket(home: Path) -> Store:
    return Store(str(Layout.of(home, "c").bucket))


@pytest.fixture
def machine(home: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of the cluster. No head answers."""
    layout = Layout.of(home, "c")
    layout.state.mkdir(parents=True)
    code = "import time; print(1, flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=base_environment(layout.mark("p-0")), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_down_asks_the_bucket_when_the_head_is_dead(home: Path, machine: subprocess.Popen[str]) -> None:
    store = bucket(home)
    store.put(queue_key("c"), b'{"format": 1, "jobs": ["toy-1", "toy-2", "toy-3"], "held": ["toy-0"]}')
    store.put(job_key("toy-1", "state.json"), b'{"phase": "succeeded"}')
    store.put(job_key("toy-2", "state.json"), b'{"phase": "running"}')
    with pytest.raises(SpotrunError, match="c: not ended yet: toy-2, toy-3; `make stop ID=toy-2` saves"):
        sites.take_down(sites.site(SPEC), force=False)
    for junk in (b"{", b'{"format": 2, "jobs": []}'):
        store.put(queue_key("c"), junk)
        with pytest.raises(SpotrunError, match="its queue in the bucket is broken; `make down FORCE=1` ignores it"):
            sites.take_down(sites.site(SPEC), force=False)
    assert machine.poll() is None
    assert "is down" in sites.take_down(sites.site(SPEC), force=True)
    assert wait_for(lambda: machine.poll() is not None, what="that the machine has ended")


def test_down_of_what_is_down_asks_nobody(home: Path) -> None:
    store = bucket(home)
    store.put(queue_key("c"), b'{"format": 1, "jobs": ["toy-1"]}')
    assert "is down" in sites.take_down(sites.site(SPEC), force=False)


def test_down_refuses_when_the_bucket_does_not_answer(home: Path, machine: subprocess.Popen[str]) -> None:
    folder = Layout.of(home, "c").bucket / "clusters" / "c" / "queue.json"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(folder)
    with pytest.raises(SpotrunError, match=r"which jobs run is not known: .*; `make down FORCE=1` ends them"):
        sites.take_down(sites.site(SPEC), force=False)
    assert machine.poll() is None


@pytest.mark.parametrize("missing", [False, True], ids=["held", "missing in the queue"])
async def test_a_job_that_no_head_ran_takes_no_device_from_a_job_that_trains_there_now(
    tmp_path: Path, missing: bool
) -> None:
    """Its machine is still there, as after `make down` was interrupted. Another job has the machine since."""
    stage = Theatre(tmp_path, machines=1)
    held = await stage.queue_job("held")
    await stage.round(20)
    assert stage.nodes(held) == ["p-0"]
    if missing:  # the head dies after this write of `take_out`
        await stage.head.journal.dequeue(held)
    else:
        queue.hold(stage.store, "c")
    stage.restart_head()
    other = await stage.queue_job("other")
    await stage.round(60)
    assert stage.nodes(other) == ["p-0"]
    await stage.head.relaunch(held)
    await stage.round(60)
    assert (stage.nodes(other), stage.nodes(held)) == (["p-0"], [])
    assert stage.state(held).phase == ("queued" if missing else "waiting")
    await stage.ask(lambda job, now: apply(job, Stop("enough"), now), other)
    await stage.round(60)
    assert stage.nodes(held) == ["p-0"]
