"""Pool sizes as data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotrun.head.capacity import Decision, Observation, Pool, decide


def pool(name: str, running: int = 0, size: int | None = None, most: int = 4, short: bool = False) -> Pool:
    names = tuple(f"{name}-{i}" for i in range(running))
    return Pool(name, most, running if size is None else size, names, short)


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
    "what was never born is taken back by size": (
        Observation((pool("a", 3), pool("b", 0, 2)), 3),
        Decision({"b": 0}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_decide(name: str) -> None:
    seen, expected = CASES[name]
    assert decide(seen) == expected
