"""No wait for a state is longer than the work that it could hold, plus a constant: tables, and a new head's world."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spotrun.head.fleet.record import Recreate
from spotrun.head.fleet.replacements import Record
from spotrun.head.job_state import Ending, Finish, JobState, Progress, Save, Saving, Start, apply
from spotrun.head.planner import liveness, patience
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import Machine, Sign
from spotrun.store import replaced_key
from spotrun.wire import StateRef, Worker
from tests.head.views import NOW as EARLIER
from tests.head.views import Seen, fleet, frozen, job, member, node, notice, planned, spare, spec, wanted
from tests.head.views import view as view_of
from tests.head.world import World

ALONE = TIMEOUTS.alone
MARGIN = TIMEOUTS.state_margin
HOLDER = TIMEOUTS.last_holder
NOW = EARLIER + 36000.0
A, B, C, D = "a", "b", "c", "d"
MADE = NOW - 5000
THREE = spec(nodes={"min": 3, "max": 3})
LIVED = 12.0  # seconds of steps that the newest generation did
PROGRESS = Progress(base=0, step=120, stepped_at=NOW - 60, restored_at=NOW - 72, pace=0.1)
HELD = StateRef(generation=1, step=100)


def machine(name: str, **changes: Any) -> Machine:
    values = {"name": name, "pool": "p", "state": "running", "created": MADE, "answered": NOW - 1}
    return Machine(**{**values, **changes})


def unreported(name: str) -> Machine:
    return machine(name, answered=0.0)


def left(*members: str, **changes: Any) -> JobState:
    """A job whose last generation, of these, did 12 s of work that is not in the bucket."""
    values = {"generation": 1, "last": tuple(map(member, members)), "ordered_at": NOW - 50, "reached": 120}
    return job(**{**values, "pace": 0.1, "progress": Progress(), "spec": THREE, **changes})


def view(state: JobState, *nodes: Any, head: float, **changes: Any) -> Seen:
    """head: how long it has been there, seconds."""
    begun = {"began": NOW - head, "awake_since": NOW - head}
    return view_of(state, *nodes, **{"now": NOW, **begun, **changes})


def reporting(name: str, snapshot: StateRef | None = None, **changes: Any) -> Any:
    return spare(name, reported_at=NOW - 0.1, snapshot=snapshot, **changes)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (left(A), LIVED),
        (left(A, checkpoints=(StateRef(generation=1, step=100),)), 2.0),
        (left(A, checkpoints=(StateRef(generation=1, step=120),)), 0.0),
        (left(A, checkpoints=(StateRef(generation=0, step=60),)), 6.0),
        (left(A, reached=0), 0.0),
        (job(A, B, progress=PROGRESS), LIVED),
        (job(), 5.0),
    ],
    ids=[
        "no checkpoint",
        "a checkpoint has a part of the work",
        "a checkpoint has all of the work",
        "the checkpoint is of an older generation",
        "the generation never completed a step",
        "the generation still runs",
        "the generation is at step 50",
    ],
)
def test_at_stake(given: JobState, expected: float) -> None:
    assert patience.at_stake(given) == pytest.approx(expected)
    assert patience.patience(given, TIMEOUTS.save) == pytest.approx(expected + MARGIN)
    assert patience.patience(given, 7.0) == 7.0


def mute(name: str, seconds: float, **changes: Any) -> Any:
    """A node with the newest state that has not reported for so long."""
    return replace(frozen(name, 0, **{"snapshot": HELD, **changes}), reported_at=NOW - seconds)


def leaving(name: str) -> Any:
    """A node with the newest state that will be gone."""
    return node(name, phase="drained", notice=notice(), snapshot=HELD, reported_at=NOW - 0.1)


GONE = (Recreate(node=C, pool="p", created=MADE),)
KNOWN = (machine(A), machine(B), machine(C))
MUCH = left(A, B, C, reached=10**9)
STOPPED = {C: Sign(changed=NOW - 90, advanced=NOW - 90, looked=NOW - 1)}
MACHINES = (machine(A), machine(B), unreported(C))
CASES: dict[str, tuple[Seen, tuple[Recreate, ...]]] = {
    "one of three does not report to a new head: the head waits a moment": (
        view(left(A, B, C), reporting(A, HELD), reporting(B, HELD), machines=MACHINES, head=MARGIN - 1),
        (),
    ),
    "one of three does not report for long, and others hold the state: it is replaced": (
        view(left(A, B, C), reporting(A, HELD), reporting(B, HELD), machines=MACHINES, head=MARGIN + 1),
        GONE,
    ),
    "a silent machine alone may hold 12 s of work: the head waits 12 s": (
        view(left(A, B, C), reporting(A), reporting(B), machines=MACHINES, head=MARGIN + LIVED - 1),
        (),
    ),
    "a silent machine alone may hold 12 s of work: after 12 s it is replaced": (
        view(left(A, B, C), reporting(A), reporting(B), machines=MACHINES, head=MARGIN + LIVED + 1),
        GONE,
    ),
    "the newest checkpoint is of an older generation: the wait is short": (
        view(
            left(A, B, C, generation=4, checkpoints=(StateRef(generation=2, step=100),)),
            *(reporting(A), reporting(B)),
            machines=MACHINES,
            head=MARGIN + 3,
        ),
        GONE,
    ),
    "a silent machine may hold days of work: the head waits an hour": (
        view(left(A, B, C, reached=10**9), reporting(A), reporting(B), machines=MACHINES, head=HOLDER - 1),
        (),
    ),
    "a silent machine may hold days of work: after an hour it is replaced": (
        view(left(A, B, C, reached=10**9), reporting(A), reporting(B), machines=MACHINES, head=HOLDER + 1),
        GONE,
    ),
    "a spare that reported to an earlier head holds nothing": (
        view(
            left(A, B, reached=10**9),
            reporting(A),
            reporting(B),
            machines=MACHINES,
            joined={C: MADE},
            head=MARGIN + 1,
        ),
        GONE,
    ),
    "a machine that has never joined still boots: it is not replaced": (
        view(left(A, B), reporting(A), reporting(B), machines=MACHINES, head=MARGIN + 1),
        (),
    ),
    "a machine made in the place of a member still boots: it is not replaced": (
        view(
            left(A, B, C),
            *(reporting(A), reporting(B)),
            machines=(machine(A), machine(B), machine(C, created=NOW - 40, answered=0.0)),
            joined={C: MADE},
            head=MARGIN + 1,
        ),
        (),
    ),
    "one of three has fallen silent, and others hold the state: it is replaced after 20 s": (
        view(left(A, B, C), reporting(A, HELD), reporting(B, HELD), mute(C, 21), machines=KNOWN, head=1000),
        GONE,
    ),
    "one of three has fallen silent and alone holds 12 s of work: the head waits 32 s": (
        view(left(A, B, C), reporting(A), reporting(B), mute(C, MARGIN + LIVED - 1), machines=KNOWN, head=1000),
        (),
    ),
    "one of three has fallen silent and alone holds 12 s of work: after 32 s it is replaced": (
        view(left(A, B, C), reporting(A), reporting(B), mute(C, MARGIN + LIVED + 1), machines=KNOWN, head=1000),
        GONE,
    ),
    "one of three has fallen silent and alone holds days of work: the head waits an hour": (
        view(MUCH, reporting(A), reporting(B), mute(C, HOLDER - 1), machines=KNOWN, head=5000),
        (),
    ),
    "the same, and its signs of life have stopped: it is dead": (
        view(MUCH, reporting(A), reporting(B), mute(C, 100), machines=KNOWN, head=1000, signs=STOPPED),
        GONE,
    ),
    "the same, and others hold a state of that generation": (
        view(
            MUCH,
            reporting(A, HELD.model_copy(update={"step": 95})),
            reporting(B),
            mute(C, 21),
            machines=KNOWN,
            head=1000,
        ),
        GONE,
    ),
    "the same, and the other node that holds the state is leaving": (
        view(MUCH, leaving(A), reporting(B), mute(C, 21), machines=KNOWN, head=1000),
        (),
    ),
    "a silent node that never trained claims a state": (
        view(
            left(A, B, reached=10**9),
            reporting(A),
            reporting(B),
            mute(C, 21, snapshot=StateRef(generation=99, step=1)),
            machines=KNOWN,
            head=1000,
        ),
        GONE,
    ),
    "no node reports: the head may be cut off": (
        view(left(A, B, C), machines=tuple(map(unreported, (A, B, C))), head=ALONE - 1),
        (),
    ),
    "no node reports for long: all machines are replaced": (
        view(left(A, B, C), machines=tuple(map(unreported, (A, B, C))), head=ALONE + 1),
        tuple(Recreate(node=name, pool="p", created=MADE) for name in (A, B, C)),
    ),
    "a member of the generation that runs may train on": (
        view(
            job(A, B, C, spec=THREE, ordered_at=NOW - 100),
            machines=tuple(map(unreported, (A, B, C))),
            head=2 * HOLDER,
        ),
        (),
    ),
    "the cloud already ends a silent machine: it is not replaced": (
        view(
            left(A, B, C),
            reporting(A),
            reporting(B),
            machines=(machine(C, state="stopping", answered=0.0),),
            head=HOLDER,
        ),
        (),
    ),
    "the cloud does not answer: nothing is replaced": (
        view(left(A, B, C), reporting(A), reporting(B), machines=(), head=HOLDER),
        (),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_machines_that_do_not_report(name: str) -> None:
    given, expected = CASES[name]
    assert tuple(each for each in planned(given) if isinstance(each, Recreate)) == expected
    assert all(wanted(given, each) for each in expected)


def test_a_machine_is_not_kept_for_a_state_that_no_job_waits_for() -> None:
    """The job has gone on from an older state, and has made no snapshot since."""
    members = [node(n, generation=2, snapshot=None, reported_at=NOW - 0.1) for n in (A, B)]
    gone_on = job(A, B, generation=2, reached=10**9, trained=(A, B, C))
    assert view(gone_on, *members, mute(C, 21), machines=KNOWN, head=1000).conditions[C].state == "replacing"


@pytest.mark.parametrize(
    ("seconds", "worth", "begins"), [(5, 3600.0, False), (19, 3600.0, False), (21, 3600.0, True), (5, 4.0, True)]
)
def test_enough_nodes_wait_a_moment_for_a_silent_one_that_alone_holds_the_state(
    seconds: float, worth: float, begins: bool
) -> None:
    """They would lose its work. worth: seconds of it."""
    state = left(A, B, C, reached=round(10 * worth), spec=spec(nodes={"min": 2, "max": 3}))
    given = view(state, reporting(A), reporting(B), mute(C, seconds), machines=KNOWN, head=1000)
    assert any(isinstance(each, Start) for each in planned(given)) == begins


def test_a_successor_begins_once_the_leaving_nodes_state_is_not_worth_more() -> None:
    """Spares stand by while noticed nodes upload 12 s of work."""
    saving = Saving(ref=HELD, holders=(A, B), since=NOW - 1)
    spares = [reporting(n) for n in (C, D)]
    given = left(A, B, saving=saving, spec=spec(nodes=2), ordered_at=NOW - LIVED - MARGIN + 1)
    assert planned(view(given, leaving(A), leaving(B), *spares, head=1000)) == ()
    given = given.model_copy(update={"ordered_at": NOW - LIVED - MARGIN - 1})
    (action,) = planned(view(given, leaving(A), leaving(B), *spares, head=1000))
    assert isinstance(action, Start)


def ending(**changes: Any) -> JobState:
    goal = Ending(phase="stopped", reason="so", deadline=NOW + TIMEOUTS.save)
    return left(A, ending=goal, ordered_at=NOW - 500, **changes)


LOST = Finish(
    "stopped", "so; the state after step 100 is lost, it was not saved by a; the newest checkpoint is of step 90"
)


def silent(seconds: float, connected: bool = True) -> Any:
    return replace(frozen(A, 0, snapshot=HELD, connected=connected), reported_at=NOW - seconds)


@pytest.mark.parametrize("connected", [True, False])
def test_the_end_of_a_job_waits_for_a_silent_node_as_long_as_its_state_is_worth(connected: bool) -> None:
    state = ending(checkpoints=(StateRef(generation=1, step=90),))
    worth = 3.0 + MARGIN
    assert not any(isinstance(each, Finish) for each in planned(view(state, silent(worth - 1, connected), head=1000)))
    assert planned(view(state, silent(worth + 1, connected), head=1000)) == (LOST,)


def test_the_end_of_a_job_waits_for_an_upload_that_goes_on() -> None:
    """The last state is the job's result: the head waits for a node that reports."""
    saving = Saving(ref=HELD, holders=(A,), since=NOW - 400)
    given = view(ending(saving=saving), node(A, phase="drained", snapshot=HELD, reported_at=NOW - 0.1), head=1000)
    assert planned(given) == ()


def test_the_end_of_a_job_says_what_is_lost_with_nodes_that_never_reported_to_a_new_head() -> None:
    goal = Ending(phase="stopped", reason="so", deadline=NOW + TIMEOUTS.save)
    (action,) = planned(view(left(A, B, ending=goal), reporting(C), head=30))
    why = "so; the state after step 120 is lost, because these nodes do not report: a, b; there is no checkpoint"
    assert action == Finish("stopped", why)
    saved = left(A, B, ending=goal, checkpoints=(StateRef(generation=1, step=120),))
    assert planned(view(saved, reporting(C), head=30)) == (Finish("stopped", "so"),)


def test_a_silent_node_takes_no_part_in_saving() -> None:
    """Its part would never come, and the others' parts are no checkpoint without it."""
    away = replace(frozen(B, 0, snapshot=HELD), reported_at=NOW - 60)
    given = view(
        left(A, B),
        node(A, phase="drained", snapshot=HELD, reported_at=NOW - 0.1),
        away,
        machines=(machine(A), machine(B)),
        head=1000,
    )
    assert Save(HELD, (A,)) in planned(given)


def test_what_has_joined_is_remembered() -> None:
    machines, known = (machine(A), unreported(B), machine(C, created=NOW)), {B: MADE, C: MADE}
    found = liveness.now_joined(fleet(view(left(A), machines=machines, joined=known, head=9)))
    assert found == {A: MADE, B: MADE}, "the machine called c is another one now and has not joined"
    assert liveness.now_joined(fleet(view(left(A), machines=(), joined=found, head=9))) is found


def test_work_is_known_after_the_generation_has_ended() -> None:
    state = job(A, B, progress=PROGRESS, reached=120, pace=0.1)
    assert patience.at_stake(apply(state, Start((), ""), NOW)) == pytest.approx(LIVED)


async def test_a_new_head_replaces_the_member_that_does_not_come_back(tmp_path: Path) -> None:
    """Three nodes, one of them frozen, the head killed and made again: no wait for a machine to boot."""
    world = World(tmp_path)
    started = await world.with_machines(min=3, max=3)
    names = ("p-0", "p-1", "p-2")
    for name in names:
        world.receive(name, job=started)
    await world.turn()
    at = time.time() - 60
    worker = Worker(
        rank=0, pid=1, step=120, base=0, stepped_at=at, phases=(at - 15, at - 14, at - 13, at - 12, at - 11)
    )
    for name in names:
        world.receive(name, job=started, phase="running", generation=1, workers=(worker,), snapshot=HELD.model_dump())
    await world.turn()
    assert Record.model_validate_json(world.store.get(replaced_key("c"))).joined.keys() == set(names)

    await world.head.journal.replace(world.written(started).model_copy(update={"ordered_at": time.time() - 60}))

    head = world.new_head()
    head.presence.began = head.presence.awake_since = time.time() - MARGIN - 1
    await head.fleet.look()
    for name in names[:2]:
        world.receive(name, job=started, phase="running", generation=1, workers=(worker,), snapshot=HELD.model_dump())
    await world.turn()
    assert head.job is not None
    assert (head.job.current, head.job.interruptions[-1].node) == (None, "p-2")
    for name in names[:2]:
        world.receive(name, job=started, snapshot=HELD.model_dump())
    await world.turn(2)
    await head.replacements.answered()
    assert world.recreated == ["p-2"]
