"""Machines whose end is known, such as by `max_run_duration`: drained and replaced one after the other. Pure.

Machines that are made together end together, and their snapshots in memory with them. So each retires at a time of its
own: the last one shortly before its end, each other one some minutes before the next. A machine retires later if the
job could not continue without it, or while another machine is missing. It never stays until its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from spotrun.cloud.base import Instance
from spotrun.head.job_state import JobState
from spotrun.head.planner.liveness import reports
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import ENDING_STATES, FleetView
from spotrun.spec import PoolSpec
from spotrun.spec.notices import RETIRE_LEAD

SHARE = 0.25  # of a machine's time: the most for the lead, and the most for the gaps of all machines of a pool


def planned(instances: Iterable[Instance], pools: Mapping[str, PoolSpec]) -> dict[str, float]:
    """When each machine whose end is known retires, in epoch seconds.

    The times are planned from the last end backwards: a machine that ends earlier changes no later time.
    """
    ending = sorted((each for each in instances if each.ends), key=lambda each: (each.ends, each.name), reverse=True)
    found: dict[str, float] = {}
    limit = float("inf")
    for each in ending:
        life, pool = each.ends - each.created, pools.get(each.pool)
        at = max(each.created + life / 2, min(_latest(each.ends, each.created), limit))
        found[each.name] = at
        limit = at - min(TIMEOUTS.retirement_gap, SHARE * life / (pool.max if pool else 1))
    return found


def mark(view: FleetView) -> FleetView:
    """The view in which nodes that retire now say so (`Node.due`)."""
    if not any(each.retires for each in view.machines):
        return view
    due = _due(view)
    return replace(view, nodes=tuple(replace(n, due=due[n.name]) if n.name in due else n for n in view.nodes))


def _due(view: FleetView) -> dict[str, float]:
    """Nodes that retire now, with their machines' ends: one at a time, unless the end is near."""
    able = {
        node.name
        for node in view.nodes
        if reports(view, node) and node.phase not in ("checking", "unfit") and not node.leaving
        if node.cloud not in ENDING_STATES
    }
    full = len(able) >= view.expected  # else a machine is missing, maybe since its zone has no machine for it
    found: dict[str, float] = {}
    for each in sorted(view.machines, key=lambda machine: (machine.retires, machine.name)):
        if not 0 < each.retires <= view.now or each.state != "running" or each.name in view.kept:
            continue  # a kept node stays until its machine ends
        others = able - {each.name, *found}
        last = view.now >= _latest(each.ends, each.created)
        if last or (full and not found and all(_goes_on(view, job, others) for job in view.members.get(each.name, ()))):
            found[each.name] = each.ends
    return found


def _goes_on(view: FleetView, job: JobState, others: Set[str]) -> bool:
    """Whether the job could train on these nodes. Those of other jobs' generations do not count."""
    taken = {name for name, jobs in view.members.items() if job not in jobs}
    return len(others - taken) >= job.spec.nodes.min


def _latest(ends: float, created: float) -> float:
    return ends - min(RETIRE_LEAD, SHARE * (ends - created))
