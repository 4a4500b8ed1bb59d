"""The deadline policy: on any market, a deadline that the safest market can keep is kept."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotrun.head.capacity.policies.deadline import MARGIN
from spotrun.head.capacity.promise import refusal
from spotrun.head.capacity.situation import Demand, Offer, Situation
from spotrun.head.capacity.sizes import Pool
from tests.head.bazaar import POLL, START, Stall, work

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


def test_a_deadline_that_cannot_be_kept_is_refused_with_the_earliest_one() -> None:
    seen = Situation(START, offers())
    text = refusal(seen, job(4, 2, max=2, scaling=1.0))
    assert "deadline: 2.0 h: cannot be kept" in text
    assert "the earliest deadline is 7830s" in text
    assert refusal(seen, job(4, 7830 / HOUR, max=2, scaling=1.0)) == ""


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
