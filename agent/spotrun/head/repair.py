"""Machines that never serve: those that say they are unfit, and those whose agent does not join. Pure.

They are replaced, but not for ever: an image that is no good makes every machine so. What was tried is in the job's
state (`JobState.replaced`), so a new head goes on counting.
"""

from __future__ import annotations

import time

from spotrun.head.health import View
from spotrun.head.state import Recreate, Replacement

BOOT_TIMEOUT = (
    600.0  # seconds from a machine's creation to its agent's first report; the slowest GPU machines take half
)
LIMIT = 3  # machines of a pool that are replaced for such a reason within `WINDOW`
WINDOW = 3600.0  # seconds
AGAIN = 60.0  # seconds that the cloud gets before it is asked about the same machine again


def replacements(view: View) -> tuple[Recreate, ...]:
    """What to ask of the cloud now."""
    if view.job.ending is not None:
        return ()
    recent = recently(view)
    asked = {each.node: each.at for each in recent if view.now - each.at < AGAIN}
    counts = {pool: sum(each.pool == pool for each in recent) for pool in {each.pool for each in view.machines}}
    found = []
    running = {each.name: each for each in view.machines if each.state == "running"}
    for name, why in useless(view).items():
        machine = running.get(name)
        if machine is None or machine.created <= asked.get(name, -1.0) or counts[machine.pool] >= LIMIT:
            continue
        counts[machine.pool] += 1
        found.append(Recreate(name, machine.pool, why))
    return tuple(found)


def useless(view: View) -> dict[str, str]:
    """Machines that no job can count on, and why: name → reason."""
    found = {}
    known = {node.name: node for node in view.nodes}
    members = {member.node for member in view.job.current.members} if view.job.current else set()
    for machine in view.machines:
        node = known.get(machine.name)
        if node is not None and machine.joined:
            if node.linked and node.report.phase == "unfit":
                found[machine.name] = "; ".join(node.report.unfit) or "unfit"
            continue
        # A member that this head has not heard of may train on, cut off from it.
        hidden = node is None and machine.name in members
        waited = view.now - max(machine.created, view.awake_since)
        if machine.state == "running" and not hidden and waited > BOOT_TIMEOUT:
            found[machine.name] = f"its agent has not joined within {BOOT_TIMEOUT / 60:.0f} minutes"
    return found


def closed(view: View) -> frozenset[str]:
    """Pools that have had their replacements and of which no machine serves: idle ones would only cost.

    They open again when `WINDOW` has passed.
    """
    recent, bad = recently(view), useless(view)
    found = set()
    for pool in exhausted(view):
        newest = max(each.at for each in recent if each.pool == pool)
        machines = [each for each in view.machines if each.pool == pool]
        # The last one made in another's place gets its chance; while it is made it may not be listed.
        if view.now - newest > AGAIN and all(each.name in bad for each in machines):
            found.add(pool)
    return frozenset(found)


def exhausted(view: View) -> frozenset[str]:
    """Pools in which no more machines are replaced for now."""
    recent = recently(view)
    pools = {each.pool for each in recent}
    return frozenset(pool for pool in pools if sum(each.pool == pool for each in recent) >= LIMIT)


def problems(view: View) -> dict[str, str]:
    """What operators should know of a pool: pool → one line."""
    found: dict[str, str] = {}
    bad = useless(view)
    for machine in view.machines:
        if machine.name in bad and machine.pool not in found:
            found[machine.pool] = f"{machine.name} takes no job: {bad[machine.name]}"
    for pool in exhausted(view):
        recent = [each for each in recently(view) if each.pool == pool]
        until = time.strftime("%H:%M", time.gmtime(recent[0].at + WINDOW))
        why = f"{len(recent)} machines took no job and were replaced, the last since: {recent[-1].why}"
        found[pool] = f"{why}; no more are before {until} UTC"
    return found


def recently(view: View) -> tuple[Replacement, ...]:
    """Those that count, the oldest first."""
    return tuple(each for each in view.job.replaced if view.now - each.at < WINDOW)
