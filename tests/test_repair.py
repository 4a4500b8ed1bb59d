"""Machines that never serve, as data: what is asked of the cloud, what counts, what operators read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotrun.head import repair
from spotrun.head.capacity import Decision, Observation, Pool, decide
from spotrun.head.health import Machine, View
from spotrun.head.planner import plan
from spotrun.head.repair import AGAIN, BOOT_TIMEOUT, LIMIT, WINDOW
from spotrun.head.state import REPLACED, Ending, JobState, Recreate, Replacement, apply
from tests.test_planner import NOW as EARLIER
from tests.test_planner import job, member, node, spare
from tests.test_planner import view as view_of

NOW = EARLIER + 10 * WINDOW
A, B, C = "a", "b", "c"
LATE = NOW - BOOT_TIMEOUT - 1
NO_AGENT = "its agent has not joined within 10 minutes"
WHY = "a2-megagpu-16g has 16 GPUs, but nvidia-smi lists 15"


def machine(name: str, **changes: Any) -> Machine:
    """One that has been there for a while and whose agent has joined."""
    return replace(Machine(name, "p", "running", NOW - 5000, joined=True), **changes)


def unfit(name: str, **changes: Any) -> Any:
    outer = {"heard": NOW - 0.1, **changes}
    return spare(name, phase="unfit", job=None, unfit=(WHY,), store="", **outer)


def was_replaced(*ages: float, pool: str = "p", name: str = "x") -> tuple[Replacement, ...]:
    return tuple(Replacement(node=name, pool=pool, why=WHY, at=NOW - age) for age in ages)


def view(state: JobState, *nodes: Any, machines: tuple[Machine, ...], **changes: Any) -> View:
    return view_of(state, *nodes, now=NOW, machines=machines, **changes)


def waiting(**changes: Any) -> JobState:
    return job(**changes)


BAD = Recreate(A, "p", WHY)
CASES: dict[str, tuple[View, tuple[Recreate, ...]]] = {
    "one that is unfit": (view(waiting(), unfit(A), machines=(machine(A),)), (BAD,)),
    "one that is fit": (view(waiting(), spare(A, heard=NOW), machines=(machine(A),)), ()),
    "one that is unfit while others train": (
        view(job(B, C), unfit(A), node(B, heard=NOW), node(C, heard=NOW), machines=tuple(map(machine, (A, B, C)))),
        (BAD,),
    ),
    "its link is down: whoever cannot be heard is judged elsewhere": (
        view(waiting(), unfit(A, linked=False), machines=(machine(A),)),
        (),
    ),
    "it is going already": (view(waiting(), unfit(A), machines=(machine(A, state="stopping"),)), ()),
    "the cloud cannot be asked": (view(waiting(), unfit(A), machines=()), ()),
    "it was asked for a moment ago": (
        view(waiting(replaced=was_replaced(AGAIN - 1, name=A)), unfit(A), machines=(machine(A),)),
        (),
    ),
    "it was asked for, and nothing came of it": (
        view(waiting(replaced=was_replaced(AGAIN + 1, name=A)), unfit(A), machines=(machine(A),)),
        (BAD,),
    ),
    "its successor is unfit too": (
        view(waiting(replaced=was_replaced(30, name=A)), unfit(A), machines=(machine(A, created=NOW - 20),)),
        (BAD,),
    ),
    "the limit": (view(waiting(replaced=was_replaced(900, 600, 300)), unfit(A), machines=(machine(A),)), ()),
    "the limit is each pool's own": (
        view(waiting(replaced=was_replaced(900, 600, 300, pool="q")), unfit(A), machines=(machine(A),)),
        (BAD,),
    ),
    "the limit is for an hour": (
        view(waiting(replaced=was_replaced(WINDOW + 1, 600, 300)), unfit(A), machines=(machine(A),)),
        (BAD,),
    ),
    "many at once: no more than the limit": (
        view(waiting(), *map(unfit, "abcde"), machines=tuple(map(machine, "abcde"))),
        tuple(Recreate(name, "p", WHY) for name in "abcde"[:LIMIT]),
    ),
    "not while the last state goes into the bucket": (
        view(waiting(ending=Ending(phase="succeeded")), unfit(A), machines=(machine(A),)),
        (),
    ),
    "no agent, for too long": (
        view(waiting(), machines=(machine(A, joined=False, created=LATE),)),
        (Recreate(A, "p", NO_AGENT),),
    ),
    "no agent yet": (view(waiting(), machines=(machine(A, joined=False, created=LATE + 2),)), ()),
    "no agent, and the machine is still being made": (
        view(waiting(), machines=(machine(A, joined=False, created=LATE, state="provisioning"),)),
        (),
    ),
    "no agent has been heard since this head began": (
        view(waiting(), machines=(machine(A, joined=False, created=LATE),), awake_since=NOW - 60),
        (),
    ),
    "a predecessor of the same name was heard": (
        view(waiting(), spare(A, heard=LATE - 100, cloud="gone"), machines=(machine(A, joined=False, created=LATE),)),
        (Recreate(A, "p", NO_AGENT),),
    ),
    "a member that this head has never heard of may train on": (
        view(job(A, B), machines=(machine(A, joined=False), machine(B, joined=False)), awake_since=NOW - 2000),
        (),
    ),
    "one that was heard and has fallen silent is another rule's": (
        view(waiting(), spare(A, heard=NOW - 5000, linked=False), machines=(machine(A),)),
        (),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_replacements(name: str) -> None:
    given, expected = CASES[name]
    assert repair.replacements(given) == expected


def test_the_planner_asks_for_them() -> None:
    assert plan(view(waiting(), unfit(A), machines=(machine(A),))) == (BAD,)


def test_what_was_asked_for_is_counted_until_the_limit_and_no_further() -> None:
    """Turn after turn, each machine made in another's place being unfit as well."""
    state, asked, now = waiting(), 0, NOW
    for second in range(0, int(WINDOW) - 100, 5):
        now = NOW + second
        made = max((each.at for each in state.replaced), default=NOW - 100) + 1
        given = replace(view(state, unfit(A, heard=now), machines=(machine(A, created=made),)), now=now)
        for action in plan(given):
            assert isinstance(action, Recreate)
            asked, state = asked + 1, apply(state, action, now)
    assert asked == LIMIT
    assert JobState.model_validate_json(state.model_dump_json()).replaced == state.replaced


def test_those_that_were_lost_after_they_served_are_not_counted() -> None:
    assert apply(waiting(), Recreate(A), NOW).replaced == ()


def test_a_job_does_not_remember_without_end() -> None:
    state = waiting()
    for number in range(REPLACED + 5):
        state = apply(state, Recreate(A, "p", WHY), NOW + number)
    assert len(state.replaced) == REPLACED
    assert state.replaced[-1].at == NOW + REPLACED + 4


SPENT = was_replaced(900, 600, 300)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (view(waiting(), unfit(A), machines=(machine(A),)), set()),
        (view(waiting(replaced=SPENT), unfit(A), machines=(machine(A),)), {"p"}),
        (view(waiting(replaced=SPENT), machines=()), {"p"}),
        (view(waiting(replaced=SPENT), unfit(A), spare(B, heard=NOW), machines=(machine(A), machine(B))), set()),
        (view(waiting(replaced=SPENT), machines=(machine(A, joined=False, created=NOW - 20),)), set()),
        (view(waiting(replaced=was_replaced(900, 600, 20)), machines=()), set()),
        (view(waiting(replaced=was_replaced(WINDOW + 1, 600, 300)), unfit(A), machines=(machine(A),)), set()),
    ],
    ids=["not tried yet", "spent", "spent and gone", "another serves", "the last one boots", "it is made", "in time"],
)
def test_a_pool_is_closed_when_none_of_its_machines_serves(given: View, expected: set[str]) -> None:
    assert repair.closed(given) == expected


def test_what_operators_read() -> None:
    given = view(waiting(), unfit(A), spare(B, heard=NOW), machines=(machine(A), machine(B, pool="q")))
    assert repair.problems(given) == {"p": f"a takes no job: {WHY}"}
    given = view(waiting(replaced=SPENT), machines=())
    at = NOW - 900 + WINDOW
    assert repair.problems(given) == {
        "p": f"3 machines took no job and were replaced, the last since: {WHY}; no more are before "
        f"{int(at // 3600) % 24:02}:{int(at // 60) % 60:02} UTC"
    }
    assert repair.problems(view(waiting(), spare(A, heard=NOW), machines=(machine(A),))) == {}


P = Pool("p", max=4, size=2, running=("p-0", "p-1"))
Q = Pool("q", max=4, size=0)
UNFIT = frozenset(("p-1",))


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (Observation((P, Q), 2), Decision({})),
        (Observation((replace(P, useless=UNFIT), Q), 2), Decision({"q": 1})),
        (Observation((replace(P, useless=UNFIT), replace(Q, size=1, running=("q-0",))), 2), Decision({})),
        # The other pool's machine is a member now: nobody waits for that one any more, and it goes first.
        (
            Observation(
                (replace(P, useless=frozenset(("p-0",))), replace(Q, size=1, running=("q-0",))), 2, frozenset(("q-0",))
            ),
            Decision({}, ("p-0",)),
        ),
        # It has been replaced by one that serves: the one that stood in is too much.
        (Observation((P, replace(Q, size=1, running=("q-0",))), 2), Decision({}, ("q-0",))),
        (
            Observation((replace(P, useless=frozenset(P.running), closed=True), Q), 2),
            Decision({"q": 2}, ("p-1", "p-0")),
        ),
        (Observation((Pool("p", 4, 2, closed=True), Q), 2), Decision({"p": 0, "q": 2})),
        (Observation((Pool("p", 4, 0, closed=True), replace(Q, size=2)), 2), Decision({})),
        (Observation((replace(P, useless=UNFIT), Q), 0), Decision({"p": 0})),
    ],
    ids=["all serve", "another stands in", "it does", "not waited for", "mended", "closed", "unborn", "stays", "end"],
)
def test_capacity(seen: Observation, expected: Decision) -> None:
    assert decide(seen) == expected


def test_a_member_never_counts_as_useless() -> None:
    assert member(A).node not in repair.useless(view(job(A), node(A, heard=NOW), machines=(machine(A),)))
