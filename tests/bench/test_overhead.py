"""How exact the figures of `bench.overhead` are."""

from __future__ import annotations

import random
import statistics

import pytest

from bench.overhead import Launch, interval, render


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


@pytest.mark.parametrize(
    ("microseconds", "added", "held"),
    [
        ([41] * 6, 49, "held"),
        ([43] * 6, 51, "not held"),
        ([20, 41, 41, 41, 41, 60], 49, "not decided by these launches"),
    ],
    ids=["held", "not held", "too few launches"],
)
def test_the_goal_is_for_all_that_spotrun_adds(microseconds: list[int], added: int, held: str) -> None:
    """Of the 50 µs, 6 are what is prepared for many batches together, and 2 are of other threads."""
    launches = [_launch(each) for each in microseconds]
    text = render(launches)
    assert f"It adds {added} µs (95 %" in text
    assert f"of 5 ms: {held}." in text
    assert "The same loop again adds 2.0 µs (95 % confidence: 2.0 to 2.0 µs)." in text


def _launch(microseconds: int) -> Launch:
    """In which the loop under spotrun takes so many more than the mean of the bare loops."""
    bare, again, spotrun = (4e-4, 5e-3), (4.02e-4, 5e-3), (4.01e-4 + microseconds * 1e-6, 5e-3)
    return Launch([[bare, again, spotrun, bare]] * 3, prepared=6e-6, threads=4e-4)
