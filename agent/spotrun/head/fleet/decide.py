"""What should the cloud be asked for? `decide` turns the machines' conditions and the need into a `FleetPlan`. Pure.

A plan says what should be, whatever was asked before: it is made again whenever anything changes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from spotrun.head import capacity
from spotrun.head.capacity import Observation, Pool
from spotrun.head.fleet.classify import Condition, classify
from spotrun.head.fleet.record import Recreate, ask, counted, exhausted, may_ask, refusal
from spotrun.head.job_state import JobState
from spotrun.head.planner import idle
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import View

Conditions = Mapping[str, Condition]


@dataclass(frozen=True)
class FleetPlan:
    """What to ask of the cloud now."""

    resize: Mapping[str, int] = field(default_factory=dict)  # the sizes of the pools that change
    remove: tuple[str, ...] = ()  # machines to delete; each lowers its pool's size by one
    recreate: tuple[Recreate, ...] = ()  # machines to replace; pools keep their sizes
    reasons: Mapping[str, str] = field(default_factory=dict)  # what operators should know of a pool: one line


def decide(view: View, pools: Sequence[Pool] = (), needed: int | None = None) -> FleetPlan:
    """The plan for the pools as the cloud knows them. needed: machines wanted; None: keep the sizes."""
    conditions = classify(view)
    recreate, reasons = _recreate(view, conditions), _reasons(view, conditions)
    if needed is None:
        return FleetPlan(recreate=recreate, reasons=reasons)
    found = capacity.decide(observe(view, conditions, pools, needed))
    return FleetPlan(found.sizes, found.remove, recreate, reasons)


def needed(queue: Sequence[str] | None, job: JobState | None, busy: bool, now: float) -> int | None:
    """Machines wanted now; None: change nothing yet (the queue is not read, or logs or state are still uploaded).

    queue: ids of the jobs not yet ended; None if it is not read yet. job: the active one, or the one that ended last.
    busy: whether an agent still holds a job.
    """
    if queue is None or (job is not None and job.ending is not None):
        return None
    if idle.resting(job):
        return 0
    if job is not None and not job.ended_already:
        nodes = job.spec.nodes
        return nodes.max + nodes.spares
    if queue and (job is None or queue[0] != job.id):
        return None
    ended = job.ended if job and job.ended else 0.0
    return None if busy and now - ended < TIMEOUTS.last_logs else 0


def wanted(view: View, conditions: Conditions) -> list[Recreate]:
    """Machines in whose place others should be, whether or not the cloud may be asked now."""
    if view.job.ended_already or view.job.ending is not None or idle.resting(view.job):
        return []
    running = (each for each in conditions.values() if each.machine.state == "running")
    return [each.replacement for each in running if each.replacement is not None]


def _recreate(view: View, conditions: Conditions) -> tuple[Recreate, ...]:
    replaced, found = view.replaced, []
    for action in wanted(view, conditions):
        if may_ask(replaced, action, view.now):
            found.append(action)
            replaced = ask(replaced, action, view.now)  # counts against the limit for the next ones
    return tuple(found)


def observe(view: View, conditions: Conditions, pools: Sequence[Pool], needed: int) -> Observation:
    """What the policy of sizes sees: the pools with the conditions of their machines."""
    # Also the members of a generation that has ended: they may hold the only copy of the state.
    out_of_service = {name for name, each in conditions.items() if each.state in ("replacing", "abandoned")}
    keep = frozenset(member.node for member in view.job.last) - out_of_service
    closed = _closed(view, conditions)
    noticed = {node.name for node in view.nodes if node.connected and node.under_notice}
    seen = []
    for pool in pools:
        states = {name: _counts_as(conditions[name]) for name in pool.states if name in conditions}
        seen.append(
            replace(
                pool,
                # A machine is only known to be there while its zone or its agent answers. A member has proven itself.
                states={n: "ready" if n in keep else state for n, state in states.items() if state != "unknown"},
                supply="closed" if pool.supply != "away" and pool.name in closed else pool.supply,
                leaving=len(noticed & states.keys()),
            )
        )
    return Observation(tuple(seen), needed, keep)


def _counts_as(condition: Condition) -> str:
    """The state for the policy. A machine that leaves before it has shown that it is fit counts as one that boots."""
    return "booting" if condition.state == "leaving" and not condition.proven else condition.state


def _closed(view: View, conditions: Conditions) -> frozenset[str]:
    """Pools that have had their replacements and of which no machine serves: idle ones would only cost.

    They open again when the window of the count has passed.
    """
    found = set()
    for pool in exhausted(view.replaced, view.now):
        machines = [each for each in conditions.values() if each.machine.pool == pool]
        there = [each for each in machines if each.machine.state in ("provisioning", "running")]
        # The last replacement gets its chance; while the cloud makes it, it may not be listed.
        waited = view.now - counted(view.replaced, pool, view.now)[-1].at
        if waited > TIMEOUTS.retry and all(each.unusable for each in there):
            found.add(pool)
    return frozenset(found)


def _reasons(view: View, conditions: Conditions) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in conditions.values():
        if each.unusable and each.replacement and each.machine.pool not in found:
            refused = refusal(view.replaced, each.replacement)
            more = f"; the cloud does not replace it: {refused}" if refused else ""
            found[each.machine.pool] = f"{each.machine.name} takes no job: {each.reason}{more}"
    for pool in exhausted(view.replaced, view.now):
        recent = counted(view.replaced, pool, view.now)
        until = time.strftime("%H:%M", time.gmtime(recent[0].at + TIMEOUTS.replacement_window))
        why = f"{len(recent)} machines took no job and were replaced, the last since: {recent[-1].why}"
        found[pool] = f"{why}; no more are before {until} UTC"
    return found
