"""What should the cloud be asked for? `decide` turns the machines' conditions and the need into a `FleetPlan`. Pure.

A plan does not depend on what was asked before. It is made again whenever anything changes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from spotrun.head.allocation.demand import Wish
from spotrun.head.capacity import sizes
from spotrun.head.capacity.sizes import Observation, Pool
from spotrun.head.fleet.classify import Condition
from spotrun.head.fleet.record import Recreate, ask, counted, exhausted, may_ask, refusal
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import ENDING_STATES, FleetView

Conditions = Mapping[str, Condition]


@dataclass(frozen=True)
class FleetPlan:
    """What to ask of the cloud now."""

    resize: Mapping[str, int] = field(default_factory=dict)  # the sizes of the pools that change
    remove: tuple[str, ...] = ()  # machines to delete; each lowers its pool's size by one
    recreate: tuple[Recreate, ...] = ()  # machines to replace; pools keep their sizes
    reasons: Mapping[str, str] = field(default_factory=dict)  # what operators should know of a pool: one line


def decide(view: FleetView, conditions: Conditions, pools: Sequence[Pool] = (), wish: Wish | None = None) -> FleetPlan:
    """The plan for the pools as the cloud knows them. wish: what jobs want of them; None: keep the sizes."""
    recreate, reasons = _recreate(view, conditions), _reasons(view, conditions)
    if wish is None:
        return FleetPlan(recreate=recreate, reasons=reasons)
    found = sizes.decide(observe(view, conditions, pools, wish))
    if view.blind():  # a node that has not connected again may be under notice, and its successor may be booting
        more = {pool.name: found.sizes[pool.name] for pool in pools if found.sizes.get(pool.name, 0) > pool.size}
        return FleetPlan(more, (), recreate, reasons)
    return FleetPlan(found.sizes, found.remove, recreate, reasons)


def wanted(view: FleetView, conditions: Conditions) -> list[Recreate]:
    """Machines that should be replaced, whether or not the cloud may be asked now."""
    if not any(job.wants_nodes for job in view.jobs):
        return []
    running = (each for each in conditions.values() if each.machine.state == "running")
    return [each.replacement for each in running if each.replacement is not None]


def _recreate(view: FleetView, conditions: Conditions) -> tuple[Recreate, ...]:
    replaced, found = view.replaced, []
    for action in wanted(view, conditions):
        if may_ask(replaced, action, view.now):
            found.append(action)
            replaced = ask(replaced, action, view.now)  # counts against the limit for the next ones
    return tuple(found)


def observe(view: FleetView, conditions: Conditions, pools: Sequence[Pool], wish: Wish) -> Observation:
    """What the policy of sizes sees: the pools with the conditions of their machines."""
    out_of_service = {name for name, each in conditions.items() if each.state in ("replacing", "abandoned")}
    keep = wish.keep - out_of_service
    closed = _closed(view, conditions)
    noticed = {node.name for node in view.nodes if node.connected and node.under_notice}
    seen = []
    for pool in pools:
        states = {name: _counts_as(conditions[name]) for name in pool.states if name in conditions}
        ending = {name for name in states if conditions[name].machine.state in ENDING_STATES}
        seen.append(
            replace(
                pool,
                # A machine is only known to be there while its zone or its agent answers. A member has proven itself.
                states={n: "ready" if n in keep else state for n, state in states.items() if state != "unknown"},
                supply="closed" if pool.supply != "away" and pool.name in closed else pool.supply,
                leaving=frozenset(noticed & states.keys() - view.kept),
                ending=frozenset(ending - keep - noticed),
            )
        )
    return Observation(tuple(seen), wish.needs, keep)


def _counts_as(condition: Condition) -> str:
    """The state for the policy. A machine that leaves before it has shown that it is fit counts as one that boots."""
    return "booting" if condition.state == "leaving" and not condition.proven else condition.state


def _closed(view: FleetView, conditions: Conditions) -> frozenset[str]:
    """Pools that have had all their replacements, and in which no machine serves: their machines would only cost money.

    They open again when the window of the count has passed.
    """
    found = set()
    for pool in exhausted(view.replaced, view.now):
        machines = [each for each in conditions.values() if each.machine.pool == pool]
        there = [each for each in machines if each.machine.state in ("provisioning", "running")]
        # Wait for the last replacement: the cloud may not list a machine that it still makes.
        waited = view.now - counted(view.replaced, pool, view.now)[-1].at
        if waited > TIMEOUTS.retry and all(each.unusable for each in there):
            found.add(pool)
    return frozenset(found)


def _reasons(view: FleetView, conditions: Conditions) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in conditions.values():
        if each.unusable and each.replacement and each.machine.pool not in found:
            refused = refusal(view.replaced, each.replacement)
            more = f"; the cloud does not replace it: {refused}" if refused else ""
            found[each.machine.pool] = f"{each.machine.name} takes no job: {each.reason}{more}"
    for pool in exhausted(view.replaced, view.now):
        recent = counted(view.replaced, pool, view.now)
        until = time.strftime("%H:%M", time.gmtime(recent[0].at + TIMEOUTS.replacement_window))
        why = f"{len(recent)} machines took no job and were replaced, the last one because: {recent[-1].why}"
        found[pool] = f"{why}; no more are replaced before {until} UTC"
    return found
