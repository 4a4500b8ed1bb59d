"""Where jobs train: zones, markets, moves. As data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spotrun.cloud.base import Advice, Said
from spotrun.head.capacity.history import HALF_LIFE, Histories, learn
from spotrun.head.capacity.place import place
from spotrun.head.capacity.situation import Demand, History, Offer, Placement, Situation
from spotrun.head.capacity.sizes import Pool
from tests.head.offers import NOW, job, offer


def asked(placement: Placement) -> dict[str, int]:
    """Machines by the pools that they are asked of."""
    return {"+".join(need.order): need.machines for need in placement.needs}


def one(demand: Demand, *offers: Offer) -> Placement:
    return place(Situation(NOW, offers, (demand,)))[demand.job]


SHORT = {"supply": "short", "size": 4}
CASES: dict[str, tuple[Demand, tuple[Offer, ...], set[str], dict[str, int]]] = {
    "one pool: it is asked for max": (job(), (offer("s"),), {"s"}, {"s": 4}),
    "spares are asked for too": (job(spares=1), (offer("s"),), {"s"}, {"s": 5}),
    "two spot pools of one zone are used together, the cheaper one first": (
        job(),
        (offer("s", price=2.0), offer("t", price=1.0)),
        {"s", "t"},
        {"t+s": 4},
    ),
    "without prices, pools of one market are used in the order of the file": (
        job(),
        (offer("s"), offer("t")),
        {"s", "t"},
        {"s+t": 4},
    ),
    "on-demand machines are not asked for while spot may come": (
        job(),
        (offer("s"), offer("o", market="on-demand")),
        {"s", "o"},
        {"s": 4},
    ),
    "the zone lacks spot machines: on-demand ones stand in up to min": (
        job(),
        (offer("s", there=1, **SHORT), offer("o", market="on-demand")),
        {"s", "o"},
        {"s": 4, "o": 1},
    ),
    "spot machines are enough again: the stand-ins are not used any more": (
        job(members={"s": 1, "o": 1}),
        (offer("s", there=3, size=4), offer("o", market="on-demand", there=1)),
        {"s"},
        {"s": 4},
    ),
    "two zones are as good: the first in the file": (
        job(),
        (offer("s"), offer("t", zone="b")),
        {"s"},
        {"s": 4},
    ),
    "two zones are as good: the cheaper one": (
        job(),
        (offer("s", price=2.0), offer("t", zone="b", price=1.0)),
        {"t"},
        {"t": 4},
    ),
    "a zone has enough machines, and another one is a little cheaper: the one that has them": (
        job(),
        (offer("s", there=2, price=1.05), offer("t", zone="b", price=1.0)),
        {"s"},
        {"s": 4},
    ),
    "the best zone has too few machines: it goes on being asked, and the next one too": (
        job(),
        (offer("s", there=1, **SHORT), offer("t", zone="b", **SHORT)),
        {"s"},
        {"s": 4, "t": 4},
    ),
    "a zone has enough machines: the other one is not asked any more": (
        job(),
        (offer("s", there=1, **SHORT), offer("t", zone="b", there=4)),
        {"t"},
        {"t": 4},
    ),
    "it trains on all that it may have: other zones are not asked": (
        job(members={"s": 4}),
        (offer("s", there=4), offer("t", zone="b")),
        {"s"},
        {"s": 4},
    ),
    "it trains with less than another zone may have: that zone is asked, the job stays": (
        job(members={"s": 2}, left=40000.0),
        (offer("s", there=2, **SHORT), offer("t", zone="b")),
        {"s"},
        {"s": 4, "t": 4},
    ),
    "the other zone is ready: the job moves": (
        job(members={"s": 2}, left=40000.0),
        (offer("s", there=2, **SHORT), offer("t", zone="b", there=4)),
        {"t"},
        {"t": 4},
    ),
    "a move has begun: that the zone which it leaves has all that it is asked for now says nothing": (
        job(members={"s": 2}, left=40000.0),
        (offer("s", there=2, size=2, history=History(short_at=NOW - 60, short_with=2)), offer("t", zone="b", there=4)),
        {"t"},
        {"t": 4},
    ),
    "too little work is left to pay for a move": (
        job(members={"s": 2}, left=400.0),
        (offer("s", there=2, **SHORT), offer("t", zone="b", there=4)),
        {"s"},
        {"s": 4},
    ),
    "the other zone fell short a moment ago: it is not asked again yet": (
        job(members={"s": 2}, left=40000.0),
        (
            offer("s", there=2, **SHORT),
            offer("t", zone="b", history=History(short_at=NOW - 60, short_with=1, refusals=1)),
        ),
        {"s"},
        {"s": 4},
    ),
    "the other zone takes machines all the time: the move would not pay": (
        job(members={"s": 3}, left=40000.0),
        (offer("s", there=3, **SHORT), offer("t", zone="b", history=History(up=0.1, lost=100.0, found=100.0))),
        {"s"},
        {"s": 4},
    ),
    "most of its machines are under notice, and none come in their place: another zone is asked at once": (
        job(members={"s": 4}, leaving={"s": 2}, left=40000.0),
        (offer("s", there=4, leaving=2, supply="short", size=6), offer("t", zone="b")),
        {"s"},
        {"s": 4, "t": 4},
    ),
    "the zone of the machines under notice gives others: the job stays there": (
        job(members={"s": 4}, leaving={"s": 2}, left=40000.0),
        (offer("s", there=6, leaving=2, most=8), offer("t", zone="b")),
        {"s"},
        {"s": 4},
    ),
    "the other zone costs a tenth: the job moves, though it is no faster there": (
        job(members={"s": 4}, left=40000.0),
        (offer("s", there=4, price=10.0), offer("t", zone="b", there=4, price=1.0)),
        {"t"},
        {"t": 4},
    ),
    "the other zone costs a little less: the job stays": (
        job(members={"s": 4}, left=40000.0),
        (offer("s", there=4, price=1.0), offer("t", zone="b", there=4, price=0.95)),
        {"s"},
        {"s": 4},
    ),
    "the other zone costs a tenth, but the work ends before the move pays": (
        job(members={"s": 4}, left=100.0),
        (offer("s", there=4, price=10.0), offer("t", zone="b", there=4, price=1.0)),
        {"s"},
        {"s": 4},
    ),
    "one machine was lost a moment ago, and the others go on: that alone is no reason to move": (
        job(min=1, max=16, members={"s": 15}, left=3e5),
        (
            offer("s", there=15, most=16, supply="short", size=16, history=History(interruptions=1.0)),
            offer("t", zone="b", most=16),
        ),
        {"s"},
        {"s": 16},
    ),
    "the job may cross zones: all pools are one zone": (
        job(across=True),
        (offer("s", there=1, **SHORT), offer("t", zone="b")),
        {"s", "t"},
        {"s+t": 4},
    ),
    "the cheapest job has min nodes, in the cheapest zone": (
        job(cheapest=True),
        (offer("s", price=2.0), offer("t", zone="b", price=1.0), offer("o", market="on-demand", price=0.5)),
        {"t"},
        {"t": 2},
    ),
    "the cheapest job waits for spot instead of on-demand": (
        job(cheapest=True),
        (offer("s", **SHORT), offer("o", market="on-demand")),
        {"s"},
        {"s": 2},
    ),
    "the spot pools can never have enough machines: the cheapest job takes the next market": (
        job(cheapest=True),
        (offer("s", most=1), offer("t", zone="b", most=1), offer("o", zone="c", market="on-demand")),
        {"o"},
        {"o": 2},
    ),
    "a zone can never have enough machines: it is not asked, though the other one is short": (
        job(),
        (offer("s", there=1, **SHORT), offer("t", zone="b", most=1)),
        {"s"},
        {"s": 4},
    ),
    "a zone costs nothing": (
        job(min=1, max=1, left=3600.0, deadline=NOW + 9000.0),
        (offer("s", price=0.0), offer("o", zone="c", market="on-demand", price=1.0)),
        {"s"},
        {"s": 1},
    ),
    "a job that ends keeps what its generation has": (
        job(wants=False, members={"s": 3}),
        (offer("s", there=3),),
        {"s"},
        {"s": 3},
    ),
    "no pool suits the job": (job(pools=frozenset()), (offer("s"),), set(), {}),
}


@pytest.mark.parametrize(("demand", "offers", "use", "needs"), CASES.values(), ids=CASES.keys())
def test_place(demand: Demand, offers: tuple[Offer, ...], use: set[str], needs: dict[str, int]) -> None:
    found = one(demand, *offers)
    assert (found.use, asked(found)) == (use, needs), found.reason
    assert found.reason


# Reasons that operators see: the job, the pools, and the reason.
PLAIN = job(min=1, max=1, pools=frozenset({"s", "t"}))
SCARCE = Advice(obtainability=Said(0.125, NOW, "the cloud"))
WORDS: dict[str, tuple[Demand, tuple[Offer, ...], str]] = {
    "two other zones: the machines that the head expects there": (
        replace(PLAIN, pools=frozenset({"s", "t", "u"})),
        (offer("s", there=1), offer("t", zone="b", advice=SCARCE), offer("u", zone="c", supply="short")),
        "s in a: 1 machine; other zones would probably have: b 0.5, c 0",
    ),
    "another zone with many machines": (
        job(min=16, max=16),
        (offer("s", there=16, most=16), offer("t", zone="b", there=16, most=16)),
        "s in a: 16 machines; other zones would probably have: b 16",
    ),
    "a deadline without on-demand machines": (
        replace(PLAIN, deadline=NOW + 7200.0, left=60.0),
        (offer("s", there=1),),
        "s in a: 1 machine; if machines are lost or missing, the deadline may be missed: no on-demand pool has room",
    ),
    "a deadline, and the work is not known yet": (
        replace(PLAIN, deadline=NOW + 7200.0),
        (offer("s", there=1), offer("t", market="on-demand")),
        "s, t in a: 1 machine; the deadline counts once the work left is measured",
    ),
}


@pytest.mark.parametrize(("demand", "offers", "reason"), WORDS.values(), ids=WORDS.keys())
def test_the_reason(demand: Demand, offers: tuple[Offer, ...], reason: str) -> None:
    assert one(demand, *offers).reason == reason


def test_a_zone_that_gave_most_of_the_machines_keeps_a_waiting_job() -> None:
    first = one(job(), offer("s"), offer("t", zone="b"))

    def later(there: int, most: int) -> Placement:
        """The zone gave so many machines, which boot, of the `most` that it was asked for."""
        booting = offer("s", there=there, most=most, supply="short", size=most)
        offers = (replace(booting, usable=0), offer("t", zone="b", most=most))
        return place(Situation(NOW, offers, (job(max=most),)), {"j": first})["j"]

    assert later(15, 16).use == {"s"}
    assert asked(later(15, 16)) == {"s": 16}
    assert later(8, 16).use == {"t"}  # twice as many machines are worth another zone


def test_a_later_job_takes_the_zone_that_the_first_one_leaves() -> None:
    seen = Situation(NOW, (offer("s"), offer("t", zone="b")), (job(), job(job="k", order=1)))
    found = place(seen)
    assert (found["j"].use, found["k"].use) == ({"s"}, {"t"})


def test_a_job_asks_for_no_machines_with_which_it_could_not_begin() -> None:
    """An earlier job keeps two of three machines. A third one would cost money, and no job could use it."""
    first, second = job(max=2), job(job="k", order=1, max=2)

    def needs(most: int, *demands: Demand, there: int = 0) -> dict[str, int]:
        found = place(Situation(NOW, (offer("s", most=most, there=there),), demands))
        return {name: sum(need.machines for need in each.needs) for name, each in found.items()}

    assert needs(3, first, second) == {"j": 2, "k": 0}
    assert needs(3, replace(first, members={"s": 2}), second, there=2) == {"j": 2, "k": 0}
    assert needs(3, first, replace(second, members={"s": 2}), there=2) == {"j": 0, "k": 2}
    assert needs(3, replace(first, priority=1), second) == {"j": 2, "k": 0}
    assert needs(4, first, second) == {"j": 2, "k": 2}
    large = job(min=1, max=3, members={"s": 3})  # it shrinks for the second one
    assert needs(3, large, second, there=3) == {"j": 3, "k": 2}


def test_no_job_asks_for_a_machine_on_which_an_earlier_job_will_begin() -> None:
    """The first job keeps two of three machines, and the second one waits for two. So the third one may not begin.

    A job with a deadline asks in time all the same.
    """
    first = job(max=2, members={"o": 2})
    second, third = job(job="k", order=1, max=2, left=3600.0), job(job="l", order=2, min=1, max=1, left=3600.0)

    def needs(*demands: Demand) -> list[int]:
        found = place(Situation(NOW, (offer("o", market="on-demand", most=3, there=3),), demands))
        return [sum(need.machines for need in found[name].needs) for name in ("j", "k", "l")]

    assert needs(first, second, third) == [2, 0, 0]
    assert needs(first, second, replace(third, holds=True)) == [2, 0, 1], "it is between two generations"
    assert needs(first, second, replace(third, deadline=NOW + 4000.0)) == [2, 0, 1]


def test_a_job_that_cannot_begin_in_a_zone_leaves_it_to_later_jobs() -> None:
    offers = (offer("s", zone="a", most=3), offer("t", zone="b", there=4, most=4))
    trains, waits = job(min=4, members={"t": 4}), job(job="k", order=1, min=4)
    found = place(Situation(NOW, offers, (trains, waits, job(job="l", order=2, min=1, max=1))))
    assert {name: sum(need.machines for need in each.needs) for name, each in found.items()} == {"j": 4, "k": 0, "l": 1}
    assert found["k"].use == {"t"}


def test_a_pool_that_is_over_its_new_limit_takes_no_room_from_the_next_one() -> None:
    offers = (offer("s", there=4, most=2), offer("o", market="on-demand", most=2))
    found = place(Situation(NOW, offers, (job(min=4, members={"s": 4}), job(job="k", order=1, min=1, max=1))))
    assert found["k"].needs


def test_a_job_of_several_nodes_asks_for_the_machine_that_it_lacks_beside_shared_ones() -> None:
    """Half of two machines is free."""
    offers = (offer("s", there=2, most=3, devices=8),)
    first, second = job(min=2, max=2, devices=4, members={"s": 2}), job(job="k", order=1, min=3, max=3, devices=4)
    found = place(Situation(NOW, offers, (first, second)))
    assert sum(need.machines for need in found["k"].needs) == 3


@pytest.mark.parametrize("trains", [True, False], ids=["the first job trains", "no machine is there"])
def test_jobs_share_the_last_machine_of_a_zone_before_another_zone_is_asked(trains: bool) -> None:
    offers = tuple(offer(name, zone=name, most=1, devices=4) for name in ("s", "t"))
    jobs = [job(job=str(index), order=index, min=1, max=1, devices=1) for index in range(6)]
    if trains:
        jobs[0] = replace(jobs[0], members={"s": 1})
        offers = (offer("s", zone="s", there=1, most=1, devices=4), offers[1])
    found = place(Situation(NOW, offers, tuple(jobs)))
    assert [next(iter(found[each.job].use)) for each in jobs] == ["s", "s", "s", "s", "t", "t"]


def test_jobs_are_served_by_priority_then_by_deadline_then_in_order() -> None:
    demands = (
        job(job="plain"),
        job(job="late", order=1, deadline=NOW + 9e5),
        job(job="soon", order=2, deadline=NOW + 8e5),
        job(job="high", order=3, priority=1),
    )
    offers = tuple(offer(name, zone=name) for name in ("s", "t", "o", "u"))
    found = place(Situation(NOW, offers, tuple(replace(d, pools=frozenset({"s", "t", "o", "u"})) for d in demands)))
    assert [next(iter(found[name].use)) for name in ("high", "soon", "late", "plain")] == ["s", "t", "o", "u"]


def test_a_budget_that_does_not_last_makes_the_job_thrifty() -> None:
    offers = (offer("s", price=1.0), offer("t", zone="b", price=0.2, most=2))
    rich, poor = (one(job(left=7200.0, budget=budget), *offers) for budget in (50.0, 1.0))
    assert (rich.use, rich.max) == ({"s"}, 4)
    assert (poor.use, poor.max) == ({"t"}, 2)
    assert "$1.00 of the budget is left" in poor.reason


def test_on_demand_machines_that_the_budget_does_not_pay_are_not_asked_for() -> None:
    demand = job(min=1, max=1, left=7200.0, deadline=NOW + 7500, members={"s": 1}, pools=frozenset({"s", "o"}))
    offers = (offer("s", there=1, price=1.0), offer("o", market="on-demand", price=9.0))
    rich, poor = (one(replace(demand, budget=budget), *offers) for budget in (50.0, 5.0))
    assert {pool for need in rich.needs for pool in need.pools} == {"o", "s"}
    assert {pool for need in poor.needs for pool in need.pools} == {"s"}


def test_a_job_with_a_budget_pays_for_its_own_devices_only() -> None:
    """Its share of the work left costs $1 of the $8, so it need not be thrifty."""
    demand = job(min=1, max=1, devices=1, left=3600.0, budget=2.0, deadline=NOW + 3900, pools=frozenset({"s", "o"}))
    found = one(demand, offer("s", **SHORT), offer("o", market="on-demand", price=8.0, devices=8))
    assert found.use == {"o"}
    assert "budget" not in found.reason


def test_what_is_asked_for_costs_what_the_devices_of_the_job_cost() -> None:
    whole, part = (one(job(min=1, max=1, devices=devices), offer("s", price=8.0, devices=8)) for devices in (None, 1))
    assert (whole.hourly, part.hourly) == (8.0, 1.0)


offers_of = st.lists(
    st.builds(
        offer,
        st.sampled_from("stou"),
        st.sampled_from("abc"),
        st.sampled_from(["spot", "on-demand", "flex"]),
        st.integers(0, 4),
        supply=st.sampled_from(["open", "short", "away", "closed"]),
        size=st.integers(0, 4),
        price=st.none() | st.just(0.0) | st.floats(0.1, 9),
    ),
    unique_by=lambda each: each.name,
)
demands_of = st.builds(
    job,
    pools=st.frozensets(st.sampled_from("stou")),
    min=st.integers(1, 3),
    max=st.integers(3, 6),
    left=st.none() | st.floats(0, 1e6),
    deadline=st.none() | st.floats(NOW, NOW + 1e6),
    budget=st.none() | st.floats(0, 100),
    across=st.booleans(),
    cheapest=st.booleans(),
    members=st.dictionaries(st.sampled_from("stou"), st.integers(0, 3)),
)


def test_of_two_zones_that_were_asked_the_better_one_is_asked_on() -> None:
    """Both lacked machines, and both have enough now. The agents of none of them have reported yet."""
    before: Mapping[str, Placement] = {}
    for here, there, more in ((1, 0, {"supply": "short"}), (4, 2, {})):
        given = (
            offer("s", there=here, size=4, price=1.0, **more),
            offer("t", "b", there=there, size=4, price=1.05, **more),
        )
        offers = tuple(replace(each, usable=0) for each in given)
        before = place(Situation(NOW, offers, (job(),)), before)
    assert (before["j"].use, asked(before["j"])) == ({"s"}, {"s": 4})


@settings(max_examples=300, deadline=None)
@given(offers_of, demands_of)
@example(  # the job uses the machine of one zone, and asks another zone for more
    [offer("s", there=1, size=0, price=1.625), offer("o", zone="b", market="flex")],
    job(min=1, max=3, pools=frozenset("so")),
)
def test_the_same_situation_has_the_same_placement(offers: list[Offer], demand: Demand) -> None:
    seen = Situation(NOW, tuple(offers), (demand,))
    first = place(seen)
    assert place(seen, first) == first
    found = first["j"]
    known = demand.pools | demand.members.keys()  # a generation may be where the job may not be any more
    assert found.use <= known
    assert found.reason
    assert all(need.machines >= 0 and need.pools <= known for need in found.needs)
    assert 1 <= found.min <= found.max


# What the head learns.


def pool(size: int, there: int, supply: str = "open") -> tuple[Pool, dict[str, float]]:
    machines = {f"s-{i}": 1.0 for i in range(there)}
    return Pool("s", 4, size, dict.fromkeys(machines, "ready"), supply), machines  # type: ignore[arg-type]


def learned(*looks: tuple[float, tuple[Pool, dict[str, float]]]) -> History:
    found = Histories()
    for at, (seen, machines) in looks:
        found = learn(found, NOW + at, [seen], {"s": machines})
        found = Histories.model_validate_json(found.model_dump_json())  # a new head goes on with it
    return found.of()["s"]


def test_a_machine_that_the_cloud_took_is_an_interruption() -> None:
    found = learned((0, pool(2, 2)), (360, pool(2, 1, "short")))
    assert found.interruptions == pytest.approx(1)
    assert found.hours == pytest.approx(0.2)
    assert (found.lost, found.short_with, found.refusals) == (pytest.approx(1), 1, 1)


def test_a_machine_that_the_head_removed_is_none() -> None:
    assert learned((0, pool(2, 2)), (360, pool(1, 1))).interruptions == 0


def test_a_pool_that_falls_short_and_recovers() -> None:
    found = learned((0, pool(2, 1, "short")), (360, pool(2, 1, "short")), (720, pool(2, 2)), (1080, pool(2, 2)))
    assert (found.down, found.up) == (pytest.approx(0.2, rel=0.01), pytest.approx(0.1, rel=0.01))
    assert (found.found, found.refusals) == (pytest.approx(1, rel=0.01), 0)


def test_a_pool_did_not_fall_short_in_the_future() -> None:
    """The clock of the last head was ahead. Else the pool would not be asked again before that time."""
    assert learned((3600, pool(2, 1, "short")), (0, pool(1, 1))).short_at == NOW


def test_machines_that_boot_say_nothing() -> None:
    found = learned((0, pool(2, 0)), (360, pool(2, 1)))
    assert (found.up, found.down, found.short_at) == (0, 0, 0)


def test_a_pool_that_nobody_asks_says_nothing() -> None:
    assert learned((0, pool(0, 0, "short")), (360, pool(0, 0, "short"))) == History()


def test_half_of_a_count_is_forgotten_in_a_half_life() -> None:
    found = learned((0, pool(1, 1)), (60, pool(1, 0, "short")), (60 + HALF_LIFE, pool(0, 0)))
    assert found.interruptions == pytest.approx(0.5)


def test_keys_of_a_newer_version_are_ignored() -> None:
    text = '{"at": 5, "new": 1, "pools": {"s": {"hours": 2, "newer": []}}}'
    assert Histories.model_validate_json(text).of()["s"].hours == 2


def test_the_machines_to_which_a_job_moves_are_taken() -> None:
    """A job that comes later asks for others."""
    offers = (offer("s", there=4, price=10.0), offer("t", "b", price=1.0), offer("u", "c", price=2.0))
    moves = job(pools=frozenset({"s", "t"}), min=4, priority=1, members={"s": 4}, cheapest=True, left=1e6)
    later = job(job="k", pools=frozenset({"t", "u"}), min=4, order=1)
    found = place(Situation(NOW, offers, (moves, later)))
    assert [asked(found[each]) for each in ("j", "k")] == [{"s": 4, "t": 4}, {"u": 4}]
