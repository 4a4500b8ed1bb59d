"""From the view of the fleet to the `Situation` that the policies see. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from spotrun.cloud.base import Advice
from spotrun.head.allocation.claims import Claim
from spotrun.head.capacity.situation import NO_ADVICE, Demand, History, Offer, Situation
from spotrun.head.capacity.sizes import Pool
from spotrun.head.job_state import JobState
from spotrun.head.planner import patience
from spotrun.head.speeds import LEAST
from spotrun.head.view import FleetView
from spotrun.spec import ClusterSpec, JobSpec, devices_of, largest_zone, may_cross_zones

SCALING = 0.956
"""n nodes are as fast as n ** SCALING: 97 % for each doubling. An assumption in the range that PyTorch's DDP paper
reports for ResNet-50 and BERT on NCCL (Li et al., VLDB 2020, figure 9)."""
MOVE = 30.0  # seconds without training in a move, until the job has measured some
RECENT = 5  # interruptions whose times count: of these, the median is the time of a move


def situation(
    view: FleetView,
    cluster: ClusterSpec,
    pools: Sequence[Pool],
    prices: Mapping[str, float] | None = None,
    histories: Mapping[str, History] | None = None,
    advice: Mapping[str, Advice] | None = None,
    holders: Container[str] = (),
    pins: Iterable[Claim] = (),
) -> Situation:
    """What the policies see.

    pools: as the cloud knows them, with the conditions of their machines. prices: USD an hour. histories: by pool.
    advice: what the cloud says about pools. holders: the jobs that have nodes. pins: the claims of parked jobs.
    """
    known, histories, prices, advice = {pool.name: pool for pool in pools}, histories or {}, prices or {}, advice or {}
    ready = Counter(n.report.pool for n in view.nodes if n.connected and n.report.phase == "ready" and not n.leaving)
    kept = _kept(view, pins)
    offers = tuple(
        Offer(
            pool=known.get(pool.name) or Pool(pool.name, pool.max, 0),
            zone=pool.zone,
            market=pool.market,
            machine=pool.machine,
            devices=devices_of(pool, cluster) or 1,
            price=prices.get(pool.name),
            history=histories.get(pool.name, History()),
            advice=advice.get(pool.name, NO_ADVICE),
            life=pool.max_run_duration,
            usable=ready[pool.name],
            kept=kept.get(pool.name, 0.0),
        )
        for pool in cluster.pools
    )
    found = [demand(view, cluster, job, index) for index, job in enumerate(view.jobs) if claims(job)]
    return Situation(view.now, offers, tuple(replace(each, holds=each.job in holders) for each in found))


def _kept(view: FleetView, pins: Iterable[Claim]) -> dict[str, float]:
    """The machines that failed and parked jobs keep, by pool."""
    shares = [(job.kept.node, job.kept.share) for job in view.jobs if job.kept]
    for name, devices in [each for pin in pins for each in pin.holds.items()]:
        if (node := view.by_name.get(name)) is not None:
            shares.append((name, len(devices) / max(node.report.devices, len(devices))))
    found: dict[str, float] = {}
    for name, share in shares:
        found[view.pools.get(name, "")] = found.get(view.pools.get(name, ""), 0.0) + share
    return found


def claims(job: JobState) -> bool:
    """Whether the job has devices or should get some."""
    return job.wants_nodes or job.current is not None


def suited(job: JobSpec, cluster: ClusterSpec) -> frozenset[str]:
    """The pools that the job may use, and whose machines have enough devices, as far as that is known."""
    wanted = job.devices or 1
    fit = (pool.name for pool in cluster.pools if (devices_of(pool, cluster) or 1) >= wanted)
    return frozenset(name for name in fit if not job.pools or name in job.pools)


def demand(view: FleetView, cluster: ClusterSpec, job: JobState, index: int) -> Demand:
    """The demand of one job. index: its place in the queue."""
    spec, pools, members = job.spec, suited(job.spec, cluster), [member.node for member in job.members]
    wide = spec.zones == "any" or spec.nodes.min > largest_zone(pool for pool in cluster.pools if pool.name in pools)
    restart = spec.restart_time
    # From the order of a generation to its first step: not the time in which it waited for machines.
    measured = [each.phases[-1] - each.phases[0] for each in job.interruptions[-RECENT:] if len(each.phases) > 1]
    return Demand(
        job=job.id,
        pools=pools,
        order=index,
        priority=job.rank,
        submitted=job.submitted,
        wants=job.wants_nodes,
        min=spec.nodes.min,
        max=spec.nodes.max,
        spares=spec.nodes.spares,
        devices=spec.devices,
        cheapest=spec.policy == "cheapest",
        across=wide and may_cross_zones(spec, cluster),
        members=Counter(view.pools.get(name, "") for name in members),
        leaving=Counter(node.report.pool for node in map(view.by_name.get, members) if node and node.leaving),
        left=_left(job, _reached(view, job)),
        scaling=SCALING,
        deadline=job.submitted + spec.deadline if spec.deadline else None,
        budget=job.cost_limit - job.cost if job.cost_limit else None,
        restart=restart,
        move=min(restart, statistics.median(measured) if measured else MOVE),
        # A checkpoint is complete when it is in the bucket. It has the state from before its upload.
        checkpoint=spec.checkpoint_interval + 2 * job.upload,
        unsaved=_unsaved(job, view.now) if job.current else 0.0,
    )


def _unsaved(job: JobState, now: float) -> float:
    """Seconds of training that the bucket lacks. The time in which the job waited for machines is none."""
    began = job.progress.base if job.progress.base >= 0 else job.reached  # the step at which this generation began
    before = max(0, began - max(0, job.newest[1])) * (job.progress.pace or job.pace)
    since = min(job.ordered_at, job.progress.restored_at or job.ordered_at)  # it may have begun without a head
    return max(0.0, now - max(job.saved_at - job.upload, job.started or now, since - before))


def _reached(view: FleetView, job: JobState) -> int:
    """The step that its workers have reached, or else that of the newest state that a new generation can begin with."""
    if job.progress.base >= 0:
        return max(job.progress.step, job.progress.base)
    holders = (view.by_name[name] for name in view.reporting.get(job.id, ()))
    states = (patience.held(work) for node in holders if node.connected and (work := node.report.of(job.id)))
    return max(0, max(states, default=job.newest)[1], job.newest[1])


def _left(job: JobState, reached: int) -> float | None:
    """The work left, in seconds on one machine: as measured, else as the job file says; None if neither is known.

    The first steps of a generation are slow. Until it has done `LEAST` steps, the measurement before it counts. That
    may be of other numbers of nodes and of samples a step: `total` is in steps of `size` nodes.
    """
    progress, spec = job.progress, job.spec
    total, pace, nodes = progress.total_steps, progress.pace, len(job.members) or len(job.last)
    if progress.step - max(progress.base, 0) < LEAST:
        size = nodes if progress.base >= 0 else job.paced or nodes
        last = max(job.speeds, key=lambda speed: speed.at, default=None)
        if last:
            samples = progress.samples_per_second * progress.pace or last.samples * size / last.nodes
            pace, nodes = samples / last.samples_per_second, last.nodes
        elif spec.work is not None and job.reached < LEAST:
            return spec.work * (1 - reached / total) if total else spec.work
        elif not progress.pace:
            nodes = job.paced or nodes
            pace = job.pace * size / max(nodes, 1)
    if not (total and pace and nodes):
        return spec.work
    return float(max(0, total - reached) * pace * nodes**SCALING)
