"""What machine time costs: by month, pool and market, at the price of the moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from spotrun.head.costs import bill
from spotrun.head.costs.bill import Line, Rates, Use

MIDNIGHT = datetime(2026, 12, 1, tzinfo=UTC).timestamp()
YEAR = datetime(2027, 1, 1, tzinfo=UTC).timestamp()
RATES = Rates({"p": 3.6, "q": 36.0}, {"p": 36.0, "q": 36.0}, {"p": "spot", "q": "on-demand"})


def use(start: float, end: float, share: float = 1.0, pool: str = "p") -> Use:
    return Use("a", pool, start, end, share)


def line(month: str = "2026-11", pool: str = "p", **values: float) -> Line:
    return Line(month=month, pool=pool, market=RATES.markets[pool], **values)  # type: ignore[arg-type]


CASES: dict[str, tuple[Sequence[Use], Rates, Sequence[Line]]] = {
    "a whole machine": (
        [use(MIDNIGHT - 100, MIDNIGHT)],
        RATES,
        [line(seconds=100, cost=0.1, on_demand=1)],
    ),
    "a quarter of a machine": (
        [use(MIDNIGHT - 100, MIDNIGHT, 0.25)],
        RATES,
        [line(seconds=25, cost=0.025, on_demand=0.25)],
    ),
    "time in two months": (
        [use(MIDNIGHT - 100, MIDNIGHT + 50)],
        RATES,
        [line(seconds=100, cost=0.1, on_demand=1), line("2026-12", seconds=50, cost=0.05, on_demand=0.5)],
    ),
    "time in two years": (
        [use(YEAR - 100, YEAR + 50)],
        RATES,
        [line("2026-12", seconds=100, cost=0.1, on_demand=1), line("2027-01", seconds=50, cost=0.05, on_demand=0.5)],
    ),
    "two pools": (
        [use(MIDNIGHT - 100, MIDNIGHT), use(MIDNIGHT - 100, MIDNIGHT, pool="q")],
        RATES,
        [line(seconds=100, cost=0.1, on_demand=1), line(pool="q", seconds=100, cost=1, on_demand=1)],
    ),
    "time that was counted by mistake": (
        [use(MIDNIGHT - 100, MIDNIGHT), use(MIDNIGHT, MIDNIGHT - 40)],
        RATES,
        [line(seconds=60, cost=0.06, on_demand=0.6)],
    ),
    "mistaken time in two months": (
        [use(MIDNIGHT - 100, MIDNIGHT + 50), use(MIDNIGHT + 50, MIDNIGHT - 40)],
        RATES,
        [line(seconds=60, cost=0.06, on_demand=0.6), line("2026-12")],
    ),
    "no price is known": (
        [use(MIDNIGHT - 100, MIDNIGHT)],
        Rates({}, RATES.on_demand, RATES.markets),
        [line(seconds=100, unpriced=100, on_demand=1)],
    ),
    "no on-demand price is known": (
        [use(MIDNIGHT - 100, MIDNIGHT)],
        Rates(RATES.prices, {}, RATES.markets),
        [line(seconds=100, cost=0.1, unlisted=100)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_use_is_in_the_account(name: str) -> None:
    uses, rates, expected = CASES[name]
    found = bill.add((), uses, rates)
    assert [(each.month, each.pool, each.market) for each in found] == [(e.month, e.pool, e.market) for e in expected]
    for mine, theirs in zip(found, expected, strict=True):
        for key in ("seconds", "cost", "on_demand", "unpriced", "unlisted"):
            assert getattr(mine, key) == pytest.approx(getattr(theirs, key), abs=1e-9), key


def test_a_price_that_changes_counts_from_its_change_on() -> None:
    dearer = Rates({"p": 7.2}, RATES.on_demand, RATES.markets)
    before = bill.add((), [use(MIDNIGHT - 200, MIDNIGHT - 100)], RATES)
    (after,) = bill.add(before, [use(MIDNIGHT - 100, MIDNIGHT)], dearer)
    assert (after.seconds, after.cost) == (200, pytest.approx(0.3))


def test_a_use_may_have_a_price_of_its_own() -> None:
    before = bill.add((), [use(MIDNIGHT - 100, MIDNIGHT)], RATES)
    back, again = use(MIDNIGHT, MIDNIGHT - 40), use(MIDNIGHT - 40, MIDNIGHT)
    late = [replace(back, price=3.6), replace(again, price=7.2)]
    (after,) = bill.add(before, late, RATES)
    assert (after.seconds, after.cost, after.on_demand) == (100, pytest.approx(0.14), pytest.approx(1))


def test_time_without_a_price_gets_the_first_price_that_is_known() -> None:
    unknown = Rates({}, {}, RATES.markets)
    before = bill.add((), [use(MIDNIGHT - 100, MIDNIGHT)], unknown)
    (after,) = bill.add(before, [], RATES)
    assert (after.cost, after.unpriced) == (pytest.approx(0.1), 0.0)
    assert (after.on_demand, after.unlisted) == (pytest.approx(1), 0.0)


def test_accounts_of_two_heads_become_one() -> None:
    one, other = line(seconds=100, cost=0.1), line(seconds=50, cost=0.2, unpriced=7)
    elsewhere = line("2026-12", seconds=5)
    assert bill.merged([one, elsewhere, other]) == (
        line(seconds=150, cost=0.1 + 0.2, unpriced=7),
        elsewhere,
    )
