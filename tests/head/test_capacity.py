"""Pool sizes as data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotrun.head.capacity import Decision, Observation, Pool, decide


def pool(name: str, running: int = 0, size: int | None = None, most: int = 4, short: bool = False) -> Pool:
    names = tuple(f"{name}-{i}" for i in range(running))
    return Pool(name, most, running if size is None else size, names, short)


def away(name: str, running: int = 0, size: int | None = None, most: int = 4) -> Pool:
    """One whose zone does not answer."""
    return replace(pool(name, running, size, most, short=True), away=True)


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
    "one is of no use, another is on its way in its place: nobody stands in": (
        Observation((replace(pool("a", 2), unusable=ONE, coming=ONE), pool("b")), 2, frozenset({"a-1"})),
        Decision({}),
    ),
    "it goes first once there are too many": (
        Observation((replace(pool("a", 3), unusable=ONE, coming=ONE), pool("b")), 2, frozenset({"a-1"})),
        Decision({}, ("a-0",)),
    ),
    "but not before": (
        Observation((replace(pool("a", 1), unusable=ONE, coming=ONE), pool("b", 1)), 2, frozenset({"b-0"})),
        Decision({}),
    ),
    "all are of no use, others are on their way: the healthy ones of another pool stay": (
        Observation((replace(pool("a", 4), unusable=ALL, coming=ALL), pool("b", 4)), 4),
        Decision({}),
    ),
    "one of them serves: one healthy one is too much": (
        Observation((replace(pool("a", 4), unusable=MEMBERS, coming=MEMBERS), pool("b", 4)), 4),
        Decision({}, ("b-3",)),
    ),
    "the healthy ones are members now: the others go": (
        Observation(
            (replace(pool("a", 4), unusable=ALL, coming=ALL), pool("b", 4)), 4, frozenset(pool("b", 4).running)
        ),
        Decision({}, ("a-3", "a-2", "a-1", "a-0")),
    ),
    "one is given up, no other pool has room: one more of this one": (
        Observation((replace(pool("a", 4, most=8), unusable=LAST),), 4, MEMBERS),
        Decision({"a": 5}),
    ),
    "that one is not there yet": (
        Observation((replace(pool("a", 4, 5, most=8), unusable=LAST),), 4, MEMBERS),
        Decision({}),
    ),
    "it has not shown yet whether it is fit": (
        Observation((replace(pool("a", 5, most=8), unusable=LAST, unproven=frozenset({"a-4"})),), 4, MEMBERS),
        Decision({}),
    ),
    "it is fit: the other one goes": (
        Observation((replace(pool("a", 5, most=8), unusable=LAST),), 4, MEMBERS),
        Decision({}, ("a-3",)),
    ),
    "it is of no use either: one more": (
        Observation((replace(pool("a", 5, most=8), unusable=LAST | {"a-4"}),), 4, MEMBERS),
        Decision({"a": 6}),
    ),
    "not for ever: those are paid for": (
        Observation((replace(pool("a", 7, most=8), unusable=LAST | {"a-4", "a-5", "a-6"}),), 4, MEMBERS),
        Decision({}),
    ),
    "not more than there may be, though one is given up": (
        Observation((replace(pool("a", 4), unusable=LAST),), 4, MEMBERS),
        Decision({}),
    ),
    "one is given up, another pool has room": (
        Observation((replace(pool("a", 4, most=8), unusable=LAST), pool("b")), 4, MEMBERS),
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
    "all of it is heard: nobody stands in": (Observation((away("a", 3), pool("b")), 3, MEMBERS), Decision({})),
    "what is too much there stays": (Observation((away("a", 4), pool("b")), 2, ONE), Decision({})),
    "what is too much elsewhere goes": (
        Observation((pool("a", 3), away("b", 2)), 3, frozenset({"a-0", "b-0", "b-1"})),
        Decision({}, ("a-2", "a-1")),
    ),
    "one there is given up": (
        Observation((replace(away("a", 2, most=8), unusable=ONE),), 2, frozenset({"a-1"})),
        Decision({}),
    ),
    "the last job ended while a zone does not answer": (
        Observation((away("a", 3), pool("b", 1)), 0),
        Decision({"b": 0}),
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
