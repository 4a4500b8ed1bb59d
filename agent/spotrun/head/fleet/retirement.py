"""Machines whose end is known, such as by `max_run_duration`: drained and replaced one after the other. Pure.

Machines that are made together end together, and their snapshots in memory with them. So each retires at a time of its
own: the last one shortly before its end, each other one some minutes before the next. A machine retires later if the
job could not continue without it, or while another machine is missing. It never stays until its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from spotrun.cloud.base import Instance
from spotrun.head.planner.liveness import eligible
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import View
from spotrun.spec import PoolSpec
from spotrun.spec.notices import RETIRE_LEAD

SHARE = 0.25  # of a machine's time that the lead, and the gaps of all machines of a pool, take at the most


def planned(instances: Iterable[Instance], pools: Mapping[str, PoolSpec]) -> dict[str, float]:
    """When each machine whose end is known retires, epoch seconds. Machines that end earlier change nothing."""
    ending = sorted((each for each in instances if each.ends), key=lambda each: (each.ends, each.name), reverse=True)
    found: dict[str, float] = {}
    limit = float("inf")
    for each in ending:
        life, pool = each.ends - each.created, pools.get(each.pool)
        at = max(each.created + life / 2, min(_latest(each.ends, each.created), limit))
        found[each.name] = at
        limit = at - min(TIMEOUTS.retirement_gap, SHARE * life / (pool.max if pool else 1))
    return found


def mark(view: View) -> View:
    """The view in which nodes that retire now say so (`Node.due`)."""
    if not any(each.retires for each in view.machines):
        return view
    due = _due(view)
    return replace(view, nodes=tuple(replace(n, due=due[n.name]) if n.name in due else n for n in view.nodes))


def _due(view: View) -> dict[str, float]:
    """Nodes that retire now, with their machines' ends: one at a time, unless the end is near."""
    able = {node.name for node in eligible(view)}
    full = len(able) >= view.expected  # else a machine is missing, maybe since its zone has no machine for it
    found: dict[str, float] = {}
    for each in sorted(view.machines, key=lambda machine: (machine.retires, machine.name)):
        if not 0 < each.retires <= view.now or each.state != "running":
            continue
        others = able - {each.name, *found}
        last = view.now >= _latest(each.ends, each.created)
        if last or (full and not found and len(others) >= view.job.spec.nodes.min):
            found[each.name] = each.ends
    return found


def _latest(ends: float, created: float) -> float:
    return ends - min(RETIRE_LEAD, SHARE * (ends - created))
