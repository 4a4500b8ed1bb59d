"""`make bench-metrics`, with few steps: what it measures and what it writes."""

from __future__ import annotations

from bench import metrics
from bench.metrics import Row


def test_a_stretch_is_measured() -> None:
    row = metrics.measure(3, 20, 2)
    assert [len(each) for each in (row.call, row.without, row.logged)] == [2, 2, 2]
    assert min(row.call) > 0


def test_the_section() -> None:
    rows = [Row(5, call=[2e-6, 4e-6], without=[1e-5, 1e-5], logged=[2e-5, 4e-5])]
    text = metrics.render(rows, "a machine", "2026-11-23", 2000, 2)
    assert "| 5 | 3.0 | 20.0 | 0.40 |" in text
