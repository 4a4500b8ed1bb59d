"""What jobs are promised, on any market, by the head's own decisions: the deadline, the budget, and a saved state."""

from __future__ import annotations

import re

from hypothesis import example, given, settings
from hypothesis import strategies as st

from spotrun.head.capacity.observe import demand, situation
from spotrun.head.capacity.policies.deadline import MARGIN
from spotrun.head.capacity.promise import refusal
from spotrun.head.capacity.sizes import Pool
from spotrun.head.view import FleetView
from spotrun.simulate.costs import Costs
from spotrun.simulate.replay import BEGIN, Job, Outcome, cluster_of, replay, state_of
from spotrun.simulate.traces import Changes, Trace, Zone

HOUR = 3600.0
LENGTH = 7 * HOUR


@st.composite
def changes(draw: st.DrawFn, values: st.SearchStrategy[float], most: int) -> Changes:
    """Values that change at full minutes of the first four hours."""
    times = draw(st.lists(st.integers(1, 240), max_size=most, unique=True))
    return tuple((60.0 * time, draw(values)) for time in (0, *sorted(times)))


@st.composite
def zones(draw: st.DrawFn) -> tuple[Zone, ...]:
    """Two spot markets. A price at most triples at a time: a head cannot know of a higher one before it is there."""
    counts, prices = changes(st.sampled_from((0.0, 1.0, 2.0, 3.0)), 8), changes(st.sampled_from((0.6, 1.0, 1.7)), 5)
    return tuple(Zone(name, draw(counts), draw(prices)) for name in ("a", "b"))


def market(spot: tuple[Zone, ...]) -> Trace:
    return Trace("t", LENGTH, spot, on_demand=3.0, price=1.0)


def refused(spot: tuple[Zone, ...], job: Job, costs: Costs) -> str:
    """What a submission to an empty cluster is told."""
    cluster = cluster_of(market(spot), job, job.max)
    view = FleetView(now=BEGIN, jobs=(), nodes=(), expected=0, began=BEGIN, awake_since=BEGIN)
    seen = situation(view, cluster, [Pool(pool.name, pool.max, 0) for pool in cluster.pools])
    return refusal(seen, demand(view, cluster, state_of(job, cluster, costs), 0))


@settings(max_examples=250, deadline=None)
@given(
    spot=zones(),
    hours=st.floats(0.1, 2),
    more=st.floats(0, 1.5) | st.just(0.0),
    nodes=st.integers(1, 3),
    notice=st.sampled_from((0.0, 30.0)),
    boot=st.sampled_from((60.0, 300.0, 690.0)),
    on_demand=st.sampled_from((0.5, 3.0)),
)
def test_the_earliest_deadline_that_is_offered_and_each_later_one_are_met(
    spot: tuple[Zone, ...], hours: float, more: float, nodes: int, notice: float, boot: float, on_demand: float
) -> None:
    costs = Costs(boot=boot, restart=10, restore=30, notice=notice)
    job = Job(hours * HOUR * costs.rate(nodes), 1, nodes, deadline=301)
    text = refused(spot, job, costs)
    found = re.search(r"the earliest deadline is (\d+)s", text)
    assert found is not None, text
    earliest = int(found[1])
    safest = boot + costs.restore + hours * HOUR
    assert safest <= earliest <= safest + MARGIN + 1
    job = Job(job.work, 1, nodes, deadline=earliest + more * HOUR)
    assert refused(spot, job, costs) == ""
    trace = Trace("t", LENGTH, spot, on_demand, 1.0)
    outcome = replay(trace, job, None, costs, on_demand=nodes)
    assert outcome.met, (outcome.finished, job.deadline, outcome.log)


PRICE_RISES = (
    Zone("a", ((0.0, 0.0), (6720.0, 1.0), (8700.0, 0.0)), ((0.0, 0.6),)),
    Zone("b", ((0.0, 0.0), (2280.0, 1.0)), ((0.0, 0.6), (8520.0, 1.0), (8700.0, 0.6))),
)
"""The budget moves the job to the cheaper zone. Between two generations, the deadline alone speaks for the other."""


@settings(max_examples=150, deadline=None)
@example(spot=PRICE_RISES, budget=175, hours=1.0, nodes=2, on_demand=True, keys="deadline")
@given(
    spot=zones(),
    budget=st.integers(10, 400),
    hours=st.floats(0.2, 3),
    nodes=st.integers(1, 3),
    on_demand=st.booleans(),
    keys=st.sampled_from(("elastic", "cheapest", "deadline")),
)
def test_a_budget_is_never_exceeded_and_the_state_is_in_the_bucket_before_it_is_spent(
    spot: tuple[Zone, ...], budget: int, hours: float, nodes: int, on_demand: bool, keys: str
) -> None:
    more = {"policy": "cheapest"} if keys == "cheapest" else {}
    deadline = 1.5 * hours * HOUR + 600 if keys == "deadline" else None
    work = hours * HOUR * Costs().rate(nodes)
    job = Job(work, 1, nodes, deadline=deadline, budget=budget / 100, more=more)
    outcome = replay(market(spot), job, None, Costs(boot=120), on_demand=nodes if on_demand else 0)
    assert outcome.counted <= budget / 100
    assert outcome.cost <= budget / 100 + 1e-9
    if outcome.finished is None and _stopped(outcome):
        assert "budget" in outcome.log[-1][2]
        assert outcome.saved == outcome.done


def _stopped(outcome: Outcome) -> bool:
    return bool(outcome.log) and outcome.log[-1][1] == "job"
