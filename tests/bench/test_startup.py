"""The measurement of an agent's start: one run of it, and what it writes."""

from __future__ import annotations

import pytest

from bench import startup


def test_one_run_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTRUN_HOME", "")  # set by the measurement; put back afterwards
    rows = startup.measure(1)
    assert list(rows) == [
        startup.JOINED,
        startup.INTERPRETER,
        "imports",
        "metadata",
        "bucket, agent",
        "head.json, TLS link, first report",
        "health gate, beside the link; no GPUs here",
        startup.TORCH,
    ]
    assert all(len(seconds) == 1 and 0 <= seconds[0] < startup.PATIENCE for seconds in rows.values())


@pytest.mark.parametrize(("joined", "held"), [([0.9, 0.2, 5.0], "held"), ([1.1, 1.2, 0.3], "not held")])
def test_the_section(joined: list[float], held: str) -> None:
    text = startup.render({startup.JOINED: joined, "imports": [0.5]}, "a machine", "2026-11-21")
    assert f"Goal: under 1 s: {held}." in text
    assert "medians of 3 runs" in text
    assert f"| **{startup.JOINED}** | {sorted(joined)[1]:.3f} | {min(joined):.3f} to {max(joined):.3f} |" in text
    assert "| imports | 0.500 | 0.500 to 0.500 |" in text
