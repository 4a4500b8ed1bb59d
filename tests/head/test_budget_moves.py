"""A job with a budget and its moves: one that has begun is finished, and soon there are no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotrun.head.capacity.place import place
from spotrun.head.capacity.situation import Demand, History, Offer, Placement, Situation
from tests.head.bazaar import trains_on
from tests.head.offers import NOW, job, offer

SAFE = {"zone": "c", "market": "on-demand"}
CASES: dict[str, tuple[Demand, tuple[Offer, ...], str, str]] = {
    "a move to a cheaper zone, though without members the job would not need dear on-demand machines": (
        job(left=772.0, deadline=NOW - 2640.0, budget=0.5, restart=150.0),
        (
            offer("s", there=1, price=1.0, history=History(hours=10.0)),
            offer("t", "b", there=1, price=0.6),
            offer("o", **SAFE, most=2, price=3.0),
        ),
        "s",
        "t",
    ),
    "a move to on-demand machines, though without members the job would use dearer spot machines": (
        job(left=3333.0, deadline=NOW + 344.0, budget=0.373, restart=150.0),
        (
            offer("s", there=3, price=1.0, history=History(hours=2.0, interruptions=5.0)),
            offer("t", "b", there=1, price=0.6, history=History(hours=2.0)),
            offer("o", **SAFE, there=2, most=2, price=0.5),
        ),
        "t",
        "o",
    ),
}


@pytest.mark.parametrize(("demand", "offers", "old", "new"), CASES.values(), ids=CASES)
def test_a_move_that_has_begun_is_finished(demand: Demand, offers: tuple[Offer, ...], old: str, new: str) -> None:
    demand, found = replace(demand, min=1, max=2), dict[str, Placement]()
    for members in ({old: 1}, {}, {new: 1}):
        found = dict(place(Situation(NOW, offers, (replace(demand, members=members),)), found))
        assert found["j"].use == {new}


histories = st.builds(
    History,
    hours=st.sampled_from((0.0, 2.0, 10.0)),
    interruptions=st.sampled_from((0.0, 1.0, 5.0)),
    up=st.sampled_from((0.0, 1.0, 5.0)),
    down=st.sampled_from((0.0, 0.5, 2.0)),
    short_at=st.sampled_from((0.0, NOW - 600, NOW - 6000)),
    short_with=st.integers(0, 2),
)
prices = st.sampled_from((0.6, 0.65, 1.0, 1.7))


@st.composite
def markets(draw: st.DrawFn) -> tuple[Offer, ...]:
    """Three spot pools and one on-demand pool, each in a zone of its own."""
    found = []
    for name, zone in zip("stu", "abd", strict=True):
        there = draw(st.integers(0, 3))
        size = there + draw(st.integers(0, 1))
        found.append(offer(name, zone, there=there, size=size, price=draw(prices), history=draw(histories)))
    there, price = draw(st.sampled_from((0, 2))), draw(st.sampled_from((0.5, 1.2, 3.0)))
    return (*found, offer("o", **SAFE, there=there, price=price))


@settings(max_examples=300, deadline=None)
@given(
    offers=markets(),
    least=st.integers(1, 2),
    left=st.floats(100, 20000),
    budget=st.floats(0.3, 1.5),
    until=st.none() | st.floats(-0.5, 2.0),
    begin=st.sampled_from("stuo"),
)
def test_moves_come_to_an_end_if_nothing_else_changes(
    offers: tuple[Offer, ...], least: int, left: float, budget: float, until: float | None, begin: str
) -> None:
    """budget: in USD for each hour of work that is left. until: the deadline, in parts of this work."""
    demand = job(min=least, max=2, pools=frozenset("stuo"), left=left, budget=budget * left / 3600, scaling=0.956)
    demand = replace(demand, deadline=None if until is None else NOW + until * left)
    usable, found = {each.name: each.usable for each in offers}, dict[str, Placement]()
    members = {begin: min(2, usable[begin])} if usable[begin] >= least else {}
    for _ in range(20):
        found = dict(place(Situation(NOW, offers, (replace(demand, members=members),)), found))
        then = trains_on(found["j"], usable, members, least)
        if then == members:
            return
        members = then if members.keys() & then.keys() else {} if members else then
    raise AssertionError(found["j"])
