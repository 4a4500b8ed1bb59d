"""Replays one trace for one job under one policy: `replay(trace, job, policy) -> Outcome`. Time is simulated."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from spotrun.head.capacity.situation import Policy
from spotrun.head.job_state import JobState
from spotrun.simulate.costs import Costs
from spotrun.simulate.head import SimulatedHead
from spotrun.simulate.job_nodes import JobNodes
from spotrun.simulate.market import Fault, Market
from spotrun.simulate.traces import Changes, Trace
from spotrun.spec import ClusterSpec, JobSpec

BEGIN = 1_000_000.0  # epoch seconds at the beginning of each replay


@dataclass(frozen=True)
class Supply:
    """What a pool gives. Times are seconds from the submission."""

    counts: Changes = ()  # machines; (): as many as the pool may have
    prices: Changes = ()  # USD an hour for one machine


@dataclass(frozen=True)
class Job:
    """A job to replay."""

    work: float  # seconds that it takes on one node of speed 1
    min: int = 1
    max: int = 1
    deadline: float | None = None  # seconds from its submission
    budget: float | None = None  # USD
    step: float = 1.0  # work of a step
    more: Mapping[str, Any] = field(default_factory=dict)  # other keys of its job file


@dataclass(frozen=True)
class Outcome:
    """How the job ended, and what it cost."""

    finished: float | None  # seconds from the submission to the end; None: not within the trace
    done: float  # the part of the work that is done
    cost: float  # USD for all machines, until the job's end
    spot_hours: float
    on_demand_hours: float
    goodput: float  # seconds in steps that counted / machine-seconds
    moves: int  # generations that began in another pool
    restarts: int  # generations after the first one
    deadline: float | None = None  # as in the job
    log: tuple[tuple[float, str, str], ...] = ()  # the events of the job: seconds, kind and text
    turns: int = 0  # of the head
    saved: float = 0.0  # the part of the work that the bucket has at the end
    counted: float = 0.0  # USD that the head has counted for the job

    @property
    def met(self) -> bool:
        """Whether the job ended by its deadline."""
        return self.finished is not None and (self.deadline is None or self.finished <= self.deadline + 1e-6)


def replay(
    trace: Trace, job: Job, policy: Policy | None, costs: Costs | None = None, seed: int = 0, on_demand: int = 0
) -> Outcome:
    """The outcome of a job that is submitted at the beginning of the trace, on a pool of spot machines for each zone.

    policy: None: the one that the job's own keys choose. on_demand: machines of one on-demand pool; 0: there is none.
    """
    cluster = cluster_of(trace, job, on_demand)
    pools = zip(cluster.pools, trace.zones, strict=False)
    supplies = {pool.name: Supply(zone.counts, zone.prices or ((0.0, trace.price),)) for pool, zone in pools}
    if on_demand:
        supplies["on-demand"] = Supply((), ((0.0, trace.on_demand),))
    return play(cluster, supplies, job, policy, costs or Costs(), trace.length, seed)


def play(
    cluster: ClusterSpec,
    supplies: Mapping[str, Supply],
    job: Job,
    policy: Policy | None,
    costs: Costs,
    length: float,
    seed: int = 0,
    faults: Sequence[Fault] = (),
    boots: Sequence[float] = (),
) -> Outcome:
    """The outcome on the pools of a cluster.

    supplies: by pool. length: seconds after which the replay ends. faults: their times are seconds from the submission.
    boots: how long the first machines take until they are ready.
    """
    shifted = [replace(fault, at=BEGIN + fault.at) for fault in faults]
    market = Market(costs.boot, costs.notice, Random(seed), shifted, boots)
    for pool in cluster.pools:
        supply = supplies[pool.name]
        market.add(pool.name, pool.max, supply.counts, supply.prices, BEGIN, costs.again)
    market.now = BEGIN
    nodes = JobNodes("job", job.work, job.step, costs, {})
    head = SimulatedHead(cluster, market, {"job": nodes}, policy)
    head.jobs["job"] = state_of(job, cluster, costs)
    now, due, looks = BEGIN, BEGIN, -1
    while True:
        if now >= due or market.looks != looks:  # else nothing has happened that the head would see
            head.settle(now)
            if head.jobs["job"].ended_already:
                break
            due, looks = min(head.next, nodes.next if nodes.next > now else math.inf), market.looks
        now = min(market.next, due)
        if now > BEGIN + length:
            now = BEGIN + length
            market.advance(now)
            break
        market.advance(now)
    market.now = now
    market.close()
    nodes.close(now)
    return _outcome(cluster, market, job, nodes, head, now)


def state_of(job: Job, cluster: ClusterSpec, costs: Costs) -> JobState:
    """The job when it is submitted."""
    times = {"work": job.work, "restart_time": costs.boot + costs.restore, "checkpoint_interval": costs.checkpoint}
    keys = {"deadline": job.deadline, "budget": job.budget}
    nodes = {"min": job.min, "max": job.max}
    given = {key: value for key, value in keys.items() if value is not None}
    spec = JobSpec.model_validate({"script": "train.py", "nodes": nodes, **times, **given, **job.more})
    state = JobState(id="job", name=spec.name, cluster=cluster.name, code="", spec=spec, submitted=BEGIN)
    return state.replace(upload=1e-3)  # known from the start: here, uploads take no time


def cluster_of(trace: Trace, job: Job, on_demand: int) -> ClusterSpec:
    """A pool of spot machines for each zone, and one of on-demand machines if there are any."""
    pools: list[dict[str, Any]] = [
        {"name": pool_name(zone.name), "zone": f"local-{index}", "max": max(job.max, 1) + 1}
        for index, zone in enumerate(trace.zones)
    ]
    if on_demand:
        pools.append({"name": "on-demand", "zone": "local-od", "market": "on-demand", "max": on_demand})
    return ClusterSpec.model_validate({"name": "simulated", "cloud": "local", "pools": pools})


def pool_name(zone: str) -> str:
    """The name of the pool in a zone."""
    return re.sub("[^a-z0-9]+", "-", zone.lower()).strip("-")[:20].strip("-")


def _outcome(
    cluster: ClusterSpec, market: Market, job: Job, nodes: JobNodes, head: SimulatedHead, now: float
) -> Outcome:
    spot = {pool.name for pool in cluster.pools if pool.market == "spot"}
    hours = sum(market.hours.values())
    state = head.jobs["job"]
    done = 1.0 if state.phase == "succeeded" else min(1.0, nodes.reached / nodes.total)
    seconds = sum(nodes.good.values())
    again = nodes.lost / (job.work * done) if done else 0.0
    return Outcome(
        finished=now - BEGIN if state.phase == "succeeded" else None,
        done=done,
        cost=market.cost,
        spot_hours=sum(value for pool, value in market.hours.items() if pool in spot),
        on_demand_hours=sum(value for pool, value in market.hours.items() if pool not in spot),
        goodput=seconds * (1 - again / (1 + again)) / 3600 / hours if hours else 0.0,
        moves=nodes.moved,
        restarts=max(0, nodes.restarts - 1),
        deadline=job.deadline,
        log=tuple((time - BEGIN, kind, text) for time, kind, text in head.log),
        turns=head.turns,
        saved=max(0, state.newest[1]) / nodes.total,
        counted=state.cost,
    )
