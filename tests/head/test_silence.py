"""Every member of a generation is silent: signs of life in the bucket tell whether they are dead, stuck or cut off."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spotrun.head.fleet.record import Recreate
from spotrun.head.job_state import Cause, EndGeneration, Ending, Finish, JobState, Progress
from spotrun.head.life_signs import Signs
from spotrun.head.planner import silence
from spotrun.head.status import job_status
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import Machine, Sign, View
from spotrun.spec import JobSpec
from spotrun.store import Store, alive_key
from spotrun.wire import AliveJob, AliveRecord, StateRef
from tests.head.views import NOW, frozen, job, listed, member, node, planned, spare, spec
from tests.head.views import view as view_of
from tests.head.world import World, stepping
from tests.helpers import await_for

A, B = "a", "b"
ALONE = TIMEOUTS.alone
MADE = 1.0
HANG = 10.0  # seconds; the bound on silence is 30 s then, and signs come every 2 s
ONE = spec(nodes=1, hang_timeout=HANG)
TWO = spec(nodes=2, hang_timeout=HANG)
RULES = JobSpec.kept(ONE)
PROGRESS = Progress(base=0, step=50, stepped_at=NOW - 40, restored_at=NOW - 45, pace=0.1, total_steps=1000)


def machine(name: str, **changes: Any) -> Machine:
    values = {"name": name, "pool": "p", "state": "running", "created": MADE, "answered": NOW - 1}
    return Machine(**{**values, **changes})


def running(*members: str, **changes: Any) -> JobState:
    values = {"spec": ONE if len(members) == 1 else TWO, "progress": PROGRESS, "reached": 50, "pace": 0.1, **changes}
    return job(*members, **values)


def sign(unchanged: float = 0.0, no_step: float = 0.0, looked: float = 0.0, **changes: Any) -> Sign:
    """A sign of generation 1 that the head has seen unchanged, and without a new step, for so long."""
    times = {"changed": NOW - looked - unchanged, "advanced": NOW - looked - max(no_step, unchanged)}
    values = {"node": A, "boot": "b1", "at": 0.0, "every": 2.0, "job": "j", "generation": 1, "step": 60}
    return Sign(**times, looked=NOW - looked, record=AliveRecord(**{**values, **changes}))


def view(state: JobState, *nodes: Any, **changes: Any) -> View:
    names = [each.node for each in state.last]
    return view_of(state, *nodes, **{"machines": tuple(map(machine, names)), **changes})


def silent(*, for_: float = 31.0, **changes: Any) -> Any:
    return frozen(A, for_, **changes)


GONE, FRESH = sign(60), sign()
LOST = EndGeneration(Cause(kind="silent", node=A))
CASES: dict[str, tuple[View, tuple[Any, ...]]] = {
    "the only node is silent and its sign has stopped": (view(running(A), silent(), signs={A: GONE}), (LOST,)),
    "not for long enough": (view(running(A), silent(for_=29), signs={A: GONE}), ()),
    "its sign was never there": (view(running(A), silent(), signs={A: Sign(NOW - 70, NOW - 70, NOW)}), (LOST,)),
    "the same, not for long": (view(running(A), silent(), signs={A: Sign(NOW - 60, NOW - 60, NOW)}), ()),
    "its sign and its steps go on: the connection is cut": (view(running(A), silent(for_=900), signs={A: FRESH}), ()),
    "its sign goes on, its steps do not": (view(running(A), silent(), signs={A: sign(no_step=HANG + 1)}), (LOST,)),
    "the same, not for long enough": (view(running(A), silent(), signs={A: sign(no_step=HANG - 1)}), ()),
    "before its first step it has longer": (
        view(running(A, progress=Progress()), silent(), signs={A: sign(no_step=100, step=-1)}),
        (),
    ),
    "but not for ever": (
        view(running(A, progress=Progress()), silent(), signs={A: sign(no_step=601, step=-1)}),
        (LOST,),
    ),
    "the bucket has not answered lately": (view(running(A), silent(), signs={A: sign(60, looked=31)}), ()),
    "the bucket has not answered": (view(running(A), silent()), ()),
    "the cloud does not answer": (view(running(A), silent(), signs={A: GONE}, machines=()), ()),
    "nor does its zone": (
        view(running(A), silent(), signs={A: GONE}, machines=(machine(A, state="unknown"),)),
        (),
    ),
    "the head itself stood still": (view(running(A), silent(), signs={A: GONE}, awake_since=NOW - 5), ()),
    "the node says how often it signs, but not as it likes": (
        view(running(A), silent(), signs={A: sign(66, every=1e9)}),
        (LOST,),
    ),
    "it has never reported to a new head": (
        view(running(A), signs={A: GONE}, began=NOW - 31, awake_since=NOW - 31),
        (LOST,),
    ),
    "a new head waits": (view(running(A), signs={A: GONE}, began=NOW - 29, awake_since=NOW - 29), ()),
    "its agent is another one now": (view(running(A), silent(), signs={A: sign(boot="b2")}), (LOST,)),
    "one of two is dead: the other is not lost": (
        view(running(A, B), silent(), frozen(B, 31), signs={A: GONE, B: FRESH}),
        (LOST,),
    ),
    "two are dead": (
        view(running(A, B), silent(), frozen(B, 31), signs={A: GONE, B: GONE}),
        (EndGeneration(Cause(kind="silent", node="a, b")),),
    ),
    "one of two reports": (view(running(A, B), silent(), node(B), signs={A: GONE}), ()),
    "what hangs is not known of a silent node": (
        view(running(A, progress=PROGRESS.model_copy(update={"stepped_at": NOW - 12})), silent(for_=12)),
        (),
    ),
    "stopped by the operator: nobody is waited for": (
        view(running(A, stopping="so"), silent(for_=21), signs={A: FRESH}),
        (EndGeneration(Cause(kind="stop")),),
    ),
    "a wait of a generation that is lost: its machine is replaced": (
        view(running(last=(member(A),), generation=1, ordered_at=NOW - 1), silent(), signs={A: GONE}),
        (Recreate(node=A, pool="p", created=MADE),),
    ),
    "the same, it has not reported to this head": (
        view(
            running(last=(member(A),), generation=1, ordered_at=NOW - 1),
            **{"signs": {A: GONE}, "began": NOW - 31, "awake_since": NOW - 31},
        ),
        (Recreate(node=A, pool="p", created=MADE),),
    ),
    "its sign goes on: it may be the head that is cut off": (
        view(
            running(last=(member(A),), generation=1, ordered_at=NOW - 1),
            silent(for_=ALONE - 1),
            signs={A: FRESH},
        ),
        (),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_plan(name: str) -> None:
    given, expected = CASES[name]
    found = planned(given)
    assert tuple(each for each in found if not type(each).__name__.startswith("Save")) == expected


def test_a_stop_waits_for_no_node_whose_sign_has_stopped() -> None:
    ended = running(ending=Ending(phase="stopped", reason="so", deadline=NOW + 1000), reached=10**6, ordered_at=NOW)
    given = view(ended, silent(for_=40, snapshot=StateRef(generation=1, step=48)), signs={A: GONE})
    (action,) = planned(given)
    assert isinstance(action, Finish)
    assert action.reason == "so; the state after step 48 is lost, it was not saved by a; there is no checkpoint"
    assert not any(isinstance(each, Finish) for each in planned(replace(given, signs={A: FRESH})))


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (view(running(A), silent(for_=14), signs={A: FRESH}), None),
        (view(running(A), silent(for_=16)), "bucket"),
        (view(running(A), silent(for_=16), signs={A: sign(looked=40)}), "bucket"),
        (view(running(A), silent(for_=16), signs={A: FRESH}), "cut"),
        (view(running(A), silent(for_=16), signs={A: sign(no_step=12)}), "stuck"),
        (view(running(A), silent(for_=16), signs={A: GONE}), "dead"),
        (view(running(A), silent(for_=16), signs={A: GONE}, machines=()), "cloud"),
        (view(running(A), node(A)), None),
        (view(running(), spare(A)), None),
    ],
    ids=["too early", "not looked", "no answer", "cut", "stuck", "dead", "no cloud", "reported_at", "waiting"],
)
def test_news(given: View, kind: str | None) -> None:
    found = silence.news(given)
    assert (found[0] if found else None) == kind
    if found:
        assert found[1].startswith("the only node, a, has been silent for 15 s or more")


def test_operators_are_told_within_the_first_minute_whatever_the_timeouts() -> None:
    patient = running(A, B, spec=spec(nodes=2, hang_timeout=3600))
    found = silence.news(view(patient, frozen(A, 21), frozen(B, 21)))
    assert found is not None
    assert found[1].startswith("all 2 nodes have been silent for 20 s or more; looking in the bucket")


def test_status_says_silent() -> None:
    state = running(A, progress=PROGRESS.model_copy(update={"samples_per_second": 72.0}))
    found = job_status(state, view(state, silent(for_=4)))
    assert (found["phase"], found["samples_per_second"], found["eta"]) == ("silent", 0.0, None)
    found = job_status(state, view(state, node(A)))
    assert (found["phase"], found["samples_per_second"]) == ("running", 72.0)


def test_what_a_lost_generation_did_is_known_from_its_signs() -> None:
    state = running(A)
    assert silence.observe(state, view(state, silent(), signs={A: FRESH})).reached == 60
    assert silence.observe(state, view(state, silent(), signs={A: sign(generation=2)})).reached == 50


def test_whose_signs_are_looked_for() -> None:
    assert silence.watched(view(running(A, B), node(A), frozen(B, 31))) == set()
    assert silence.watched(view(running(A, B), frozen(A, 4), frozen(B, 4))) == {A, B}
    waits = running(last=(member(A),))
    assert silence.watched(view(waits, frozen(A, 4))) == {A}
    assert silence.watched(view(waits, frozen(A, 4), spare(B))) == {A}
    assert silence.watched(view(waits, spare(A), frozen(B, 4))) == set()
    assert silence.watched(view(waits, spare(B), machines=listed(B))) == set(), "the machine is gone"


def record(at: float, step: int = 5, boot: str = "b1") -> AliveRecord:
    return AliveRecord(node=A, boot=boot, at=at, every=2.0, job="j", generation=1, step=step)


def test_a_sign_is_judged_by_the_head_s_clock() -> None:
    """A node's clock may be hours off, and may be set back."""
    first = silence.seen(None, record(at=9e9), 100.0)
    assert (first.changed, first.advanced, first.looked) == (100.0, 100.0, 100.0)
    same = silence.seen(first, record(at=9e9), 105.0)
    assert (same.changed, same.advanced, same.looked) == (100.0, 100.0, 105.0)
    again = silence.seen(same, record(at=3.0), 110.0)
    assert (again.changed, again.advanced, again.looked) == (110.0, 100.0, 110.0)
    step = silence.seen(again, record(at=5.0, step=6), 112.0)
    assert (step.changed, step.advanced) == (112.0, 112.0)
    missing = silence.seen(step, None, 120.0)
    assert (missing.changed, missing.record) == (120.0, None)
    assert silence.seen(missing, None, 125.0).changed == 120.0
    assert silence.seen(step, record(at=5.0, step=6, boot="b2"), 130.0).changed == 130.0


def test_a_job_that_steps_hides_no_job_that_hangs() -> None:
    """Two jobs of one node have one sign."""

    def both(at: float, j: int, k: int) -> AliveRecord:
        steps = (AliveJob(job="j", generation=1, step=j), AliveJob(job="k", generation=4, step=k))
        return record(at, step=j).replace(jobs=steps)

    sign = silence.seen(None, both(1.0, j=5, k=9), 100.0)
    sign = silence.seen(sign, both(2.0, j=6, k=9), 110.0)
    sign = silence.seen(sign, both(3.0, j=7, k=9), 120.0)
    assert (sign.changed, sign.advanced, sign.jobs) == (120.0, 120.0, {"j": 120.0, "k": 100.0})
    # The sign of an agent that knows one job.
    assert silence.seen(sign, record(4.0, step=7), 130.0).jobs == {"j": 120.0}


async def test_signs_are_read_and_those_of_gone_machines_removed(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    listed: set[str] | None = None
    signs = Signs(store, "c", lambda: listed, time.time)
    for name in (A, B):
        store.put(alive_key("c", name), record(at=1.0).model_dump_json().encode())
    signs.want(frozenset((A, "x")))
    await signs.look()
    assert (signs.found[A].record, signs.found["x"].record, set(signs.found)) == (record(at=1.0), None, {A, "x"})
    signs.want(frozenset())
    assert dict(signs.found) == {}
    await signs.sweep()
    assert store.exists(alive_key("c", A)), "the cloud does not answer: nothing is known to be gone"
    listed = {B}
    await signs.sweep()
    assert [store.exists(alive_key("c", name)) for name in (A, B)] == [False, True]


async def test_a_sign_that_cannot_be_read_proves_nothing(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.put(alive_key("c", A), b"{")
    signs = Signs(store, "c", set, time.time)
    signs.want(frozenset((A,)))
    task = asyncio.create_task(signs.run())
    try:
        await await_for(lambda: signs._warned, 20, "the warning")
        assert dict(signs.found) == {}
        store.put(alive_key("c", A), record(at=1.0).model_dump_json().encode())
        await await_for(lambda: A in signs.found, 20, "the sign")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_frozen_job_of_one_node_gets_another_machine(tmp_path: Path) -> None:
    """The head's own part, without a wait: it receives nothing, finds the sign old, and asks the cloud."""
    world = World(tmp_path)
    started = await world.with_machines(min=1, max=1)
    world.receive("p-0", job=started)
    await world.turn()
    world.receive("p-0", job=started, phase="running", generation=1, workers=stepping(5))
    await world.turn()
    head = world.head
    head.agents.known["p-0"].reported_at -= 301
    head.presence.began = head.presence.awake_since = time.time() - 400
    await world.turn()
    assert world.head.status()["job"]["phase"] == "silent"
    assert [e["text"] for e in world.events() if e["kind"] == "silence"] == [
        "the only node, p-0, has been silent for 20 s or more; looking in the bucket for signs of life; nothing is "
        "ended yet"
    ]
    await head.signs.look()
    await world.turn()
    assert head.job is not None
    assert head.job.current is not None, "the sign has been looked for a moment only"
    head.signs._found["p-0"] = replace(head.signs.found["p-0"], changed=time.time() - 66)
    await world.turn(2)
    assert head.job.current is None
    assert head.job.interruptions[-1].kind == "silent"
    await head.replacements.answered()
    assert world.recreated == ["p-0"]


def test_the_bounds_follow_the_job_s_own() -> None:
    assert (RULES.silence_timeout, RULES.sign_interval) == (30.0, 2.0)
    default = JobSpec(script="t.py")
    assert (default.silence_timeout, default.sign_interval) == (300.0, 20.0)
    assert TIMEOUTS.state_margin <= TIMEOUTS.tell_silence
