"""Pool sizes as data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from spotrun.head.capacity import Decision, Observation, Pool, decide


def pool(name: str, running: int = 0, size: int | None = None, most: int = 4, short: bool = False) -> Pool:
    states = {f"{name}-{i}": "ready" for i in range(running)}
    return Pool(name, most, running if size is None else size, states, "short" if short else "open")


def away(name: str, running: int = 0, size: int | None = None, most: int = 4) -> Pool:
    """One whose zone does not answer."""
    return replace(pool(name, running, size, most), supply="away")


def having(pool: Pool, **states: Collection[str]) -> Pool:
    """The pool, some of whose machines are in other states."""
    return replace(pool, states=pool.states | {name: state for state, names in states.items() for name in names})


ONE, LAST = frozenset({"a-0"}), frozenset({"a-3"})
MEMBERS = frozenset({"a-0", "a-1", "a-2"})
ALL = MEMBERS | LAST
CASES: dict[str, tuple[Observation, Decision]] = {
    "one is under notice: its successor is asked for now": (
        Observation((replace(pool("a", 3), leaving=1), pool("b")), 3, frozenset({"a-0", "a-1", "a-2"})),
        Decision({"a": 4}),
    ),
    "it is there, the one under notice still too": (
        Observation((replace(pool("a", 4), leaving=1), pool("b")), 3, frozenset({"a-0", "a-1", "a-2"})),
        Decision({}),
    ),
    "one of a full pool is under notice: nobody stands in": (
        Observation((replace(pool("a", 4), leaving=1), pool("b")), 4, frozenset({"a-0", "a-1", "a-2", "a-3"})),
        Decision({}),
    ),
    "no job, nothing there": (Observation((pool("a"), pool("b")), 0), Decision({})),
    "the last job ended": (Observation((pool("a", 3), pool("b", 1)), 0), Decision({"a": 0, "b": 0})),
    "the first pool first": (Observation((pool("a"), pool("b")), 3), Decision({"a": 3})),
    "then the next": (Observation((pool("a"), pool("b")), 6), Decision({"a": 4, "b": 2})),
    "not more than there may be": (Observation((pool("a"), pool("b")), 9), Decision({"a": 4, "b": 4})),
    "as it should be": (Observation((pool("a", 3), pool("b")), 3), Decision({})),
    "on its way": (Observation((pool("a", 1, 3), pool("b")), 3), Decision({})),
    "the zone has one only": (
        Observation((pool("a", 1, 3, short=True), pool("b")), 3),
        Decision({"b": 2}),
    ),
    "the zone has none and the next is at its most": (
        Observation((pool("a", 0, 3, short=True), pool("b", 1, most=1)), 3),
        Decision({}),
    ),
    "the zone has machines again: the stand-ins go, members stay": (
        Observation((pool("a", 2), pool("b", 2)), 3, frozenset({"a-0", "a-1", "b-1"})),
        Decision({}, ("b-0",)),
    ),
    "a member in another pool counts: no machine too many": (
        Observation((pool("a", 3), pool("b", 1)), 3, frozenset({"a-0", "a-1", "b-0"})),
        Decision({}, ("a-2",)),
    ),
    "the zone promises machines again but has none yet: the stand-ins stay": (
        Observation((pool("a", 0, 3), pool("b", 3)), 3),
        Decision({}),
    ),
    "one is unusable, another is on its way in its place: nobody stands in": (
        Observation((having(pool("a", 2), replacing=ONE), pool("b")), 2, frozenset({"a-1"})),
        Decision({}),
    ),
    "it goes first once there are too many": (
        Observation((having(pool("a", 3), replacing=ONE), pool("b")), 2, frozenset({"a-1"})),
        Decision({}, ("a-0",)),
    ),
    "but not before": (
        Observation((having(pool("a", 1), replacing=ONE), pool("b", 1)), 2, frozenset({"b-0"})),
        Decision({}),
    ),
    "all are unusable, others are on their way: the healthy ones of another pool stay": (
        Observation((having(pool("a", 4), replacing=ALL), pool("b", 4)), 4),
        Decision({}),
    ),
    "one of them serves: one healthy one is too much": (
        Observation((having(pool("a", 4), replacing=MEMBERS), pool("b", 4)), 4),
        Decision({}, ("b-3",)),
    ),
    "the healthy ones are members now: the others go": (
        Observation((having(pool("a", 4), replacing=ALL), pool("b", 4)), 4, frozenset(pool("b", 4).states)),
        Decision({}, ("a-3", "a-2", "a-1", "a-0")),
    ),
    "one is given up, no other pool has room: one more of this one": (
        Observation((having(pool("a", 4, most=8), abandoned=LAST),), 4, MEMBERS),
        Decision({"a": 5}),
    ),
    "that one is not there yet": (
        Observation((having(pool("a", 4, 5, most=8), abandoned=LAST),), 4, MEMBERS),
        Decision({}),
    ),
    "it has not shown yet whether it is fit": (
        Observation((having(pool("a", 5, most=8), abandoned=LAST, booting={"a-4"}),), 4, MEMBERS),
        Decision({}),
    ),
    "it is fit: the other one goes": (
        Observation((having(pool("a", 5, most=8), abandoned=LAST),), 4, MEMBERS),
        Decision({}, ("a-3",)),
    ),
    "it is unusable too: one more": (
        Observation((having(pool("a", 5, most=8), abandoned=LAST | {"a-4"}),), 4, MEMBERS),
        Decision({"a": 6}),
    ),
    "not for ever: those are paid for": (
        Observation((having(pool("a", 7, most=8), abandoned=LAST | {"a-4", "a-5", "a-6"}),), 4, MEMBERS),
        Decision({}),
    ),
    "not more than there may be, though one is given up": (
        Observation((having(pool("a", 4), abandoned=LAST),), 4, MEMBERS),
        Decision({}),
    ),
    "one is given up, another pool has room": (
        Observation((having(pool("a", 4, most=8), abandoned=LAST), pool("b")), 4, MEMBERS),
        Decision({"b": 1}),
    ),
    "a zone does not answer: the next pool stands in for what is not known to be there": (
        Observation((away("a", 1, 3), pool("b")), 3, ONE),
        Decision({"b": 2}),
    ),
    "nothing is known of it, as when the head has just begun": (
        Observation((away("a"), pool("b")), 3),
        Decision({"b": 3}),
    ),
    "all of it reports: no pool stands in": (Observation((away("a", 3), pool("b")), 3, MEMBERS), Decision({})),
    "what is too much there stays": (Observation((away("a", 4), pool("b")), 2, ONE), Decision({})),
    "what is too much elsewhere goes": (
        Observation((pool("a", 3), away("b", 2)), 3, frozenset({"a-0", "b-0", "b-1"})),
        Decision({}, ("a-2", "a-1")),
    ),
    "one there is given up": (
        Observation((having(away("a", 2, most=8), abandoned=ONE),), 2, frozenset({"a-1"})),
        Decision({}),
    ),
    "the last job ended while a zone does not answer": (
        Observation((away("a", 3), pool("b", 1)), 0),
        Decision({"b": 0}),
    ),
    "one of two is abandoned, the next pool is empty: it stands in": (
        Observation((having(pool("a", 2), abandoned={"a-1"}), pool("b")), 2),
        Decision({"b": 1}),
    ),
    "one of two is abandoned, the next pool stands in already": (
        Observation((having(pool("a", 2), abandoned={"a-1"}), pool("b", 1)), 2),
        Decision({}),
    ),
    "one is abandoned, the machine that stands in is a member: the abandoned one goes": (
        Observation((having(pool("a", 2), abandoned={"a-0"}), pool("b", 1)), 2, frozenset({"b-0"})),
        Decision({}, ("a-0",)),
    ),
    "a replacement serves: the machine that stood in is too much": (
        Observation((pool("a", 2), pool("b", 1)), 2),
        Decision({}, ("b-0",)),
    ),
    "a closed pool is emptied, and the next one stands in": (
        Observation((replace(having(pool("a", 2), abandoned={"a-0", "a-1"}), supply="closed"), pool("b")), 2),
        Decision({"b": 2}, ("a-1", "a-0")),
    ),
    "a closed pool gets no machines that are not there yet": (
        Observation((replace(pool("a", 0, 2), supply="closed"), pool("b")), 2),
        Decision({"a": 0, "b": 2}),
    ),
    "a closed pool stays empty": (
        Observation((replace(pool("a"), supply="closed"), pool("b", 0, 2)), 2),
        Decision({}),
    ),
    "the last job ended: abandoned machines go too": (
        Observation((having(pool("a", 2), abandoned={"a-1"}), pool("b")), 0),
        Decision({"a": 0}),
    ),
    "what was never born is taken back by size": (
        Observation((pool("a", 3), pool("b", 0, 2)), 3),
        Decision({"b": 0}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_decide(name: str) -> None:
    seen, expected = CASES[name]
    assert decide(seen) == expected
