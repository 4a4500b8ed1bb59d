"""What a job did and what it cost: progress, what an interruption cost, goodput."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotrun.head.capacity.situation import Placement
from spotrun.head.capacity.sizes import Need
from spotrun.head.costs import job_totals
from spotrun.head.costs.bill import Rates, Use
from spotrun.head.costs.meter import running
from spotrun.head.fleet.classify import classify
from spotrun.head.job_state import Cause, JobState, Start, Stop, apply
from spotrun.head.planner.plan import plan
from spotrun.head.view import FleetView, Machine
from spotrun.wire import StateRef, Worker
from tests.head.views import NOW, A, B, C, Seen, fleet, job, listed, node, spec, start, view


def at(step: int, base: int, restored: float, stepped: float, **changes: object) -> Worker:
    values = {"rank": 0, "pid": 1, "step": step, "base": base, "stepped_at": stepped, "samples": 10.0}
    return Worker.model_validate({**values, "phases": (0, 0, 0, restored, restored + 0.2), **changes})


def interrupted() -> JobState:
    """Killed at step 50, 0.05 s after it; a new generation is on its way."""
    return apply(job(A, B, C), start(A, C, cause=Cause(kind="kill", node=B)), NOW)


def test_first_step_after_an_interruption_closes_it() -> None:
    workers = (at(47, 46, NOW + 2.0, NOW + 2.2),)
    nodes = [node(name, generation=2, workers=workers, snapshot=StateRef(generation=1, step=46)) for name in (A, C)]
    state = job_totals.observe(interrupted(), view(interrupted(), *nodes, now=NOW + 3))
    (interruption,) = state.interruptions
    assert interruption.steps_lost == 4
    assert interruption.seconds == pytest.approx(2.25)
    # Four of fifty steps of three nodes do not count after all.
    assert state.good_seconds == pytest.approx(3 * 4.95 * 46 / 50)
    assert state.phase == "running"


def test_restored_alone_is_not_a_step() -> None:
    workers = (at(46, 46, NOW + 2.0, 0.0, phases=(0, 0, 0, NOW + 2.0, 0)),)
    nodes = [node(name, generation=2, workers=workers) for name in (A, C)]
    state = job_totals.observe(interrupted(), view(interrupted(), *nodes, now=NOW + 3))
    assert state.interruptions[0].seconds is None
    assert state.phase == "starting"


@pytest.mark.parametrize(("regroup", "can"), [("able", True), ("waiting", True), ("no", False), ("unknown", False)])
def test_a_job_can_regroup_if_all_its_workers_can(regroup: str, can: bool) -> None:
    """Also if they have left while their agent made its report: it says that they train, and that they wait."""
    state = job(A, B, regroups=not can)
    assert job_totals.observe(state, view(state, node(A, regroup="able"), node(B, regroup=regroup))).regroups is can


def test_reports_of_an_older_generation_do_not_count() -> None:
    state = interrupted()
    nodes = [node(name, generation=1, step=90) for name in (A, C)]
    assert job_totals.observe(state, view(state, *nodes)) == state


def counted(state: JobState, seen: Seen, prices: dict[str, float], before: float) -> JobState:
    """The job after it has paid for all machines since `before`."""
    uses = [Use(name, pool, before, seen.now) for name, pool in running(seen).items()]
    return job_totals.count(state, seen, uses, Rates(prices, {}, dict.fromkeys("pq", "spot")))


def test_goodput_is_a_share_of_machine_time() -> None:
    state = job(A, B, counted_at=NOW - 10)
    seen = view(
        state, node(A), node(B), node(C, connected=False, cloud="running"), node("d", connected=False, cloud="gone")
    )
    after = counted(state, seen, {"p": 3.6}, NOW - 10)
    assert after.node_seconds == pytest.approx(30)
    assert after.cost == pytest.approx(0.03)
    assert job_totals.goodput(after) == pytest.approx(2 * 4.95 / 30)


def test_every_machine_that_runs_is_paid_for() -> None:
    """Also one that boots or is unusable: the budget holds it."""
    state = job(counted_at=NOW - 600, spec=spec(budget=50.0))
    machines = [Machine(f"m{number}", "p", "running", NOW - 600) for number in range(8)]
    making = Machine("m8", "p", "provisioning", NOW - 599)
    connected = node("m0", phase="unfit", pool="p", job=None)
    seen = view(state, connected, machines=(*machines, making, Machine("q0", "q", "running", NOW - 600)))
    after = counted(state, seen, {"p": 98.0, "q": 6.0}, NOW - 600)
    assert after.cost == pytest.approx((8 * 98 + 6) / 6)
    assert after.node_seconds == pytest.approx(9 * 600)
    assert after.hourly == pytest.approx(8 * 98 + 6)
    (stop,) = plan(replace(seen, job=after)).actions
    assert stop == Stop("the budget of $50 is spent")


def test_a_job_pays_for_machines_that_are_ready_for_its_move_or_keep_its_state() -> None:
    """The budget counts them, so they must not be the cluster's."""
    state = job(A, B, checkpoints=(StateRef(generation=1, step=40),), trained=(A, B, C))
    idle = {"generation": 0, "phase": "ready", "workers": ()}
    left = node(C, **idle)  # its snapshot is of step 48
    target = node("d", **idle, snapshot=None, pool="q")
    other = node("e", **idle, snapshot=None)
    nodes = (node(A), node(B), left, target, other)
    machines = tuple(Machine(n.name, n.report.pool, "running", NOW - 600, NOW - 500) for n in nodes)
    seen = fleet(view(state, *nodes, machines=machines))
    expected = {"j": {A: (), B: ()}}
    asks = Placement(frozenset("p"), (Need(2, frozenset("p")), Need(2, frozenset("q"))))
    found = job_totals.shares(seen, expected, classify(seen), {"j": asks})
    assert {payer: set(of) for payer, of in found.items()} == {"j": {A, B, C, "d"}, "": {"e"}}
    saved = replace(seen, jobs=(state.replace(checkpoints=(StateRef(generation=1, step=48),)),))
    found = job_totals.shares(saved, expected, classify(saved))
    assert {payer: set(of) for payer, of in found.items()} == {"j": {A, B}, "": {C, "d", "e"}}


def test_the_job_that_asked_for_a_machine_pays_for_its_boot() -> None:
    """Another job wants more nodes too, but of another pool."""
    first, second = job(A, id="i"), job(id="j", spec=spec(nodes=1))
    booting = Machine("q0", "q", "running", NOW - 10)
    member = node(A, job="i")
    seen = FleetView(now=NOW, jobs=(first, second), nodes=(member,), machines=(booting, *listed(A)))
    places = {
        "i": Placement(frozenset("p"), (Need(2, frozenset("p")),)),
        "j": Placement(frozenset("q"), (Need(1, frozenset("q")),)),
    }
    found = job_totals.shares(seen, {"i": {A: ()}}, classify(seen), places)
    assert {payer: set(of) for payer, of in found.items()} == {"i": {A}, "j": {"q0"}, "": set()}


def test_jobs_pay_for_their_own_devices_while_a_machine_boots() -> None:
    first, second = job(id="i", spec=spec(nodes=1, devices=1)), job(id="j", spec=spec(nodes=1, devices=2))
    booting = Machine("q0", "q", "running", NOW - 10)
    seen = FleetView(now=NOW, jobs=(first, second), nodes=(), machines=(booting,))
    expected = {"i": {"q0": (0,)}, "j": {"q0": (1, 2)}}
    found = job_totals.shares(seen, expected, classify(seen), devices={"q": 8})
    assert found == {"i": {"q0": 1 / 8}, "j": {"q0": 2 / 8}, "": {"q0": 5 / 8}}


def test_what_ran_before_its_price_was_known_is_paid_for() -> None:
    """As when the cloud does not tell prices for a while, and machines of one pool are gone by then."""
    state = job(spec=spec(budget=50.0))
    both = (Machine("p0", "p", "running", NOW - 7200), Machine("q0", "q", "running", NOW - 7200))
    before = counted(state, view(state, now=NOW - 3600, machines=both), {}, NOW - 7200)
    assert (before.cost, before.node_seconds) == (0.0, 7200.0)
    seen = view(before, machines=both[:1])
    after = counted(before, seen, {"p": 30.0}, NOW - 3600)
    assert (after.cost, after.node_seconds) == (pytest.approx(60), 10800.0)
    assert plan(replace(seen, job=after)).actions == (Stop("the budget of $50 is spent"),)
    assert counted(after, seen, {"p": 30.0, "q": 6.0}, NOW).cost == pytest.approx(66)


def test_the_state_of_an_older_head_goes_on() -> None:
    """Its cost is not split by pool, and what it counted without a price gets one."""
    old = job(node_seconds=7200.0, cost=5.0, unpriced={"p": 3600.0})
    after = counted(old, view(old, listed=False), {"p": 2.0}, NOW)
    assert (after.cost, after.node_seconds, after.unpriced) == (pytest.approx(7), 7200.0, {})
    assert JobState.model_validate_json(after.model_dump_json()) == after


def test_a_first_start_is_no_loss() -> None:
    state = apply(job(), start(A, B), NOW)
    assert state.interruptions == ()
    assert isinstance(start(A, B), Start)
