"""The measurement of a snapshot's delay: one run of it, and what it writes."""

from __future__ import annotations

import pytest

from bench import snapshots
from bench.snapshots import Row


@pytest.mark.parametrize("workers", [1, 2])
def test_one_run_of_it(workers: int) -> None:
    row = snapshots.measure(1, workers, 1)
    assert (row.size, row.workers) == (1, workers)
    assert len(row.alone) == len(row.commit_alone) == 1
    assert len(row.shared) == len(row.commit_shared) == (workers > 1)


def test_the_section() -> None:
    rows = [Row(100, 1, [0.02], [], [0.04], []), Row(1000, 2, [0.3, 0.2, 0.9], [0.1], [0.5], [0.4])]
    text = snapshots.render(rows, "a machine", "2026-11-22", 7)
    assert "7 snapshots of each kind" in text
    assert "| 100 | 1 | 20.0 (20.0) |  | 40.0 (40.0) |  |" in text
    assert "| 1,000 | 2 | 300.0 (200.0) | 100.0 (100.0) | 500.0 (500.0) | 400.0 (400.0) |" in text
