"""No wait without a bound: a generation that makes no step for an hour is ended, whatever its members look like."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from spotrun.head.job_state import Cause, Draining, JobState, Progress, Release, Saving, apply
from spotrun.head.planner.plan import plan
from spotrun.head.view import Node
from spotrun.wire import StateRef
from tests.head.views import NOW, A, B, C, failed, job, listed, node, spare, spec, view

LONG = 3600.0  # seconds since the last step
ABLE = st.sampled_from(["no", "able", "waiting"])


def stuck(name: str, regroup: str) -> Node:
    """It reports, and its workers complete no step."""
    return node(name, regroup=regroup, stepped_at=NOW - LONG)


def peer(name: str, regroup: str) -> Node:
    """Its workers have noticed that a peer is gone."""
    return failed(name, "peer", regroup=regroup, at=NOW - LONG, stepped_at=NOW - LONG)


def gone(name: str, regroup: str) -> Node:
    """Its connection has ended."""
    return node(name, regroup=regroup, connected=False, reported_at=NOW - LONG, stepped_at=NOW - LONG)


def silent(name: str, regroup: str) -> Node:
    return node(name, regroup=regroup, reported_at=NOW - LONG, stepped_at=NOW - LONG)


def another(name: str, regroup: str) -> Node:
    """Another machine has the member's name."""
    return spare(name, boot="b2", regroup=regroup, since=NOW - LONG)


def late(name: str, regroup: str) -> Node:
    """Its workers have not begun to train."""
    return node(name, regroup=regroup, phase="starting", workers=(), since=NOW - LONG)


def over(name: str, regroup: str) -> Node:
    return node(name, regroup=regroup, phase="succeeded", stepped_at=NOW - LONG)


def drained(name: str, regroup: str) -> Node:
    return node(name, regroup=regroup, phase="drained", stepped_at=NOW - LONG)


KINDS = (stuck, peer, gone, silent, another, late, over, drained)


@st.composite
def members(draw: st.DrawFn) -> tuple[tuple[Node, ...], frozenset[str]]:
    """Nodes of three members, of which one reports, and the members whose machines are gone."""
    found, vanished = [stuck(A, draw(ABLE))], set()
    for name in (B, C):
        kind = draw(st.sampled_from([*KINDS, None]))
        if kind is not None:
            found.append(kind(name, draw(ABLE)))
        elif draw(st.booleans()):
            vanished.add(name)
    return tuple(found), frozenset(vanished)


@st.composite
def jobs(draw: st.DrawFn) -> JobState:
    step = draw(st.sampled_from([0, 50]))  # 0: the generation has completed no step
    pace = draw(st.sampled_from([0.1, 60.0]))
    drain = Draining(step=60, cause=Cause(kind="grow"), deadline=NOW - LONG + 60)
    save = Saving(ref=StateRef(generation=1, step=60), holders=(A, B, C), since=NOW - LONG)
    found = job(
        A,
        B,
        C,
        regroups=draw(st.booleans()),
        ordered_at=NOW - LONG - 10,
        saved_at=NOW - LONG,
        spec=spec(nodes={"min": draw(st.integers(1, 3)), "max": 3}),
        progress=Progress(base=0, step=step, stepped_at=NOW - LONG, pace=pace),
        draining=draw(st.sampled_from([None, drain])),
        saving=draw(st.sampled_from([None, save])),
        stopping=draw(st.sampled_from(["", "by the operator"])),
    )
    assert found.current is not None
    found = found.replace(current=found.current.replace(regroup=draw(st.booleans())))
    return apply(found, Release(B), NOW - LONG) if draw(st.booleans()) else found


@settings(max_examples=1000)
@given(jobs(), members(), st.sampled_from([0.0, NOW - LONG]))
def test_a_generation_without_steps_ends(
    state: JobState, seen: tuple[tuple[Node, ...], frozenset[str]], awake: float
) -> None:
    """awake: when this head began; 0: before the job."""
    nodes, vanished = seen
    machines = listed(*({A, B, C} - vanished))
    found = view(state, *nodes, vanished=vanished, machines=machines, began=awake, awake_since=awake)
    assert plan(found).actions, "it waits for ever"
