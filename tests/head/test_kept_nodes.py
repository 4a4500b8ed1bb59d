"""The node of a failed job, kept for a person: the real head, and nodes that obey it without processes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotrun.errors import SpotrunError
from spotrun.head.allocation.demand import wish
from spotrun.head.capacity.situation import Placement
from spotrun.head.capacity.sizes import Need, Observation, Pool, decide
from spotrun.head.job_state import JobState, KeepNode, KeptNode, LetGo
from spotrun.head.planner import kept_node
from spotrun.head.view import FleetView, Machine
from spotrun.spec import ClusterSpec, JobSpec
from spotrun.store import job_key, queue_key
from tests.head import views
from tests.head.puppets import Theatre, place_of
from tests.head.views import NOW, listed, member
from tests.head.world import asked, phases

MINUTE = 60.0
PLACE = place_of("toy-1")


@pytest.mark.parametrize(
    ("job", "node", "until"),
    [
        ({}, {}, NOW + 600),
        ({"keep_on_failure": None}, {}, None),
        ({"stopping": "stopped by the operator"}, {}, None),
        ({}, {"notice": views.notice()}, None),
        ({}, {"cloud": "terminated"}, None),
        ({}, {"boot": "b2"}, None),
    ],
    ids=[
        "the job file asks for it",
        "the job file does not ask for it",
        "the operator has stopped the job",
        "the node is under notice",
        "the machine is gone",
        "another agent has the name",
    ],
)
def test_whether_the_node_of_a_failure_is_kept(job: dict[str, Any], node: dict[str, Any], until: float | None) -> None:
    keep = job.pop("keep_on_failure", 600)
    state = views.job("a", "b", spec=views.spec(keep_on_failure=keep), **job)
    found = views.node("b", place=PLACE, **node)
    kept = kept_node.keep(views.view(state, views.node("a"), found, machines=listed("a", "b")), found)
    expected = KeptNode(member=member("b"), until=until or 0.0, made=0.0, place=PLACE)
    assert kept == ((KeepNode(expected),) if until else ())


@pytest.mark.parametrize(
    ("job", "view", "reason"),
    [
        ({}, {}, ""),
        ({"until": NOW}, {}, "the time of keep_on_failure is over"),
        ({"stopping": "stopped by the operator"}, {}, "stopped by the operator"),
        ({"cost": 0.99}, {}, ""),
        ({"cost": 1.0}, {}, "the budget of $1 is spent"),
        ({"cost": 0.99, "hourly": 3600.0}, {}, "the budget of $1 is spent"),
        ({}, {"machines": listed("a")}, "its machine is gone"),
        ({}, {"machines": listed("a"), "awake_since": NOW - 1}, ""),
        ({}, {"machines": (), "listed": False}, ""),
        ({"made": 5.0}, {"machines": (Machine("b", "p", "running", created=6.0),)}, "its machine is gone"),
        ({"made": 5.0}, {"machines": (Machine("b", "p", "running", created=5.0),)}, ""),
        ({}, {"machines": (Machine("b", "p", "terminated", created=0.0),)}, "its machine is gone"),
        ({}, {"machines": (Machine("b", "p", "stopping", created=0.0),)}, ""),
        ({}, {"machines": (Machine("b", "p", "unknown", created=0.0),)}, ""),
    ],
    ids=[
        "it stays while nothing is wrong, though its agent does not report",
        "its time is over",
        "the operator lets it go",
        "the budget is almost spent",
        "the budget is spent",
        "the budget will be spent when the machine has ended",
        "the cloud does not list it",
        "the cloud does not list it to a head that has just begun",
        "the cloud does not answer",
        "another machine has its name",
        "the same machine",
        "the machine has ended",
        "the machine is about to end",
        "its zone does not answer",
    ],
)
def test_when_a_kept_node_goes(job: dict[str, Any], view: dict[str, Any], reason: str) -> None:
    kept = KeptNode(member=member("b"), until=job.pop("until", NOW + 1), made=job.pop("made", 0.0))
    state = views.job(phase="failed", ended=NOW - 9, spec=views.spec(budget=1.0), kept_node=kept, **job)
    seen = views.view(state, **{"machines": listed("a", "b"), "awake_since": NOW - 1000, **view})
    assert kept_node.let_go(seen) == ((LetGo(reason),) if reason else ())


@pytest.fixture
def stage(tmp_path: Path) -> Theatre:
    return Theatre(tmp_path, machines=3)


async def failed(stage: Theatre, name: str = "job", nodes: int = 2, last: int = -1, **more: Any) -> tuple[str, str]:
    """A job that has just failed on one of its nodes, and that node."""
    await stage.round()  # the prices are known
    job = await stage.queue_job(name, nodes=nodes, max_restarts=0, **{"keep_on_failure": "10m", **more})
    await stage.round(10)
    node = stage.nodes(job)[last]
    stage.fail(job, node)
    stage.play()
    await ends(stage, job)
    return job, node


async def ends(stage: Theatre, job: str) -> None:
    """Rounds until the job's last state is in the bucket, and the job has ended."""
    for _ in range(10):
        if not stage.written(job).ended_already:
            await stage.round()
    assert stage.written(job).ended_already


def kept(stage: Theatre, job: str) -> str:
    """The node that the job keeps, as the bucket has it."""
    found = stage.written(job).kept_node
    return found.member.node if found else ""


def jobs_on(stage: Theatre, node: str) -> list[str]:
    """The jobs that the node was last told to have."""
    return list(stage.puppets[node].work)


def wanted(stage: Theatre) -> frozenset[str]:
    """The machines that must not go."""
    return wish(stage.head.fleet_view(stage.now), stage.cluster, stage.head.allocator.assignment.expected, {}).keep


async def texts(stage: Theatre, job: str) -> list[str]:
    return [event["text"] for event in await stage.head.journal.events(job)]


async def test_the_job_has_failed_and_keeps_the_node_that_failed(stage: Theatre) -> None:
    job, node = await failed(stage)
    assert (stage.written(job).phase, stage.written(job).reason, kept(stage, job)) == ("failed", "boom", node)
    document = await asked(stage, stage.head, f"status?job={job}")
    assert document["job"]["ended"], "who follows it does not wait for the node"
    assert document["job"]["kept"] == {
        "node": node,
        "devices": [0],
        "until": stage.now + 10 * MINUTE,
        **place_of(job).model_dump(),
        "run": f"cd {place_of(job).folder} && . {place_of(job).env} && python train.py",
    }
    assert await phases(stage, stage.head) == [(job, "failed")]
    until = time.strftime("%H:%M:%S", time.gmtime(stage.now + 10 * MINUTE))
    assert f"{node} is kept for SSH until {until} UTC" in await texts(stage, job)


async def test_only_the_node_that_failed_is_kept(stage: Theatre) -> None:
    job, node = await failed(stage, nodes=3, last=1)
    assert wanted(stage) == {node}
    assert {name: jobs_on(stage, name) for name in stage.puppets} == {"p-0": [], "p-1": [job], "p-2": []}
    await stage.round(5)
    assert ("remove", ("p-2", "p-0")) in stage.cloud.calls


async def test_the_node_goes_when_its_time_is_over(stage: Theatre) -> None:
    job, node = await failed(stage, nodes=1)
    stage.now += 9 * MINUTE
    stage.play()
    await stage.round(3)
    assert (kept(stage, job), jobs_on(stage, node), stage.cloud.size) == (node, [job], {"p": 1})
    stage.now += MINUTE
    stage.play()
    await stage.round(3)
    assert (kept(stage, job), jobs_on_all(stage), stage.cloud.size, stage.queue()) == ("", [], {"p": 0}, [])
    assert f"{node} is let go: the time of keep_on_failure is over" in await texts(stage, job)


def jobs_on_all(stage: Theatre) -> list[str]:
    return [job for name in stage.puppets for job in jobs_on(stage, name)]


async def test_its_time_costs_and_the_budget_ends_it(stage: Theatre) -> None:
    """A machine costs $3.60 an hour: a dollar is spent after 1,000 s."""
    job, node = await failed(stage, nodes=1, budget=1.0, keep_on_failure="1h")
    before, elapsed = stage.written(job).cost, stage.now
    await stage.round(1)
    for _ in range(20):
        stage.now += 0.5 * MINUTE
        stage.play()
        await stage.round(1)
    state = stage.state(job)
    assert state.cost - before == pytest.approx((stage.now - elapsed) / 1000)
    assert state.spent["kept"] == pytest.approx(stage.now - elapsed)
    assert kept(stage, job) == node
    stage.now += 10 * MINUTE
    stage.play()
    await stage.round(3)
    assert kept(stage, job) == ""
    assert f"{node} is let go: the budget of $1 is spent" in await texts(stage, job)


async def test_stop_lets_the_node_go(stage: Theatre) -> None:
    job, node = await failed(stage, nodes=1)
    await stage.round(3)
    answer = await answered(stage, "stop", job)
    assert answer == {"job": job, "kept": node}
    assert (kept(stage, job), stage.written(job).phase) == ("", "failed")
    await stage.round(3)
    assert stage.cloud.size == {"p": 0}
    with pytest.raises(SpotrunError, match="has already ended: failed"):
        await asked(stage, stage.head, "stop", job)


async def answered(stage: Theatre, verb: str, job: str | None, **more: Any) -> Any:
    """The answer to a request for which the head takes a turn."""
    asking = asyncio.create_task(asked(stage, stage.head, verb, job, **more))
    async with asyncio.timeout(60):
        while not asking.done():
            await stage.round()
            await asyncio.sleep(0)
    return await asking


async def test_stop_of_a_group_lets_its_nodes_go_too(stage: Theatre) -> None:
    job, _ = await failed(stage, nodes=1, group="search")
    answer = await answered(stage, "stop", None, group="search")
    assert answer == {"group": "search", "jobs": [job]}
    assert kept(stage, job) == ""


@pytest.mark.parametrize(
    ("verb", "more"),
    [("pause", {}), ("resume", {}), ("priority", {"to": 5}), ("stop", {"job": None})],
    ids=["pause", "resume", "priority", "stop without a job"],
)
async def test_other_commands_say_that_the_job_has_ended(stage: Theatre, verb: str, more: dict[str, Any]) -> None:
    job, node = await failed(stage, nodes=1)
    with pytest.raises(SpotrunError, match=f"job {job} has ended|no job is active; {job} has failed and keeps {node}"):
        await answered(stage, verb, more.pop("job", job), **more)
    assert kept(stage, job) == node


async def test_a_relaunch_lets_the_node_go_and_trains_again(stage: Theatre) -> None:
    job, _ = await failed(stage, nodes=1)
    await stage.round(3)
    await answered(stage, "relaunch", job)
    await stage.round(10)
    assert (stage.state(job).phase, stage.state(job).kept_node, stage.state(job).stopping) == ("running", None, "")


async def test_jobs_after_it_do_not_wait_for_the_node(stage: Theatre) -> None:
    first = await stage.queue_job("job", max_restarts=0, keep_on_failure="10m")
    after = await stage.queue_job("after", after=["job"], on="end")
    only = await stage.queue_job("only", after=["job"])
    await stage.round(10)
    (node,) = stage.nodes(first)
    stage.fail(first, node)
    await stage.round(10)
    assert kept(stage, first) == node
    assert stage.state(after).phase == "running"
    assert (stage.written(only).phase, stage.written(only).reason) == (
        "stopped",
        f"{first}, which this job comes after, has failed: boom",
    )


async def test_a_new_head_knows_that_the_jobs_after_it_do_not_wait(stage: Theatre) -> None:
    job, _ = await failed(stage, nodes=1)
    stage.restart_head()
    after = await stage.queue_job("after", after=["job"], on="end")
    await stage.round(10)
    assert stage.state(after).phase == "running"
    assert kept(stage, job)


async def test_no_other_job_gets_its_devices(stage: Theatre) -> None:
    """Not even one of the highest priority, which needs all machines."""
    job, node = await failed(stage, nodes=1)
    urgent = await stage.queue_job("urgent", nodes={"min": 1, "max": 3}, priority=1000)
    larger = await stage.queue_job("larger", nodes=3, priority=1000)
    await stage.round(10)
    assert set(stage.nodes(urgent)) == {"p-0", "p-1", "p-2"} - {node}
    rows = {row["id"]: row for row in stage.head.status()["jobs"]}
    assert rows[job]["nodes"] == [{"node": node, "devices": [0]}]
    assert f"{job} (failed, keeps a node)" in rows[urgent]["reason"] or "behind" in rows[larger]["reason"]
    await answered(stage, "stop", job)
    await stage.round(10)
    assert len(stage.nodes(urgent)) == 3


async def test_the_other_devices_of_the_node_serve_other_jobs(tmp_path: Path) -> None:
    stage = Theatre(tmp_path, machines=1, devices=4)
    job, node = await failed(stage, nodes=1, devices=2)
    other, third = await stage.queue_job("other", devices=2), await stage.queue_job("third", devices=2)
    await stage.round(10)
    held = stage.written(job).kept_node
    assert held is not None
    assert stage.nodes(other) == [node]
    assert set(held.member.devices).isdisjoint(stage.state(other).members[0].devices)
    assert stage.nodes(third) == []
    (shown,) = stage.head.status()["nodes"]
    assert {each["job"]: (each["devices"], each["phase"]) for each in shown["jobs"]} == {
        job: ([0, 1], "kept"),
        other: ([2, 3], "running"),
    }
    assert stage.state(other).cost + stage.state(job).cost <= (stage.now - 1000) / 1000


async def test_a_job_asks_for_a_machine_in_another_zone(tmp_path: Path) -> None:
    """The only machine of the first zone is the kept one."""
    stage = Theatre(tmp_path, machines=1)
    pools = [{"name": name, "zone": f"local-{name}", "max": 1} for name in ("p", "q")]
    stage.cluster = ClusterSpec.model_validate({"name": "c", "cloud": "local", "pools": pools})
    stage.cloud.size, stage.cloud.price = {"p": 0, "q": 0}, {"p": 3.6, "q": 3.6}
    stage.restart_head()
    _, node = await failed(stage, nodes=1)
    assert node == "p-0"
    await stage.queue_job("other")
    await stage.round(3)
    assert stage.cloud.size == {"p": 1, "q": 1}


def test_a_machine_that_stands_in_for_more_than_is_lacking_is_removed_beside_a_kept_node() -> None:
    """A job of three nodes has one spot machine and two on-demand machines; its third one is too many."""
    pools = [{"name": "p", "zone": "local-a", "max": 4}, {"name": "o", "zone": "local-a", "market": "on-demand"}]
    cluster = ClusterSpec.model_validate({"name": "c", "cloud": "local", "pools": pools})
    kept = views.job(phase="failed", kept_node=KeptNode(member=member("b"), until=NOW + 600), id="kept")
    trains, names = views.job("a", "x", "y"), ("x", "y", "z")
    there = {"p": ("a", "b"), "o": names}
    machines = tuple(Machine(name, pool, "running", created=0.0) for pool, each in there.items() for name in each)
    needs = (Need(3, frozenset("p")), Need(2, frozenset("o")))
    held = {trains.id: dict.fromkeys(("a", "x", "y"), (0,)), kept.id: {"b": (0,)}}
    seen = FleetView(now=NOW, jobs=(kept, trains), nodes=(), machines=machines)
    found = wish(seen, cluster, held, {trains.id: Placement(frozenset("po"), needs)})
    short = Pool("p", 4, 4, dict.fromkeys(there["p"], "ready"), "short")
    enough = Pool("o", 4, 3, dict.fromkeys(names, "ready"))
    assert decide(Observation((short, enough), found.needs, found.keep)).remove == ("z",)


async def test_the_head_dies_before_it_has_written_the_failure(stage: Theatre) -> None:
    """The node still reports the failure: the next head keeps the node."""
    job = await stage.queue_job("job", max_restarts=0, keep_on_failure="10m")
    await stage.round(10)
    (node,) = stage.nodes(job)
    stage.fail(job, node)
    stage.play()
    stage.restart_head()
    await ends(stage, job)
    assert (stage.written(job).phase, kept(stage, job)) == ("failed", node)


async def test_the_head_dies_when_it_has_written_the_failure_and_ordered_nothing(stage: Theatre) -> None:
    job = await stage.queue_job("job", nodes=2, max_restarts=0, keep_on_failure="10m")
    await stage.round(10)
    node = stage.nodes(job)[1]
    stage.fail(job, node)
    stage.play()
    stage.head._order = lambda *_: None  # type: ignore[method-assign]
    await stage.turn()
    assert (stage.written(job).phase, stage.written(job).bound[-1].node) == ("finishing", node)
    stage.restart_head()
    await ends(stage, job)
    held = stage.state(job).kept_node
    await stage.round(5)
    assert jobs_on(stage, node) == [job]
    assert held is not None
    assert stage.state(job).kept_node == held
    assert wanted(stage) == {node}


async def test_a_head_that_was_away_for_too_long_gives_the_node_back_at_once(stage: Theatre) -> None:
    job, _ = await failed(stage, nodes=1)
    stage.now += 11 * MINUTE
    stage.restart_head()
    await stage.round(3)
    assert kept(stage, job) == ""
    assert stage.cloud.size == {"p": 0}


async def test_a_new_head_whose_clock_is_behind_keeps_no_longer(stage: Theatre) -> None:
    job, _ = await failed(stage, nodes=1)
    stage.now -= 60 * MINUTE
    stage.restart_head()
    await stage.round(3)
    found = stage.written(job).kept_node
    assert found is not None
    assert stage.now < found.until <= stage.now + 10 * MINUTE


async def test_the_head_dies_after_it_has_let_the_node_go_in_the_bucket(stage: Theatre) -> None:
    job, node = await failed(stage, nodes=1)
    stage.head._order = lambda *_: None  # type: ignore[method-assign]
    stage.now += 10 * MINUTE
    await stage.turn()
    assert (kept(stage, job), stage.queue(), jobs_on(stage, node)) == ("", [job], [job])
    stage.restart_head()
    await stage.round(3)
    assert (stage.queue(), jobs_on_all(stage), stage.cloud.size) == ([], [], {"p": 0})


async def test_a_queue_that_cannot_be_read_is_rebuilt_with_the_job(stage: Theatre) -> None:
    job, node = await failed(stage, nodes=1)
    stage.store.put(queue_key("c"), b"{")
    stage.restart_head()
    await stage.round(5)
    assert (stage.head.jobs, kept(stage, job), jobs_on(stage, node)) == ([job], node, [job])


@pytest.mark.parametrize(
    "take", [lambda stage, node: stage.kill(node), lambda stage, node: gone(stage)], ids=["made again", "not there"]
)
async def test_a_machine_that_is_gone_is_not_kept(stage: Theatre, take: Callable[[Theatre, str], None]) -> None:
    job, node = await failed(stage, nodes=1)
    await stage.round(40)
    take(stage, node)
    await stage.round(5)
    assert kept(stage, job) == ""
    assert f"{node} is let go: its machine is gone" in await texts(stage, job)
    await stage.round(5)
    assert stage.cloud.size == {"p": 0}


def gone(stage: Theatre) -> None:
    stage.cloud.room = {"p": 0}
    for name in list(stage.puppets):
        stage.head.disconnect(name, stage.puppets.pop(name).send)


async def test_an_agent_that_restarts_keeps_the_job(stage: Theatre) -> None:
    job, node = await failed(stage, nodes=1)
    await stage.round(5)
    puppet = stage.puppets[node]
    puppet.boot, puppet.work = "another boot", {}
    await stage.round(5)
    assert (kept(stage, job), jobs_on(stage, node)) == (node, [job])


async def test_a_machine_that_does_not_report_or_is_unfit_is_not_replaced(stage: Theatre) -> None:
    """A person is on it. Another job wants machines meanwhile."""
    job, node = await failed(stage, nodes=1, keep_on_failure="10h")
    await stage.queue_job("other", nodes=1)
    await stage.round(5)
    puppet = stage.puppets.pop(node)
    stage.head.disconnect(node, puppet.send)
    for _ in range(100):
        stage.now += MINUTE
        for other in stage.puppets.values():
            stage.head.receive(other.report(stage.now), other.send)
        await stage.look()
        await stage.turn()
    assert kept(stage, job) == node
    assert [call for call in stage.cloud.calls if call[0] in ("recreate", "remove")] == []


@pytest.mark.parametrize("how", ["without the key", "a restart is left", "stopped before"])
async def test_no_node_is_kept(stage: Theatre, how: str) -> None:
    more = {} if how == "without the key" else {"keep_on_failure": "10m"}
    restarts = 1 if how == "a restart is left" else 0
    job = await stage.queue_job("job", max_restarts=restarts, **more)
    await stage.round(10)
    (node,) = stage.nodes(job)
    if how == "stopped before":
        await stage.ask(lambda state, now: state.replace(stopping="enough"), job)
    stage.fail(job, node)
    await stage.round(3)
    assert stage.state(job).kept_node is None


def test_a_state_of_an_older_version_has_no_kept_node(stage: Theatre) -> None:
    state = JobState(
        id="j", name="j", cluster="c", code="x", spec=JobSpec(script="a.py").model_dump(mode="json"), submitted=1.0
    )  # type: ignore[arg-type]
    values = json.loads(state.model_dump_json())
    del values["kept_node"]
    assert JobState.model_validate(values) == state
    assert job_key("j", "state.json")
