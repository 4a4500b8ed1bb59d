"""A drain whose step has come too late for a member: a later step if all have passed it, else the generation ends.

If steps suddenly take much longer, the members stop after an earlier step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotrun.head import status
from spotrun.head.job_parts import Draining, Interruption
from spotrun.head.job_state import Action, Cause, Drain, EndGeneration, JobState, Release, Start, apply
from spotrun.head.planner.plan import plan
from spotrun.head.view import Node, View
from spotrun.wire import StateRef
from tests.head.views import NOW, A, B, C, D, failed, job, node, notice, spare, spec, start, view

GROW, PREEMPT = Cause(kind="grow"), Cause(kind="preempt", node=B)
STEP, UNTIL = 56, NOW + 27
REPORTED = NOW - 0.1  # when the head got the newest reports
KEPT = StateRef(generation=1, step=STEP)
ALREADY = {"generation": 2, "phase": "starting", "regroup": "able", "workers": ()}


def draining(*members: str, cause: Cause = GROW, regroups: bool = True, newcomer: str = "") -> JobState:
    """A job that stops after step 56. newcomer: a node that joins the members after that."""
    found = job(*members, regroups=regroups, spec=spec(nodes={"min": 2, "max": 4}))
    following = start(*members, newcomer, cause=cause) if newcomer else None
    return apply(found, Drain(STEP, cause, UNTIL, following), NOW - 0.1)


def late(name: str, step: int = STEP, **changes: Any) -> Node:
    """The order came when its workers had passed step 56."""
    return node(name, **{"late": STEP, "step": step, "regroup": "able", **changes})


def stopping(name: str, step: int = STEP - 1, **changes: Any) -> Node:
    """The order came in time."""
    return node(name, **{"stops": STEP, "step": step, "regroup": "able", **changes})


def stopped(name: str, **changes: Any) -> Node:
    """Its workers have stopped, and their state is safe. They wait for the others before they leave."""
    return stopping(name, **{"step": STEP, "snapshot": KEPT, **changes})


def drained(name: str, **changes: Any) -> Node:
    return stopped(name, **{"phase": "drained", "regroup": "waiting", **changes})


def trains(name: str, step: int = STEP, **changes: Any) -> Node:
    """A node that has not said yet whether the order came in time."""
    return node(name, **{"step": step, "regroup": "able", **changes})


def ahead(name: str) -> Node:
    """A node that has joined the generation after the drain."""
    return node(name, **ALREADY)


def again(*names: str, cause: Cause) -> Start:
    """The next generation, which begins without a restart."""
    return replace(start(*names, cause=cause), regroup=True)


def told(text: str) -> Action:
    """The workers are freed. text: the cause."""
    kind, _, name = text.partition(" ")
    return Release(name, kind)


def slow(seconds: float) -> JobState:
    """The job of A and B after step 50. The next step has taken so many seconds; those before took 0.1 s each."""
    found = draining(A, B)
    return found.replace(progress=found.progress.replace(seen_at=REPORTED - seconds))


LATER = Drain(71, GROW, UNTIL)
SOONER = Drain(51, GROW, UNTIL)
CASES: dict[str, tuple[View, tuple[Action, ...]]] = {
    "all members are late: a later step": (view(draining(A, B), late(A), late(B)), (LATER,)),
    "one is late, and nobody knows about the other: wait": (view(draining(A, B), late(A), trains(B)), ()),
    "one is late, and a step after that is completed, so nobody has stopped: a later step": (
        view(draining(A, B), late(A, STEP + 1), trains(B)),
        (Drain(72, GROW, UNTIL),),
    ),
    "one is late, and the other will stop: wait for its state": (view(draining(A, B), late(A), stopping(B)), ()),
    "one is late, and the other has stopped, but its state is not safe yet: wait for it": (
        view(draining(A, B), late(A), stopping(B, STEP)),
        (),
    ),
    "one is late, and the other has stopped: both leave": (
        view(draining(A, B), late(A), stopped(B)),
        (told("grow"),),
    ),
    "the same, and a newcomer has gone on": (
        view(draining(A, B, newcomer=C), late(A), stopped(B), ahead(C)),
        (told("grow"),),
    ),
    "one is late, and the other has not said anything, while a newcomer has gone on: wait": (
        view(draining(A, B, newcomer=C), late(A), trains(B), ahead(C)),
        (),
    ),
    "one is late, and the other has left after its stop: both leave": (
        view(draining(A, B), late(A), drained(B)),
        (told("grow"),),
    ),
    "one is late, and the other has gone on: both leave": (
        view(draining(A, B, newcomer=C), late(A), ahead(B), ahead(C)),
        (told("grow"),),
    ),
    "an agent of an older version does not say that it stops: its workers have left": (
        view(draining(A, B), late(A), drained(B, stops=None)),
        (told("grow"),),
    ),
    "the same, and they have not left yet: wait": (
        view(draining(A, B), late(A), stopped(B, stops=None)),
        (),
    ),
    "the late one has noticed that the other has left: the next generation begins": (
        view(draining(A, B), failed(A, "peer", late=STEP, regroup="waiting"), drained(B)),
        (again(A, B, cause=GROW),),
    ),
    "workers that cannot go on are ended when the state is safe: others begin": (
        view(draining(A, B, regroups=False), late(A, regroup="no"), stopped(B, regroup="no"), spare(C)),
        (start(A, B, C, cause=GROW),),
    ),
    "the same, and the state is not safe yet: wait for it": (
        view(draining(A, B, regroups=False), late(A, regroup="no"), stopping(B, STEP, regroup="no"), spare(C)),
        (),
    ),
    "the one that leaves has stopped, and the other is late: both leave": (
        view(draining(A, B, cause=PREEMPT), late(A), stopped(B, notice=notice())),
        (told("preempt b"),),
    ),
    "two of three have stopped: all leave": (
        view(draining(A, B, C), late(A), stopped(B), stopped(C)),
        (told("grow"),),
    ),
    "two of three are late: all leave": (view(draining(A, B, C), late(A), late(B), stopped(C)), (told("grow"),)),
    "one of three has stopped, and another one will: wait for its state": (
        view(draining(A, B, C), late(A), stopped(B), stopping(C)),
        (),
    ),
    "one of three has said nothing, and one has stopped: all leave, as no step can follow": (
        view(draining(A, B, C), late(A), stopped(B), trains(C)),
        (told("grow"),),
    ),
    "one of three has said nothing, and two are late: wait": (
        view(draining(A, B, C), late(A), late(B), trains(C)),
        (),
    ),
    "one of three does not report, and a step after that is completed: a later step": (
        view(draining(A, B, C), late(A, STEP + 1), late(B), trains(C, connected=False)),
        (Drain(72, GROW, UNTIL),),
    ),
    "all of three are late: a later step": (view(draining(A, B, C), late(A), late(B), late(C)), (LATER,)),
    "six steps may take longer than the drain: an earlier step": (
        view(slow(2.5), stopping(A, 50), stopping(B, 50)),
        (SOONER,),
    ),
    "the same, and a member has not said whether it will stop": (
        view(slow(2.5), stopping(A, 50), trains(B, 50)),
        (SOONER,),
    ),
    "a step takes ten times as long, but there is time for six of them: wait": (
        view(slow(1.0), stopping(A, 50), stopping(B, 50)),
        (),
    ),
    "a step takes very long, but there is no step between the next one and the ordered one: wait": (
        view(slow(25.0).replace(draining=Draining(step=51, cause=GROW, deadline=UNTIL)), trains(A, 50), trains(B, 50)),
        (),
    ),
    "a step takes very long, but the newest report of a member is older than that: wait": (
        view(slow(2.5), stopping(A, 50), stopping(B, 50, reported_at=REPORTED - 2)),
        (),
    ),
    "an earlier step came too late for both, so both stop after the one that was ordered before: wait": (
        view(draining(A, B), late(A, stops=STEP + 4), late(B, stops=STEP + 4)),
        (),
    ),
    "a head of an older version has not noted when it saw the step: wait": (
        view(draining(A, B), stopping(A, 50), stopping(B, 50)),
        (),
    ),
    "the members obey an order of an earlier step: nothing is known about this one": (
        view(draining(A, B), late(A), trains(B, STEP, stops=STEP - 20)),
        (),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_plan(name: str) -> None:
    seen, wanted = CASES[name]
    assert plan(seen).actions == wanted


@pytest.mark.parametrize("cause", [GROW, PREEMPT], ids=["grow", "preempt"])
def test_workers_that_were_freed_go_on_together(cause: Cause) -> None:
    """It counts as what the drain was for, and not as a failure of the script."""
    before = draining(A, B, cause=cause)
    (release,) = plan(view(before, late(A), stopped(B), spare(D, regroup="waiting"))).actions
    after = apply(before, release, NOW)
    assert plan(view(after, late(A), stopped(B), spare(D, regroup="waiting"))).actions == (), "they are about to leave"
    left = failed(A, "peer", late=STEP, step=STEP, regroup="waiting"), drained(B), spare(D, regroup="waiting")
    (begun,) = plan(view(after, *left)).actions
    assert begun == again(A, B, D, cause=cause)
    later = apply(after, begun, NOW)
    assert ([each.kind for each in later.interruptions], later.restarts) == ([cause.kind], 0)


def test_workers_that_are_not_freed_in_time_are_replaced() -> None:
    after = apply(draining(A, B), Release("", "grow"), NOW - 3)
    (begun,) = plan(view(after, late(A), drained(B))).actions
    assert (begun.cause, begun.regroup) == (GROW, False)


def test_a_member_that_has_gone_on_is_called_back() -> None:
    after = apply(draining(A, B, newcomer=C), Release("", "grow"), NOW)
    left = failed(A, "peer", late=STEP, step=STEP, regroup="waiting")
    assert plan(view(after, left, ahead(B), ahead(C))).actions == (EndGeneration(GROW),)


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (Cause(kind="kill", node=B), f"none; waiting for nodes (kill: {B})"),
        (Cause(kind="pause", node=B), f"none (pause: {B})"),
        (Cause(kind="stop"), "none (stop)"),
    ],
    ids=["a lost node", "a pause", "a stop"],
)
def test_the_event_of_an_end_says_whether_the_job_waits(cause: Cause, text: str) -> None:
    assert status.event(job(A, B), EndGeneration(cause=cause)) == ("generation", text)


@pytest.mark.parametrize(("lost", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps")], ids=str)
def test_the_event_of_a_recovery_counts_the_lost_steps(lost: int, text: str) -> None:
    each = Interruption(kind="kill", node=B, at=NOW, step=9, generation=1, nodes=2)
    over = each.replace(seconds=3.0, steps_lost=lost)
    before, after = (job(A, B).replace(interruptions=(one,)) for one in (each, over))
    assert status.recovery(before, after) == f"after 3.0 s, {text} lost (kill)"


def test_the_event_says_for_whom_the_stop_came_too_late() -> None:
    before = draining(A, B)
    (release,) = plan(view(before, late(A), stopped(B))).actions
    text = f"the workers leave the generation, because the stop after step {STEP} came too late for {A}"
    assert status.event(before, release) == ("generation", text)
