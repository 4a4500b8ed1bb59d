"""How long machines have run: exact from the cloud's making to the last sign of life, though the head looks late."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from spotrun.cloud.base import Ended
from spotrun.head.costs.bill import Rates
from spotrun.head.costs.meter import NOBODY, Meter, hourly
from spotrun.head.view import FleetView, Machine, Node
from tests.head.views import NOW, A, B, job, node

Shares = Mapping[str, Mapping[str, float]]
ALL: Shares = {"j": {A: 1.0, B: 1.0}, NOBODY: {}}


def seen(at: float, *machines: Machine, nodes: tuple[Node, ...] = (), **changes: object) -> FleetView:
    values = {"listed_at": at, "machines": machines, "nodes": nodes, **changes}
    return FleetView(now=at, jobs=(job(),), **values)  # type: ignore[arg-type]


def machine(name: str = A, created: float = NOW - 100, state: str = "running") -> Machine:
    return Machine(name, "p", state, created)


def over(created: float, until: float, since: float = 0.0) -> Ended:
    return Ended(A, "p", created, since or created, until)


def away(each: Node) -> Node:
    return replace(each, connected=False, cloud=None)


def read(*views: FleetView, shares: Shares = ALL, paid: float = NOW - 10) -> dict[str, float]:
    """The seconds that each payer has paid after all of these readings."""
    meter, found = Meter(), dict.fromkeys([*shares, NOBODY], 0.0)
    for each in views:
        meter, uses = meter.read(each, shares, {"j": paid, NOBODY: paid})
        for payer, mine in uses.items():
            found[payer] = found.get(payer, 0.0) + sum(use.seconds for use in mine)
    return {payer: round(seconds, 6) for payer, seconds in found.items()}


EMPTY = seen(NOW)
# The readings, and how long the job has paid.
CASES: dict[str, tuple[tuple[FleetView, ...], float]] = {
    "a machine that an earlier head has counted up to 10 s ago": ((seen(NOW, machine()),), 10),
    "a machine that was made after the earlier head had counted": ((seen(NOW, machine(created=NOW - 4)),), 4),
    "a machine that was made 3 s before the head saw it": ((EMPTY, seen(NOW + 5, machine(created=NOW + 2))), 3),
    "a machine that still boots": ((EMPTY, seen(NOW + 5, machine(created=NOW + 2, state="provisioning"))), 0),
    "a machine that boots, then runs": (
        (EMPTY, seen(NOW + 5, machine(created=NOW + 2, state="provisioning")), seen(NOW + 9, machine(created=NOW + 2))),
        7,
    ),
    "a machine whose agent left 2 s before the cloud said that it is gone": (
        (
            seen(NOW, machine(created=NOW), nodes=(node(A),)),
            seen(NOW + 5, machine(created=NOW), nodes=(node(A),), listed_at=NOW),
            seen(NOW + 7, machine(created=NOW), nodes=(away(node(A)),), listed_at=NOW),
            seen(NOW + 8, nodes=(away(node(A)),)),
        ),
        5,
    ),
    "a machine that is cut off still runs, as the cloud says": (
        (
            seen(NOW, machine(created=NOW), nodes=(node(A),)),
            seen(NOW + 7, machine(created=NOW), nodes=(away(node(A)),)),
            seen(NOW + 9, nodes=(away(node(A)),)),
        ),
        7,
    ),
    "a machine without an agent, listed for the last time 3 s before it is gone": (
        (
            seen(NOW, machine(created=NOW)),
            seen(NOW + 1, machine(created=NOW), listed_at=NOW),
            seen(NOW + 3),
        ),
        0,
    ),
    "another machine of the same name": (
        (
            seen(NOW, machine(created=NOW), nodes=(node(A),)),
            seen(NOW + 5, machine(created=NOW), nodes=(node(A),), listed_at=NOW),
            seen(NOW + 9, machine(created=NOW + 8)),
        ),
        5 + 1,
    ),
    "another machine of the same name, made while the zone did not answer": (
        (
            seen(NOW, machine(created=NOW), nodes=(node(A),)),
            seen(NOW + 5, machine(created=NOW, state="unknown"), nodes=(node(A),), listed_at=NOW),
            seen(NOW + 9, machine(created=NOW, state="unknown"), nodes=(node(A),), listed_at=NOW),
            seen(NOW + 12, machine(created=NOW + 3), nodes=(node(A),)),
        ),
        3 + 9,
    ),
    "a machine that one answer of the cloud leaves out": (
        (
            seen(NOW, machine(created=NOW)),
            seen(NOW + 50, machine(created=NOW)),
            seen(NOW + 55),
            seen(NOW + 60, machine(created=NOW)),
            seen(NOW + 61, machine(created=NOW)),
        ),
        61,
    ),
    "a machine that runs again after its host was repaired for more than an hour": (
        (
            seen(NOW, machine(created=NOW)),
            seen(NOW + 50, machine(created=NOW)),
            seen(NOW + 55, machine(created=NOW, state="stopping")),
            seen(NOW + 3000, machine(created=NOW, state="stopping")),
            seen(NOW + 6000, machine(created=NOW, state="stopping")),
            seen(NOW + 6005, machine(created=NOW)),
            seen(NOW + 6010, machine(created=NOW)),
        ),
        50 + 10,
    ),
    "a machine that stops, and the cloud says when it ended": (
        (
            seen(NOW, machine(created=NOW)),
            seen(NOW + 50, machine(created=NOW)),
            seen(NOW + 55, machine(created=NOW, state="stopping")),
            seen(NOW + 70, machine(created=NOW, state="stopping")),
            seen(NOW + 75, ended=(over(NOW, NOW + 52),)),
        ),
        52,
    ),
    "the cloud does not answer for a while": (
        (
            seen(NOW, machine(created=NOW)),
            seen(NOW + 5, listed=False, listed_at=NOW),
            seen(NOW + 9, machine(created=NOW)),
        ),
        9,
    ),
    "the cloud does not answer, and the agent is connected": (
        (
            seen(NOW, machine(created=NOW), nodes=(node(A),)),
            seen(NOW + 5, listed=False, listed_at=NOW, nodes=(node(A, cloud=None),)),
        ),
        5,
    ),
    "the cloud says when the machine ended, before its last sign": (
        (
            seen(NOW, machine(created=NOW), nodes=(node(A),)),
            seen(NOW + 9, machine(created=NOW), nodes=(node(A),), listed_at=NOW),
            seen(NOW + 10, ended=(over(NOW, NOW + 4),)),
            seen(NOW + 11, ended=(over(NOW, NOW + 4),)),
            seen(NOW + 12),
        ),
        4,
    ),
    "the cloud says when the machine ended, after its last sign, and late": (
        (
            seen(NOW, machine(created=NOW)),
            seen(NOW + 1, machine(created=NOW)),
            seen(NOW + 8),
            seen(NOW + 9),
            seen(NOW + 20, ended=(over(NOW, NOW + 6),)),
            seen(NOW + 21, ended=(over(NOW, NOW + 6),)),
        ),
        6,
    ),
    "the agent of a machine that has ended still seems to be connected": (
        (
            seen(NOW, machine(created=NOW), nodes=(node(A),)),
            seen(NOW + 5, machine(created=NOW), nodes=(node(A),), ended=(over(NOW, NOW + 3),)),
            seen(NOW + 9, nodes=(node(A),), ended=(over(NOW, NOW + 3),)),
        ),
        3,
    ),
    "another machine of the same name, and the cloud says when the first one ended": (
        (
            seen(NOW, machine(created=NOW), nodes=(node(A),)),
            seen(NOW + 5, machine(created=NOW), nodes=(node(A),), listed_at=NOW),
            seen(NOW + 9, machine(created=NOW + 7), ended=(over(NOW, NOW + 4),)),
        ),
        4 + 2,
    ),
    "a machine whose agent joins before the cloud lists it as running": (
        (
            EMPTY,
            seen(NOW + 4, machine(created=NOW + 1, state="provisioning"), nodes=(node(A),)),
            seen(NOW + 6, replace(machine(created=NOW + 1), started=NOW + 3), nodes=(node(A),)),
            seen(NOW + 8, replace(machine(created=NOW + 1), started=NOW + 3), nodes=(node(A),)),
        ),
        5,
    ),
    "the pool's zone does not answer for a while": (
        (
            seen(NOW, machine(created=NOW)),
            seen(NOW + 5, machine(created=NOW, state="unknown")),
            seen(NOW + 9, machine(created=NOW)),
        ),
        9,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_machine_time(name: str) -> None:
    views, seconds = CASES[name]
    assert read(*views) == {"j": pytest.approx(seconds), NOBODY: 0.0}


def test_the_parts_of_a_machine_go_to_those_who_have_them() -> None:
    shares = {"j": {A: 0.25}, "k": {A: 0.5}, NOBODY: {A: 0.25}}
    found = read(seen(NOW, machine(created=NOW)), seen(NOW + 8, machine(created=NOW)), shares=shares)
    assert found == {"j": 2, "k": 4, NOBODY: 2}


def test_what_an_ended_job_has_paid_too_much_is_the_clusters() -> None:
    meter, _ = Meter().read(seen(NOW, machine(created=NOW), nodes=(node(A),)), ALL, {})
    meter, _ = meter.read(seen(NOW + 4, machine(created=NOW), listed_at=NOW), ALL, {})
    _, uses = meter.read(seen(NOW + 5), {NOBODY: {}}, {})
    assert [(use.start, use.end) for use in uses[NOBODY]] == [(NOW + 4, NOW)]


def test_a_price_that_changed_before_the_head_knew_it() -> None:
    """Since then the dearer price counts, but not before the machine was made."""
    both = (machine(A, created=NOW), machine(B, created=NOW + 6))
    meter, _ = Meter().read(seen(NOW), ALL, {})
    meter, _ = meter.read(seen(NOW + 8, *both), {"j": {A: 0.5, B: 1.0}, NOBODY: {A: 0.5}}, {})
    uses = meter.repriced("p", 3.6, 7.2, at=NOW + 4, known=NOW + 8)
    dearer = {payer: sum(use.seconds * (use.price or 0) / 3600 for use in mine) for payer, mine in uses.items()}
    assert dearer == {"j": pytest.approx((2 + 2) * 0.001), NOBODY: pytest.approx(2 * 0.001)}
    assert all(sum(use.seconds for use in mine) == 0 for mine in uses.values())
    assert meter.repriced("q", 3.6, 7.2, at=NOW + 4, known=NOW + 8) == {}


def test_a_machine_that_began_and_ended_between_two_looks_is_the_clusters() -> None:
    ended = over(NOW + 1, NOW + 5, since=NOW + 2)
    assert read(EMPTY, seen(NOW + 8, ended=(ended,)), seen(NOW + 9, ended=(ended,))) == {"j": 0, NOBODY: 3}


def test_a_machine_that_had_ended_before_the_head_began_is_not_counted() -> None:
    ended = over(NOW - 60, NOW - 20)
    assert read(seen(NOW, ended=(ended,)), seen(NOW + 5, ended=(ended,))) == {"j": 0, NOBODY: 0}


def test_a_correction_does_not_count_as_a_machine_that_runs() -> None:
    meter, _ = Meter().read(seen(NOW, machine(created=NOW)), ALL, {})
    meter, _ = meter.read(seen(NOW + 4), ALL, {})
    _, uses = meter.read(seen(NOW + 9, ended=(over(NOW, NOW + 3),)), ALL, {})
    assert [(use.start, use.end) for use in uses["j"]] == [(NOW, NOW + 3)]
    assert hourly(uses["j"], Rates({"p": 3.6})) == 0


def test_time_counts_from_the_start_if_the_cloud_says_it() -> None:
    started = replace(machine(created=NOW + 1), started=NOW + 3)
    assert read(seen(NOW), seen(NOW + 8, started)) == {"j": 5, NOBODY: 0}


def test_the_price_of_an_hour_counts_machines_that_run() -> None:
    meter, _ = Meter().read(seen(NOW, machine(A), machine(B)), ALL, {})
    _, uses = meter.read(seen(NOW + 4, machine(A)), ALL, {})
    assert hourly(uses["j"], Rates({"p": 3.6})) == pytest.approx(3.6)


def test_a_machine_that_was_made_and_joined_while_the_cloud_did_not_answer() -> None:
    """Its time counts from when it was made, as soon as the cloud says that."""
    joined = seen(NOW + 5, nodes=(node(A),), listed=False, listed_at=NOW)
    listed = [seen(NOW + at, machine(created=NOW + 2), nodes=(node(A),)) for at in (9, 10)]
    assert read(EMPTY, joined, *listed, paid=NOW + 4)["j"] == 8


def test_a_machine_that_is_repaired_while_the_cloud_does_not_answer_pays_nothing_twice() -> None:
    ran, stands = machine(created=NOW + 2), machine(created=NOW + 2, state="stopping")
    before = (seen(NOW + 4, ran), seen(NOW + 5, stands), seen(NOW + 6, stands))
    back = (seen(NOW + 8, nodes=(node(A),), listed=False, listed_at=NOW), seen(NOW + 9, ran, nodes=(node(A),)))
    assert read(EMPTY, *before, *back, paid=NOW + 8)["j"] == 2 + 1
