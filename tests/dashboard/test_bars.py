"""How the timeline of a run is drawn: the sums are the account's, and void time is beside its interruption."""

from __future__ import annotations

from typing import Any

import pytest

from spotrun.dashboard import bars
from spotrun.head.job_state import Interruption, JobState, Progress
from spotrun.head.timeline import Span, Timeline
from tests.head.views import A, B, job

KILL = Interruption(
    kind="kill", node=B, at=100.0, generation=1, step=50, step_cost=4.0, nodes=2.0, seconds=6.0, steps_lost=5
)


def state(**changes: Any) -> JobState:
    spent = {"training": 200.0, "recovery": 10.0, "starting": 30.0}
    values = {"spent": spent, "node_seconds": 240.0, "good_seconds": 176.0, "cost": 24.0, "progress": Progress()}
    return job(A, B, interruptions=(KILL,), **{**values, **changes})


SPANS = Timeline(
    (
        Span(A, "booting", 0, 15), Span(B, "booting", 0, 15),
        Span(A, "training", 15, 102), Span(B, "training", 15, 102),
        Span(A, "recovery", 102, 106), Span(B, "recovery", 102, 106),
        Span(A, "training", 106, 119), Span(B, "training", 106, 119),
    )
)  # fmt: skip


def rows(found: dict[str, Any], node: str) -> list[tuple[str, float, float]]:
    (bar,) = [each for each in found["bars"] if each["node"] == node]
    return [(kind, start, end) for kind, start, end, _ in bar["spans"]]


def test_lost_steps_are_drawn_before_the_interruption_and_the_wait_after_it() -> None:
    """Five steps of four node-seconds on two nodes took ten seconds."""
    assert rows(bars.document(state(), SPANS), A) == [
        ("booting", 0, 15), ("counted", 15, 90), ("lost", 90, 102), ("recovery", 102, 106), ("counted", 106, 119),
    ]  # fmt: skip


def test_the_sums_are_those_of_the_account() -> None:
    found = bars.document(state(), SPANS)
    assert sum(found["node_time"].values()) == pytest.approx(found["node_seconds"])
    assert found["goodput"] == pytest.approx(found["node_time"]["counted"] / found["node_seconds"])
    assert found["missing"] == pytest.approx(240 - 238)


def test_what_an_interruption_cost() -> None:
    """20 node-seconds of lost steps, and 20 lost or recovering, at 0.1 dollars; the drawn loss is not counted twice."""
    (mark,) = bars.document(state(), SPANS)["marks"]
    assert mark["dollars"] == pytest.approx((20 + 2 * 2 + 2 * 4) * 0.1)
    (unpriced,) = bars.document(state(cost=0.0), SPANS)["marks"]
    assert unpriced["dollars"] is None


def test_a_run_of_an_older_head_has_sums_and_no_bars() -> None:
    found = bars.document(state(), Timeline())
    assert found["bars"] == []
    assert found["missing"] == 240
    assert found["node_time"]
