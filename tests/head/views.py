"""What a planner sees, in short: jobs, their nodes, and views of both at the time `NOW`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from spotrun.head.allocation.demand import Wish
from spotrun.head.capacity.sizes import Need, Pool
from spotrun.head.fleet.classify import classify
from spotrun.head.fleet.decide import FleetPlan, decide
from spotrun.head.fleet.decide import wanted as wanted_now
from spotrun.head.fleet.record import Recreate, Replacement
from spotrun.head.job_state import Cause, JobState, Progress, Start
from spotrun.head.planner.plan import plan
from spotrun.head.view import FleetView, Machine, Node, View
from spotrun.spec import JobSpec
from spotrun.wire import Failure, Generation, JobReport, Member, Notice, Part, Report, StateRef, Worker

NOW = 1000.0
A, B, C, D = "a", "b", "c", "d"
OUTER = ("connected", "reported_at", "reports_since", "cloud", "since")  # fields of `Node` that `node` can set


def spec(**changes: Any) -> dict[str, Any]:
    return JobSpec(script="train.py", **{"nodes": {"min": 2, "max": 3}, **changes}).model_dump(mode="json")


def member(name: str, boot: str = "b1") -> Member:
    return Member(node=name, boot=boot, address=f"127.0.0.{ord(name[-1])}")


def job(*members: str, **changes: Any) -> JobState:
    """A job that runs on `members` since 100 s, at step 50 of 1000, 0.1 s a step; none: it waits."""
    current = Generation(number=1, members=tuple(map(member, members)), store="h:1") if members else None
    values: dict[str, Any] = {
        "id": "j",
        "name": "j",
        "cluster": "c",
        "code": "x",
        "spec": spec(),
        "submitted": NOW - 110,
        "started": NOW - 100,
        "phase": "running" if members else "waiting",
        "generation": 1 if members else 0,
        "current": current,
        "ordered_at": NOW - 100,
        "last": tuple(map(member, members)),
        "saved_at": NOW - 10,
        "progress": Progress(base=0, step=50, stepped_at=NOW - 0.05, restored_at=NOW - 5, pace=0.1, total_steps=1000),
    }
    return JobState(**{**values, **changes})


def node(name: str, **changes: Any) -> Node:
    """A healthy node that takes part in generation 1 at step 50."""
    outer = {key: changes.pop(key) for key in OUTER if key in changes}
    step = changes.pop("step", 50)
    worker = Worker(rank=0, pid=1, step=step, base=0, stepped_at=changes.pop("stepped_at", NOW - 0.05))
    report = {
        "node": name,
        "boot": "b1",
        "pool": "p",
        "zone": "z",
        "address": "127.0.0.1",
        "job": "j",
        "phase": "running",
        "generation": 1,
        "store": f"{name}:1",
        "workers": (worker,),
        "snapshot": StateRef(generation=1, step=48),
    }
    outer = {"connected": True, "reported_at": NOW - 0.1, "cloud": "running", **outer}
    found = Report.model_validate({**report, **changes})
    return Node(report=found, work=found.jobs[0] if found.jobs else JobReport(), **outer)


def spare(name: str, **changes: Any) -> Node:
    return node(name, **{"phase": "ready", "generation": 0, "workers": (), "snapshot": None, **changes})


@dataclass(frozen=True)
class Seen(View):
    """What a job sees, and what the cloud was asked about its machines."""

    replaced: tuple[Replacement, ...] = ()


def view(job: JobState, *nodes: Node, **changes: Any) -> Seen:
    """What the job sees. It has all of the nodes and may have all of the machines."""
    found = Seen(**{"now": NOW, "job": job, "nodes": nodes, "expected": 3, "waiting_since": NOW - 1, **changes})
    return replace(found, conditions=classify(fleet(found)))


def fleet(seen: Seen) -> FleetView:
    """The same of a fleet that has no other job."""
    kept = ("now", "nodes", "expected", "began", "awake_since", "machines", "listed", "signs", "joined", "replaced")
    jobs = () if seen.job.over else (seen.job,)
    return FleetView(jobs=jobs, **{key: getattr(seen, key) for key in kept})


def fleet_plan(seen: Seen, pools: Sequence[Pool] = (), needed: int | None = None) -> FleetPlan:
    """What to ask of the cloud. needed: the machines that the job wants; None: keep the sizes."""
    found, keep = fleet(seen), frozenset(member.node for member in seen.job.last)
    wish = None if needed is None else Wish((Need(needed),) if needed else (), keep)
    return decide(found, classify(found), pools, wish)


def listed(*names: str) -> tuple[Machine, ...]:
    """Machines that run, and whose agents have joined."""
    return tuple(Machine(name, "p", "running", created=0.0, answered=1.0) for name in names)


def failure(kind: str, rank: int = 0, at: float = NOW - 0.1, message: str = "boom") -> Failure:
    return Failure(kind=kind, rank=rank, at=at, message=message)  # type: ignore[arg-type]


def notice(seconds: float = 30.0) -> Notice:
    return Notice(kind="preempt", deadline=NOW + seconds)


def failed(name: str, kind: str, **changes: Any) -> Node:
    why = failure(kind, at=changes.pop("at", NOW - 0.1)).replace(repeats=changes.pop("repeats", False))
    return node(name, phase="failed", failure=why, **changes)


def part(index: int, whole: str) -> Part:
    return Part(step=48, generation=1, index=index, parts=2, files=(), whole=whole)


def start(*names: str, cause: Cause | None = None, store: str | None = None) -> Start:
    return Start(tuple(Member(node=n, boot="b1", address="127.0.0.1") for n in names), store or f"{names[0]}:1", cause)


def frozen(name: str, seconds: float, **changes: Any) -> Node:
    return node(name, reported_at=NOW - seconds, stepped_at=NOW - seconds, **changes)


def planned(seen: Seen) -> tuple[Any, ...]:
    """All that the head does now: for the job, then about single machines."""
    return (*plan(seen).actions, *fleet_plan(seen).recreate)


def wanted(seen: Seen, action: Recreate) -> bool:
    """Whether that machine should still be replaced."""
    return action in wanted_now(fleet(seen), classify(fleet(seen)))
