"""Orders as differences: what an agent reads is what the head wrote, whatever is lost or late."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotrun.changes import SHARED, Inbox, OrderChange, Texts
from spotrun.errors import LinkError
from spotrun.head.server.outbox import KEPT, Outbox
from spotrun.wire import Bundle, Generation, JobOrder, Member, Order, SaveOrder, StateRef

JOBS = ("a", "b", "c")
FLOATS = st.floats(allow_nan=False, allow_infinity=False)

generations = st.builds(
    Generation,
    number=st.integers(1, 3),
    members=st.lists(
        st.builds(Member, node=st.sampled_from(JOBS), boot=st.text(max_size=2), address=st.text(max_size=3)), max_size=3
    ).map(tuple),
    store=st.just("h:1"),
    checkpoints=st.lists(st.builds(StateRef, generation=st.just(1), step=st.integers(0, 9)), max_size=2).map(tuple),
)
bundles = {
    job: st.builds(Bundle, id=st.just(job), code=st.sampled_from("xy"), job=st.dictionaries(st.text(), FLOATS))
    for job in JOBS
}


def job_orders(job: str) -> st.SearchStrategy[JobOrder]:
    return st.builds(
        JobOrder,
        bundle=bundles[job],
        devices=st.lists(st.integers(0, 7), max_size=2).map(tuple),
        generation=st.none() | generations,
        stop_at=st.none() | st.integers(0, 9),
        save=st.none() | st.builds(SaveOrder, step=st.just(1), index=st.integers(0, 3), parts=st.just(4)),
        dump=st.booleans(),
    )


orders = st.lists(st.sampled_from(JOBS), unique=True).flatmap(
    lambda jobs: st.builds(
        Order,
        epoch=st.integers(1, 2),
        jobs=st.tuples(*map(job_orders, jobs)),
        parked=st.lists(st.sampled_from(JOBS), max_size=1).map(tuple),
    )
)


class Line:
    """A connection between an `Outbox` and an `Inbox`, over which reports may take long."""

    def __init__(self, texts: Texts | None = None, version: int = 2) -> None:
        self.outbox, self.inbox, self.version = Outbox(texts or Texts()), Inbox(), version
        self.messages: list[str] = []

    def order(self, order: Order) -> Order:
        """Send an order; what the agent reads."""
        self.outbox.put(order)
        self.messages.append(asyncio.run(self.outbox.next()))
        return self.inbox.read(self.messages[-1])

    def report(self) -> None:
        """The agent says which order it has."""
        self.outbox.taken(self.inbox.newest, self.version)

    def kinds(self) -> list[str]:
        return [json.loads(each)["kind"] for each in self.messages]


def test_a_difference_has_all_values_of_an_order() -> None:
    assert OrderChange.model_fields.keys() >= Order.model_fields.keys()


def same(order: Order) -> Order:
    return order.replace(number=0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(orders, st.integers(0, 2)), max_size=2 * KEPT))
def test_an_agent_reads_each_order_as_it_was_written(steps: list[tuple[Order, int]]) -> None:
    """The number beside an order: after it, no report arrives (0), that about the order before (1), its own (2)."""
    line, before = Line(), 0
    for order, arrives in steps:
        assert same(line.order(order)) == order
        if arrives:
            line.outbox.taken(before if arrives == 1 else line.inbox.newest, 2)
        before = line.inbox.newest


@settings(deadline=None)
@given(orders)
def test_a_whole_order_has_the_json_of_the_document(order: Order) -> None:
    assert json.loads(Texts().whole(order)) == json.loads(order.model_dump_json())


def large(members: int = 1000, **values: Any) -> Order:
    """An order for one of so many members."""
    found = tuple(Member(node=f"n-{index}", boot="b", address="10.0.0.1") for index in range(members))
    generation = Generation(number=1, members=found, store="n-0:1")
    order = JobOrder(bundle=Bundle(id="j", code="c", job={"script": "a.py"}), generation=generation)
    return Order(epoch=1, jobs=(order.replace(**values),))


def changed(order: Order, **values: Any) -> Order:
    return order.replace(jobs=tuple(each.replace(**values) for each in order.jobs))


def test_a_stop_step_for_a_thousand_members_is_a_small_message() -> None:
    line, order = Line(), large()
    line.order(order)
    line.report()
    assert same(line.order(changed(order, stop_at=7))) == changed(order, stop_at=7)
    assert json.loads(line.messages[1]) == {
        **{"kind": "change", "base": 1, "number": 2, "version": 2, "epoch": 1, "parked": []},
        "jobs": [{"id": "j", "stop_at": 7}],
    }


def test_a_value_that_is_taken_back_is_in_the_difference() -> None:
    line, order = Line(), large(2, stop_at=7)
    line.order(order)
    line.report()
    assert line.order(changed(order, stop_at=None, generation=None)).jobs[0].generation is None
    assert json.loads(line.messages[1])["jobs"] == [{"id": "j", "generation": None, "stop_at": None}]


@pytest.mark.parametrize(
    ("version", "reports"), [(1, True), (2, False)], ids=["reads version 1", "does not say which order it has"]
)
def test_an_agent_of_the_version_before_gets_whole_orders(version: int, reports: bool) -> None:
    line, order = Line(version=version), large(2)
    for step in range(3 * KEPT):
        if reports:
            line.report()
        else:
            line.outbox.taken(0, version)
        wanted = changed(order, stop_at=step)
        assert line.order(wanted).jobs == wanted.jobs
    assert set(line.kinds()) == {"order"}
    assert len(line.outbox._sent) <= KEPT
    if version == 1:
        assert json.loads(line.messages[-1])["stop_at"] == 3 * KEPT - 1


def test_an_order_that_the_agent_cannot_read_is_no_base() -> None:
    line, order = Line(), large(2)
    line.order(order)
    line.report()
    bad = changed(order, devices="all")
    line.outbox.put(bad)
    with pytest.raises(ValueError, match="devices"):
        line.inbox.read(asyncio.run(line.outbox.next()))
    line.report()
    assert same(line.order(changed(order, stop_at=3))) == changed(order, stop_at=3)
    assert json.loads(line.messages[-1])["base"] == 1


def test_a_difference_to_an_unknown_order_is_no_order() -> None:
    line = Line()
    line.order(large(2))
    line.report()
    message = Texts().change(changed(large(2), stop_at=3).replace(number=9), large(2).replace(number=8))
    with pytest.raises(LinkError, match="the difference to order 8, which is not here"):
        line.inbox.read(message)
    assert line.inbox.newest == 1
    with pytest.raises(ValueError, match="bundle"):  # of a job about which the base says nothing
        line.inbox.read(
            '{"kind": "change", "base": 1, "number": 2, "version": 2, "epoch": 1, "jobs": [{"id": "x", "stop_at": 3}]}'
        )


def test_only_the_newest_order_that_waits_is_sent() -> None:
    line = Line()
    line.outbox.put(large(1))
    assert line.order(large(2)).jobs == large(2).jobs
    assert len(line.messages) == 1


def test_the_text_of_a_shared_part_is_made_once_and_not_kept_for_ever() -> None:
    texts, order = Texts(), large(3)
    lines = [Line(texts) for _ in range(3)]
    assert [same(line.order(changed(order, devices=(index,)))).jobs[0].devices for index, line in enumerate(lines)] == [
        (0,), (1,), (2,),
    ]  # fmt: skip
    assert len(texts._shared) == 2  # the bundle and the generation
    for step in range(2 * SHARED):
        assert same(lines[0].order(large(1, stop_at=step))) == large(1, stop_at=step)
    assert len(texts._shared) == SHARED
