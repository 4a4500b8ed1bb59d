"""Machines that never serve, as data: what is asked of the cloud, what counts, what operators read."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from spotrun.head.allocation.demand import Wish
from spotrun.head.capacity.sizes import Need, Pool
from spotrun.head.fleet import classify, decide, record
from spotrun.head.fleet.record import LIMIT, Recreate, Replacement
from spotrun.head.job_state import Ending, JobState
from spotrun.head.planner import idle
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import Machine
from spotrun.node.health import gate
from spotrun.wire import StateRef
from tests.head.views import NOW as EARLIER
from tests.head.views import Seen, fleet, fleet_plan, job, member, node, planned, spare
from tests.head.views import view as view_of

ALONE = TIMEOUTS.alone
REJOIN = TIMEOUTS.rejoin
AGAIN = TIMEOUTS.retry
AGAIN_MOST = TIMEOUTS.retry_most
BOOT_TIMEOUT = TIMEOUTS.boot
BOOT_TIMEOUT_METAL = TIMEOUTS.boot_metal
GRACE = TIMEOUTS.unfit
SAVING = TIMEOUTS.unfit_holder
WINDOW = TIMEOUTS.replacement_window
NOW = EARLIER + 10 * WINDOW
A, B, C = "a", "b", "c"
MADE = NOW - 5000
LATE = NOW - BOOT_TIMEOUT - 1
NO_AGENT = "its agent has not joined within 15 minutes"
UNSURE = "it could not tell within 15 minutes whether it is fit"
WHY = "a2-megagpu-16g has 16 GPUs, but nvidia-smi lists 15"


def machine(name: str, **changes: Any) -> Machine:
    """One that has been there for a while and whose agent has joined."""
    values = {"name": name, "pool": "p", "state": "running", "created": MADE, "answered": NOW - 1}
    return Machine(**{**values, **changes})


def away(name: str) -> Machine:
    """One whose zone does not answer."""
    return machine(name, state="unknown")


def booting(name: str, **changes: Any) -> Machine:
    return machine(name, **{"answered": 0.0, **changes})


def unfit(name: str, **changes: Any) -> Any:
    """One that has said so for long enough."""
    outer = {"reported_at": NOW - 0.1, "since": NOW - GRACE, **changes}
    return spare(name, phase="unfit", job=None, unfit=(WHY,), store="", **outer)


HELD = StateRef(generation=1, step=40)


def holder(name: str, **changes: Any) -> Any:
    """One that is unfit and has the state of the newest generation in memory."""
    outer = {"reported_at": NOW - 0.1, "since": NOW - GRACE, **changes}
    return spare(name, phase="unfit", unfit=(WHY,), store="", snapshot=HELD, **outer)


def checking(name: str, since: float, **changes: Any) -> Any:
    return spare(name, phase="checking", job=None, store="", **{"reported_at": NOW - 0.1, "since": since, **changes})


def was_replaced(*ages: float, pool: str = "p", name: str = "x", **changes: Any) -> tuple[Replacement, ...]:
    """Machines of one name that were replaced so long ago, each made just before."""
    values = {"node": name, "pool": pool, "why": WHY}
    return tuple(Replacement(**{**values, "at": NOW - age, "created": NOW - age - 1, **changes}) for age in ages)


def view(state: JobState, *nodes: Any, machines: tuple[Machine, ...], **changes: Any) -> Seen:
    return view_of(state, *nodes, now=NOW, machines=machines, **changes)


def waiting(**changes: Any) -> JobState:
    return job(**changes)


def left(*members: str, **changes: Any) -> JobState:
    """A job that waits for machines, its last generation having been these."""
    values = {"generation": 1, "last": tuple(map(member, members)), "ordered_at": NOW - 2000, **changes}
    return job(**values)


def begun(at: float) -> dict[str, float]:
    """A head that began then and has had no gap."""
    return {"began": at, "awake_since": at}


def states(view: Seen) -> dict[str, str]:
    return {name: each.state for name, each in classify.classify(fleet(view)).items()}


BAD = Recreate(node=A, pool="p", why=WHY, created=MADE)
TWO = (booting(A), booting(B))
CASES: dict[str, tuple[Seen, tuple[Recreate, ...]]] = {
    "one that is unfit, in a zone that does not answer": (
        view(waiting(), unfit(A), machines=(machine(A, state="unknown"),)),
        (),
    ),
    "one that is unfit": (view(waiting(), unfit(A), machines=(machine(A),)), (BAD,)),
    "one that is fit": (view(waiting(), spare(A, reported_at=NOW), machines=(machine(A),)), ()),
    "one that is unfit while others train": (
        view(
            job(B, C),
            unfit(A),
            node(B, reported_at=NOW),
            node(C, reported_at=NOW),
            machines=tuple(map(machine, (A, B, C))),
        ),
        (BAD,),
    ),
    "it has not said so for long: its agent looks again": (
        view(waiting(), unfit(A, since=NOW - GRACE + 1), machines=(machine(A),)),
        (),
    ),
    "it is disconnected: that was its last word": (
        view(waiting(), unfit(A, connected=False), machines=(machine(A),)),
        (BAD,),
    ),
    "it alone holds the state, and saves it": (view(left(A), holder(A), machines=(machine(A),)), ()),
    "it has not saved it in all that time": (
        view(left(A), holder(A, since=NOW - SAVING), machines=(machine(A),)),
        (BAD,),
    ),
    "the state that it held is in the bucket": (
        view(left(A, checkpoints=(HELD,)), holder(A), machines=(machine(A),)),
        (BAD,),
    ),
    "another holds the state too": (
        view(left(A, B), holder(A), node(B, reported_at=NOW, snapshot=HELD), machines=(machine(A), machine(B))),
        (BAD,),
    ),
    "a node that has not trained the job says that it holds a newer state": (
        view(
            left(A),
            holder(A),
            node(B, reported_at=NOW, snapshot=StateRef(generation=9, step=1)),
            machines=(machine(A), machine(B)),
        ),
        (),
    ),
    "it is going already": (view(waiting(), unfit(A), machines=(machine(A, state="stopping"),)), ()),
    "the cloud cannot be asked": (view(waiting(), unfit(A), machines=()), ()),
    "it was asked for a moment ago": (
        view(waiting(), unfit(A), machines=(machine(A),), replaced=was_replaced(AGAIN - 1, name=A, created=MADE)),
        (),
    ),
    "it was asked for, and nothing came of it": (
        view(waiting(), unfit(A), machines=(machine(A),), replaced=was_replaced(AGAIN + 1, name=A, created=MADE)),
        (BAD,),
    ),
    "the same, several times": (
        view(
            waiting(),
            unfit(A),
            machines=(machine(A),),
            replaced=was_replaced(2 * AGAIN - 1, name=A, created=MADE, tries=2),
        ),
        (),
    ),
    "its successor is unfit too": (
        view(waiting(), unfit(A), machines=(machine(A, created=NOW - 20),), replaced=was_replaced(30, name=A)),
        (BAD.replace(created=NOW - 20),),
    ),
    "the limit": (view(waiting(), unfit(A), machines=(machine(A),), replaced=was_replaced(900, 600, 300)), ()),
    "the limit is each pool's own": (
        view(waiting(), unfit(A), machines=(machine(A),), replaced=was_replaced(900, 600, 300, pool="q")),
        (BAD,),
    ),
    "the limit is for an hour": (
        view(waiting(), unfit(A), machines=(machine(A),), replaced=was_replaced(WINDOW + 1, 600, 300)),
        (BAD,),
    ),
    "the limit is not for those that the cloud did not replace": (
        view(
            waiting(),
            unfit(A),
            machines=(machine(A),),
            replaced=(*was_replaced(900, 600), *was_replaced(300, refused="Rate exceeded")),
        ),
        (BAD,),
    ),
    "nor for those that had served": (
        view(waiting(), unfit(A), machines=(machine(A),), replaced=was_replaced(900, 600, 300, why="")),
        (BAD,),
    ),
    "nor for the same machine again": (
        view(
            waiting(),
            unfit(A),
            machines=(machine(A),),
            replaced=(*was_replaced(900, 600), *was_replaced(300, name=A, created=MADE)),
        ),
        (BAD,),
    ),
    "many at once: no more than the limit": (
        view(waiting(), *map(unfit, "abcde"), machines=tuple(map(machine, "abcde"))),
        tuple(BAD.replace(node=name) for name in "abcde"[:LIMIT]),
    ),
    "not while the last state goes into the bucket": (
        view(waiting(ending=Ending(phase="succeeded")), unfit(A), machines=(machine(A),)),
        (),
    ),
    "no agent, for too long": (
        view(waiting(), spare(B, reported_at=NOW), machines=(booting(A, created=LATE), machine(B))),
        (Recreate(node=A, pool="p", why=NO_AGENT, created=LATE),),
    ),
    "no agent yet": (
        view(waiting(), spare(B, reported_at=NOW), machines=(booting(A, created=LATE + 2), machine(B))),
        (),
    ),
    "no agent, and no other either: it may be the head that is cut off": (
        view(waiting(), machines=(booting(A, created=LATE - ALONE + 2),)),
        (),
    ),
    "the same, for longer: the first machine may be no good": (
        view(waiting(), machines=(booting(A, created=LATE - ALONE),)),
        (Recreate(node=A, pool="p", why=NO_AGENT, created=LATE - ALONE),),
    ),
    "no agent, for too long, while long turns keep the head from its picture": (
        view(
            waiting(),
            spare(B, reported_at=NOW),
            machines=(booting(A, created=LATE), machine(B)),
            began=LATE,
            awake_since=NOW - REJOIN - 1,
        ),
        (Recreate(node=A, pool="p", why=NO_AGENT, created=LATE),),
    ),
    "the head has just stood still: the agent may have joined meanwhile": (
        view(
            waiting(),
            spare(B, reported_at=NOW),
            machines=(booting(A, created=LATE), machine(B)),
            began=LATE,
            awake_since=NOW - REJOIN + 1,
        ),
        (),
    ),
    "the same, and none reports: it may be cut off": (
        view(
            waiting(),
            machines=(booting(A, created=LATE - ALONE),),
            began=LATE - ALONE,
            awake_since=NOW - ALONE + 1,
        ),
        (),
    ),
    "bare metal takes longer": (
        view(waiting(), spare(B, reported_at=NOW), machines=(booting(A, created=LATE, kind="g4dn.metal"), machine(B))),
        (),
    ),
    "no agent, and the machine is still being made": (
        view(
            waiting(), spare(B, reported_at=NOW), machines=(booting(A, created=LATE, state="provisioning"), machine(B))
        ),
        (),
    ),
    "no agent has reported since this head began": (
        view(waiting(), spare(B, reported_at=NOW), machines=(booting(A), machine(B)), **begun(NOW - 60)),
        (),
    ),
    "a predecessor of the same name had reported": (
        view(
            waiting(),
            spare(A, reported_at=LATE - 100, cloud="gone"),
            machines=(booting(A, created=LATE, answered=LATE - 100),),
        ),
        (Recreate(node=A, pool="p", why=NO_AGENT, created=LATE),),
    ),
    "it is still being checked": (
        view(waiting(), checking(A, LATE + 2), machines=(booting(A, created=LATE + 2),)),
        (),
    ),
    "it has been checked for too long": (
        view(waiting(), checking(A, NOW - 100), machines=(booting(A, created=LATE),)),
        (Recreate(node=A, pool="p", why=UNSURE, created=LATE),),
    ),
    "it is checked again, because its agent began again": (
        view(waiting(), checking(A, NOW - 100), machines=(machine(A, answered=LATE + 2),)),
        (),
    ),
    "the same, for too long": (
        view(waiting(), checking(A, LATE), machines=(machine(A, answered=LATE),)),
        (Recreate(node=A, pool="p", why=UNSURE, created=MADE),),
    ),
    "it fell silent while it was checked: it has never served, so it counts": (
        view(
            waiting(), checking(A, LATE, reported_at=NOW - 600, connected=False), machines=(booting(A, created=LATE),)
        ),
        (Recreate(node=A, pool="p", why=NO_AGENT, created=LATE),),
    ),
    "a member that has never reported to this head may train on": (
        view(job(A, B, ordered_at=NOW - 100), machines=TWO, **begun(NOW - 2 * TIMEOUTS.last_holder)),
        (),
    ),
    "a member of the last generation that does not report has served: its replacement is not limited": (
        view(left(A, B), spare(C, reported_at=NOW), machines=(*TWO, machine(C)), **begun(LATE - TIMEOUTS.last_holder)),
        (Recreate(node=A, pool="p", created=MADE), Recreate(node=B, pool="p", created=MADE)),
    ),
    "a machine whose agent reported to an earlier head has served: its replacement is not limited": (
        view(waiting(), spare(C, reported_at=NOW), machines=(booting(A), machine(C)), joined={A: MADE}, **begun(LATE)),
        (Recreate(node=A, pool="p", created=MADE),),
    ),
    "a machine made since the generation ended holds nothing": (
        view(
            left(A, B),
            spare(C, reported_at=NOW),
            machines=(booting(A, created=LATE), machine(C)),
            **begun(LATE),
        ),
        (Recreate(node=A, pool="p", why=NO_AGENT, created=LATE),),
    ),
    "a machine that has fallen silent has served: its replacement is not limited": (
        view(waiting(), spare(A, reported_at=NOW - 5000, connected=False), machines=(machine(A),)),
        (Recreate(node=A, pool="p", created=MADE),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_replacements(name: str) -> None:
    given, expected = CASES[name]
    assert fleet_plan(given).recreate == expected


def test_the_planner_asks_for_them() -> None:
    assert planned(view(waiting(), unfit(A), machines=(machine(A),))) == (BAD,)


def test_the_planner_leaves_those_alone_that_have_not_served() -> None:
    """They would not count against the limit."""
    silent = checking(A, NOW - 300, reported_at=NOW - 200, connected=False)
    machines = (booting(A, created=NOW - 600), machine(B))
    assert planned(view(waiting(), silent, spare(B, reported_at=NOW), machines=machines)) == ()


def test_an_unfit_one_that_falls_silent_is_replaced_once_and_counts() -> None:
    silent = unfit(A, reported_at=NOW - 200, connected=False)
    assert planned(view(waiting(), silent, spare(B, reported_at=NOW), machines=(machine(A), machine(B)))) == (BAD,)


def test_one_that_served_and_was_lost_is_asked_about_now_and_then() -> None:
    silent = spare(A, reported_at=NOW - 400, connected=False)
    action = Recreate(node=A, pool="p", created=MADE)
    given = view(waiting(), silent, machines=(machine(A, answered=NOW - 400),))
    assert planned(given) == (action,)
    given = replace(given, replaced=record.ask((), action, NOW))
    assert planned(given) == ()
    assert planned(replace(given, now=NOW + AGAIN)) == (action,)


def test_the_head_waits_until_the_agent_has_looked_again() -> None:
    assert GRACE > gate.AGAIN


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("", BOOT_TIMEOUT), ("a3-highgpu-8g", BOOT_TIMEOUT), ("g4dn.metal", BOOT_TIMEOUT_METAL)]
    + [(kind, BOOT_TIMEOUT_METAL) for kind in ("c7i.metal-24xl", "c3-standard-192-metal")],
)
def test_boot_timeout(kind: str, expected: float) -> None:
    assert classify.boot_timeout(kind) == expected


def asking(seconds: int, refusal: str = "", made_anew: bool = True) -> tuple[list[float], Seen]:
    """When the cloud is asked, with one machine that is always unfit; and what is known at the end."""
    given, times = view(waiting(), machines=()), []
    for now in range(int(NOW), int(NOW) + seconds, 5):
        created = max((each.at for each in given.replaced), default=NOW - 100) + 1 if made_anew else NOW - 100
        nodes = (unfit(A, reported_at=float(now)),)
        given = replace(given, now=float(now), nodes=nodes, machines=(machine(A, created=created),))
        for action in planned(given):
            assert isinstance(action, Recreate)
            times.append(now - NOW)
            replaced = record.ask(given.replaced, action, now)
            given = replace(given, replaced=record.answered(replaced, action, refusal, given.now))
    return times, given


def test_what_was_asked_for_is_counted_until_the_limit_and_no_further() -> None:
    """Each machine made in another's place is unfit as well."""
    times, given = asking(int(WINDOW) - 100)
    assert len(times) == LIMIT
    assert record.exhausted(given.replaced, given.now) == {"p"}


def test_a_cloud_that_refuses_is_asked_ever_more_rarely_and_counts_nothing() -> None:
    times, given = asking(int(WINDOW) - 100, "Rate exceeded", made_anew=False)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps == [AGAIN, 2 * AGAIN, 4 * AGAIN, 8 * AGAIN, AGAIN_MOST, AGAIN_MOST]
    assert record.exhausted(given.replaced, given.now) == set()
    assert len(given.replaced) == 1
    said = f"a takes no job: {WHY}; the cloud does not replace it: Rate exceeded"
    assert fleet_plan(given).reasons == {"p": said}


def test_records_are_not_kept_without_end() -> None:
    replaced: tuple[Replacement, ...] = ()
    for number in range(1000):
        replaced = record.ask(replaced, Recreate(node=A, pool="p", why=WHY, created=NOW + number), NOW + number * 60)
    assert len(replaced) == WINDOW / 60


def test_others_stand_in_only_for_machines_that_are_given_up() -> None:
    """A machine that stands in becomes a member, and stays, perhaps at a higher price."""
    fresh = view(waiting(), unfit(A), machines=(machine(A), machine(B)), replaced=was_replaced(1, name=A, created=MADE))
    assert states(fresh)[A] == "replacing"
    spent = replace(fresh, replaced=was_replaced(900, 600, 300))
    assert states(spent)[A] == "abandoned"
    late = replace(fresh, nodes=(unfit(A, since=NOW - BOOT_TIMEOUT),))
    assert states(late)[A] == "abandoned", "nothing came of it"


def test_nobody_comes_in_the_place_of_one_in_a_zone_that_does_not_answer() -> None:
    assert states(view(waiting(), unfit(A), machines=(machine(A, state="unknown"),))) == {A: "abandoned"}


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (view(waiting(), spare(A, reported_at=NOW), machines=(away(A),)), set()),
        (view(waiting(), spare(A, reported_at=NOW - 1, connected=False), machines=(away(A),)), set()),
        (view(waiting(), spare(A, reported_at=NOW - 60), machines=(away(A), away(B))), {A, B}),
        (view(job(A, B), node(A, reported_at=NOW - 60), machines=(away(A), away(B), away(C))), {C}),
        (view(left(A), machines=(away(A),)), {A}),
        (view(left(A), machines=(away(A),), awake_since=NOW - 1), set()),
    ],
    ids=[
        "it reports",
        "it reported a moment ago",
        "it is silent",
        "a member is silent",
        "a last member is silent",
        "a new head",
    ],
)
def test_a_silent_machine_in_a_zone_that_does_not_answer_is_unknown(seen: Seen, expected: set[str]) -> None:
    assert {name for name, state in states(seen).items() if state == "unknown"} == expected


def test_an_unfit_silent_machine_in_a_zone_that_does_not_answer_is_not_usable() -> None:
    seen = view(waiting(), unfit(A, reported_at=NOW - 60), machines=(away(A), machine(B)))
    assert states(seen)[A] == "unknown"
    assert idle.usable(seen) == {B}


@pytest.mark.parametrize("leaving", [booting(A, state="terminated"), machine(A, state="stopping")])
def test_an_unproven_machine_that_leaves_does_not_count_beside_an_abandoned_one(leaving: Machine) -> None:
    abandoned = checking(C, LATE - 5000)
    machines = (leaving, machine(B, created=LATE - 5000), machine(C, created=LATE - 5000, answered=0.0))
    seen = view(waiting(), spare(B, reported_at=NOW), abandoned, machines=machines, **begun(MADE - 5000))
    assert states(seen)[C] == "abandoned"
    pools = (Pool("p", 3, 3, dict.fromkeys("abc", "ready")), Pool("q", 3, 0))
    sizes = fleet_plan(seen, pools, 3).resize
    assert sizes == {"q": 2 if not leaving.joined else 1}


@pytest.mark.parametrize(("supply", "expected"), [("open", {}), ("short", {"q": 1})])
def test_a_machine_that_the_cloud_ends_does_not_count_in_a_pool_that_is_short(
    supply: Any, expected: dict[str, int]
) -> None:
    machines = (machine(A), machine(B), machine(C, state="stopping"))
    seen = view(waiting(), spare(A, reported_at=NOW), spare(B, reported_at=NOW), machines=machines)
    pools = (Pool("p", 3, 3, dict.fromkeys("abc", "ready"), supply), Pool("q", 3, 0))
    assert fleet_plan(seen, pools, 3).resize == expected


def test_a_machine_is_not_replaced_because_its_predecessor_retired() -> None:
    predecessor = replace(spare(A, reported_at=NOW - 2150, since=NOW - 3000, cloud="gone"), due=NOW + 60)
    seen = view(waiting(), predecessor, machines=(machine(A, created=NOW - 200, answered=NOW - 2150),))
    assert states(seen)[A] == "booting"


def test_machines_that_have_not_shown_what_they_are_good_for() -> None:
    nodes = (checking(A, NOW - 10), unfit(B, since=NOW - 1), spare(C, reported_at=NOW))
    machines = (booting(A, created=NOW - 60), machine(B), machine(C), booting("d", created=NOW - 60))
    found = states(view(waiting(), *nodes, machines=machines))
    assert found == {A: "checking", B: "unfit", C: "ready", "d": "booting"}


SPENT = was_replaced(900, 600, 300)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (view(waiting(), unfit(A), machines=(machine(A),)), set()),
        (view(waiting(), unfit(A), machines=(machine(A),), replaced=SPENT), {"p"}),
        (view(waiting(), machines=(), replaced=SPENT), {"p"}),
        (view(waiting(), unfit(A, connected=False), machines=(machine(A),), replaced=SPENT), {"p"}),
        (view(waiting(), machines=(booting(A, state="stopping"),), replaced=SPENT), {"p"}),
        (
            view(waiting(), unfit(A), spare(B, reported_at=NOW), machines=(machine(A), machine(B)), replaced=SPENT),
            set(),
        ),
        (view(waiting(), machines=(booting(A, created=NOW - 20),), replaced=SPENT), set()),
        (view(waiting(), machines=(), replaced=was_replaced(900, 600, 20)), set()),
        (view(waiting(), unfit(A), machines=(machine(A),), replaced=was_replaced(WINDOW + 1, 600, 300)), set()),
    ],
    ids=[
        "not tried yet",
        "spent",
        "spent and gone",
        "spent and going",
        "spent, and what never joined is going",
        "another serves",
        "the last one boots",
        "it is made",
        "in time",
    ],
)
def test_a_pool_is_closed_when_none_of_its_machines_serves(given: Seen, expected: set[str]) -> None:
    (pool,) = decide.observe(fleet(given), given.conditions, [Pool("p", 4, 2)], Wish((Need(1),))).pools
    assert ({"p"} if pool.supply == "closed" else set()) == expected


def test_what_operators_read() -> None:
    given = view(waiting(), unfit(A), spare(B, reported_at=NOW), machines=(machine(A), machine(B, pool="q")))
    assert fleet_plan(given).reasons == {"p": f"a takes no job: {WHY}"}
    given = view(waiting(), machines=(), replaced=SPENT)
    at = NOW - 900 + WINDOW
    assert fleet_plan(given).reasons == {
        "p": f"3 machines took no job and were replaced, the last one because: {WHY}; no more are replaced before "
        f"{int(at // 3600) % 24:02}:{int(at // 60) % 60:02} UTC"
    }
    assert fleet_plan(view(waiting(), spare(A, reported_at=NOW), machines=(machine(A),))).reasons == {}


def test_a_member_is_never_unusable() -> None:
    assert states(view(job(A), node(A, reported_at=NOW), machines=(machine(A),))) == {A: "ready"}
