"""When a generation stops because machines leave: as late as is safe, or when others are ready in their place."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotrun.head.capacity.sizes import Pool
from spotrun.head.job_state import (
    AbortSave,
    Action,
    Cause,
    Drain,
    Draining,
    EndGeneration,
    Progress,
    Save,
    Saving,
    apply,
    saved,
)
from spotrun.head.planner import departure
from spotrun.head.planner.departure import SAFETY, last_moment, stop_time
from spotrun.head.planner.plan import plan
from spotrun.head.status import event
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.turn_timing import TICK
from spotrun.head.view import Machine, Node, View
from spotrun.wire import Manifest, Notice, StateRef, Worker
from tests.head.views import NOW, A, B, C, D, failed, fleet_plan, job, listed, node, notice, spare, spec, start, view

FIXED = spec(nodes={"min": 3, "max": 3})
ELASTIC = spec(nodes={"min": 1, "max": 3})
E = "e"
PREEMPT, BOTH = Cause(kind="preempt", node=B), Cause(kind="preempt", node=f"{B}, {C}")


def trains(name: str, left: float = 0.0, took: float = 0.2, **changes: Any) -> Node:
    """A member whose workers could join another generation. left: of its notice, in seconds; 0: it has none."""
    worker = Worker(rank=0, pid=1, step=50, base=0, stepped_at=NOW - 0.05, took=took)
    more = {"notice": notice(left)} if left else {}
    return node(name, **{"regroup": "able", "workers": (worker,), **more, **changes})


def warm(name: str) -> Node:
    return spare(name, regroup="waiting")


def warms(name: str) -> Node:
    return spare(name, regroup="no")


def able(*members: str, **changes: Any) -> Any:
    """A job of fixed size, whose uploads take 2 s."""
    return job(*(members or (A, B, C)), **{"regroups": True, "spec": FIXED, "upload": 2.0, **changes})


def leaving(left: float, *others: Node, **changes: Any) -> View:
    """One of three members leaves in so many seconds."""
    more = {key: changes.pop(key) for key in ("machines",) if key in changes}
    return view(able(**changes), trains(A), trains(B, left), trains(C), *others, **more)


def drained(name: str, left: float = 0.0) -> Node:
    return trains(name, left, phase="drained", regroup="waiting")


def drain(left: float, *then: str, cause: Cause = PREEMPT) -> tuple[Action, ...]:
    """All stop. then: the nodes of the next generation, if the order names it."""
    following = replace(start(*then, cause=cause), regroup=True) if then else None
    return (Drain(56, cause, NOW + left - TIMEOUTS.drain_margin, following),)


def shared(found: Node) -> Node:
    """The node with another job."""
    jobs = (*found.report.jobs, found.work.replace(job="other"))
    return replace(found, report=found.report.replace(jobs=jobs))


STOP = stop_time(0.1, 0.2)  # of the jobs here
LAST = TIMEOUTS.drain_margin + SAFETY * (STOP + 2.0)

CASES: dict[str, tuple[View, tuple[Action, ...]]] = {
    "nobody is ready in its place: training goes on": (leaving(30), ()),
    "its successor warms up: training goes on": (leaving(30, warms(D)), ()),
    "its successor has warmed up: all stop at once": (leaving(30, warm(D)), drain(30, A, C, D)),
    "a spare has been there before the notice: all stop at once": (leaving(120, warm(D)), drain(120, A, C, D)),
    "a job that restarts its workers: a ready node is enough": (leaving(30, spare(D), regroups=False), drain(30)),
    "enough nodes remain: all stop at once, and the job goes on with these": (
        leaving(30, spec=ELASTIC),
        drain(30, A, C),
    ),
    "the stop and the upload just fit into the notice: training goes on": (leaving(LAST + 0.01), ()),
    "they would soon not fit: all stop": (leaving(LAST - 0.01), drain(LAST - 0.01)),
    "nobody knows how long an upload takes: a checkpoint begins": (
        leaving(30, upload=0.0),
        (Save(StateRef(generation=1, step=56), (A, B, C)),),
    ),
    "all members leave: checkpoints follow each other, in case the machines go early": (
        view(able(saved_at=NOW - 9), trains(A, 30), trains(B, 30), trains(C, 30)),
        (Save(ref=StateRef(generation=1, step=56), holders=(A, B, C)),),
    ),
    "all members leave, and a checkpoint was taken a moment ago": (
        view(able(saved_at=NOW - 7), trains(A, 30), trains(B, 30), trains(C, 30)),
        (),
    ),
    "a checkpoint was given up a moment ago: another one does not begin at once": (
        view(apply(able(upload=0.0), AbortSave("no"), NOW - 1), trains(A), trains(B, 30), trains(C)),
        (),
    ),
    "an upload of unknown length has taken for so long that the rest of the notice may be needed for it": (
        leaving(20, upload=0.0, saving=Saving(ref=StateRef(generation=1, step=40), holders=(A, B, C), since=NOW - 11)),
        drain(20),
    ),
    "the notice has ended and the machine is still there: the drain gets its time": (
        leaving(-5),
        (Drain(56, PREEMPT, NOW + SAFETY * STOP),),
    ),
    "two jobs of the machine upload at the same time: each takes twice as long": (
        view(able(), trains(A), shared(trains(B, LAST + 1)), trains(C)),
        drain(LAST + 1),
    ),
    "two of three leave, and one successor is ready: the other one is awaited": (
        view(able(), trains(A), trains(B, 30), trains(C, 40), warm(D), warms(E)),
        (),
    ),
    "two of three leave, and both successors are ready: all stop": (
        view(able(), trains(A), trains(B, 30), trains(C, 40), warm(D), warm(E)),
        drain(30, A, D, E, cause=BOTH),
    ),
    "two of three leave: the earlier end counts": (
        view(able(), trains(A), trains(B, 60), trains(C, 6), warms(D)),
        (Drain(56, Cause(kind="preempt", node="b, c"), NOW + 3),),
    ),
    "one of two that leave has time: it is in one more generation, since too few others are there": (
        view(
            able(draining=Draining(step=56, cause=PREEMPT, deadline=NOW + 3)),
            drained(A),
            drained(B, 6),
            drained(C, 90),
            warm(D),
        ),
        (replace(start(A, C, D, cause=PREEMPT), regroup=True),),
    ),
    "nobody has time: the generation ends, and its state goes into the bucket": (
        view(
            able(draining=Draining(step=56, cause=PREEMPT, deadline=NOW + 3)),
            drained(A),
            drained(B, 6),
            drained(C, 12),
            warm(D),
        ),
        (EndGeneration(PREEMPT),),
    ),
    "enough others are there: a member that leaves is not kept, however much time it has": (
        view(
            able(draining=Draining(step=56, cause=PREEMPT, deadline=NOW + 117)),
            drained(A),
            drained(B, 120),
            drained(C),
            warm(D),
        ),
        (replace(start(A, C, D, cause=PREEMPT), regroup=True),),
    ),
    "the machine goes earlier than it said: survivors and the successor go on": (
        view(
            able(),
            *(failed(n, "peer", regroup="waiting") for n in (A, C)),
            trains(B, 20, connected=False, reported_at=NOW - 0.2, cloud="gone"),
            warm(D),
        ),
        (replace(start(A, C, D, cause=PREEMPT), regroup=True),),
    ),
    "workers of the machine have ended, and its agent has not: all stop": (
        view(able(), trains(A), failed(B, "signal", notice=notice(20)), trains(C)),
        (Drain(56, PREEMPT, NOW + 17),),
    ),
    "the job has made no step yet, and enough nodes remain: it begins again without the machine": (
        view(
            able(spec=ELASTIC, phase="starting", progress=Progress(base=40, step=40)),
            *(trains(A), trains(B, 30), trains(C)),
        ),
        (start(A, C, cause=PREEMPT),),
    ),
    "the job has made no step yet, and too few nodes remain: it may still make some": (
        view(able(phase="starting", progress=Progress(base=40, step=40)), trains(A), trains(B, 30), trains(C)),
        (),
    ),
    "the job should stop: it does not wait for a successor": (
        leaving(30, stopping="by hand"),
        (Drain(56, Cause(kind="stop"), NOW + TIMEOUTS.drain),),
    ),
    "it grows at the same time": (
        view(
            able(ordered_at=NOW - 1000, spec=spec(nodes={"min": 1, "max": 5})),
            *(trains(A), trains(B, 30), trains(C, 40), warm(D)),
        ),
        drain(30, A, D, cause=BOTH),
    ),
    "a planned end: the machine is drained now, because its successor is asked for afterwards": (
        view(able(), trains(A), replace(trains(B), due=NOW + 140), trains(C)),
        (Drain(56, Cause(kind="end", node=B), NOW + 57),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_plan(name: str) -> None:
    given_, expected = CASES[name]
    assert plan(given_).actions == expected


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        pytest.param(
            leaving(30, warms(D), machines=listed(A, B, C, D)),
            "b leaves; training goes on until d has warmed up, for at most 23 s",
            id="one successor",
        ),
        pytest.param(
            leaving(30, warms(D), warms(E), machines=listed(A, B, C, D, E)),
            "b leaves; training goes on until d, e have warmed up, for at most 23 s",
            id="any of two",
        ),
        pytest.param(
            leaving(30, regroups=False, machines=listed(A, B, C)),
            "b leaves; training goes on until another node is ready, for at most 23 s",
            id="none in sight",
        ),
        pytest.param(leaving(30, warm(D)), "", id="it stops"),
        pytest.param(view(able(), trains(A), trains(B), trains(C)), "", id="nobody leaves"),
    ],
)
def test_status_says_what_the_job_trains_on_for(seen: View, reason: str) -> None:
    assert plan(seen).reason == reason


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        pytest.param(leaving(30, warm(D)), "3 nodes are ready without b", id="a successor"),
        pytest.param(
            view(able(A, B, spec=ELASTIC), trains(A), trains(B, 30)), "1 node is ready without b", id="one node"
        ),
        pytest.param(
            leaving(6), "b leaves, and the rest of the notice is just enough to stop and save", id="no time left"
        ),
    ],
)
def test_the_event_says_why_it_stops_now(seen: View, text: str) -> None:
    (action,) = plan(seen).actions
    assert event(seen.job, action) == ("drain", f"all stop after step 56 (preempt: b); {text}")


def test_an_upload_is_measured_with_each_checkpoint() -> None:
    """By the agents, or by the head if an agent is too old to say it."""
    ref = StateRef(generation=1, step=48)
    found = able(upload=0.0, saving=Saving(ref=ref, holders=(A, B), since=NOW - 7))
    manifest = Manifest(job="j", generation=1, step=48, created=NOW, files=())
    assert saved(found, (ref,), manifest, NOW, took=3.5).upload == 3.5
    assert saved(found, (ref,), manifest, NOW).upload == 7.0
    assert saved(found.replace(saving=None, upload=2.0), (ref,), manifest, NOW).upload == 2.0


class Training:
    """A job in steps of equal length, one of whose machines leaves: what the planner sees, and what its stop takes."""

    def __init__(self, step: float, snapshot: float, upload: float, end: float, offset: float) -> None:
        self.step, self.snapshot, self.upload, self.end, self.offset = step, snapshot, upload, end, offset

    def seen(self, now: float, warm_up: float) -> View:
        """warm_up: when the successor has warmed up."""
        done = 100 + math.floor((now - self.time_of(100)) / self.step)
        at = self.time_of(done)
        progress = Progress(base=0, step=done, stepped_at=at, restored_at=NOW - 100, pace=self.step)
        worker = Worker(rank=0, pid=1, step=done, base=0, stepped_at=at, took=self.snapshot)
        end = Notice(kind="preempt", deadline=self.end)
        nodes = [
            node(name, regroup="able", workers=(worker,), reported_at=now, notice=end if name == B else None)
            for name in (A, B, C)
        ]
        nodes.append(spare(D, regroup="waiting" if now >= warm_up else "no", reported_at=now))
        state = able(progress=progress, upload=self.upload, saved_at=now)
        return view(state, *nodes, now=now)

    def time_of(self, step: int) -> float:
        return NOW - self.offset * self.step + (step - 100) * self.step

    def stop(self, warm_up: float) -> tuple[float, float]:
        """When the stop was ordered, and when all that it takes is done, if each part takes as long as was measured."""
        now = NOW
        while True:
            found = [each for each in plan(self.seen(now, warm_up)).actions if isinstance(each, Drain)]
            if found:
                return now, self.time_of(found[0].step) + self.snapshot + (self.upload if now < warm_up else 0.0)
            now += TICK


@settings(max_examples=200, deadline=None)
@given(
    step=st.floats(0.01, 30.0),
    snapshot=st.floats(0.01, 5.0),
    upload=st.floats(0.01, 60.0),
    left=st.floats(-10.0, 130.0),
    offset=st.floats(0.0, 0.99),
    warm_up=st.floats(0.0, 150.0),
)
def test_the_stop_comes_no_later_than_is_safe_and_no_earlier_than_needed(
    step: float, snapshot: float, upload: float, left: float, offset: float, warm_up: float
) -> None:
    found = Training(step, snapshot, upload, NOW + left, offset)
    ordered, done = found.stop(NOW + warm_up)
    last = last_moment(NOW + left, step, snapshot, upload)
    assert ordered <= max(NOW, min(last, NOW + warm_up)) + TICK, "no later"
    assert ordered >= max(NOW, min(last, NOW + warm_up)), "no earlier"
    if ordered > NOW:  # there was time
        assert done <= NOW + left - TIMEOUTS.drain_margin + TICK, "all is done before the machine ends"


@pytest.mark.parametrize("seconds", [0.0, 1.0, 9.0])
def test_the_drain_is_ordered_once(seconds: float) -> None:
    """A new head plans the same from the job's state, and so does each later turn."""
    seen = leaving(30, warm(D))
    (action,) = plan(seen).actions
    later = replace(seen, now=NOW + seconds, job=apply(seen.job, action, NOW))
    later = replace(later, nodes=tuple(replace(n, reported_at=NOW + seconds) for n in seen.nodes))
    assert plan(later).actions == ()
    assert departure.decide(seen) == departure.decide(replace(seen, began=NOW))


# The successor.


def bought(seen: View, size: int, needed: int = 3) -> tuple[dict[str, int], tuple[str, ...]]:
    """The sizes that change and the machines that are removed, of a pool with this size."""
    names = {each.name for each in seen.machines}
    found = fleet_plan(seen, (Pool("p", 5, size, dict.fromkeys(sorted(names), "ready")),), needed)
    return dict(found.resize), found.remove


def test_a_successor_is_asked_for_at_the_notice_and_no_second_one_by_the_next_head() -> None:
    members = listed(A, B, C)
    there = [trains(A), trains(B, 30), trains(C)]
    assert bought(view(able(), *there, machines=members), 3) == ({"p": 4}, ())
    boots = (*members, Machine(D, "p", "running", created=NOW - 2, answered=0.0))
    assert bought(view(able(), *there, machines=boots), 4) == ({}, ()), "once"
    new_head = {"machines": boots, "began": NOW - 1, "awake_since": NOW - 1}
    assert bought(view(able(), trains(A), trains(C), **new_head), 4) == ({}, ()), "it does not see the notice yet"
    assert bought(view(able(), *there, **new_head), 4) == ({}, ())
    gone = (*listed(A, C), Machine(D, "p", "running", created=NOW - 2, answered=NOW - 1))
    after = view(able(**{"current": None, "last": ()}), trains(A), trains(C), warm(D), machines=gone)
    assert bought(after, 4) == ({"p": 3}, ()), "when the machine is gone, the pool has its size again"
