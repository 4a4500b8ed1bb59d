"""A job with fewer machines than it needs gives them back, and asks for them again: data, and the head's world."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spotrun.head.allocation.assignment import Assignment, job_view
from spotrun.head.allocation.demand import wish
from spotrun.head.capacity.observe import situation
from spotrun.head.capacity.place import place
from spotrun.head.capacity.sizes import Pool
from spotrun.head.fleet.classify import classify
from spotrun.head.fleet.record import Recreate
from spotrun.head.job_state import Ending, Idle, JobState, Progress, SetIdle, Start, apply
from spotrun.head.planner import idle
from spotrun.head.status import conditions
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import FleetView, Machine, View
from spotrun.spec import ClusterSpec
from spotrun.wire import StateRef, Trouble
from tests.head.views import NOW, job, member, node, notice, planned, spare, spec, wanted
from tests.head.views import view as view_of
from tests.head.world import World

A, B, C = "a", "b", "c"
HOLD = 600.0
HELD = StateRef(generation=1, step=40)
TWO = spec(nodes=2)


def machine(name: str, **changes: Any) -> Machine:
    values = {"name": name, "pool": "p", "state": "running", "created": NOW - 5000, "answered": NOW - 1}
    return Machine(**{**values, **changes})


def short(seconds: float = HOLD + 1, **changes: Any) -> JobState:
    """A job that has waited for so long with too few machines."""
    return job(**{"spec": TWO, "idle": Idle(since=NOW - seconds), "progress": Progress(), **changes})


def view(state: JobState, *nodes: Any, **changes: Any) -> View:
    """Machines are those of the nodes, if nothing else is said."""
    return view_of(state, *nodes, **{"machines": tuple(machine(node.name) for node in nodes), **changes})


def reporting(name: str, **changes: Any) -> Any:
    return spare(name, **{"reported_at": NOW - 0.1, **changes})


def trouble(seconds: float) -> Trouble:
    """Uploads have failed for so long."""
    return Trouble(step=40, message="the disk is full", since=NOW - seconds, at=NOW, tries=9)


SAFE = ClusterSpec.model_validate(
    {
        "name": "c",
        "cloud": "local",
        "pools": [
            {"name": "p", "zone": "local-a", "max": 2},
            {"name": "od", "zone": "local-a", "max": 2, "market": "on-demand"},
        ],
    }
)
GIVEN = Idle(since=NOW - HOLD - 1, next=NOW + TIMEOUTS.probe_pause)
BACK = SetIdle(GIVEN, "1 of the 2 machines that it needs, for 10 min: they are given back; next try in 60 s")
RESTING = GIVEN.model_copy(update={"next": NOW - 1})
ASKED = RESTING.model_copy(update={"tries": 3, "until": NOW + 1})
CASES: dict[str, tuple[View, tuple[SetIdle, ...]]] = {
    "a job has waited for hold_idle: its machines are given back": (view(short(), reporting(A)), (BACK,)),
    "a job has waited for less than hold_idle: it keeps its machines": (view(short(HOLD - 1), reporting(A)), ()),
    "a job with hold_idle of 60 s has waited for 31 s: it keeps its machines": (
        view(short(31, spec=spec(nodes=2, hold_idle=60)), reporting(A)),
        (),
    ),
    "the waiting machines' state is not in the bucket: the job keeps them": (
        view(short(), reporting(A, snapshot=HELD)),
        (),
    ),
    "the upload of the waiting machines' state has failed for long: they are given back": (
        view(short(reached=40, pace=1.0), reporting(A, snapshot=HELD, trouble=trouble(61))),
        (BACK,),
    ),
    "the upload of the waiting machines' state fails: the job keeps them": (
        view(short(reached=40, pace=1.0), reporting(A, snapshot=HELD, trouble=trouble(59))),
        (),
    ),
    "the upload has failed for long, but the bucket is back only now: the job keeps them": (
        view(short(reached=40, pace=1.0), reporting(A, snapshot=HELD, trouble=trouble(61)), able_since=NOW - 59),
        (),
    ),
    "the waiting machines' state is in the bucket: they are given back": (
        view(short(checkpoints=(HELD,)), reporting(A, snapshot=HELD)),
        (BACK,),
    ),
    "a silent machine holds much work: the job keeps the machines": (
        view(
            short(reached=10**5, pace=0.1),
            reporting(A),
            reporting(B, snapshot=HELD, reported_at=NOW - 90, cloud="stopping"),
        ),
        (),
    ),
    "a silent machine holds little work: the machines are given back": (
        view(
            short(reached=100, pace=0.1),
            *(reporting(A), reporting(B, snapshot=HELD, reported_at=NOW - 90, connected=False, cloud="stopping")),
            machines=(machine(A),),
        ),
        (BACK,),
    ),
    "the cloud does not answer: nothing is done": (view(short(), reporting(A), machines=(), listed=False), ()),
    "a new head has no report of the last members yet": (
        view(short(last=(member(A), member(B))), reporting(A), awake_since=NOW - 1),
        (),
    ),
    "the machines were given back and the next try is not due: nothing is done": (view(short(idle=GIVEN)), ()),
    "the next try is due: the cloud is asked again": (
        view(short(idle=RESTING)),
        (
            SetIdle(
                RESTING.model_copy(update={"tries": 1, "until": NOW + TIMEOUTS.probe}),
                "asking the cloud for machines again, for 2 min (try 1)",
            ),
        ),
    ),
    "the cloud was asked again and the try still lasts: nothing is done": (
        view(short(idle=RESTING.model_copy(update={"tries": 3, "until": NOW + 1})), reporting(A)),
        (),
    ),
    "the third try failed: the pause grows to 8 minutes": (
        view(short(idle=RESTING.model_copy(update={"tries": 3, "until": NOW - 1})), reporting(A)),
        (
            SetIdle(
                RESTING.model_copy(update={"tries": 3, "next": NOW + 8 * TIMEOUTS.probe_pause}),
                "still 1 of 2 machines: given back; next try in 8 min",
            ),
        ),
    ),
    "the thirtieth try failed: the pause is not longer than 30 minutes": (
        view(short(idle=RESTING.model_copy(update={"tries": 30, "until": NOW - 1}))),
        (
            SetIdle(
                RESTING.model_copy(update={"tries": 30, "next": NOW + TIMEOUTS.probe_pause_most}),
                "still 0 of 2 machines: given back; next try in 30 min",
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_decide(name: str) -> None:
    given, expected = CASES[name]
    assert idle.decide(given) == expected
    assert tuple(each for each in planned(given) if isinstance(each, SetIdle)) == expected


SINCE = Idle(since=NOW)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (view(job(spec=TWO), reporting(A)), SINCE),
        (view(short(), reporting(A)), short().idle),
        (view(job(spec=TWO)), None),
        (view(short()), short().idle),
        (view(short(), reporting(A), reporting(B)), None),
        (view(short(), machines=(machine(A), machine(B, state="provisioning", answered=0.0))), None),
        (view(short(), machines=(machine(A), machine(B, state="stopping"))), short().idle),
        (view(short(), reporting(A), reporting(B), machines=(), listed=False), short().idle),
        (view(job(A, B, spec=TWO, idle=GIVEN)), None),
        (view(short(stopping="so"), reporting(A)), None),
        (view(short(idle=RESTING), reporting(A)), RESTING),
        (view(short(idle=RESTING), reporting(A), reporting(B)), None),
    ],
    ids=[
        "one of two",
        "still",
        "none: that costs nothing",
        "none any more",
        "enough",
        "enough, once they have booted",
        "one is going",
        "the cloud does not answer",
        "it trains",
        "it stops",
        "asked again",
        "asked again, and there are enough",
    ],
)
def test_since_when_there_are_too_few(given: View, expected: Idle | None) -> None:
    assert idle.observe(given.job, given).idle == expected


def test_no_machine_is_asked_for_while_they_are_given_back() -> None:
    cluster = ClusterSpec.model_validate(
        {"name": "c", "cloud": "local", "pools": [{"name": "p", "zone": "local-a", "max": 4}]}
    )

    def machines(job: JobState) -> int:
        fleet = FleetView(now=NOW, jobs=(job,), nodes=())
        found = wish(fleet, cluster, {}, place(situation(fleet, cluster, ())))
        return sum(need.machines for need in found.needs)

    assert machines(short()) == 2
    assert machines(short(idle=GIVEN)) == 0
    assert machines(short(idle=RESTING.model_copy(update={"until": NOW + 1}))) == 2
    assert machines(job(A, B, spec=TWO, idle=GIVEN)) == 2


def test_the_end_of_a_job_has_a_limit_of_its_own() -> None:
    ending = Ending(phase="succeeded", deadline=NOW + 1000, state=HELD)
    state = job(spec=TWO, ending=ending, reached=40, pace=1.0, progress=Progress(), trained=(A,))
    node = reporting(A, snapshot=HELD, trouble=trouble(900))
    fleet = FleetView(now=NOW, jobs=(state,), nodes=(node,), machines=(machine(A),))
    assert wish(fleet, SAFE, {}, {}).keep == {A}


def test_a_job_rests_again_when_no_machine_can_meet_its_deadline() -> None:
    """It has spot machines too few, and on-demand machines cannot be had."""
    state = short(7000, spec=spec(nodes=2, deadline=7000.0, work=HOUR), submitted=NOW - 7000)
    nodes = (reporting(A, pool="p"),)
    pools = [Pool("p", 2, 2, {A: "ready"}, "short"), Pool("od", 2, 0, {}, "short")]
    fleet = FleetView(now=NOW, jobs=(state,), nodes=nodes, machines=(machine(A),))
    placed = place(situation(fleet, SAFE, pools, {"p": 1.0, "od": 3.0}))[state.id]
    assert idle.decide(view(state, *nodes, rest_until=placed.rest_until)) != ()


@pytest.mark.parametrize(("seconds", "kept"), [(59, {A}), (61, set())])
def test_a_paused_job_does_not_keep_a_machine_for_ever(seconds: float, kept: set[str]) -> None:
    """Its state is worth 60 s, and cannot be uploaded."""
    state = job(spec=TWO, paused="a person", reached=40, pace=1.0, progress=Progress(), trained=(A,))
    node = reporting(A, snapshot=HELD, trouble=trouble(seconds))
    fleet = FleetView(now=NOW, jobs=(state,), nodes=(node,), machines=(machine(A),))
    assert wish(fleet, SAFE, {}, {}).keep == kept


def test_what_is_given_back_is_not_replaced() -> None:
    silent = reporting(A, reported_at=NOW - 400, connected=False)
    action = Recreate(node=A, pool="p", created=NOW - 5000)
    assert planned(view(short(10), silent)) == (action,)
    assert planned(view(short(idle=GIVEN), silent)) == ()
    assert not wanted(view(short(idle=GIVEN), silent), action)


def test_a_machine_that_trains_another_job_does_not_keep_those_of_a_waiting_job() -> None:
    """The waiting job has lost much work, for which nobody waits: no machine holds it."""
    state, other = short(reached=10**5, pace=0.1), job(B, id="k")
    made = {A: NOW - 5000, B: NOW - 5000}
    nodes, machines = (reporting(A), node(B, job="k")), (machine(A), machine(B))
    fleet = FleetView(now=NOW, jobs=(state, other), nodes=nodes, machines=machines, joined=made)
    mine = {state.id: {A: (0,)}}
    assert idle.decide(job_view(fleet, state, Assignment(mine, mine, mine), classify(fleet))) == (BACK,)


def test_a_job_that_has_enough_begins_whatever_was_before() -> None:
    actions = planned(view(short(idle=RESTING, generation=1), reporting(A), reporting(B)))
    assert any(isinstance(each, Start) for each in actions)


def test_a_noticed_machine_is_no_reason_to_begin() -> None:
    assert not any(
        isinstance(each, Start) for each in planned(view(short(), reporting(A), reporting(B, notice=notice())))
    )


def test_years_of_waiting_cost_a_few_minutes_a_day() -> None:
    """One machine can be had, two are needed: how long it is there, and how often the cloud is asked."""
    state, there, asked = job(spec=TWO, submitted=NOW), 0.0, []
    day, tick = 86400, 5
    for now in range(int(NOW), int(NOW) + 2 * day, tick):
        held = not state.resting
        there += tick if held else 0
        given = replace(view(state, *([reporting(A, reported_at=float(now))] if held else [])), now=float(now))
        state = idle.observe(state, given)
        for action in idle.decide(replace(given, job=state)):
            state = apply(state, action, now)
            asked += [now] if action.idle.until else []
    assert there < HOLD + len(asked) * (TIMEOUTS.probe + 2 * tick) + tick
    assert len(asked) < 2 * day / TIMEOUTS.probe_pause_most + 10
    assert len(asked) > day / TIMEOUTS.probe_pause_most


HOUR = 3600.0  # seconds of work


def first_asked(deadline: float, rests: bool = True) -> tuple[float, float]:
    """When a job asks for on-demand machines, in seconds, and how long its spot machine was there. One is too few."""
    wanted = spec(nodes=2, deadline=deadline, work=HOUR)
    state, there, tick, before = job(spec=wanted, submitted=NOW, started=None, progress=Progress()), 0.0, 20, None
    prices = {"p": 1.0, "od": 3.0}
    for passed in range(0, int(deadline), tick):
        now, held = NOW + passed, not state.resting
        there += tick if held else 0
        nodes = (reporting(A, pool="p", reported_at=now),) if held else ()
        pools = [Pool("p", 2, 2 * held, {A: "ready"} if held else {}, "short" if held else "open"), Pool("od", 2, 0)]
        fleet = FleetView(now=now, jobs=(state,), nodes=nodes, machines=(machine(A),) if held else ())
        before = place(situation(fleet, SAFE, pools, prices), before)
        placed = before.get(state.id)
        if placed and any("od" in need.pools for need in placed.needs):
            return passed, there
        given = view(state, *nodes, now=now, rest_until=placed.rest_until if placed else None)
        state = idle.observe(state, given)
        for action in idle.decide(replace(given, job=state)) if rests else ():
            state = apply(state, action, now)
    raise AssertionError("no machine is asked for before the deadline")


@pytest.mark.parametrize("deadline", [7800.0, 11600.0, 25200.0])
def test_a_job_with_a_deadline_does_not_rest_through_its_last_chance(deadline: float) -> None:
    asked, there = first_asked(deadline)
    always, _ = first_asked(deadline, rests=False)
    assert asked <= always + 2 * 20
    assert there < asked, "it has rested"


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (short(60), "waiting with 1 of 2 machines; they are given back in 9 min"),
        (short(idle=GIVEN), "waiting, machines given back; next try in 60 s"),
        (
            short(idle=RESTING.model_copy(update={"until": NOW + 90})),
            "waiting, asking the cloud again: 1 of 2 machines, for 90 s more",
        ),
    ],
    ids=["held", "given back", "asked again"],
)
def test_what_operators_read(state: JobState, text: str) -> None:
    assert conditions(view(state, reporting(A))) == [{"since": state.idle.since if state.idle else None, "text": text}]


async def test_pools_are_emptied_and_asked_again_also_by_a_new_head(tmp_path: Path) -> None:
    """Room for one, two are needed; later there is room for two."""
    world = World(tmp_path)
    world.cloud.room = {"p": 1, "q": 0}
    name = await world.with_machines(min=2, max=2)
    world.receive("p-0", job=name)
    await world.turn()
    assert (world.written(name).idle is not None, sum(world.cloud.size.values()) >= 2) == (True, True)

    await shifted(world, name, since=-HOLD - 1)
    world.receive("p-0", job=name)
    await world.turn()
    await world.look()
    assert set(world.cloud.size.values()) == {0}
    assert "they are given back; next try in 60 s" in world.events()[-1]["text"]

    await world.turn()
    await world.look()
    assert set(world.cloud.size.values()) == {0}, "nothing before it is time"

    await shifted(world, name, next=-TIMEOUTS.probe_pause - 1)
    world.cloud.room = {"p": 2}
    await world.turn()
    await world.look()
    await world.look()
    assert world.cloud.size["p"] == 2
    for each in ("p-0", "p-1"):
        world.receive(each, job=name)
    await world.turn(2)
    assert world.written(name).current is not None
    assert world.written(name).idle is None


async def shifted(world: World, name: str, **seconds: float) -> None:
    """A new head, to which the times of the job's wait are so much earlier."""
    state = world.written(name)
    assert state.idle is not None
    times = {key: getattr(state.idle, key) + value for key, value in seconds.items()}
    await world.head.journal.replace(state.model_copy(update={"idle": state.idle.model_copy(update=times)}))
    head = world.new_head()
    head.presence.began = head.presence.awake_since = time.time() - 100
    await head.fleet.look()
