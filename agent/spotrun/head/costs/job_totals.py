"""Adds up what a job did and what the job cost: its steps, interruptions, machine time and bill. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spotrun.head.allocation.demand import Holdings, holds_unsaved
from spotrun.head.capacity.place import Placements
from spotrun.head.capacity.situation import Placement
from spotrun.head.costs import node_time
from spotrun.head.costs.bill import Line, Rates, Use, add, merged, total
from spotrun.head.costs.meter import NOBODY, hourly, running
from spotrun.head.fleet.classify import Condition
from spotrun.head.job_state import JobState, Progress
from spotrun.head.speeds import noted
from spotrun.head.view import FleetView, Node, View
from spotrun.wire import Kept, Worker


def observe(job: JobState, view: View) -> JobState:
    """The job with the progress that the members report. The first step after an interruption ends the interruption."""
    if job.current is None:
        return job
    here = [n for n in view.members() if n is not None and n.work.generation == job.generation]
    workers = [worker for node in here for worker in node.work.workers if worker.base >= 0]
    if job.following:  # members that are in the next generation already report their last steps in this one
        ahead = [n for n in view.members() if n is not None and n.work.generation == job.following.number]
        workers += [worker for node in ahead for worker in node.work.before if worker.base >= 0]
    if not workers:
        return job
    if len(here) == len(job.members) and all(node.phase == "running" for node in here):
        # Workers can leave while their agent makes a report, which then says both `running` and `waiting`.
        able = all(node.work.regroup in ("able", "waiting") for node in here)
        job = job if able == job.regroups else job.replace(regroups=able)
    progress = _progress(job.progress, here, workers, view.now)
    if progress == job.progress:
        return job
    phase = "running" if job.phase == "starting" and progress.step > progress.base else job.phase
    reached, pace = max(progress.step, progress.base), progress.pace or job.pace
    paced = len(job.members) if progress.pace else job.paced
    job = job.replace(progress=progress, phase=phase, reached=reached, pace=pace, paced=paced)
    if len(here) == len(job.members):
        steps, at = progress.step - progress.base, progress.stepped_at
        speeds = noted(job.speeds, here, progress.samples_per_second, progress.pace, steps, at)
        job = job.replace(speeds=speeds)
    if progress.step > progress.base and job.interruptions and job.interruptions[-1].seconds is None:
        job = _close(job, workers)
    return job


Uses = Sequence[Use]


class Idle(Kept):
    """What machines cost while no job had their devices. clusters/<name>/idle.json."""

    counted_at: float = 0.0  # the time is counted up to here
    node_seconds: float = 0.0
    cost: float = 0.0  # USD, as far as prices are known
    account: tuple[Line, ...] = ()  # time and cost by month, pool and market; older heads wrote only the sums


def count(job: JobState, view: View, uses: Uses, rates: Rates) -> JobState:
    """Add machine time that the job pays for. Time at an unknown price is added to the cost once the price is known."""
    if job.over:
        return job.replace(counted_at=view.now)
    account = add(job.account, [*_unpriced(job, view.now), *uses], rates)
    seconds: dict[str, float] = {}
    for use in uses:
        seconds[use.machine] = seconds.get(use.machine, 0.0) + use.seconds
    return job.replace(
        counted_at=view.now,
        node_seconds=job.node_seconds + sum(seconds.values()),
        spent=node_time.add(job.spent, job, view, seconds),
        timeline=job.timeline.add(uses, node_time.kinds(job, view)),
        cost=job.cost + total(account) - total(job.account),
        account=account,
        unpriced={},
        hourly=hourly(uses, rates),
    )


def count_idle(idle: Idle, now: float, uses: Uses, rates: Rates) -> Idle:
    """Add machine time that no job pays for, as `count` does for a job."""
    account = add(idle.account, uses, rates)
    return idle.replace(
        counted_at=now,
        node_seconds=idle.node_seconds + sum(use.seconds for use in uses),
        cost=idle.cost + total(account) - total(idle.account),
        account=account,
    )


def joined(before: Idle, idle: Idle) -> Idle:
    """The sum of what an earlier head and this head have counted."""
    return idle.replace(
        counted_at=idle.counted_at or before.counted_at,
        node_seconds=before.node_seconds + idle.node_seconds,
        cost=before.cost + idle.cost,
        account=merged((*before.account, *idle.account)),
    )


def shares(
    view: FleetView,
    expected: Holdings,
    conditions: Mapping[str, Condition],
    placements: Placements | None = None,
    devices: Mapping[str, int] | None = None,
) -> dict[str, dict[str, float]]:
    """By job: which part of each machine the job pays for. What no job pays for is under `NOBODY`.

    devices: of a machine that has not reported yet, by pool.

    The parts of a machine add up to 1. A job pays for the devices that it has or that boot for it, for the nodes that
    save its last state, and for the node that is kept after it has failed. A machine may serve no job, because it is
    unfit, boots or ends. Then a job that asks for machines of this pool pays. If no job does, the first job that wants
    more nodes pays, or else the first job that wants nodes. A job pays for machines that are kept because they hold a
    state which the bucket lacks, and for those that are ready for its move. The cluster pays for idle devices.
    """
    found: dict[str, dict[str, float]] = {NOBODY: {}, **{job.id: {} for job in view.jobs}}
    counts = {machine.name: (devices or {}).get(machine.pool, 1) for machine in view.machines}
    counts |= {node.name: node.report.devices for node in view.nodes}
    left = dict.fromkeys(running(view), 1.0)
    for job in view.jobs:
        mine = {member.node: member.devices for member in job.bound} | dict(expected.get(job.id, {}))
        if job.ending is not None:  # its last state goes into the bucket
            mine |= dict.fromkeys(view.reporting.get(job.id, ()), ())
        for name, held in mine.items():
            if left.get(name, 0.0) > 0:
                share = min(left[name], len(held) / max(counts.get(name, 1), len(held)) if held else 1.0)
                found[job.id][name], left[name] = share, left[name] - share
    wanting = [job for job in view.jobs if job.wants_nodes]
    lacking = [job for job in wanting if len(found[job.id]) < job.spec.nodes.max]
    order = [job.id for job in (*lacking, *wanting)]  # a job that moves may have more than its `max`
    places, pools = placements or {}, running(view)
    movers = {pool: job.id for job in reversed(wanting) for pool in _moves_to(places.get(job.id))}
    for name, share in left.items():
        if share > 1e-9:
            asking = (job for job in order if pools[name] in _asks(places.get(job)))
            payer = NOBODY if share < 1 else next(asking, next(iter(order), NOBODY))
            if share == 1 and name in conditions and conditions[name].state == "ready":
                payer = _kept_for(view, name) or movers.get(conditions[name].machine.pool, NOBODY)
            found[payer][name] = share
    return found


def _kept_for(view: FleetView, name: str) -> str:
    """The job whose state the machine holds, if the bucket does not have that state; else ""."""
    node = view.by_name.get(name)
    mine = (work.job for work in node.report.jobs if view.believes(node, work.job)) if node else ()
    jobs = (view.by_id[job] for job in mine)
    return next((job.id for job in jobs if node and not job.ended_already and holds_unsaved(node, job)), "")


def _asks(placement: Placement | None) -> frozenset[str]:
    """Pools in which a job wants machines."""
    return frozenset[str]().union(*(need.pools for need in placement.needs)) if placement else frozenset()


def _moves_to(placement: Placement | None) -> frozenset[str]:
    """Pools in which a job wants machines, but does not train yet."""
    return _asks(placement) - placement.use if placement else frozenset()


def goodput(job: JobState) -> float | None:
    """Which share of the counted time went into steps that counted; None: no time has been counted."""
    if job.node_seconds <= 0:
        return None
    return max(0.0, min(1.0, node_time.counted(job) / job.node_seconds))


def _unpriced(job: JobState, now: float) -> list[Use]:
    """The time that an older head has counted without a price. The job's other fields have this time already."""
    return [Use("", pool, now - seconds, now) for pool, seconds in job.unpriced.items()]


def _progress(before: Progress, here: Sequence[Node], workers: Sequence[Worker], now: float) -> Progress:
    front = max(workers, key=lambda w: (w.step, w.stepped_at))
    base = max([w.base for w in workers])
    # The generation's time begins when its last worker has restored the state.
    restored_at = max([w.phases[3] for w in workers])
    steps = front.step - base
    stepping = front.stepped_at - restored_at
    pace = stepping / steps if steps > 0 and stepping > 0 else before.pace
    samples = sum([w.samples for w in workers])
    return Progress(
        base=base,
        step=max(front.step, before.step),
        stepped_at=max(front.stepped_at, before.stepped_at),
        restored_at=restored_at,
        pace=pace,
        samples_per_second=samples / stepping if stepping > 0 else 0.0,
        total_steps=front.total_steps or before.total_steps,
        metrics=next((w.metrics for w in sorted(workers, key=lambda w: w.rank) if w.metrics), before.metrics),
        stall=max([w.stall for w in workers]),
        seen_at=now if front.step > before.step else before.seen_at,
    )


def _close(job: JobState, workers: Sequence[Worker]) -> JobState:
    """Close the last interruption: the first step after it is done, so its cost is known."""
    last = job.interruptions[-1]
    phases = max((w.phases for w in workers), key=lambda phases: phases[4])  # those of the slowest worker
    if phases[4] <= 0:
        return job
    lost = max(0, last.step - job.progress.base)
    good = max(0.0, job.good_seconds - lost * last.step_cost)
    ordered = min(job.ordered_at, phases[0] or job.ordered_at)  # after a drain, workers join before the head's turn
    seconds = max(0.0, phases[4] - last.at)
    held = min(seconds, max(0.0, job.resumed_at - last.at))
    closed = last.replace(seconds=seconds, held=held, steps_lost=lost, phases=(ordered, *phases))
    return job.replace(interruptions=(*job.interruptions[:-1], closed), good_seconds=good)
