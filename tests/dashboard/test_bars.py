"""How the timeline of a run is drawn: the sums are the account's, and void time is beside its interruption."""

from __future__ import annotations

from functools import partialmethod
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
    return job(A, B, **{"interruptions": (KILL,), **values, **changes})


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


def test_a_cost_is_not_known_before_the_head_has_written_the_time_of_the_pause() -> None:
    """An interruption that goes on has its cost so far. All of it is known once the run has ended."""
    running, until = (
        {"phase": "running", "counted_at": 110.0},
        Timeline(tuple(each for each in SPANS if each.end < 105)),
    )
    (mark,) = bars.document(state(**running), until)["marks"]
    assert (mark["dollars"], mark["counted"]) == (None, False)
    lasting = KILL.model_copy(update={"seconds": None, "steps_lost": None})
    (mark,) = bars.document(state(**running, interruptions=(lasting,)), until)["marks"]
    assert (mark["dollars"], mark["counted"]) == (pytest.approx(2 * 2 * 0.1), True)
    (mark,) = bars.document(state(**running), SPANS)["marks"]
    assert (mark["dollars"], mark["counted"]) == (pytest.approx(3.2), True)


def waited(at: float, node: str) -> tuple[Span, ...]:
    """Five seconds to notice; then A waits for 300 s, while a new node boots for 270 s."""
    return (
        Span(A, "training", at - 85, at + 5), Span(node, "booting", at + 30, at + 300),
        Span(A, "waiting", at + 5, at + 305), Span(A, "spare", at + 305, at + 315),
    )  # fmt: skip


def test_waiting_and_starting_until_the_next_step_cost_too() -> None:
    """The seconds of other kinds, and what comes after the next step, are not its cost."""
    kill = KILL.model_copy(update={"steps_lost": 0, "seconds": 305.0})
    timeline = Timeline((*waited(100, "c"), Span("c", "starting", 405, 500)))
    (mark,) = bars.document(state(interruptions=(kill,)), timeline)["marks"]
    assert mark["dollars"] == pytest.approx((5 + 300 + 270) * 0.1)


def test_no_time_is_the_cost_of_two_interruptions() -> None:
    """The first interruption has no end, because its generation did not last; the next one has begun meanwhile."""
    first = KILL.model_copy(update={"steps_lost": 0, "seconds": None})
    second = first.model_copy(update={"at": 200.0})
    found = state(interruptions=(first, second), counted_at=1000.0)
    marks = bars.document(found, Timeline(waited(100, "c")))["marks"]
    assert [mark["dollars"] for mark in marks] == [pytest.approx((5 + 95 + 70) * 0.1), pytest.approx((205 + 200) * 0.1)]


class Counted(float):
    """A time that counts how often it is compared."""

    count = 0

    def _compared(self, name: str, other: float) -> bool:
        Counted.count += 1
        return bool(getattr(float, name)(self, other))

    __lt__ = partialmethod(_compared, "__lt__")  # type: ignore[assignment]
    __le__ = partialmethod(_compared, "__le__")  # type: ignore[assignment]
    __gt__ = partialmethod(_compared, "__gt__")  # type: ignore[assignment]
    __ge__ = partialmethod(_compared, "__ge__")  # type: ignore[assignment]


def test_each_span_is_compared_with_the_interruptions_near_it() -> None:
    """All with all took two seconds for a long run; the page asks every two seconds."""
    number = 250
    spans = [
        span
        for index in range(number)
        for start in (1000.0 * index,)
        for node in (A, B)
        for span in (Span(node, "training", start, start + 902), Span(node, "recovery", start + 902, start + 1000))
    ]
    interruptions = tuple(
        Interruption.model_construct(**{**dict(KILL), "at": Counted(1000.0 * index + 900), "seconds": 100.0})
        for index in range(number)
    )
    Counted.count = 0
    found = bars.document(state().model_copy(update={"interruptions": interruptions}), Timeline(tuple(spans)))
    assert Counted.count < 50 * (number + len(spans))
    assert [mark["dollars"] for mark in found["marks"]] == [pytest.approx((20 + 2 * 100) * 0.1)] * number


def test_a_run_of_an_older_head_has_sums_and_no_bars() -> None:
    found = bars.document(state(), Timeline())
    assert found["bars"] == []
    assert found["missing"] == 240
    assert found["node_time"]
