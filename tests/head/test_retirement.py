"""Machines whose end is known: when each retires, what the planner does then, and what the cloud is asked."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotrun.cloud.base import Instance
from spotrun.head.fleet import record, retirement
from spotrun.head.fleet.record import Recreate
from spotrun.head.job_state import Cause, Drain, EndGeneration, JobState, KeptNode, Start
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import Machine, Node
from spotrun.spec import PoolSpec
from spotrun.spec.notices import RETIRE_LEAD
from spotrun.wire import StateRef
from tests.head.views import NOW, Seen, fleet, job, member, node, notice, planned, spare, spec, view, wanted
from tests.head.world import World, stepping

DAY = 86400.0
POOLS = {"p": PoolSpec(name="p", zone="local-a", max=8), "q": PoolSpec(name="q", zone="local-a", max=1)}


def listed(name: str, created: float = 0.0, life: float = DAY, pool: str = "p") -> Instance:
    return Instance(name, pool, "z", "10.0.0.1", "running", "spot", created, name, created + life if life else 0.0)


def machine(name: str, left: float, retires: float, life: float = DAY, **changes: Any) -> Machine:
    """left: seconds until it ends. retires: seconds until it should retire."""
    end = NOW + left
    values = {"state": "running", "created": end - life, "answered": NOW, "ends": end, "retires": NOW + retires}
    return Machine(**{"name": name, "pool": "p", **values, **changes})


def marked(job: JobState, *nodes: Node, machines: tuple[Machine, ...]) -> Seen:
    return marked_view(view(job, *nodes, machines=machines))


def marked_view(seen: Seen) -> Seen:
    return replace(seen, nodes=retirement.mark(fleet(seen)).nodes)


# When.


@given(st.integers(1, 8), st.floats(60.0, 120 * DAY))
def test_machines_that_are_made_together_retire_one_after_the_other(count: int, life: float) -> None:
    found = retirement.planned([listed(f"p-{i}", life=life) for i in range(count)], POOLS)
    times = [found[f"p-{i}"] for i in range(count)]
    lead, gap = min(RETIRE_LEAD, retirement.SHARE * life), min(TIMEOUTS.retirement_gap, retirement.SHARE * life / 8)
    assert max(times) == pytest.approx(life - lead)
    assert all(later - earlier >= 0.99 * gap for earlier, later in pairwise(times))
    assert min(times) >= life / 2


def test_a_machine_that_is_replaced_does_not_move_the_others() -> None:
    all_of_them = [listed(f"p-{i}") for i in range(4)]
    before = retirement.planned(all_of_them, POOLS)
    after = retirement.planned([listed("p-0", created=80_000.0), *all_of_them[1:]], POOLS)
    assert {name: at for name, at in after.items() if name != "p-0"} == {
        name: at for name, at in before.items() if name != "p-0"
    }


def test_machines_of_several_pools_and_such_as_never_end() -> None:
    found = retirement.planned(
        [listed("a"), listed("b", pool="q"), listed("c", life=0.0), listed("d", pool="gone")], POOLS
    )
    assert found.keys() == {"a", "b", "d"}
    assert len(set(found.values())) == 3


# What the planner does.

FAR, SOON = 1000.0, 100.0  # seconds until the end: time enough to wait, and none


def test_a_member_retires_while_the_job_can_go_on() -> None:
    machines = (machine("a", FAR, -1), machine("b", FAR, -1), machine("c", FAR, 300))
    (drain,) = planned(marked(job("a", "b", "c"), node("a"), node("b"), node("c"), machines=machines))
    assert isinstance(drain, Drain)
    assert drain.cause == Cause(kind="end", node="a"), "one at a time, though two are due"
    assert NOW < drain.deadline <= NOW + 60


def test_nobody_retires_early_while_a_machine_is_missing() -> None:
    """The last one's successor is not there yet, or its zone has no machine for it."""
    two = (node("a"), node("b"))
    early = (machine("a", FAR, -1), machine("b", FAR, 300))
    elastic = job("a", "b", spec=spec(nodes={"min": 1, "max": 3}))
    assert planned(marked_view(view(elastic, *two, machines=early, expected=3))) == ()
    (drain,) = planned(marked_view(view(elastic, *two, machines=early, expected=2)))
    assert isinstance(drain, Drain)
    late = (machine("a", SOON, -1), machine("b", FAR, 300))
    (drain,) = planned(marked_view(view(elastic, *two, machines=late, expected=3)))
    assert isinstance(drain, Drain)


def test_a_notice_is_graver() -> None:
    machines = (machine("a", FAR, -1), machine("b", FAR, 300), machine("c", FAR, 300))
    (drain,) = planned(marked(job("a", "b", "c"), node("a"), node("b", notice=notice()), node("c"), machines=machines))
    assert isinstance(drain, Drain)
    assert drain.cause.kind == "preempt"
    assert drain.deadline == NOW + 27


@pytest.mark.parametrize(
    ("nodes", "left", "expected"),
    [
        pytest.param(2, FAR, None, id="the job needs all it has: it waits"),
        pytest.param(2, SOON, "a", id="the end is near: it does not"),
        pytest.param(3, FAR, "a", id="a spare is ready"),
    ],
)
def test_a_job_that_needs_all_its_nodes_waits_as_long_as_it_can(nodes: int, left: float, expected: str | None) -> None:
    there = (node("a"), node("b"), spare("c"))[:nodes]
    machines = (machine("a", left, -1), machine("b", FAR, 300))
    fixed = job("a", "b", spec=spec(nodes={"min": 2, "max": 2}))
    found = planned(marked(fixed, *there, machines=machines))
    assert [each.cause.node for each in found if isinstance(each, Drain)] == ([expected] if expected else [])


def test_all_whose_end_is_near_retire_together() -> None:
    """They end together, and nobody stands in: their state gets into the bucket before that."""
    machines = (machine("a", SOON, -300), machine("b", SOON, -1))
    fixed = job("a", "b", spec=spec(nodes={"min": 2, "max": 2}))
    (drain,) = planned(marked(fixed, node("a"), node("b"), machines=machines))
    assert isinstance(drain, Drain)
    assert drain.cause.node == "a, b"
    assert drain.deadline <= NOW + SOON
    drained = [node(name, phase="drained", snapshot=StateRef(generation=1, step=50)) for name in ("a", "b")]
    waiting = fixed.model_copy(update={"current": None, "phase": "waiting"})
    found = planned(marked(waiting, *drained, machines=machines))
    assert not any(isinstance(each, Recreate | Start) for each in found), "they hold the only state"
    assert found, "which is put into the bucket"


def test_a_node_that_is_kept_for_a_person_stays_until_its_machine_ends() -> None:
    kept = KeptNode(member=member("a"), until=NOW + 600)
    state = job("a", phase="failed", ended=NOW - 1, current=None, kept_node=kept)
    machines = (machine("a", left=9000, retires=-2), machine("b", left=9000, retires=-1))
    seen = marked_view(view(state, spare("a"), spare("b"), machines=machines, expected=2))
    assert [each.name for each in seen.nodes if each.due] == ["b"], "it does not delay another one either"


def test_a_machine_that_has_retired_is_replaced() -> None:
    machines = (machine("a", FAR, -1), machine("b", FAR, 300), machine("c", FAR, 600))
    rest = job("b", "c", generation=2)
    others = [node(name, generation=2, snapshot=StateRef(generation=2, step=48)) for name in ("b", "c")]
    left = spare("a", since=NOW - 60, snapshot=StateRef(generation=1, step=48))
    seen = marked(rest, left, *others, machines=machines)
    clock = time.strftime("%H:%M UTC", time.gmtime(NOW + FAR))
    action = Recreate(node="a", pool="p", why=f"its cloud ends it at {clock}", created=NOW + FAR - DAY, planned=True)
    assert planned(seen) == (action,)
    assert wanted(seen, action)
    for early in (
        spare("a", since=NOW - 1),  # its logs may not be in the bucket yet
        spare("a", since=NOW - 60, snapshot=StateRef(generation=2, step=60)),  # nobody else has this state
        spare("a", since=NOW - 60, connected=False),
    ):
        seen = marked(rest, early, *others, machines=machines)
        assert not any(isinstance(each, Recreate) for each in planned(seen))
        assert not wanted(seen, action)


def test_its_successor_is_a_node_like_any_other() -> None:
    fresh = (machine("a", DAY, DAY - 500), machine("b", FAR, 300))
    seen = marked(job("b", spec=spec(nodes={"min": 1, "max": 2})), spare("a"), node("b"), machines=fresh)
    (grow,) = planned(seen)
    assert isinstance(grow, Drain)
    assert grow.cause.kind == "grow"


def test_known_ends_do_not_count_as_machines_that_never_served() -> None:
    replaced: tuple[Any, ...] = ()
    for name in "abcd":
        replaced = record.ask(
            replaced, Recreate(node=name, pool="p", why="its cloud ends it", created=1.0, planned=True), NOW
        )
    assert not record.exhausted(replaced, NOW)


def test_a_record_of_another_version_is_read() -> None:
    """What a version before known ends wrote, and what a later one may."""
    from spotrun.head.fleet.record import Replacement

    old = Replacement.model_validate({"node": "a", "pool": "p", "at": 1.0, "why": "no driver"})
    assert not old.planned
    assert Replacement.model_validate({**old.model_dump(), "planned": True, "more": 1}).planned


def test_a_hold_says_why() -> None:
    """Drained below its least: the job waits for machines, and the cause is the known end."""
    machines = (machine("a", SOON, -1), machine("b", SOON, -1))
    draining: Any = {"step": 50, "cause": Cause(kind="end", node="a, b"), "deadline": NOW + 20}
    fixed = job("a", "b", spec=spec(nodes={"min": 2, "max": 2}), draining=draining, phase="draining")
    drained = [node(name, phase="drained") for name in ("a", "b")]
    (hold,) = planned(marked(fixed, *drained, machines=machines))
    assert hold == EndGeneration(cause=Cause(kind="end", node="a, b"))


# The head, with a cloud in memory.


async def test_the_head_drains_and_replaces_a_machine_before_its_end(tmp_path: Path) -> None:
    world = World(tmp_path)
    job = await world.with_machines(min=1, max=2)
    for name in ("p-0", "p-1"):
        world.receive(name, job=job)
    await world.turn()
    members = [member.node for member in world.head.job.current.members]  # type: ignore[union-attr]
    assert sorted(members) == ["p-0", "p-1"]
    now = time.time()
    world.cloud.made = {"p-0": now - DAY + 600, "p-1": now - DAY + 4000}
    world.cloud.ends = {"p-0": now + 600, "p-1": now + 4000}
    for name in ("p-0", "p-1"):
        world.receive(name, job=job, phase="running", generation=1, workers=stepping(5))
    await world.look()
    await world.turn()
    assert world.head.job is not None
    assert world.head.job.draining is None, "600 s before its end"
    world.cloud.ends = {"p-0": now + 140, "p-1": now + 4000}
    await world.look()
    await world.turn()
    assert world.head.job.draining is not None
    assert world.head.job.draining.cause == Cause(kind="end", node="p-0")
    shown = {each["name"]: each["notice"] for each in world.head.status()["nodes"]}
    assert shown == {"p-0": pytest.approx(now + 140), "p-1": None}
    step = world.head.job.draining.step
    for name in ("p-0", "p-1"):
        held = {"snapshot": StateRef(generation=1, step=step), "workers": stepping(step)}
        world.receive(name, job=job, phase="drained", generation=1, **held)
    await world.turn()
    assert [member.node for member in world.head.job.last] == ["p-1"]
    world.receive("p-1", job=job, phase="running", generation=2, snapshot=StateRef(generation=2, step=step))
    world.receive("p-0", job=job, snapshot=StateRef(generation=1, step=step))
    world.head.agents.known["p-0"].since -= TIMEOUTS.last_logs
    await world.turn()
    await world.head.replacements.answered()
    assert world.recreated == ["p-0"]
    assert [each.planned for each in world.replaced()] == [True]
