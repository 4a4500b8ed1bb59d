"""What the head does with the policies' choices: refusals at submission, events, history, and a second head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotrun.errors import SpecError
from spotrun.head import placer
from spotrun.head.capacity.history import Histories
from spotrun.head.job_state import Idle, JobState, Stop
from spotrun.head.planner import spending
from spotrun.head.planner.plan import plan
from spotrun.spec import ClusterSpec
from spotrun.store import history_key
from tests.head.views import A, B, job, node, spec, view
from tests.head.world import CODE, JOB, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def steady(world: World, most: int = 4) -> None:
    """The second pool is on-demand, in another zone."""
    pools = [
        {"name": "p", "zone": "local-a", "max": 4},
        {"name": "q", "zone": "local-b", "max": most, "market": "on-demand"},
    ]
    world.cluster = ClusterSpec.model_validate({"name": "c", "cloud": "local", "pools": pools})
    world.new_head()


async def test_a_deadline_that_cannot_be_kept_is_refused(world: World) -> None:
    steady(world)
    wanted = {**JOB, "work": 7200.0, "restart_time": 60.0}
    with pytest.raises(
        SpecError, match=r"job toy: deadline: 20 min: cannot be kept.*the earliest deadline is \d+s \(20"
    ):
        await world.head.submit({**wanted, "deadline": 1200.0}, CODE)
    assert await world.head.submit({**wanted, "deadline": 7200.0}, CODE)


@pytest.mark.parametrize(
    "change",
    [{}, {"idle": Idle(since=1.0, next=2.0)}],
    ids=["waits for machines", "has given its machines back"],
)
async def test_a_job_that_would_break_the_promise_to_a_waiting_job_is_refused(
    world: World, change: dict[str, Any]
) -> None:
    steady(world, most=2)
    wanted = {**JOB, "work": 7200.0, "restart_time": 60.0}
    first = await world.head.submit({**wanted, "deadline": 7200.0}, CODE)
    await world.turn()
    world.head.states[first] = world.head.states[first].replace(**change)
    with pytest.raises(SpecError, match=f"job {first} would miss its deadline"):
        await world.head.submit({**wanted, "name": "next", "deadline": 4400.0}, CODE)


async def test_a_second_head_does_not_buy_again(world: World) -> None:
    """The machines that the first one asked for are not there yet, and the cloud lists none of them."""
    world.cloud.room = {"p": 0, "q": 0}
    await world.head.submit(JOB, CODE)
    await world.turn()
    await world.look()
    assert world.cloud.calls == [("resize", ("p", 2))]
    for epoch in (2, 3):
        world.new_head(epoch)
        await world.turn()
        await world.look()
        await world.look()
    assert world.cloud.calls == [("resize", ("p", 2))]


async def test_a_second_head_leaves_sizes_alone_until_it_knows_the_jobs(world: World) -> None:
    await world.with_machines(min=2, max=2)
    calls = list(world.cloud.calls)
    world.new_head(2)
    await world.look()
    assert world.cloud.calls == calls


async def test_where_a_job_trains_is_in_the_status_and_in_the_events(world: World) -> None:
    await world.with_machines(min=2, max=2)
    for name in ("p-0", "p-1"):
        world.receive(name)
    await world.turn()
    assert world.head.status()["job"]["placement"] == "p, q in local-a: 2 machines"
    assert [each["text"] for each in world.events() if each["kind"] == "machines"] == ["asks p, q in local-a"]


async def test_what_was_learned_outlasts_the_head(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placer, "WRITE_EVERY", 0.0)
    await world.with_machines(min=2, max=2)
    key = history_key("c")
    learned = Histories.model_validate_json(world.store.get(key))
    assert learned.pools["p"].machines.keys() == {"p-0", "p-1"}
    document = json.loads(world.store.get(key))
    document["pools"]["p"]["interruptions"] = 7.0
    world.store.put(key, json.dumps({**document, "later": True}).encode())
    world.new_head(2)
    await world.turn()
    await world.look()
    assert world.head.scaler.placer.histories.of()["p"].interruptions == pytest.approx(7, rel=0.01)


async def test_machines_that_the_last_head_ended_were_not_taken(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those of a job that was paused for some seconds, less than a minute before the head died."""
    with monkeypatch.context() as patched:
        patched.setattr(placer, "WRITE_EVERY", 0.0)
        await world.with_machines(min=2, max=2)
    world.cloud.size["p"] = 0
    await world.look()
    assert Histories.model_validate_json(world.store.get(history_key("c"))).pools["p"].machines == {}
    world.cloud.size["p"], world.cloud.made = 2, {"p-0": 9.0, "p-1": 9.0}
    await world.look()
    world.new_head(2)
    await world.turn()
    await world.look()
    assert world.head.scaler.placer.histories.of()["p"].interruptions == 0


@pytest.mark.parametrize(("text", "stays"), [(b"junk", False), (b'{"format": 2}', True)])
async def test_a_history_that_cannot_be_read_is_begun_again(
    world: World, monkeypatch: pytest.MonkeyPatch, text: bytes, stays: bool
) -> None:
    """That of a later version is not replaced."""
    monkeypatch.setattr(placer, "WRITE_EVERY", 0.0)
    world.store.put(history_key("c"), text)
    await world.with_machines(min=2, max=2)
    assert world.cloud.size["p"] == 2
    assert world.head.scaler.placer.histories.pools["p"].size == 2
    assert (world.store.get(history_key("c")) == text) == stays


def test_a_job_stops_while_there_is_money_to_save_its_state() -> None:
    state = job(A, B, spec=spec(budget=10.0), cost=9.9, hourly=36.0, state_bytes=0)
    (stop,) = plan(view(state, node(A), node(B))).actions
    assert stop == Stop("$9.90 of the budget of $10 are spent; the rest pays for saving its state")
    assert plan(view(state.replace(cost=9.5), node(A), node(B))).actions == ()
    assert plan(view(state.replace(cost=9.5), node(A), node(B), dearest=180.0)).actions != ()
    slow = state.replace(cost=9.5, upload=60.0)  # as the last upload took
    assert plan(view(slow, node(A), node(B))).actions != ()


@given(
    st.floats(0.01, 100),
    st.lists(st.tuples(st.floats(0, 50), st.floats(0.05, 2.0)), min_size=1, max_size=200),
    st.integers(0, 10**11),
    st.floats(0, 3),
)
def test_the_budget_is_never_exceeded(budget: float, turns: list[tuple[float, float]], size: int, pace: float) -> None:
    """Whatever its machines cost from turn to turn, as long as the dearest ones are known."""
    most = max(price for price, _ in turns)
    state: JobState = job(A, B, spec=spec(budget=budget), state_bytes=size, pace=pace)
    for hourly, seconds in turns:
        if spending.exhausted(view(state, dearest=most)):
            break
        state = state.replace(cost=state.cost + hourly * seconds / 3600, hourly=hourly)
    else:
        return  # it may still go on
    after = spending.closing(state) - 2.0  # one turn of at most 2 s has passed, for which the margin allows
    assert state.cost == 0 or state.cost + most * after / 3600 <= budget + 1e-6
