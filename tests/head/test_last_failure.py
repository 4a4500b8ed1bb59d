"""A script that fails for the last time: its last state gets into the bucket before the job counts as failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotrun.head import status
from spotrun.head.job_state import (
    Action,
    CountFailure,
    EndGeneration,
    Ending,
    Finish,
    JobState,
    KeepNode,
    KeptNode,
    Save,
    SetEnding,
    apply,
)
from spotrun.head.planner.plan import plan
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import View
from spotrun.wire import StateRef
from tests.head.puppets import Theatre, place_of
from tests.head.views import NOW, A, B, failed, failure, job, listed, member, node, spec, view

HELD, KEPT = StateRef(generation=1, step=48), StateRef(generation=1, step=40)
FAIL = CountFailure(failure("user"), B)
GOAL = Ending(phase="failed", reason="boom", state=HELD)
LOST = "boom; the state after step 48 is lost, it was not saved by a, b; the newest checkpoint is of step 40"
OUT = {"spec": spec(budget=1.0), "cost": 1.0}


def fails(*checkpoints: StateRef, **changes: Any) -> View:
    """The last failure of a job, whose nodes hold the state after step 48."""
    state = job(A, B, restarts=3, checkpoints=checkpoints, **changes)
    return view(state, node(A), failed(B, "user"))


def ending(**changes: Any) -> JobState:
    """The job after that."""
    state = job(A, B, restarts=3, checkpoints=(KEPT,), **changes)
    return apply(apply(state, FAIL, NOW), EndGeneration(ending=GOAL), NOW)


def ready(state: JobState, **changes: Any) -> View:
    """Its nodes, whose workers have ended."""
    return view(state, *(node(each, phase="ready", workers=()) for each in (A, B)), machines=listed(A, B), **changes)


CASES: dict[str, tuple[View, tuple[Action, ...]]] = {
    "the nodes hold a newer state than the bucket": (fails(KEPT), (FAIL, EndGeneration(ending=GOAL))),
    "the bucket has the newest state: the job fails at once": (
        fails(HELD),
        (FAIL, EndGeneration(), Finish("failed", "boom")),
    ),
    "it begins to save": (
        ready(ending()),
        (SetEnding(GOAL.replace(deadline=NOW + TIMEOUTS.save)), Save(HELD, (A, B))),
    ),
    "the state is in the bucket": (ready(ending().replace(checkpoints=(HELD,))), (Finish("failed", "boom"),)),
    "the bucket refuses the state to the end": (
        ready(ending().replace(ending=GOAL.replace(deadline=NOW - 1))),
        (Finish("failed", LOST),),
    ),
    "the nodes are gone": (
        view(ending(), *(node(each, connected=False, cloud="gone") for each in (A, B))),
        (Finish("failed", LOST.replace("a, b", "the nodes that held it")),),
    ),
    "the budget is spent": (ready(ending(**OUT)), (Finish("failed", LOST),)),
    "an operator stops the job meanwhile: it has failed all the same": (
        ready(ending().replace(checkpoints=(HELD,), stopping="by the operator")),
        (Finish("failed", "boom"),),
    ),
    "the folders of keep are for jobs that succeed": (
        ready(ending(spec=spec(keep=["out"])).replace(checkpoints=(HELD,))),
        (Finish("failed", "boom"),),
    ),
    "a state that says only that the script has failed too often": (
        ready(ending().replace(ending=None)),
        (SetEnding(GOAL),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_plan(name: str) -> None:
    seen, wanted = CASES[name]
    assert plan(seen).actions == wanted


def test_the_node_of_the_failure_stays_the_jobs_while_the_state_is_saved() -> None:
    state = ending(spec=spec(keep_on_failure=600))
    assert (state.kept, state.bound) == (member(B), (member(B),))
    assert ending().bound == ()
    until = KeptNode(member=member(B), until=NOW + 600)
    saved = ready(state.replace(checkpoints=(HELD,)))
    assert plan(saved).actions == (Finish("failed", "boom"), KeepNode(until))
    assert plan(ready(state.replace(ending=GOAL.replace(deadline=NOW - 1)))).actions == (
        Finish("failed", LOST),
        KeepNode(until),
    )


def test_a_node_that_is_gone_when_the_state_is_saved_is_not_kept() -> None:
    state = ending(spec=spec(keep_on_failure=600)).replace(checkpoints=(HELD,))
    assert plan(view(state, node(A), node(B, boot="b2"))).actions == (Finish("failed", "boom"),)
    assert plan(view(state, node(A))).actions == (Finish("failed", "boom"),)


def test_events_say_that_the_state_is_saved_first() -> None:
    action = EndGeneration(ending=GOAL)
    text = "the job has failed; its last state goes into the bucket"
    assert status.event(job(A, B), action) == ("generation", text)


async def test_a_relaunched_job_continues_from_its_last_snapshot(tmp_path: Path) -> None:
    """Another head takes over while the state gets into the bucket. Another job gets no device of the kept node."""
    stage = Theatre(tmp_path, machines=3)
    await stage.round()
    first = await stage.queue_job("job", nodes=2, max_restarts=0, keep_on_failure="10m")
    await stage.round(20)
    failing = stage.nodes(first)[1]
    stage.fail(first, failing)
    stage.play()
    await stage.round()
    held = stage.puppets[failing].work[first].snapshot
    assert held is not None
    assert (stage.written(first).phase, stage.written(first).newest < (held.generation, held.step)) == (
        "finishing",
        True,
    )
    urgent = await stage.queue_job("urgent", nodes={"min": 1, "max": 3}, priority=1000)
    stage.restart_head()
    await stage.round(10)
    ended = stage.written(first)
    assert (ended.phase, ended.reason, ended.newest) == ("failed", "boom", (held.generation, held.step))
    assert ended.kept_node is not None
    assert (ended.kept_node.member.node, ended.kept_node.place) == (failing, place_of(first))
    assert failing not in stage.nodes(urgent)
