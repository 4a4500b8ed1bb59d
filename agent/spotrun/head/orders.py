"""From a job's state to the orders for its agents, and from uploaded parts to manifests. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from spotrun.head.job_state import JobState
from spotrun.wire import Bundle, Manifest, Order, Part, Report, SaveOrder


def order_for(job: JobState, bundle: Bundle, node: str, boot: str, epoch: int) -> Order:
    """What the agent `node`, in its incarnation `boot`, should be doing for a job that has not ended."""
    order, save = Order(epoch=epoch, bundle=bundle), _save_for(job, node)
    if job.current is None:
        return order.replace(upload=job.saving.ref, save=save) if job.saving and save else order
    if all((member.node, member.boot) != (node, boot) for member in job.members):
        return order
    stop_at = job.draining.step if job.draining else None
    return order.replace(generation=job.current, stop_at=stop_at, save=save, dump=job.dumping)


def manifests(job: JobState, reports: Iterable[Report], now: float) -> list[Manifest]:
    """A manifest for each checkpoint that has all its parts and is newer than every complete checkpoint.

    Older ones do not count: the last report of a disconnected node may name a checkpoint that has been removed.
    """
    found: dict[tuple[int, int, int], dict[int, Part]] = defaultdict(dict)
    for report in reports:
        for part in report.parts if report.job == job.id else ():
            found[(part.generation, part.step, part.parts)][part.index] = part
    return [
        Manifest(
            job=job.id,
            generation=generation,
            step=step,
            created=now,
            files=tuple(file for index in sorted(parts) for file in parts[index].files),
        )
        for (generation, step, count), parts in sorted(found.items())
        if set(parts) == set(range(count)) and (generation, step) > job.newest
        if len({part.whole for part in parts.values()}) == 1
    ]


def _save_for(job: JobState, node: str) -> SaveOrder | None:
    if job.saving is None or node not in job.saving.holders:
        return None
    holders = job.saving.holders
    return SaveOrder(step=job.saving.ref.step, index=holders.index(node), parts=len(holders))
