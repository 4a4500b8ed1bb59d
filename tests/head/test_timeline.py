"""When each machine did what: the spans add up to the account, whatever is counted and corrected in between."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from spotrun.head.costs import job_totals, node_time
from spotrun.head.costs.bill import Rates, Use
from spotrun.head.job_state import JobState
from spotrun.head.timeline import EARLIER, MIXED, MOST, Span, Timeline, read
from spotrun.store import job_key
from tests.head.views import A, B, job, node, view
from tests.head.world import World, stepping


def use(machine: str, start: float, end: float, share: float = 1.0, late: bool = False) -> Use:
    return Use(machine, "p", start, end, share, late=late)


def always(kind: str) -> Callable[[str], str]:
    return lambda _: kind


def kinds(state: JobState) -> dict[str, float]:
    """Node-seconds of the timeline by kind, as `spent` has them."""
    found: dict[str, float] = {}
    for span in state.timeline:
        kind = node_time.STARTING if span.kind == node_time.BOOTING else span.kind
        found[kind] = found.get(kind, 0.0) + span.seconds
    return found


def test_the_spans_of_a_kind_add_up_to_the_account() -> None:
    chance, state, now = random.Random(1), job(A, B), 100.0
    for _ in range(300):
        length = chance.uniform(0.1, 5)
        members = [(A, B), (A,), ()][chance.randrange(3)]
        state = job(*members, spent=state.spent, timeline=state.timeline, node_seconds=state.node_seconds)
        seen = view(state, *(node(name) for name in (A, B) if chance.random() < 0.8))
        uses = [use(name, now, now + length, chance.choice((1.0, 0.5))) for name in (A, B)]
        now += length
        state = job_totals.count(state, seen, uses, Rates())
    assert kinds(state) == {kind: pytest.approx(seconds) for kind, seconds in state.spent.items()}
    assert sum(span.seconds for span in state.timeline) == pytest.approx(state.node_seconds)


def test_time_of_one_kind_is_one_span() -> None:
    found = Timeline()
    for second in range(100):
        found = found.add([use(A, second, second + 1)], lambda _: "training")
    assert list(found) == [Span(A, "training", 0, 100)]


def test_time_that_was_counted_by_mistake_is_taken_back() -> None:
    found = Timeline().add([use(A, 0, 10)], lambda _: "training").add([use(A, 10, 7)], lambda _: "training")
    assert list(found) == [Span(A, "training", 0, 7)]


def test_time_that_was_counted_by_mistake_may_have_several_spans() -> None:
    """A machine was dead for some time before the head knew. Meanwhile its time was of other kinds."""
    found = Timeline()
    for start, kind in ((0, "training"), (8, "lost"), (9, "recovery"), (10, "idle")):
        found = found.add([use(A, start, start + 1 if start else 8), use(B, start, start + 1)], always(kind))
    found = found.add([use(A, 11, 7)], always("idle"))
    assert [span for span in found if span.node == A] == [Span(A, "training", 0, 7)]
    assert sum(span.seconds for span in found if span.node == B) == pytest.approx(4)
    found = found.add([use(A, 20, 21)], always("training"))  # another machine of that name
    assert [span for span in found if span.node == A] == [Span(A, "training", 0, 7), Span(A, "training", 20, 21)]


def test_time_that_is_told_later_comes_before() -> None:
    found = Timeline().add([use(A, 5, 10)], lambda _: "training").add([use(A, 2, 5, late=True)], lambda _: "starting")
    assert list(found) == [Span(A, "starting", 2, 5), Span(A, "training", 5, 10)]


def test_the_number_of_spans_is_bounded_and_no_time_is_lost() -> None:
    found = Timeline()
    for second in range(3 * MOST):
        found = found.add([use(A, second, second + 1)], always("ab"[second % 2]))
    spans = list(found)
    assert len(spans) <= MOST + 1
    assert spans[0].kind == MIXED
    assert sum(span.seconds for span in spans) == pytest.approx(3 * MOST)


def test_many_machines_one_after_the_other_are_bounded_and_no_time_is_lost() -> None:
    found = Timeline()
    for number in range(3 * MOST):
        found = found.add([use(f"m{number}", 100 * number, 100 * number + 90, 0.5)], always("training"))
    spans = list(found)
    assert len(spans) <= MOST + 1
    assert (spans[0].node, spans[0].kind, spans[0].start) == (EARLIER, MIXED, 0)
    assert len({span.node for span in spans}) == len(spans), "each other machine has its own row"
    assert spans[-1].node == f"m{3 * MOST - 1}"
    assert sum(span.seconds for span in spans) == pytest.approx(45 * 3 * MOST)
    assert list(read(found.text())) == spans


def test_a_machine_that_does_not_come_back_is_not_kept_open() -> None:
    found = Timeline()
    for second in range(0, 1000, 10):
        found = found.add([use(f"m{second}", second, second + 10)], lambda _: "training")
        found = found.add([use("stays", second, second + 10)], always(str(second)))
    assert len(found.growing) < 20


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b'{"spans": [[1]]}', b'{"format": 99, "spans": 5}', b"null", None])
def test_junk_is_no_timeline(junk: bytes | None) -> None:
    assert not read(junk)


def test_a_document_is_read_as_it_was_written() -> None:
    found = Timeline().add([use(A, 1, 2), use(B, 1, 3)], lambda machine: f"kind {machine}")
    assert list(read(found.text())) == list(found)
    assert [span.end for span in read(found.text(), until=2.5)] == [2, 2.5]


async def test_a_new_head_goes_on_with_the_timeline(tmp_path: Path) -> None:
    world = World(tmp_path)
    state = await world.started()
    world.cloud.size["p"] = 2
    await world.look()
    for name in ("a", "b"):
        world.receive(name, job=state.id, phase="running", generation=1, workers=stepping(3))
    await world.turn()
    before = world.head.states[state.id]
    assert before.timeline
    assert b"timeline" not in world.store.get(job_key(state.id, "state.json"))
    world.head.journal.forget(state.id)
    await world.head.journal.write(before.replace(phase="stopped"), [], world.clock())  # the end is always written
    written = read(await asyncio.to_thread(world.store.get, job_key(state.id, "timeline.json")))
    assert list(written) == list(before.timeline)
    world.new_head(2)
    found, *_ = await world.head.journal.take_up(state.id, 2, world.clock())
    assert {span.node for span in found.timeline} == {span.node for span in written}
    assert max(span.end for span in found.timeline) <= found.counted_at
