"""What a job that does not train waits for, as operators read it: a job that does nothing says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotrun.head.job_state import Ending, Idle, JobState, Progress, Saving
from spotrun.head.planner.plan import plan
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import Machine, Node
from spotrun.wire import StateRef
from tests.head.views import NOW, A, B, C, D, Seen, job, listed, member, node, spare, spec, view

BLIND: dict[str, Any] = {"awake_since": NOW - 1}  # of a head that began a moment ago
SEEING: dict[str, Any] = {"awake_since": NOW - 100}
HELD = StateRef(generation=1, step=48)
STOPPED = Ending(phase="stopped", reason="by the operator")
SUCCEEDED = Ending(phase="succeeded")
AWAY: dict[str, Any] = {"connected": False, "reported_at": NOW - 5}
WAITS = job()  # it has not trained yet


def left(*nodes: str, **changes: Any) -> JobState:
    """A job whose first generation, on these nodes, has ended."""
    values = {"phase": "waiting", "generation": 1, "last": tuple(map(member, nodes)), "progress": Progress()}
    return job(**{**values, **changes})


def holder(name: str, **changes: Any) -> Node:
    """A node of that generation, which waits with a state that is not in the bucket."""
    return spare(name, **{"snapshot": HELD, **changes})


def machine(name: str, **changes: Any) -> Machine:
    return replace(listed(name)[0], created=NOW - 500, answered=NOW - 1, **changes)


BOOTING = Machine(A, "p", "running", created=NOW - 12)
REASONS: dict[str, tuple[Seen, str]] = {
    "a machine boots": (
        view(WAITS, spare(B), machines=(BOOTING, machine(B))),
        "1 of 2 to 3 nodes ready; waiting for a to boot, 12 s",
    ),
    "a machine is replaced": (
        view(
            WAITS,
            spare(A, phase="unfit", job=None, unfit=("no driver",), store="", since=NOW - TIMEOUTS.unfit),
            spare(B),
            machines=(machine(A), machine(B)),
        ),
        "1 of 2 to 3 nodes ready; waiting for a to be replaced, 45 s",
    ),
    "a machine leaves": (
        view(WAITS, spare(B), machines=(machine(A, state="stopping"), machine(B))),
        "1 of 2 to 3 nodes ready; waiting for machines",
    ),
    "a node prepares": (
        view(WAITS, spare(B, phase="preparing", since=NOW - 3), machines=(machine(B),)),
        "0 of 2 to 3 nodes ready; waiting for b to prepare, 3 s",
    ),
    "enough nodes are ready, and one more has been asked for": (
        view(WAITS, spare(A), spare(B), machines=listed(A, B)),
        "2 of 2 to 3 nodes ready; waiting for machines",
    ),
    "all nodes are ready: the head begins a generation in its next turn": (
        view(WAITS, spare(A), spare(B), spare(C), machines=listed(A, B, C)),
        "about to start",
    ),
    "the head began a moment ago, and two nodes have not reported": (
        view(left(A, B), spare(C), spare(D), **BLIND),
        "waiting for a, b to report to the head, which began a moment ago",
    ),
    "the only node with the newest state is away": (
        view(left(A, B), holder(A, **AWAY), spare(B), spare(C), **SEEING),
        "waiting for a to report: the newest state is there",
    ),
    "the newest state is being saved before the next generation": (
        view(left(A, B, saving=Saving(ref=HELD, holders=(A,), since=NOW)), holder(A), spare(B), **SEEING),
        "waiting for the state of step 48 to get into the bucket",
    ),
    "its machines have been given back": (
        view(left(A, spec=spec(nodes=2), idle=Idle(since=NOW - 700, next=NOW + 60)), **SEEING),
        "waiting, machines given back; next try in 60 s",
    ),
    "an operator has just asked for its stop": (view(left(A, stopping="by the operator"), **SEEING), "about to end"),
    "it stops, and its last state is being saved": (
        view(left(A, ending=STOPPED, saving=Saving(ref=HELD, holders=(A,), since=NOW)), holder(A), **SEEING),
        "waiting for the state of step 48 to get into the bucket",
    ),
    "it was relaunched and stopped a moment after the head began: its nodes have not reported": (
        view(left("n10", "n2", "n3", "n4", "n5", ending=STOPPED), **BLIND),
        "waiting for n10, n2, n3, n4, 1 more to report to the head, which began a moment ago",
    ),
    "it stops, and the nodes with its last state are away": (
        view(left(A, B, ending=STOPPED), holder(A, **AWAY), holder(B, **AWAY), **SEEING),
        "waiting for a, b to report: the newest state is there",
    ),
    "it has succeeded, and its folders are being uploaded": (
        view(left(A, ending=SUCCEEDED, spec=spec(keep=["out"]), checkpoints=(HELD,)), holder(A), **SEEING),
        "waiting for a to put the folders of keep into the bucket",
    ),
    "a paused job is stopped: the pause is no reason any more": (
        view(left(A, ending=STOPPED, paused="paused by ann"), holder(A, **AWAY), **SEEING),
        "waiting for a to report: the newest state is there",
    ),
    "it trains": (view(job(B), node(B), machines=(machine(B),)), ""),
}


@pytest.mark.parametrize(("seen", "reason"), REASONS.values(), ids=REASONS.keys())
def test_a_plan_says_what_the_job_waits_for(seen: Seen, reason: str) -> None:
    assert plan(seen).reason == reason


nodes_of = st.sampled_from(
    [
        {},
        {"snapshot": HELD},
        {"snapshot": HELD, **AWAY},
        AWAY,
        {"phase": "preparing", "store": ""},
        {"regroup": "waiting"},
        {"regroup": "no"},
    ]
)
jobs_of = st.builds(
    left,
    st.just(A),
    st.just(B),
    spec=st.sampled_from([spec(), spec(nodes=1), spec(keep=["out"])]),
    generation=st.sampled_from([0, 1]),
    ending=st.none() | st.sampled_from([STOPPED, SUCCEEDED, STOPPED.replace(deadline=NOW + 9)]),
    stopping=st.sampled_from(["", "by the operator"]),
    paused=st.sampled_from(["", "paused by ann"]),
    saving=st.none() | st.just(Saving(ref=HELD, holders=(A,), since=NOW - 1)),
    checkpoints=st.sampled_from([(), (HELD,)]),
    idle=st.none() | st.builds(Idle, since=st.just(NOW - 700), next=st.sampled_from([0.0, NOW - 1, NOW + 60])),
    regroups=st.booleans(),
    reached=st.sampled_from([0, 48]),
)


@settings(max_examples=500, deadline=None)
@given(
    jobs_of, st.dictionaries(st.sampled_from([A, B, C]), nodes_of), st.sampled_from([BLIND, SEEING]), st.integers(0, 3)
)
def test_a_job_that_does_nothing_says_why(
    state: JobState, nodes: dict[str, dict[str, Any]], head: dict[str, Any], expected: int
) -> None:
    found = [spare(name, **changes) for name, changes in nodes.items()]
    told = plan(view(state, *found, machines=listed(*nodes), expected=expected, **head))
    assert told.actions or (told.reason and not told.reason.startswith("about to"))
