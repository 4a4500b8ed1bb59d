"""Pool sizes as data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from spotrun.head.capacity.sizes import Decision, Need, Observation, Pool, decide


def seen(pools: Sequence[Pool], needed: int, keep: frozenset[str] = frozenset()) -> Observation:
    """The pools, for jobs that want so many machines of any pool."""
    return Observation(tuple(pools), (Need(needed),) if needed else (), keep)


def pool(name: str, running: int = 0, size: int | None = None, most: int = 4, short: bool = False) -> Pool:
    states = {f"{name}-{i}": "ready" for i in range(running)}
    return Pool(name, most, running if size is None else size, states, "short" if short else "open")


def away(name: str, running: int = 0, size: int | None = None, most: int = 4) -> Pool:
    """A pool whose zone does not answer."""
    return replace(pool(name, running, size, most), supply="away")


def having(pool: Pool, **states: Collection[str]) -> Pool:
    """The pool, some of whose machines are in other states."""
    return replace(pool, states={**pool.states, **{name: state for state, names in states.items() for name in names}})


def dying(pool: Pool, *names: str) -> Pool:
    """The pool, of which the cloud ends these machines."""
    return replace(pool, states={**pool.states, **dict.fromkeys(names, "leaving")}, ending=frozenset(names))


ONE, LAST = frozenset({"a-0"}), frozenset({"a-3"})
MEMBERS = frozenset({"a-0", "a-1", "a-2"})
ALL = MEMBERS | LAST
CASES: dict[str, tuple[Observation, Decision]] = {
    "a machine is under notice: its successor is asked for now": (
        seen((replace(pool("a", 3), leaving=ONE), pool("b")), 3, frozenset({"a-0", "a-1", "a-2"})),
        Decision({"a": 4}),
    ),
    "the successor of a machine under notice has come, and both are there: nothing changes": (
        seen((replace(pool("a", 4), leaving=ONE), pool("b")), 3, frozenset({"a-0", "a-1", "a-2"})),
        Decision({}),
    ),
    "the successor is a job's already, and both machines are kept: no second one is asked for": (
        Observation(
            (replace(pool("a", 4, most=5), leaving=ONE), pool("b")),
            (Need(3, has=frozenset({"a-1", "a-2", "a-3"})),),
            ALL,
        ),
        Decision({}),
    ),
    "a machine of a full pool is under notice: no other pool stands in": (
        seen((replace(pool("a", 4), leaving=ONE), pool("b")), 4, frozenset({"a-0", "a-1", "a-2", "a-3"})),
        Decision({}),
    ),
    "no job, nothing there": (seen((pool("a"), pool("b")), 0), Decision({})),
    "no job wants machines, but one holds a state that the bucket lacks: it stays": (
        seen((pool("a", 3), pool("b", 1)), 0, ONE),
        Decision({}, ("a-2", "a-1", "b-0")),
    ),
    "the last job ended": (seen((pool("a", 3), pool("b", 1)), 0), Decision({"a": 0, "b": 0})),
    "the first pool has room for all: it gets all": (seen((pool("a"), pool("b")), 3), Decision({"a": 3})),
    "the first pool has too little room: the next one gets the rest": (
        seen((pool("a"), pool("b")), 6),
        Decision({"a": 4, "b": 2}),
    ),
    "more is needed than the pools may have: each gets its maximum": (
        seen((pool("a"), pool("b")), 9),
        Decision({"a": 4, "b": 4}),
    ),
    "the pools have what is needed: nothing changes": (seen((pool("a", 3), pool("b")), 3), Decision({})),
    "the missing machines are asked for already: nothing changes": (
        seen((pool("a", 1, 3), pool("b")), 3),
        Decision({}),
    ),
    "the zone has one machine and no more: the next pool gets the rest": (
        seen((pool("a", 1, 3, short=True), pool("b")), 3),
        Decision({"b": 2}),
    ),
    "the zone has no machines, and the next pool is at its maximum: nothing changes": (
        seen((pool("a", 0, 3, short=True), pool("b", 1, most=1)), 3),
        Decision({}),
    ),
    "the zone has machines again: the stand-ins go, members stay": (
        seen((pool("a", 2), pool("b", 2)), 3, frozenset({"a-0", "a-1", "b-1"})),
        Decision({}, ("b-0",)),
    ),
    "a member in the next pool counts: the first pool has one machine too many": (
        seen((pool("a", 3), pool("b", 1)), 3, frozenset({"a-0", "a-1", "b-0"})),
        Decision({}, ("a-2",)),
    ),
    "the zone promises machines again but has none yet: the stand-ins stay": (
        seen((pool("a", 0, 3), pool("b", 3)), 3),
        Decision({}),
    ),
    "a machine is being replaced: no other pool stands in": (
        seen((having(pool("a", 2), replacing=ONE), pool("b")), 2, frozenset({"a-1"})),
        Decision({}),
    ),
    "there is one machine too many: the one being replaced goes first": (
        seen((having(pool("a", 3), replacing=ONE), pool("b")), 2, frozenset({"a-1"})),
        Decision({}, ("a-0",)),
    ),
    "a machine is being replaced, and there is none too many: it stays": (
        seen((having(pool("a", 1), replacing=ONE), pool("b", 1)), 2, frozenset({"b-0"})),
        Decision({}),
    ),
    "a whole pool is being replaced: the healthy machines of another pool stay": (
        seen((having(pool("a", 4), replacing=ALL), pool("b", 4)), 4),
        Decision({}),
    ),
    "one machine of a pool that is being replaced serves: one of the stand-ins goes": (
        seen((having(pool("a", 4), replacing=MEMBERS), pool("b", 4)), 4),
        Decision({}, ("b-3",)),
    ),
    "the stand-ins are members: the machines that are being replaced go": (
        seen((having(pool("a", 4), replacing=ALL), pool("b", 4)), 4, frozenset(pool("b", 4).states)),
        Decision({}, ("a-3", "a-2", "a-1", "a-0")),
    ),
    "a machine is abandoned, and no other pool has room: its pool gets one more": (
        seen((having(pool("a", 4, most=8), abandoned=LAST),), 4, MEMBERS),
        Decision({"a": 5}),
    ),
    "the extra machine for an abandoned one is not there yet: nothing changes": (
        seen((having(pool("a", 4, 5, most=8), abandoned=LAST),), 4, MEMBERS),
        Decision({}),
    ),
    "the extra machine for an abandoned one still boots: nothing changes": (
        seen((having(pool("a", 5, most=8), abandoned=LAST, booting={"a-4"}),), 4, MEMBERS),
        Decision({}),
    ),
    "the extra machine for an abandoned one is ready: the abandoned one goes": (
        seen((having(pool("a", 5, most=8), abandoned=LAST),), 4, MEMBERS),
        Decision({}, ("a-3",)),
    ),
    "the extra machine for an abandoned one is abandoned too: the pool gets one more": (
        seen((having(pool("a", 5, most=8), abandoned=LAST | {"a-4"}),), 4, MEMBERS),
        Decision({"a": 6}),
    ),
    "four machines are abandoned: no fourth extra one, because all cost money": (
        seen((having(pool("a", 7, most=8), abandoned=LAST | {"a-4", "a-5", "a-6"}),), 4, MEMBERS),
        Decision({}),
    ),
    "a machine of a full pool is abandoned, and there is no other pool: nothing changes": (
        seen((having(pool("a", 4), abandoned=LAST),), 4, MEMBERS),
        Decision({}),
    ),
    "a machine is abandoned, and another pool has room: that one gets one more": (
        seen((having(pool("a", 4, most=8), abandoned=LAST), pool("b")), 4, MEMBERS),
        Decision({"b": 1}),
    ),
    "a zone does not answer: the next pool stands in for machines that are not known to be there": (
        seen((away("a", 1, 3), pool("b")), 3, ONE),
        Decision({"b": 2}),
    ),
    "a zone does not answer, and none of its machines is known: the next pool gets all": (
        seen((away("a"), pool("b")), 3),
        Decision({"b": 3}),
    ),
    "a zone does not answer, but all its machines report: no pool stands in": (
        seen((away("a", 3), pool("b")), 3, MEMBERS),
        Decision({}),
    ),
    "a pool whose zone does not answer has too many machines: they stay": (
        seen((away("a", 4), pool("b")), 2, ONE),
        Decision({}),
    ),
    "a zone does not answer, and another pool has too many machines: they go": (
        seen((pool("a", 3), away("b", 2)), 3, frozenset({"a-0", "b-0", "b-1"})),
        Decision({}, ("a-2", "a-1")),
    ),
    "a machine is abandoned, and its zone does not answer: nothing changes": (
        seen((having(away("a", 2, most=8), abandoned=ONE),), 2, frozenset({"a-1"})),
        Decision({}),
    ),
    "the last job ended while a zone does not answer": (
        seen((away("a", 3), pool("b", 1)), 0),
        Decision({"b": 0}),
    ),
    "one of two is abandoned, the next pool is empty: it stands in": (
        seen((having(pool("a", 2), abandoned={"a-1"}), pool("b")), 2),
        Decision({"b": 1}),
    ),
    "one of two is abandoned, the next pool stands in already": (
        seen((having(pool("a", 2), abandoned={"a-1"}), pool("b", 1)), 2),
        Decision({}),
    ),
    "one is abandoned, the machine that stands in is a member: the abandoned one goes": (
        seen((having(pool("a", 2), abandoned={"a-0"}), pool("b", 1)), 2, frozenset({"b-0"})),
        Decision({}, ("a-0",)),
    ),
    "a replacement serves: the machine that stood in is too much": (
        seen((pool("a", 2), pool("b", 1)), 2),
        Decision({}, ("b-0",)),
    ),
    "a closed pool is emptied, and the next one stands in": (
        seen((replace(having(pool("a", 2), abandoned={"a-0", "a-1"}), supply="closed"), pool("b")), 2),
        Decision({"b": 2}, ("a-1", "a-0")),
    ),
    "a closed pool gets no machines that are not there yet": (
        seen((replace(pool("a", 0, 2), supply="closed"), pool("b")), 2),
        Decision({"a": 0, "b": 2}),
    ),
    "a closed pool stays empty": (
        seen((replace(pool("a"), supply="closed"), pool("b", 0, 2)), 2),
        Decision({}),
    ),
    "the last job ended: abandoned machines go too": (
        seen((having(pool("a", 2), abandoned={"a-1"}), pool("b")), 0),
        Decision({"a": 0}),
    ),
    "the first pool got one machine, so a stand-in is too many, though the first pool still lacks two": (
        Observation(
            (pool("a", 1, 3, short=True), pool("b", 3)),
            (Need(3, frozenset("a")), Need(2, frozenset("b"))),
            frozenset({"a-0", "b-0", "b-1"}),
        ),
        Decision({}, ("b-2",)),
    ),
    "a machine takes long to end, and its pool counts it no more: the idle one goes all the same": (
        seen((dying(pool("a", 3, 2), "a-2"),), 1, ONE),
        Decision({}, ("a-2", "a-1")),
    ),
    "a machine takes long to end, and its successor has come and is idle: the successor goes": (
        seen((dying(pool("a", 4, 3), "a-1"),), 2, frozenset({"a-0", "a-2"})),
        Decision({}, ("a-1", "a-3")),
    ),
    "machines of a short pool take long to end, and one is still to be made: the idle one goes all the same": (
        Observation(
            (dying(pool("a", 4, 3, short=True), "a-2", "a-3"), pool("b", 3, most=3)),
            (Need(4, order=("b", "a")),),
            frozenset({"b-0", "b-1", "b-2"}),
        ),
        Decision({}, ("a-3", "a-2", "a-1")),
    ),
    "the cloud ends a machine, and one is too much: no healthy one goes in its place": (
        seen((dying(pool("a", 3), "a-0"),), 2),
        Decision({}, ("a-0",)),
    ),
    "the cloud ends a machine, and its successor is not there yet: the stand-in stays": (
        seen((dying(pool("a", 3), "a-2"), pool("b", 1)), 3, frozenset({"a-0", "a-1"})),
        Decision({}),
    ),
    "the cloud ends a machine of a pool that is not short: no other pool stands in": (
        seen((dying(pool("a", 3), "a-2"), pool("b")), 3, frozenset({"a-0", "a-1"})),
        Decision({}),
    ),
    "a machine takes long to end, and its zone has no successor: the next pool stands in": (
        seen((dying(pool("a", 3, short=True), "a-2"), pool("b")), 3, frozenset({"a-0", "a-1"})),
        Decision({"b": 1}),
    ),
    "no job wants a pool any more, and the cloud ends its machines: their successors are given up": (
        Observation(
            (dying(pool("a", 2), "a-0", "a-1"), pool("b", 1)), (Need(1, frozenset({"b"})),), frozenset({"b-0"})
        ),
        Decision({}, ("a-1", "a-0")),
    ),
    "machines that do not exist yet are too many: the pool gets a smaller size": (
        seen((pool("a", 3), pool("b", 0, 2)), 3),
        Decision({"b": 0}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_decide(name: str) -> None:
    seen, expected = CASES[name]
    assert decide(seen) == expected
