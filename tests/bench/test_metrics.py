"""`make bench-metrics`, with few steps: what it measures and what it writes."""

from __future__ import annotations

import pytest

from bench import metrics
from bench.metrics import Row


@pytest.mark.parametrize("computes", [True, False])
def test_a_stretch_is_measured(computes: bool) -> None:
    row = metrics.measure(3, computes, 20, 2)
    assert [len(each) for each in (row.call, row.without, row.logged)] == [2, 2, 2]
    assert min(row.call) > 0


def test_the_section() -> None:
    rows = [Row(5, True, call=[2e-6, 4e-6], without=[1e-5, 1e-5], logged=[2e-5, 4e-5])]
    text = metrics.render(rows, 0.005, "a machine", "2026-11-23", 2000, 2)
    assert "| 5 | computes | 3.0 | 20.0 | 0.40 |" in text
    assert "takes 5.00 ms of processor time, which is 0.100% of a core (goal: 0.5%): held." in text
    assert "this is 0.50% of a core (goal: 1%): held." in text


def test_a_goal_that_is_not_held() -> None:
    rows = [Row(5, True, call=[2e-6], without=[1e-5], logged=[5.6e-5])]
    assert "this is 1.02% of a core (goal: 1%): not held." in metrics.render(rows, 0.005, "", "", 1, 1)


def test_readings_of_the_machine_are_measured() -> None:
    assert 0 < metrics.measure_system(metrics.BLOCK) < 1
