"""Machines whose end is known, such as by `max_run_duration`: drained and replaced one after the other. Pure.

Machines that are made together would reach their end together, and their snapshots in memory would be gone at once. So
each has a time of its own at which it retires: the last one shortly before its end, each other one some minutes before
the next. A machine retires later than planned if the job could not go on without it, or while a machine is missing, but
never later than shortly before its end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from spotrun.cloud.base import Instance
from spotrun.head.job_state import Recreate
from spotrun.head.planner import patience
from spotrun.head.view import View
from spotrun.spec import JobSpec, PoolSpec
from spotrun.spec.notices import RETIRE_LEAD

GAP = 300.0  # seconds between two that retire: a successor boots meanwhile
SHARE = 0.25  # of a machine's time that the lead, and the gaps of all machines of a pool, take at the most
SETTLE = 10.0  # seconds that an agent has to upload its last logs before its machine is replaced


def planned(instances: Iterable[Instance], pools: Mapping[str, PoolSpec]) -> dict[str, float]:
    """When each machine whose end is known retires, epoch seconds.

    It does not depend on machines that end earlier: those may be replaced meanwhile.
    """
    ending = sorted((each for each in instances if each.ends), key=lambda each: (each.ends, each.name), reverse=True)
    found: dict[str, float] = {}
    limit = float("inf")
    for each in ending:
        life, pool = each.ends - each.created, pools.get(each.pool)
        at = max(each.created + life / 2, min(_latest(each.ends, each.created), limit))
        found[each.name] = at
        limit = at - min(GAP, SHARE * life / (pool.max if pool else 1))
    return found


def mark(view: View) -> View:
    """The view in which nodes that retire now say so (`Node.due`)."""
    if not any(each.retires for each in view.machines):
        return view
    due = _due(view, view.job.spec)
    return replace(view, nodes=tuple(replace(n, due=due[n.name]) if n.name in due else n for n in view.nodes))


def spent(view: View) -> tuple[Recreate, ...]:
    """Machines that have retired: the generation goes on without them, and the state is elsewhere too."""
    if view.job.ending is not None:
        return ()
    created = {each.name: each.created for each in view.machines}
    holders = view.job.saving.holders if view.job.saving else ()
    staying = (patience.state(n) for n in view.nodes if n.connected and not n.noticed and n.report.job == view.job.id)
    safe = max([view.job.newest, *staying])
    return tuple(
        Recreate(n.name, n.report.pool, f"its cloud ends it at {_clock(n.due)}", created.get(n.name, 0.0), planned=True)
        for n in view.nodes
        if n.due
        and n.connected
        and n.cloud == "running"
        and n.expendable(view)
        and n.name not in holders
        and view.now - n.since >= SETTLE
        and (n.report.job != view.job.id or patience.state(n) <= safe)
    )


def _due(view: View, spec: JobSpec) -> dict[str, float]:
    """Nodes that retire now, with their machines' ends: one at a time, unless the end is near."""
    able = {node.name for node in view.eligible(spec)}
    full = len(able) >= view.expected  # a zone that has no machine for a successor has kept the job from one already
    found: dict[str, float] = {}
    for each in sorted(view.machines, key=lambda machine: (machine.retires, machine.name)):
        if not 0 < each.retires <= view.now or each.state != "running":
            continue
        others = able - {each.name, *found}
        last = view.now >= _latest(each.ends, each.created)
        if last or (full and not found and len(others) >= spec.nodes.min):
            found[each.name] = each.ends
    return found


def _latest(ends: float, created: float) -> float:
    return ends - min(RETIRE_LEAD, SHARE * (ends - created))


def _clock(at: float) -> str:
    return time.strftime("%H:%M UTC", time.gmtime(at))
