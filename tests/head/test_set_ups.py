"""Jobs whose set-up fails: when the job ends, when another machine is awaited, and which machine is replaced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spotrun.head.fleet.classify import classify
from spotrun.head.fleet.record import LIMIT, Recreate, Replacement
from spotrun.head.job_state import Finish, JobState
from spotrun.head.planner.plan import plan
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import Machine, Misfit, Node
from spotrun.wire import JobReport, StateRef
from tests.head.puppets import Theatre
from tests.head.views import NOW, A, B, C, Seen, failure, fleet, fleet_plan, job, listed, node, spare, spec, view

TWO = spec(nodes=2)
LOST = "pip failed: connection reset"
ENDS = (Finish("failed", f"set-up failed on a: {LOST}"),)


def new(**changes: Any) -> JobState:
    return job(**{"spec": TWO, **changes})


def broken(name: str, repeats: bool = False, **changes: Any) -> Node:
    """A node that says why it cannot set up the job. The job avoids it."""
    why = failure("setup", message=LOST).replace(repeats=repeats)
    return replace(spare(name, phase="failed", store="", failure=why, **changes), assigned=False)


def preparing(name: str) -> Node:
    return spare(name, phase="preparing", store="")


def failed(**times: int) -> dict[str, Misfit]:
    return {name: Misfit(NOW - 0.1, count) for name, count in times.items()}


PLANS = {
    "an error that may pass, while another machine boots: the job waits": (
        view(new(), broken(A), expected=1, misfits=failed(a=1)),
        (),
    ),
    "the same error again on that machine: the job still waits": (
        view(new(), broken(A), expected=1, misfits=failed(a=5)),
        (),
    ),
    "the other machine has come and prepares: the job waits": (
        view(new(), broken(A), preparing(B), expected=1, misfits=failed(a=1)),
        (),
    ),
    "an error that repeats, while another machine boots: the job ends": (
        view(new(), broken(A, repeats=True), expected=1, misfits=failed(a=1)),
        ENDS,
    ),
    "an error that repeats, while another machine prepares: the job waits": (
        view(new(), broken(A, repeats=True), preparing(B), expected=1, misfits=failed(a=1)),
        (),
    ),
    "no other machine is coming: the job ends": (view(new(), broken(A), expected=0, misfits=failed(a=1)), ENDS),
    "no other machine is coming, but the head has just begun and may not see all: the job waits": (
        view(new(), broken(A), expected=0, misfits=failed(a=1), awake_since=NOW - 1),
        (),
    ),
    "as many machines as the job needs have failed: it ends": (
        view(new(), broken(A), preparing(B), expected=1, misfits=failed(a=1, b=1)),
        ENDS,
    ),
    "the job needs one machine, one has failed once and others boot: it waits": (
        view(new(spec=spec(nodes={"min": 1, "max": 3})), broken(A), expected=2, misfits=failed(a=1)),
        (),
    ),
    "the job needs one machine, one has failed twice and others boot: it ends": (
        view(new(spec=spec(nodes={"min": 1, "max": 3})), broken(A), expected=2, misfits=failed(a=2)),
        ENDS,
    ),
    "the job has trained before: it does not end": (
        view(new(generation=3), broken(A), expected=0, misfits=failed(a=9)),
        (),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_when_a_job_ends_whose_set_up_fails(name: str) -> None:
    given, expected = PLANS[name]
    assert plan(given).actions == expected


def misfit(name: str, at: float = NOW - 1, **changes: Any) -> Node:
    """A node that the job has left, because it cannot be set up there."""
    idle = {"job": "", "jobs": (), "phase": "ready", "workers": (), "snapshot": None, **changes}
    return replace(node(name, **idle), assigned=False, misfits={"j": Misfit(at, 1)})


def seen(state: JobState, *nodes: Node, machines: tuple[Machine, ...] = (), **changes: Any) -> Seen:
    return view(state, *nodes, machines=machines or listed(A, B), **changes)


WHY = "j cannot be set up on it, but on others"
ASK = (Recreate(node=A, pool="p", why=WHY),)
HELD = JobReport(job="j", phase="idle", snapshot=StateRef(generation=1, step=48))
SPENT = tuple(Replacement(node=f"x{n}", pool="p", why="unfit", created=1.0, at=NOW - 60) for n in range(LIMIT))
MACHINES = {
    "the other machine is ready and waits: replaced": (seen(new(), misfit(A), spare(B)), "replacing", ASK),
    "the other machine still prepares: it stays": (seen(new(), misfit(A), preparing(B)), "ready", ()),
    "the job has all the nodes that it needs: it stays": (
        seen(new(), misfit(A), spare(B), spare(C), machines=listed(A, B, C)),
        "ready",
        (),
    ),
    "the job trains: it stays": (seen(job(B, C, spec=TWO), misfit(A), node(B), node(C)), "ready", ()),
    "another job has work there: it stays": (
        seen(new(), misfit(A, jobs=(JobReport(job="i", phase="running"),)), spare(B)),
        "ready",
        (),
    ),
    "it alone holds the newest state: it stays": (
        seen(new(generation=1), misfit(A, jobs=(HELD,)), spare(B)),
        "ready",
        (),
    ),
    "the job may go back to it: it stays": (
        seen(new(), misfit(A, at=NOW - TIMEOUTS.setup_again), spare(B)),
        "ready",
        (),
    ),
    "a new machine of that name: it stays": (
        seen(new(), misfit(A), spare(B), machines=(Machine(A, "p", "running", NOW - 0.5, NOW), *listed(B))),
        "ready",
        (),
    ),
    "its pool has had all its replacements: another one is asked for": (
        seen(new(), misfit(A), spare(B), replaced=SPENT),
        "abandoned",
        (),
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_on_which_a_waiting_job_cannot_be_set_up(name: str) -> None:
    given, state, asked = MACHINES[name]
    assert classify(fleet(given))[A].state == state
    assert fleet_plan(given).recreate == asked


async def test_one_bad_machine_of_two_is_replaced_and_the_job_begins(tmp_path: Path) -> None:
    stage = Theatre(tmp_path, machines=2, total=30)
    job = await stage.queue_job("one", 2)
    await stage.round()
    while len(stage.puppets) < 2:
        await stage.round()
    stage.puppets["p-0"].misfits.add(job)
    for _ in range(30):
        await stage.round()
        if stage.recreated:
            break
    assert stage.recreated == ["p-0"]
    stage.kill("p-0")
    await stage.round(300)
    assert stage.written(job).phase == "succeeded"
    assert next(event["text"] for event in stage.events() if "cannot be set up" in event["text"]) == (
        f"p-0: {job} cannot be set up: no such package"
    )
    assert stage.recreated == ["p-0"]
