"""What `bench.transfer` measures and writes."""

from __future__ import annotations

from bench import transfer


def test_each_transfer_is_timed() -> None:
    found = transfer.measure("0.1M", limit=5, streams=2, times=3)
    assert len(found) == 3
    assert min(found) > 0


def test_a_row_for_each_limit_and_number_of_connections() -> None:
    text = transfer.render("25M", 3, {(5, 1): [0.5, 0.7, 0.6], (0, 2): [0.31, 0.3, 0.35]}, 0.12)
    assert "25M parameters" in text
    assert "3 transfers in each row" in text
    assert "broadcast of the same state takes 0.12 s" in text
    assert text.splitlines()[-2:] == [
        "| 5 Gbit/s | 1 | 0.60 | 0.50 to 0.70 |",
        "| none | 2 | 0.31 | 0.30 to 0.35 |",
    ]
