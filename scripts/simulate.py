"""What a job would cost, and when it would end, on traces of spot markets: `make simulate CLUSTER= JOB=`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from scripts.columns import aligned
from scripts.jobs import check
from spotrun.cloud import prices
from spotrun.errors import SpecError
from spotrun.simulate.costs import Costs
from spotrun.simulate.replay import Job, Outcome, Supply, play
from spotrun.simulate.statistics import percentiles
from spotrun.simulate.study import POLICIES, spread
from spotrun.simulate.traces import Trace, Zone, load
from spotrun.spec import ClusterSpec, JobSpec, load_cluster
from spotrun.spec.cluster import PoolSpec

TRACES = Path(__file__).parents[1] / "bench" / "data" / "traces"
RUNS = 100  # windows, unless the operator says otherwise
MOST = 100_000  # windows: all are in memory
LOCAL_SPOT = 0.3  # USD an hour, the assumed price of a spot machine of the local cloud
LEAST = 4.0  # if the job has no deadline, a window is this many times as long as a start and its work on all nodes
DROPPED = ("script", "keep", "deadline", "budget", "work", "restart_time", "checkpoint_interval")


@dataclass(frozen=True)
class Question:
    """One replay of the operator's job."""

    cluster: ClusterSpec
    job: Job
    policy: str
    supplies: dict[str, Supply]
    costs: Costs
    length: float
    seed: int


def simulate(
    cluster: str, job: str, folder: str = "", polarity: str = "", runs: int = RUNS, seed: int = 1
) -> dict[str, Any]:
    """Cost and end by policy: the 10th, 50th and 90th percentile over random windows. Raises `SpecError`."""
    spec = load_cluster(cluster)
    wanted = check(spec, job)
    if wanted.work is None:
        raise SpecError(f"{job}: work is missing: how long the whole job takes on one machine, such as work: 40h")
    path = Path(folder) if folder else _shipped(wanted)
    trace = load(path, polarity)
    costs = Costs(boot=max(0.0, wanted.restart_time - Costs().restore), checkpoint=wanted.checkpoint_interval)
    length = wanted.deadline or LEAST * (wanted.work / costs.rate(wanted.nodes.max) + wanted.restart_time)
    if length > trace.length:
        raise SpecError(
            f"{path}: is {trace.length / 3600:.0f} h long, and this job needs {length / 3600:.0f} h; name a longer"
            " trace with TRACES=, or give the job less work or an earlier deadline"
        )
    questions = _questions(spec, wanted, trace, costs, length, runs, seed)
    answers = spread(answer, questions, lambda _: None)
    policies = list(dict.fromkeys(question.policy for question in questions))
    found = {p: [a for q, a in zip(questions, answers, strict=True) if q.policy == p] for p in policies}
    rows = [_row(policy, outcomes, wanted.deadline) for policy, outcomes in found.items()]
    return {"traces": str(path), "runs": runs, "policies": rows}


def answer(question: Question) -> Outcome:
    """One replay, without its log."""
    q = question
    found = play(q.cluster, q.supplies, q.job, POLICIES[q.policy], q.costs, q.length, q.seed)
    return replace(found, log=())


def text(found: dict[str, Any]) -> str:
    """The table for operators."""
    heads = ["policy", "ended", "in time", "USD: 10 %", "50 %", "90 %", "hours: 10 %", "50 %", "90 %"]
    rows = [heads]
    for row in found["policies"]:
        numbers = [*row["cost"], *(None if each is None else each / 3600 for each in row["end"])]
        shown = ["-" if each is None else f"{each:.2f}" for each in numbers]
        rows.append([row["policy"], f"{row['ended']:.0%}", f"{row['met']:.0%}", *shown])
    source = f"{found['runs']} random windows of {found['traces']}, which may be about other machines than yours"
    return "\n".join([*aligned(rows, indent=""), source])


def _questions(
    spec: ClusterSpec, wanted: JobSpec, trace: Trace, costs: Costs, length: float, runs: int, seed: int
) -> list[Question]:
    names = ["own", "failover"] + (["uniform_progress", "greedy"] if wanted.deadline else [])
    if any(pool.market == "on-demand" for pool in spec.pools):
        names.append("static")
    more = {key: value for key, value in wanted.model_dump(exclude_unset=True).items() if key not in DROPPED}
    job = Job(wanted.work or 0.0, wanted.nodes.min, wanted.nodes.max, wanted.deadline, wanted.budget, more=more)
    found = []
    for number in range(runs):
        random = Random(seed * 1_000_003 + number)
        window = trace.window(random.uniform(0.0, trace.length - length), length)
        zones = _zones(spec, window, random)
        supplies = {pool.name: _supply(spec, pool, zones) for pool in spec.pools}
        found += [Question(spec, job, name, supplies, costs, length, number) for name in names]
    return found


def _zones(spec: ClusterSpec, window: Trace, random: Random) -> dict[str, Zone]:
    """The trace's zone for each zone of the cluster: that of the same name, else one that is chosen at random.

    No two zones of the cluster get the same one as long as the trace has others.
    """
    known = {zone.name: zone for zone in window.zones}
    wanted = dict.fromkeys(pool.zone for pool in spec.pools if pool.market == "spot")
    found = {name: known[name] for name in wanted if name in known}
    others: list[Zone] = []
    for name in wanted:
        if name not in found:
            others = others or [zone for zone in window.zones if zone not in found.values()] or list(window.zones)
            found[name] = others.pop(random.randrange(len(others)))
    return found


def _supply(spec: ClusterSpec, pool: PoolSpec, zones: dict[str, Zone]) -> Supply:
    """What the pool gives. zones: by the zone of the cluster."""
    flat = ((0.0, _price(spec, pool)),)
    return Supply(zones[pool.zone].counts if pool.market == "spot" else (), flat)


def _price(spec: ClusterSpec, pool: PoolSpec) -> float:
    table = prices.spot if pool.market == "spot" else prices.on_demand
    kind, count = (pool.accelerator.type, pool.accelerator.count) if pool.accelerator else ("", 0)
    found = table(spec.cloud, pool.zone, pool.machine, kind, count)
    if found is None and spec.cloud == "local":
        return LOCAL_SPOT
    if found is None:
        raise SpecError(f"pool {pool.name}: the price of {pool.machine} in {pool.zone} is not in the shipped table")
    return found


def _shipped(wanted: JobSpec) -> Path:
    """The shipped trace with about as many machines."""
    nodes = wanted.nodes.max
    return TRACES / ("v100-1" if nodes == 1 else "v100-4" if nodes <= 4 else "h100-16")


def _row(policy: str, outcomes: Sequence[Outcome], deadline: float | None) -> dict[str, Any]:
    ends = percentiles([math.inf if each.finished is None else each.finished for each in outcomes])
    return {
        "policy": "spotrun" if policy == "own" else policy,
        "ended": sum(each.finished is not None for each in outcomes) / len(outcomes),
        "met": sum(each.met for each in outcomes) / len(outcomes),
        "cost": list(percentiles([each.cost for each in outcomes])),
        "end": [None if math.isinf(end) else end for end in ends],
    }
