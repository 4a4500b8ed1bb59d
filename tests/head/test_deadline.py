"""The deadline policy: on any market, a deadline that the safest market can keep is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotrun.head.capacity.observe import SCALING, demand
from spotrun.head.capacity.place import place
from spotrun.head.capacity.policies.deadline import MARGIN
from spotrun.head.capacity.policies.zones import need
from spotrun.head.capacity.promise import refusal
from spotrun.head.capacity.situation import Demand, History, Offer, Placement, Situation
from spotrun.head.capacity.sizes import Pool
from spotrun.head.job_state import Progress
from spotrun.head.speeds import Speed
from spotrun.head.view import FleetView
from spotrun.spec import ClusterSpec
from spotrun.wire import StateRef
from tests.head.bazaar import POLL, START, Stall, work
from tests.head.views import NOW, A, node, spec
from tests.head.views import job as trains

HOUR = 3600.0


def job(hours: float, deadline: float, **changes: object) -> Demand:
    """A job with so many hours of work on one machine, and so many hours until its deadline."""
    made = Demand(
        "j",
        frozenset({"spot-a", "spot-b", "steady"}),
        submitted=START,
        left=hours * HOUR,
        deadline=START + deadline * HOUR,
        restart=600.0,
        move=60.0,
        checkpoint=300.0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def market(
    first: list[tuple[float, int]], second: list[tuple[float, int]], most: int = 1, steady: float = 3.0
) -> dict[str, Stall]:
    return {
        "spot-a": Stall("a", most=most, counts=first),
        "spot-b": Stall("b", most=most, counts=second),
        "steady": Stall("c", "on-demand", steady, most),
    }


changes = st.lists(st.tuples(st.floats(0, 4 * HOUR), st.integers(0, 3)), max_size=12).map(
    lambda found: [(0.0, 0), *sorted(found)]
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes, changes, st.floats(0.2, 2), st.floats(0, 2), st.integers(1, 3), st.floats(0.5, 1.0))
def test_a_deadline_that_was_feasible_is_met_on_any_market(
    first: list[tuple[float, int]],
    second: list[tuple[float, int]],
    hours: float,
    more: float,
    most: int,
    scaling: float,
) -> None:
    one = job(hours, 0, max=most, scaling=scaling)
    fastest = one.restart + MARGIN + hours * HOUR / most**scaling
    one = replace(one, deadline=START + fastest + POLL + more * HOUR)
    found = work(one, market(first, second, most), 24 * HOUR)
    assert found.finished is not None
    assert one.deadline is not None
    assert START + found.finished <= one.deadline + POLL


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.floats(0.2, 2), st.floats(0.01, 0.8), st.integers(1, 3), st.floats(0.5, 1.0))
def test_a_deadline_that_nothing_can_meet_makes_a_job_neither_later_nor_dearer(
    hours: float, share: float, most: int, scaling: float
) -> None:
    """share: of the time that the work takes on all safe machines. Over 0.9, what was measured may just be wrong."""
    one = job(hours, share * hours / most**scaling, max=most, scaling=scaling)
    found, plain = (work(each, market([], [], most), 24 * HOUR) for each in (one, replace(one, deadline=None)))
    assert found.trail == plain.trail == [("spot-a",)]
    assert (found.finished, found.cost) == (plain.finished, pytest.approx(plain.cost))


def test_without_spot_machines_the_job_ends_on_on_demand_machines() -> None:
    found = work(job(2, 4), market([(0, 0)], [(0, 0)]), 10 * HOUR)
    assert found.finished is not None
    assert 2 * HOUR < found.finished <= 4 * HOUR
    assert found.trail[-1] == ("steady",)


def test_with_spot_machines_all_the_time_nothing_else_is_used() -> None:
    found = work(job(2, 4), market([], []), 10 * HOUR)
    assert found.trail == [("spot-a",)]
    assert found.finished is not None
    assert found.cost < 2.5


def test_the_job_changes_zone_falls_back_and_returns() -> None:
    stalls = market([(0, 1), (HOUR, 0)], [(0, 1), (2 * HOUR, 0), (4.5 * HOUR, 1)])
    found = work(job(8, 10.5), stalls, 20 * HOUR)
    used = [pools for pools in found.trail if pools]
    assert used == [("spot-a",), ("spot-b",), ("steady",), ("spot-b",)]
    assert found.finished is not None
    assert found.finished <= 10.5 * HOUR


def offers(most: int = 2) -> tuple[Offer, ...]:
    return (
        Offer(Pool("spot-a", most, 0), "a", price=1.0),
        Offer(Pool("steady", most, 0), "a", "on-demand", price=3.0),
    )


def fallen(spare: float, *, on: str = "", flex: int = 0) -> Placement:
    """Where a job goes that has so many seconds to spare while its spot pool is short. on: the pool that it is on."""
    found = (
        Offer(Pool("spot-a", 1, 1, supply="short"), "a", price=1.0),
        Offer(Pool("flex", 1, flex), "c", "flex", price=2.0, usable=flex),
        Offer(Pool("steady", 1, int(on == "steady")), "c", "on-demand", price=3.0),
    )
    members = {on: 1} if on else {}
    one = job(8, 8 + (spare + MARGIN) / HOUR, pools=frozenset(each.name for each in found), members=members)
    return place(Situation(START, found, (one,)))["j"]


def asked(placement: Placement) -> list[tuple[str, ...]]:
    return [need.order for need in placement.needs]


def test_flex_machines_are_asked_for_first_and_on_demand_ones_stand_in() -> None:
    found = fallen(1300)
    assert found.reason.startswith("safe machines cost less than waiting for spot: ")
    assert asked(found) == [("flex", "steady")]
    assert found.use == {"flex", "steady"}


def test_at_the_point_of_no_return_flex_and_on_demand_machines_are_asked_for_at_the_same_time() -> None:
    found = fallen(500)
    assert found.reason == "the point of no return: 8.0 h of work on safe machines, 8 min to spare"
    assert asked(found) == [("steady",), ("flex",)]
    assert found.use == {"flex", "steady"}


def test_a_deadline_that_will_be_missed_is_told() -> None:
    assert fallen(-10).reason == "the point of no return: 8.0 h of work on safe machines, 0 s to spare"
    late = "the point of no return: 8.0 h of work on safe machines, 90 s too long for the deadline"
    assert fallen(-90 - MARGIN).reason == late


def test_a_job_on_safe_machines_does_not_ask_for_spot_machines_that_cost_more() -> None:
    """It would give up these machines while they boot, and then ask for them again."""
    past = History(short_at=START - 60, short_with=1)
    found = (
        Offer(Pool("spot-a", 2, 2, supply="short"), "a", price=0.6),
        Offer(Pool("spot-b", 2, 0), "b", price=1.7, history=past),
        Offer(Pool("steady", 2, 2), "c", "on-demand", price=1.2, usable=2),
    )
    one = replace(job(8, 12, max=2, members={"steady": 2}), min=2)
    assert asked(place(Situation(START, found, (one,)))["j"]) == [("steady",), ("spot-a",)]


ASKED = Placement(frozenset({"spot-a"}), (need(1, (Offer(Pool("steady", 1, 0), "c", "on-demand"),)),))


def hurried(spare: float, before: Placement | None = None, *, spot: int = 2, **changes: Any) -> Placement:
    """Where a job goes that one safe machine would end in 7 min, with so many seconds to spare.

    spot: machines in its spot pool, on which it trains if `members` is not in `changes`. Each is as fast as a safe one.
    """
    states = {f"spot-a-{index}": "ready" for index in range(spot)}
    pool = Pool("spot-a", 2, 2, states, "open" if spot == 2 else "short")
    found = (
        Offer(pool, "a", price=1.0, usable=spot, speed=changes.pop("speed", 1.0)),
        Offer(Pool("steady", 1, changes.pop("steady", 0)), "c", "on-demand", price=3.0),
    )
    members = changes.pop("members", {"spot-a": spot})
    one = job(7 / 60, 7 / 60 + (spare + MARGIN) / HOUR, max=2, pools=frozenset({"spot-a", "steady"}), members=members)
    one = replace(one, restart=60.0, move=30.0, unsaved=20.0, **changes)
    return place(Situation(START, found, (one,)), {"j": before} if before else {})["j"]


SPOT, STEADY = ["spot-a"], ["steady"]
LATE = -90 - MARGIN
# The pools that it asks, and the beginning of the reason.
HURRIED: dict[str, tuple[Placement, list[str], str]] = {
    "safe machines end in time: they are asked for, and the spot machines serve until then": (
        hurried(20),
        [*STEADY, *SPOT],
        "the point of no return: 7 min of work on safe machines, 20 s to spare",
    ),
    "safe machines may just end in time: the same": (
        hurried(1 - MARGIN + 30),
        [*STEADY, *SPOT],
        "the point of no return: ",
    ),
    "safe machines are too late, and spot machines end in time: the job stays": (
        hurried(LATE),
        SPOT,
        "on safe machines, the job would end 2 min too late; on spot machines, it ends in time if none is lost; spot",
    ),
    "spot machines are too late too, but less: the job stays": (
        hurried(-300),
        SPOT,
        "on safe machines, the job would end 5 min too late; on spot machines, it ends no later if none is lost",
    ),
    "the deadline is over: the job stays": (
        hurried(-1000),
        SPOT,
        "on safe machines, the job would end 17 min too late; on spot machines, it ends no later if none is lost",
    ),
    "one spot machine is as fast as one safe machine: the job stays": (
        hurried(LATE, spot=1),
        SPOT,
        "on safe machines, the job would end 2 min too late; on spot machines, it ends no later",
    ),
    "spot machines are so slow that safe ones end sooner": (
        hurried(LATE, spot=1, speed=0.5),
        [*STEADY, *SPOT],
        "the point of no return: 7 min of work on safe machines, 90 s too long for the deadline",
    ),
    "the spot machines are under notice": (
        hurried(LATE, leaving={"spot-a": 2}),
        [*STEADY, *SPOT],
        "the point of no return: ",
    ),
    "between two generations, spot machines are ready: the job uses them": (
        hurried(LATE, members={}),
        SPOT,
        "on safe machines, the job would end 2 min too late; on spot machines, it ends in time",
    ),
    "the job has no machines, and the spot pool has none: safe machines": (
        hurried(LATE, spot=0, members={}),
        STEADY,
        "the point of no return: ",
    ),
    "safe machines boot, far too late, and a spot machine is ready first: the job uses it": (
        hurried(-300, ASKED, spot=1, members={}, steady=1),
        SPOT,
        "on safe machines, the job would end 5 min too late; on spot machines, it ends no later",
    ),
    "the job is on safe machines already: it stays there": (
        hurried(LATE, members={"steady": 1}, steady=1),
        STEADY,
        "the point of no return: ",
    ),
    "safe machines are asked for, and the measured pace has changed: they are still asked for": (
        hurried(LATE, ASKED),
        [*STEADY, *SPOT],
        "the point of no return: ",
    ),
    "a little too late, which may be an error of what was measured": (
        hurried(-20),
        [*STEADY, *SPOT],
        "the point of no return: ",
    ),
}


@pytest.mark.parametrize("name", HURRIED)
def test_safe_machines_that_are_too_late(name: str) -> None:
    found, pools, reason = HURRIED[name]
    assert [pool for need in found.needs for pool in need.order or sorted(need.pools)] == pools
    assert found.reason.startswith(reason)


def test_flex_machines_that_are_there_are_safe_machines() -> None:
    assert fallen(500, flex=1).use == {"flex", "steady"}
    assert asked(fallen(500, flex=1)) == [("flex", "steady")]


def test_a_job_on_on_demand_machines_asks_for_no_flex_machines() -> None:
    assert asked(fallen(300, on="steady")) == [("steady",)]


def test_a_job_does_not_count_on_machines_of_a_job_of_its_priority_that_trains() -> None:
    """Else it would wait for a spot machine that it will not get, until the point of no return."""
    spot, steady = Pool("spot-a", 1, 1, {"spot-a-0": "ready"}, "short"), Pool("steady", 1, 0)
    both = (Offer(spot, "a", price=1.0, usable=1), Offer(steady, "c", "on-demand", price=3.0))
    other = Demand("other", frozenset({"spot-a"}), order=1, max=3, members={"spot-a": 1})
    urgent = job(8, 12)

    def told(*jobs: Demand) -> str:
        return place(Situation(START, both, jobs))["j"].reason

    assert told(urgent, other).startswith("waits for spot")
    assert told(replace(urgent, priority=1), other).startswith("trains on spot")
    assert told(urgent).startswith("trains on spot")


CLUSTER = ClusterSpec.model_validate(
    {"name": "c", "cloud": "local", "pools": [{"name": "p", "zone": "local-a", "max": 3}]}
)
WIDE = Speed(pool="p", nodes=4, devices=1, samples_per_second=160.0, samples=32.0, steps=90, at=NOW - 50)
SPEED = Speed(pool="p", nodes=1, devices=1, samples_per_second=40.0, samples=8.0, steps=90, at=NOW - 50)
# The step that the generation has done, at 30 s each so far; what else is known of the job; the work left.
LEFT: dict[str, tuple[int, dict[str, Any], float | None]] = {
    "the first steps are slow: the job file counts": (2, {"spec": spec(work=600.0)}, 600.0 * 0.998),
    "after five steps, the measured pace counts": (5, {"spec": spec(work=600.0)}, 995 * 30.0),
    "first steps of a later generation: what was measured before counts": (2, {"speeds": (SPEED,)}, 998 * 0.2),
    "first steps on fewer nodes, which take as many samples each": (
        2,
        {"speeds": (WIDE,), "samples": 8.0},
        998 * 8.0 / 160.0 * 4**SCALING,
    ),
    "no step on fewer nodes yet, and so no samples": (0, {"speeds": (WIDE,)}, 1000 * 8.0 / 160.0 * 4**SCALING),
    "no step on fewer nodes yet, and the machines were of several pools": (
        0,
        {"pace": 0.2, "paced": 4},
        1000 * 0.2 / 4 * 4**SCALING,
    ),
    "the first generation on fewer nodes starts, and has not said how many steps are left": (
        0,
        {"speeds": (WIDE,), "base": -1, "paced": 4},
        1000 * 0.2 * 4**SCALING,
    ),
    "the first generation ended after two slow steps: the job file counts": (
        0,
        {"spec": spec(work=600.0), "generation": 2, "pace": 30.0, "paced": 1, "reached": 2},
        600.0,
    ),
    "first steps, and nothing else is known": (2, {"pace": 30.0}, 998 * 30.0),
    "no step, and nothing else is known": (0, {}, None),
}


@pytest.mark.parametrize("name", LEFT)
def test_the_work_left(name: str) -> None:
    step, changes, left = LEFT[name]
    changes, pace = dict(changes), 30.0 if step else 0.0
    per_second = changes.pop("samples", 0.0) / 30.0
    base = changes.pop("base", 0)
    progress = Progress(base=base, step=max(base, step), pace=pace, samples_per_second=per_second, total_steps=1000)
    state = trains(A, progress=progress, **({"reached": step} | changes))
    found = demand(FleetView(now=NOW, jobs=(state,), nodes=()), CLUSTER, state, 0).left
    assert found == (left if left is None else pytest.approx(left))


def test_the_bucket_lacks_the_work_since_the_snapshot_of_its_newest_checkpoint() -> None:
    """It was complete 10 s ago, after 40 s of upload. The next one may be complete as late as `interval` + 40 s."""
    state = trains(A, spec=spec(checkpoint_interval=100.0), saved_at=NOW - 10, upload=40.0)
    found = demand(FleetView(now=NOW, jobs=(state,), nodes=()), CLUSTER, state, 0)
    assert (found.unsaved, found.checkpoint) == (50.0, 180.0)
    assert demand(FleetView(now=NOW, jobs=(), nodes=()), CLUSTER, state.replace(saved_at=0.0), 0).unsaved == 100.0


def test_the_time_in_which_a_job_waited_for_machines_is_no_work_that_the_bucket_lacks() -> None:
    """It has trained for 60 s, after an hour without machines. The bucket lacks 30 steps before that, 0.1 s each."""
    progress = Progress(base=50, step=600, pace=0.1, total_steps=1000)
    state = trains(A, progress=progress, checkpoints=(StateRef(generation=0, step=20),), started=NOW - 9000)
    state = state.replace(saved_at=NOW - 3660, ordered_at=NOW - 60)
    seen = FleetView(now=NOW, jobs=(state,), nodes=())
    assert demand(seen, CLUSTER, state, 0).unsaved == pytest.approx(63.0)
    begins = state.replace(progress=Progress(total_steps=1000), reached=50, pace=0.1)
    assert demand(seen, CLUSTER, begins, 0).unsaved == pytest.approx(63.0)


def test_steps_that_are_lost_are_work_left() -> None:
    """No node has a state any more, so the job goes on from its newest checkpoint."""
    state = trains(checkpoints=(StateRef(generation=1, step=40),), reached=50, pace=2.0, paced=1)
    state = state.replace(progress=Progress(total_steps=1000), generation=1, trained=(A,))
    seen = FleetView(now=NOW, jobs=(state,), nodes=())
    assert demand(seen, CLUSTER, state, 0).left == pytest.approx(960 * 2.0)
    holds = node(A, generation=0, snapshot=StateRef(generation=1, step=48))
    assert demand(replace(seen, nodes=(holds,)), CLUSTER, state, 0).left == pytest.approx(952 * 2.0)


def test_a_deadline_that_cannot_be_kept_is_refused_with_the_earliest_one() -> None:
    seen = Situation(START, offers())
    text = refusal(seen, job(4, 2, max=2, scaling=1.0))
    assert "deadline: 2.0 h: cannot be kept" in text
    assert "the earliest deadline is 7830s" in text
    assert refusal(seen, job(4, 7830 / HOUR, max=2, scaling=1.0)) == ""


def test_jobs_that_share_no_pools_do_not_disturb_each_other() -> None:
    mine, theirs = {"spot-a", "steady"}, (Pool("theirs", 2, 0), Pool("spot-b", 2, 0))
    every = (*offers(), Offer(theirs[0], "b", "on-demand", price=3.0), Offer(theirs[1], "b", price=1.0))
    first = job(3, 4, max=2, pools=frozenset(mine))
    other = job(9, 12, job="other", order=1, min=2, max=2, pools=frozenset({"theirs"}))
    alone, both = (place(Situation(START, every, demands)) for demands in ((first,), (first, other)))
    assert both["j"] == alone["j"]
    without = job(2, 3, job="new", order=2, pools=frozenset({"spot-b"}))  # it has no on-demand pool
    for jobs in ((), (first,), (replace(first, priority=1),)):
        assert refusal(Situation(START, every, jobs), without) == ""


def test_work_that_is_not_known_is_not_refused() -> None:
    assert refusal(Situation(START, offers()), replace(job(4, 1), left=None)) == ""


def test_a_job_that_would_break_a_promise_is_refused() -> None:
    urgent = job(3, 4, job="new", order=1, priority=1)
    seen = Situation(START, offers(1), (job(3, 4),))
    assert "job j would miss its deadline" in refusal(seen, urgent)
    assert refusal(Situation(START, offers(2), (job(3, 4),)), urgent) == ""
    later = job(3, 8, job="new", order=1)
    assert refusal(seen, later) == ""
    assert "earliest deadline" in refusal(seen, job(3, 5, job="new", order=1))
