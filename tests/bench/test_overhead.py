"""How exact the figures of `bench.overhead` are."""

from __future__ import annotations

import random
import statistics

import pytest

from bench.overhead import interval


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(30, 10, 21), (15, 4, 12), (6, 1, 6), (5, 1, 5), (1, 1, 1)],
    ids=["30 launches", "15 launches", "6 launches", "too few for 95 %", "one launch"],
)
def test_which_values_bound_the_median(count: int, low: int, high: int) -> None:
    """Against a table of the sign test: of 30 values, the 10th and the 21st."""
    assert interval([float(each) for each in range(count, 0, -1)]) == (low, high)


def test_the_interval_has_the_median_that_often() -> None:
    draw = random.Random(0)
    found = [interval([draw.gauss(0.0, 1.0) for _ in range(30)]) for _ in range(2000)]
    share = statistics.mean(low <= 0.0 <= high for low, high in found)
    assert 0.95 <= share < 0.97
