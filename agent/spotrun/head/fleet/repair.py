"""Machines that never serve: those that say they are unfit, and those whose agent does not join. Pure.

They are replaced, but not without end: with a broken image, every machine is unfit. Replacements are counted for the
whole cluster (`View.replaced`), not for each job. A new head continues the count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from spotrun.head import view as health
from spotrun.head.job_state import Recreate, Replacement
from spotrun.head.planner import absent
from spotrun.head.view import ALONE, REJOIN, Machine, Node, View

# Seconds from a machine's creation until its agent has said whether it is fit: what Kubernetes' cluster autoscaler
# gives a node (`--max-node-provision-time`, 15 minutes), twice that on bare metal, for which this is known to be too
# short (https://github.com/openshift/cluster-autoscaler-operator/commit/f8a7872c55cf).
BOOT_TIMEOUT, BOOT_TIMEOUT_METAL = 900.0, 1800.0
# Seconds for which a machine must have said that it is unfit: its agent looks again after 30 s (`AGAIN` in
# spotrun.node.health.gate, which the head does not import), and the look takes some time as well.
GRACE = 45.0
SAVING = 600.0  # the same, if it alone holds the newest state: its agent puts that into the bucket meanwhile
LIMIT = 3  # machines of a pool that are replaced for such a reason within `WINDOW`
WINDOW = 3600.0  # seconds
AGAIN = 60.0  # seconds that the cloud gets before it is asked about the same machine again; doubled each time …
AGAIN_MOST = 900.0  # … up to this


@dataclass(frozen=True)
class Unusable:
    """A machine that no job can count on. since: when that became so, epoch seconds."""

    pool: str
    why: str
    since: float


@dataclass(frozen=True)
class Outlook:
    """What capacity must know.

    unusable: machines that no job can count on. coming: those of them in whose place others are expected. unproven:
    machines that have not shown yet whether they are fit. closed: pools that are to have no machines for now. silent:
    machines that are not heard and that the generation does not count on; of a pool whose zone does not answer, nothing
    else says whether they are still there.
    """

    unusable: frozenset[str] = frozenset()
    coming: frozenset[str] = frozenset()
    unproven: frozenset[str] = frozenset()
    closed: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()


ALL_WELL = Outlook()


def replacements(view: View) -> tuple[Recreate, ...]:
    """What to ask of the cloud now."""
    replaced, found = view.replaced, []
    for action in wanted(view):
        others = sum(each.pool == action.pool and not _same(each, action) for each in _counted(replaced, view.now))
        if others < LIMIT and may_ask(view, action):
            found.append(action)
            replaced = asked(replaced, action, view.now)
    return tuple(found)


def wanted(view: View) -> tuple[Recreate, ...]:
    """Machines in whose place others should be, whatever the cloud was asked already."""
    if view.job.ending is not None:
        return ()
    running = {each.name: each for each in view.machines if each.state == "running"}
    bad = unusable(view)
    return tuple(
        Recreate(name, each.pool, bad[name].why, each.created) for name, each in running.items() if name in bad
    )


def may_ask(view: View, action: Recreate) -> bool:
    """Whether the cloud has had its time since it was last asked about the same machine."""
    before = on_record(view.replaced, action)
    return before is None or view.now - before.at >= min(AGAIN_MOST, AGAIN * 2 ** (before.tries - 1))


def on_record(replaced: Sequence[Replacement], action: Recreate) -> Replacement | None:
    """What was asked about the same machine."""
    return next((each for each in replaced if _same(each, action)), None)


def asked(replaced: Sequence[Replacement], action: Recreate, now: float) -> tuple[Replacement, ...]:
    """The records with one more; one machine has one, however often the cloud is asked about it."""
    before = on_record(replaced, action)
    kept = (each for each in replaced if each is not before and now - each.at < WINDOW)
    made = Replacement(
        node=action.node,
        pool=action.pool,
        at=now,
        why=action.why,
        created=action.created,
        tries=before.tries + 1 if before else 1,
        planned=action.planned,
    )
    return (*kept, made)


def refused(replaced: Sequence[Replacement], action: Recreate, why: str) -> tuple[Replacement, ...]:
    """The records after the cloud did not do it: such a one does not count, but holds the next try off."""
    return tuple(each.model_copy(update={"refused": why}) if _same(each, action) else each for each in replaced)


def undone(replaced: Sequence[Replacement], action: Recreate, before: Replacement | None) -> tuple[Replacement, ...]:
    """The records as if the cloud had not been asked this time; `before` is what they said of the machine."""
    kept = [each for each in replaced if not _same(each, action)]
    return tuple(sorted([*kept, before] if before else kept, key=lambda each: each.at))


def boot_timeout(kind: str) -> float:
    """Seconds that a machine of this type gets. Bare metal: `g4dn.metal`, `c7i.metal-24xl`, `c3-…-metal`."""
    return BOOT_TIMEOUT_METAL if "metal" in kind else BOOT_TIMEOUT


def unusable(view: View) -> dict[str, Unusable]:
    """Machines that no job can count on, by name."""
    known = {node.name: node for node in view.nodes}
    found = ((machine, _unusable(view, machine, known.get(machine.name))) for machine in view.machines)
    return {machine.name: each for machine, each in found if each is not None}


def outlook(view: View) -> Outlook:
    """What capacity must know."""
    bad, spent = unusable(view), exhausted(view)
    patience = {each.name: boot_timeout(each.kind) for each in view.machines}
    # Another pool's machine becomes a member, and stays, at that pool's price: not for a machine that is soon replaced.
    asked = {each.name for each in view.machines if each.state != "unknown"}  # of no other is one on its way
    coming = (n for n in asked & bad.keys() if bad[n].pool not in spent and view.now - bad[n].since < patience[n])
    undecided = {node.name for node in view.nodes if node.report.phase in ("checking", "unfit")}
    unproven = {each.name for each in view.machines if not each.joined or each.name in undecided}
    return Outlook(
        unusable=frozenset(bad),
        coming=frozenset(coming),
        unproven=frozenset(unproven.difference(bad)),
        closed=closed(view),
        silent=_silent(view),
    )


def closed(view: View) -> frozenset[str]:
    """Pools that have had their replacements and of which no machine serves: idle ones would only cost.

    They open again when `WINDOW` has passed.
    """
    recent, bad = _counted(view.replaced, view.now), unusable(view)
    found = set()
    for pool in exhausted(view):
        newest = max(each.at for each in recent if each.pool == pool)
        machines = [each for each in view.machines if each.pool == pool and each.state in ("provisioning", "running")]
        # The last one made in another's place gets its chance; while it is made it may not be listed.
        if view.now - newest > AGAIN and all(each.name in bad for each in machines):
            found.add(pool)
    return frozenset(found)


def exhausted(view: View) -> frozenset[str]:
    """Pools in which no more machines are replaced for now."""
    recent = _counted(view.replaced, view.now)
    pools = {each.pool for each in recent}
    return frozenset(pool for pool in pools if sum(each.pool == pool for each in recent) >= LIMIT)


def problems(view: View) -> dict[str, str]:
    """What operators should know of a pool: pool → one line."""
    found: dict[str, str] = {}
    bad = unusable(view)
    refusals = {(each.node, each.created): each.refused for each in view.replaced if each.refused}
    for machine in view.machines:
        if machine.name in bad and machine.pool not in found:
            refusal = refusals.get((machine.name, machine.created))
            found[machine.pool] = f"{machine.name} takes no job: {bad[machine.name].why}" + (
                f"; the cloud does not replace it: {refusal}" if refusal else ""
            )
    for pool in exhausted(view):
        recent = [each for each in _counted(view.replaced, view.now) if each.pool == pool]
        until = time.strftime("%H:%M", time.gmtime(recent[0].at + WINDOW))
        why = f"{len(recent)} machines took no job and were replaced, the last since: {recent[-1].why}"
        found[pool] = f"{why}; no more are before {until} UTC"
    return found


def _silent(view: View) -> frozenset[str]:
    spec = view.job.spec
    members = {member.node for member in view.job.current.members} if view.job.current else set()
    known = {node.name: node for node in view.nodes}
    never = view.now - view.awake_since > REJOIN  # until then a new head has not heard of what is there
    return frozenset(
        each.name
        for each in view.machines
        if each.name not in members and (health.silent(view, known[each.name], spec) if each.name in known else never)
    )


def _unusable(view: View, machine: Machine, node: Node | None) -> Unusable | None:
    connected = node is not None and node.connected
    if node is not None and machine.joined:
        if node.report.phase == "unfit":  # its last word, connected or not: it may be on its way out
            why = "; ".join(node.report.unfit) or "unfit"
            grace = SAVING if node.connected and _alone_holds_the_state(view, node) else GRACE
            return Unusable(machine.pool, why, node.since) if view.now - node.since >= grace else None
        if not connected or node.report.phase != "checking":
            return None  # one that has fallen silent is the planner's
    # If no agent at all is heard, this head may be the one that is cut off.
    heard = any(n.connected for n in view.nodes)
    since = max(machine.created, machine.answered, view.began) + boot_timeout(machine.kind)
    since += 0.0 if heard or node is not None else ALONE
    # After a gap, agents get only the time that they need to be heard again, not the whole timeout a second time.
    gap = REJOIN if heard else ALONE
    if machine.state != "running" or view.now <= max(since, view.awake_since + gap) or absent.served(view, machine):
        return None
    minutes = f"within {boot_timeout(machine.kind) / 60:.0f} minutes"
    checking = connected and node is not None and node.report.phase == "checking"
    why = f"it could not tell {minutes} whether it is fit" if checking else f"its agent has not joined {minutes}"
    return Unusable(machine.pool, why, since)


def _alone_holds_the_state(view: View, node: Node) -> bool:
    held = {n.name: n.report.snapshot for n in view.nodes if n.connected and n.report.job == view.job.id}
    own = held.pop(node.name, None)
    if own is None or (own.generation, own.step) <= view.job.newest:
        return False
    return all(other is None or other.generation < own.generation for other in held.values())


def _counted(replaced: Sequence[Replacement], now: float) -> list[Replacement]:
    """Those that count against the limit, the oldest first."""
    return [each for each in replaced if each.why and not (each.refused or each.planned) and now - each.at < WINDOW]


def _same(record: Replacement, action: Recreate) -> bool:
    """Whether both mean the same machine, not its successor of that name."""
    return (record.node, record.created) == (action.node, action.created)
