"""The measurement of an urgent job on a full cluster: its judgement, and what it writes."""

from __future__ import annotations

import pytest

from bench.jobs import FIRST_STEP, OWN, PAUSE, pause, render
from bench.phases import Event


def steps(node: str, *times: float, first: int = 1) -> list[Event]:
    return [Event(time, "step", 1, node, first + index) for index, time in enumerate(times)]


PAUSES = {
    "a pause after the change": (steps("a", 1.0, 1.1, 2.0, 2.1), 0.9),
    "a longer pause that ended before the change does not count": (steps("a", 0.0, 0.9, 1.1, 1.4), 0.3),
    "a step that is done again counts once": (
        [*steps("a", 1.0, 1.1, 1.2), *steps("b", 1.15, 1.3, 1.7, first=2)],
        0.5,
    ),
    "no step after the change": (steps("a", 0.1, 0.2), 0.0),
}


@pytest.mark.parametrize("case", PAUSES)
def test_the_pause(case: str) -> None:
    events, seconds = PAUSES[case]
    assert pause(events, since=1.0) == pytest.approx(seconds)


def test_the_section() -> None:
    rows = {FIRST_STEP: [4.0, 5.0, 6.0], OWN: [1.4, 1.0, 9.0], PAUSE: [0.6, 0.4, 0.7]}
    text = render(rows, "a machine", "2026-11-22", load=3.4)
    assert "The load average of other work was 3." in text
    assert f"{OWN}: under 1.5 s, held; {PAUSE}: under 0.5 s, not held." in text
    assert f"| **{FIRST_STEP}** | 5.00 | 4.00 to 6.00 |" in text
