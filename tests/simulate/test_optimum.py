"""The bounds, on problems that are solved by hand."""

from __future__ import annotations

import math

import pytest

from spotrun.simulate.costs import Costs
from spotrun.simulate.optimum import Single, cheapest, relaxed
from spotrun.simulate.traces import Changes, Trace, Zone

HOUR = 3600.0
ALWAYS, NEVER = ((0.0, 1.0),), ((0.0, 0.0),)
HALF = ((0.0, 1.0), (5 * HOUR, 0.0))  # the first five of ten hours
GAP = ((0.0, 1.0), (2 * HOUR, 0.0), (8 * HOUR, 1.0))


@pytest.mark.parametrize(
    ("counts", "hours", "usd"),
    [
        (ALWAYS, 8.0, 9.0),
        (NEVER, 8.0, 27.0),
        (NEVER, 9.5, math.inf),
        (HALF, 4.0, 5.0),
        (HALF, 5.0, 9.5),
        (GAP, 2.0, 4.0),
        (GAP, 7.0, 20.5),
    ],
    ids=[
        "with a spot machine all the time, it is the work and one change, at spot's price",
        "without any, the same at the on-demand price",
        "more work than fits is not possible",
        "what fits into the only stretch of spot costs spot's price",
        "one hour more than that: an on-demand machine boots while spot still works, so only the boot is paid twice",
        "of two stretches, each pays its change: one hour of work in each",
        "on-demand in the gap, which boots beside spot, and one hour of spot at the end",
    ],
)
def test_the_least_cost_of_one_node(counts: Changes, hours: float, usd: float) -> None:
    # Ten hours, spot 1 USD, on-demand 3 USD, a change takes one hour, of which half is the boot.
    problem = Single(counts, 10 * HOUR, 1.0, 3.0, HOUR, HOUR / 2)
    assert cheapest(problem, [hours * HOUR], step=HOUR / 4)[0] == pytest.approx(usd)


def test_one_machine_at_a_time_never_costs_less() -> None:
    for counts in (ALWAYS, NEVER, HALF, GAP):
        both, alone = (
            cheapest(Single(counts, 10 * HOUR, 1.0, 3.0, HOUR, HOUR / 2, overlap), [3 * HOUR, 6 * HOUR], HOUR / 4)
            for overlap in (True, False)
        )
        assert all(with_two <= with_one for with_two, with_one in zip(both, alone, strict=True))


@pytest.mark.parametrize(
    ("zones", "work", "usd", "hours"),
    [
        ({"a": (((0.0, 4.0),), 1.0)}, 8.0, 8.0, 2.0),
        ({"a": (((0.0, 4.0),), 2.0), "b": (((0.0, 2.0),), 1.0)}, 8.0, 8.0, 2.0),
        ({"a": (((0.0, 1.0),), 1.0)}, 8.0, math.inf, math.inf),
        ({"a": (((0.0, 0.0), (HOUR, 4.0)), 1.0)}, 8.0, 8.0, 3.0),
    ],
    ids=[
        "with linear scaling, the cost is the work",
        "the cheaper zone has time enough, the larger one is faster",
        "fewer machines than the least do nothing",
        "the wait costs nothing",
    ],
)
def test_the_relaxation(zones: dict[str, tuple[Changes, float]], work: float, usd: float, hours: float) -> None:
    trace = Trace("t", 10 * HOUR, tuple(Zone(name, counts, ((0.0, price),)) for name, (counts, price) in zones.items()))
    cost, end = relaxed(trace, work * HOUR, 2, 4, Costs(scaling=1.0), trace.length)
    assert cost == pytest.approx(usd)
    assert end == pytest.approx(hours * HOUR)
