"""Where a job's node time went: each machine's second is of one kind, and all of them add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotrun.head.costs import job_totals, node_time
from spotrun.head.costs.bill import Rates, Use
from spotrun.head.costs.meter import running
from spotrun.head.job_state import Interruption, JobState, Progress
from spotrun.head.status import job_status
from spotrun.head.view import Machine, Node
from spotrun.wire import Notice
from tests.head.views import NOW, A, B, job, node, view

OPEN = (Interruption(kind="kill", node=B, at=NOW - 5, generation=1, step=9),)
UNSTARTED = Progress(base=9, step=9)
LEAVING = replace(node(A), due=NOW + 30)


def counted(state: JobState, *nodes: Node, there: tuple[str, ...] = ()) -> dict[str, float]:
    """What one count of ten seconds adds."""
    machines = tuple(Machine(name, "p", "running", NOW - 100) for name in there)
    state = state.model_copy(update={"counted_at": NOW - 10})
    seen = view(state, *nodes, machines=machines)
    return job_totals.count(state, seen, [Use(n, p, NOW - 10, NOW) for n, p in running(seen).items()], Rates()).spent


@pytest.mark.parametrize(
    ("state", "seen", "kind"),
    [
        pytest.param(job(A), node(A), "training", id="a member that has completed a step"),
        pytest.param(job(A), replace(node(A), connected=False, cloud="running"), "training", id="a cut-off member"),
        pytest.param(job(A, progress=UNSTARTED), node(A), "starting", id="a member before the job's first step"),
        pytest.param(job(A, progress=UNSTARTED, interruptions=OPEN), node(A), "recovery", id="after an interruption"),
        pytest.param(job(phase="queued"), node(A, phase="checking"), "starting", id="the machine is being checked"),
        pytest.param(job(phase="queued"), node(A, phase="preparing"), "starting", id="packages are being installed"),
        pytest.param(job(phase="waiting"), node(A), "waiting", id="ready, with too few others"),
        pytest.param(job(B), node(A), "spare", id="ready, beside a generation"),
        pytest.param(job(B), LEAVING, "leaving", id="under notice, not a member any more"),
        pytest.param(job(B), node(A, phase="unfit"), "unfit", id="failed its checks"),
        pytest.param(job(phase="finishing"), node(A), "saving", id="the last state goes into the bucket"),
    ],
)
def test_each_machine_is_of_one_kind(state: JobState, seen: Node, kind: str) -> None:
    assert counted(state, seen, there=(A,)) == {kind: pytest.approx(10)}


def test_a_machine_without_an_agent_is_starting() -> None:
    assert counted(job(A), node(A), there=(A, "boots")) == {"training": pytest.approx(10), "starting": 10}


def test_a_machine_that_has_served_and_is_not_connected_leaves() -> None:
    seen = view(job(B), machines=(Machine(A, "p", "running", NOW - 100, answered=NOW - 50),))
    assert node_time.kinds(job(B), seen)(A) == "leaving"
    again = view(job(B), machines=(Machine(A, "p", "running", NOW - 10, answered=NOW - 50),))
    assert node_time.kinds(job(B), again)(A) == "booting", "another machine of that name"


@pytest.mark.parametrize(
    ("total", "good", "spent", "split"),
    [
        pytest.param(
            100, 50, {"training": 60, "starting": 30, "spare": 10},
            {"counted": 50, "lost": 10, "starting": 30, "spare": 10}, id="steps were lost",
        ),
        pytest.param(
            100, 64, {"training": 60, "starting": 40}, {"counted": 64, "starting": 36},
            id="a first step counts from the restore",
        ),
        pytest.param(
            100, 50, {"training": 50, "starting": 20}, {"counted": 50, "starting": 20, "unknown": 30, "lost": 0},
            id="an older head counted a part",
        ),
        pytest.param(100, 101, {"training": 100}, {"counted": 100, "lost": 0}, id="more good time than there was"),
        pytest.param(100, 50, {}, None, id="an older head counted all"),
        pytest.param(0, 0, {}, None, id="nothing is counted yet"),
    ],
)  # fmt: skip
def test_the_kinds_add_up(total: float, good: float, spent: dict[str, float], split: dict[str, float] | None) -> None:
    state = job(current=None, node_seconds=total, good_seconds=good, spent=spent)
    found = node_time.split(state)
    assert found == (None if split is None else pytest.approx(split))
    if found:
        assert sum(found.values()) == pytest.approx(total)


def test_snapshots_of_ended_and_current_generations_count() -> None:
    state = job(A, B, stalled=3.0, progress=Progress(base=0, step=5, stall=0.5))
    assert job_status(state)["snapshot_seconds"] == pytest.approx(4.0)


def test_the_state_of_an_older_head_has_no_kinds() -> None:
    old = job(A, node_seconds=70.0).model_dump(exclude={"spent", "stalled"})
    assert job_status(JobState.model_validate(old))["node_time"] is None


def test_a_notice_to_a_member_leaves_it_training() -> None:
    noticed = node(A, notice=Notice(kind="preempt", deadline=NOW + 20))
    assert counted(job(A), noticed) == {"training": pytest.approx(10)}
