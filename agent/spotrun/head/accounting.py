"""What a generation did, what an interruption cost, and which share of the machines' time counted. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spotrun.head import node_time
from spotrun.head.job_state import JobState, Progress
from spotrun.head.view import Node, View
from spotrun.wire import Worker


def observe(job: JobState, view: View) -> JobState:
    """The job with the progress that the members report. The first step after an interruption ends the interruption."""
    if job.current is None:
        return job
    here = [n for n in view.members() if n is not None and n.report.generation == job.generation]
    workers = [worker for node in here for worker in node.report.workers if worker.base >= 0]
    if not workers:
        return job
    progress = _progress(job.progress, here, workers)
    if progress == job.progress:
        return job
    phase = "running" if job.phase == "starting" and progress.step > progress.base else job.phase
    reached, pace = max(progress.step, progress.base), progress.pace or job.pace
    job = job.replace(progress=progress, phase=phase, reached=reached, pace=pace)
    if progress.step > progress.base and job.interruptions and job.interruptions[-1].seconds is None:
        job = _close(job, workers)
    return job


def count(job: JobState, view: View, prices: Mapping[str, float]) -> JobState:
    """Add the time since the last count for every machine that costs money. prices: USD an hour, by pool.

    Each machine that the cloud lists as running costs money: also while it boots, is checked or is unfit. While the
    cloud does not answer, each machine with a connected agent counts. Time at an unknown price is kept by pool, and is
    added to the cost once the price is known.
    """
    if job.ended_already or not job.counted_at:
        return job.replace(counted_at=view.now)
    span = max(0.0, view.now - job.counted_at)
    pools = {node.name: node.report.pool for node in view.nodes if node.connected or node.cloud == "running"}
    pools |= {machine.name: machine.pool for machine in view.machines if machine.state == "running"}
    due = dict(job.unpriced)
    for pool in pools.values():
        due[pool] = due.get(pool, 0.0) + span
    return job.replace(
        counted_at=view.now,
        node_seconds=job.node_seconds + span * len(pools),
        spent=node_time.add(job.spent, job, view, pools, span),
        cost=job.cost + sum(seconds * prices.get(pool, 0.0) for pool, seconds in due.items()) / 3600,
        unpriced={pool: seconds for pool, seconds in due.items() if pool not in prices},
    )


def goodput(job: JobState) -> float | None:
    """Share of the time that `count` has added that went into steps that counted; None: no time has been added."""
    if job.node_seconds <= 0:
        return None
    return max(0.0, min(1.0, node_time.counted(job) / job.node_seconds))


def _progress(before: Progress, here: Sequence[Node], workers: Sequence[Worker]) -> Progress:
    front = max(workers, key=lambda w: (w.step, w.stepped_at))
    base = max(w.base for w in workers)
    # The generation's time begins when its last worker has restored the state.
    restored_at = max(w.phases[3] for w in workers)
    steps = front.step - base
    stepping = front.stepped_at - restored_at
    pace = stepping / steps if steps > 0 and stepping > 0 else before.pace
    samples = sum(w.samples for n in here for w in n.report.workers)
    return Progress(
        base=base,
        step=max(front.step, before.step),
        stepped_at=max(front.stepped_at, before.stepped_at),
        restored_at=restored_at,
        pace=pace,
        samples_per_second=samples / stepping if stepping > 0 else 0.0,
        total_steps=front.total_steps or before.total_steps,
        metrics=next((w.metrics for w in sorted(workers, key=lambda w: w.rank) if w.metrics), before.metrics),
        stall=max(w.stall for w in workers),
    )


def _close(job: JobState, workers: Sequence[Worker]) -> JobState:
    """The first step after the last interruption is done, so the cost of the interruption is known."""
    last = job.interruptions[-1]
    phases = max((w.phases for w in workers), key=lambda phases: phases[4])  # those of the slowest worker
    if phases[4] <= 0:
        return job
    lost = max(0, last.step - job.progress.base)
    good = max(0.0, job.good_seconds - lost * last.step_cost)
    closed = last.replace(seconds=max(0.0, phases[4] - last.at), steps_lost=lost, phases=(job.ordered_at, *phases))
    return job.replace(interruptions=(*job.interruptions[:-1], closed), good_seconds=good)
