"""Replays of small traces. The expected numbers are worked out by hand in the comments."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotrun.head.capacity.policies.elastic import elastic
from spotrun.head.capacity.policies.failover import failover
from spotrun.head.capacity.policies.static import static
from spotrun.head.capacity.policies.uniform_progress import greedy, uniform_progress
from spotrun.head.capacity.situation import Policy
from spotrun.simulate.costs import Costs
from spotrun.simulate.optimum import Single, cheapest, relaxed
from spotrun.simulate.replay import Job, Outcome, Supply, cluster_of, play, replay
from spotrun.simulate.traces import Changes, Trace, Zone
from spotrun.spec import ClusterSpec

HOUR = 3600.0
COSTS = Costs(boot=600, restart=20, restore=120, notice=0, snapshot=10, checkpoint=300, scaling=1.0)


def trace(*zones: Changes, hours: float = 10, price: float = 1.0, on_demand: float = 3.0) -> Trace:
    named = tuple(Zone(f"zone-{index}", counts) for index, counts in enumerate(zones))
    return Trace("t", hours * HOUR, named, on_demand, price)


def run(seen: Trace, job: Job, policy: Policy, on_demand: int = 0) -> Outcome:
    return replay(seen, job, policy, COSTS, on_demand=on_demand)


def test_an_on_demand_machine_boots_and_works() -> None:
    found = run(trace(((0, 0),)), Job(work=2 * HOUR), static, on_demand=1)
    assert found.finished == pytest.approx(600 + 120 + 2 * HOUR)
    assert found.cost == pytest.approx(3 * (2 * HOUR + 720) / HOUR)
    assert (found.spot_hours, found.moves, found.restarts) == (0, 0, 0)
    assert found.goodput == pytest.approx(7200 / 7920)


@pytest.mark.parametrize("devices", [1, 2])
def test_machines_have_as_many_devices_as_their_pool_says(devices: int) -> None:
    job = Job(work=2 * HOUR, more={"devices": devices})
    cluster = cluster_of(trace(((0, 1),)), job, on_demand=0)
    cluster = cluster.model_copy(update={"pools": [pool.model_copy(update={"devices": 2}) for pool in cluster.pools]})
    supplies = {cluster.pools[0].name: Supply(((0.0, 1),), ((0.0, 1.0),))}
    found = play(cluster, supplies, job, elastic, COSTS, 10 * HOUR)
    assert found.finished == pytest.approx(600 + 120 + 2 * HOUR)


def test_machines_of_the_cheaper_market_are_used_first() -> None:
    """The spot pool has room for one machine. Both markets' machines are ready at the same time."""
    pools = [{"name": "spot", "zone": "local-a"}, {"name": "dear", "zone": "local-a", "market": "on-demand", "max": 2}]
    cluster = ClusterSpec.model_validate({"name": "c", "cloud": "local", "pools": pools})
    supplies = {"spot": Supply((), ((0.0, 1.0),)), "dear": Supply((), ((0.0, 3.0),))}
    found = play(cluster, supplies, Job(work=4 * HOUR, min=2, max=2), None, COSTS, 10 * HOUR)
    assert found.finished == pytest.approx(600 + 120 + 2 * HOUR)
    assert found.spot_hours == pytest.approx(2.2)
    assert found.on_demand_hours == pytest.approx(2.2, abs=0.2)  # the second one ends once the first ones are ready


def test_a_spot_machine_is_awaited() -> None:
    found = run(trace(((0, 0), (HOUR, 1))), Job(work=2 * HOUR), elastic)
    assert found.finished == pytest.approx(HOUR + 720 + 2 * HOUR)
    assert found.cost == pytest.approx((2 * HOUR + 720) / HOUR)  # waiting costs nothing


def test_a_loss_without_notice_costs_what_no_checkpoint_has() -> None:
    # Ready at 600, first step at 720. Lost at 3600: the newest checkpoint is of 720 + 9 * 300 = 3420, 2700 s of work.
    # Again from 7200: first step at 7920, and 4500 s are left.
    found = run(trace(((0, 1), (3600, 0), (7200, 1))), Job(work=2 * HOUR), elastic)
    assert found.finished == pytest.approx(7920 + 4500)
    assert found.cost == pytest.approx((3600 + 720 + 4500) / HOUR)
    assert found.restarts == 1
    assert found.goodput == pytest.approx(7200 / (3600 + 720 + 4500), rel=1e-3)


def test_survivors_go_on_with_less() -> None:
    # Four nodes from 720 on. At 3600, one goes; the newest snapshot is of 3600 - 0 s, as 2880 is a multiple of 10.
    # 20 s later, three go on: 4 * 2880 are done, and (8 * 3600 - 11520) / 3 are left.
    found = run(trace(((0, 4), (3600, 3))), Job(work=8 * HOUR, min=2, max=4), elastic)
    assert found.finished == pytest.approx(3620 + (8 * HOUR - 11520) / 3, abs=1.5)


@pytest.mark.parametrize("others", [(), (((0, 0),),)], ids=["one zone", "the other zone gives none"])
def test_fewer_than_the_least_do_not_train(others: tuple[Changes, ...]) -> None:
    found = run(trace(((0, 1),), *others), Job(work=HOUR, min=2, max=4), elastic)
    assert (found.finished, found.done) == (None, 0)
    assert 0.8 < found.cost < 1  # ten minutes, and 22 tries of two minutes: the machine is given back in between


def test_a_machine_that_is_there_counts_before_one_that_was_asked_for() -> None:
    """Else the one that is there would be nobody's, and `hold_idle` would not give it back."""
    job = Job(work=HOUR, min=2, max=2, more={"zones": "any"})
    found = run(trace(((0, 0),), ((0, 1),)), job, elastic)
    assert (found.finished, found.done) == (None, 0)
    assert found.cost < 1


def test_failover_takes_the_whole_cluster_down_and_goes_to_the_next_zone() -> None:
    # Zone 0 loses one of two machines at 3600. Zone 1 has two: ready at 4200, first step at 4320.
    # The survivor's state gets into the bucket first, as for any job of spotrun: 2 * 2880 are done.
    found = run(trace(((0, 2), (3600, 1)), ((0, 2),)), Job(work=4 * HOUR, min=2, max=2), failover)
    assert found.finished == pytest.approx(4320 + (4 * HOUR - 5760) / 2, abs=1.5)
    assert found.moves == 1


def test_greedy_waits_for_the_last_moment() -> None:
    # The deadline is at 5 h, the work 2 h, d 720 s: an on-demand machine from 5 h - 2 h - 1440 s on.
    found = run(trace(((0, 0),)), Job(work=2 * HOUR, deadline=5 * HOUR), greedy, on_demand=1)
    assert found.finished == pytest.approx(5 * HOUR - 720)
    assert found.met


def test_uniform_progress_buys_as_soon_as_it_is_behind_and_stays_until_there_is_spot() -> None:
    # It is behind at once, boots at 0 and steps from 720 s on. At 2 h it has done 6480 s, more than the progress of 2 d
    # later, (7200 + 1440) * 2 / 5 = 3456 s. So it leaves for the spot machine, which steps at 7920 s.
    job = Job(work=2 * HOUR, deadline=5 * HOUR)
    never = run(trace(((0, 0),)), job, uniform_progress, on_demand=1)
    assert never.finished == pytest.approx(720 + 2 * HOUR, abs=2)
    late = run(trace(((0, 0), (2 * HOUR, 1))), job, uniform_progress, on_demand=1)
    assert late.finished == pytest.approx(7920 + 720, abs=3)
    assert late.on_demand_hours == pytest.approx(2, abs=0.001)


def test_uniform_progress_uses_more_spot_hours_than_greedy_where_spot_comes_late() -> None:
    job = Job(work=8 * HOUR, deadline=10 * HOUR)
    seen = trace(((0, 0), (5 * HOUR, 1)))
    outcomes = [run(seen, job, policy, on_demand=1) for policy in (greedy, uniform_progress)]
    assert all(each.met for each in outcomes)
    assert outcomes[0].spot_hours < outcomes[1].spot_hours


@st.composite
def markets(draw: st.DrawFn) -> Changes:
    """Up to eight changes within ten hours."""
    lengths = draw(st.lists(st.integers(2, 90), min_size=1, max_size=8))
    there, time, found = draw(st.booleans()), 0, []
    for minutes in lengths:
        found.append((time * 60.0, float(there)))
        there, time = not there, time + minutes
    return tuple(found)


POLICIES: dict[str, tuple[Policy | None, dict[str, Any]]] = {  # None: the one that the job's keys choose
    "elastic": (None, {}),
    "cheapest": (None, {"more": {"policy": "cheapest"}}),
    "deadline": (None, {"deadline": 9 * HOUR}),
    "budget": (None, {"budget": 9.0}),
    "deadline and budget": (None, {"deadline": 9 * HOUR, "budget": 20.0}),
    "failover": (failover, {}),
    "greedy": (greedy, {"deadline": 9 * HOUR}),
    "uniform progress": (uniform_progress, {"deadline": 9 * HOUR}),
    "on-demand": (static, {"deadline": 9 * HOUR}),
}


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=6, deadline=None)
@given(counts=markets(), hours=st.integers(1, 8))
def test_no_policy_beats_the_optimum_and_all_meet_a_feasible_deadline(name: str, counts: Changes, hours: int) -> None:
    policy, keys = POLICIES[name]
    seen = trace(counts, hours=9.5)
    found = replay(seen, Job(work=hours * HOUR, **keys), policy, COSTS, on_demand=1)
    assert found.met or keys.keys() & {"budget", "more"} or policy is failover or not keys
    length = 9 * HOUR if "deadline" in keys and found.met else seen.length
    problem = Single(counts, length, 1.0, 3.0, COSTS.boot + COSTS.restore, COSTS.boot)
    if found.finished is not None:
        assert cheapest(problem, [hours * HOUR])[0] <= found.cost + 1e-6


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.sampled_from((elastic, failover)))
def test_no_policy_beats_the_relaxation(counts: list[int], policy: Policy) -> None:
    seen = trace(tuple((index * HOUR, float(count)) for index, count in enumerate(counts)), hours=9)
    job = Job(work=6 * HOUR, min=2, max=4)
    found = run(seen, job, policy)
    cost, end = relaxed(seen, job.work, 2, 4, COSTS, seen.length)
    if found.finished is not None:
        assert end <= found.finished
        assert cost <= found.cost + 1e-6
