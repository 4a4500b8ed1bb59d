"""Every member of a generation is silent at once: either the head is cut off, or the nodes are dead. Pure.

The connections do not tell which. So the head reads the nodes' signs of life in the bucket (`Sign`), which need no
connection. Ending a generation takes a second signal: the signs have stopped, or they continue while no step is
completed. If steps continue, only the connection is cut, and nothing ends.
"""

from __future__ import annotations

from dataclasses import replace

from spotrun.head.job_state import JobState
from spotrun.head.planner.liveness import reports, silent
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import FleetView, Sign, View
from spotrun.wire import AliveRecord

MISSED = 3  # missing signs in a row after which a node's signs count as stopped


def since(view: View) -> float | None:
    """Since when no member of the generation reports; None: there is no member, or one reported a moment ago."""
    members = view.members()
    if not members:
        return None
    newest = max(view.began if node is None else node.reported_at for node in members)
    found = max(newest, view.awake_since)
    return found if view.now - found > view.job.spec.heartbeat_timeout else None


def names(view: View) -> frozenset[str]:
    """Nodes that are connected but do not report."""
    return frozenset(node.name for node in view.nodes if node.connected and silent(view, node))


def interrupted(view: View) -> dict[str, str]:
    """Members that are interrupted: all are silent, and a second signal agrees. Name → kind. See also `liveness`."""
    quiet = since(view)
    if quiet is None or view.now - quiet <= view.job.spec.silence_timeout:
        return {}
    # `liveness.interrupted` has the machines that are gone. If the cloud does not answer, no node is interrupted.
    listed = {each.name for each in view.machines if each.state == "running"}
    members = [member for member in view.job.members if member.node in listed]
    dead = [each for each in members if stopped(view, each.node) or _another(view, each.node, each.boot)]
    if not dead and len(members) == len(view.job.members) and stuck(view):
        dead = members
    leaving = {node.name for node in view.nodes if node.leaving}
    return {each.node: "preempt" if each.node in leaving else "silent" for each in dead}


def stopped(view: View | FleetView, node: str) -> bool:
    """Whether the node's sign of life has stopped; False if the bucket has not answered lately."""
    sign = view.signs.get(node)
    if sign is None or view.now - sign.looked > TIMEOUTS.sign_recent:
        return False
    return sign.looked - sign.changed > _due(sign)


def stuck(view: View) -> bool:
    """Whether the members show signs of life, but none of them has completed a step for too long."""
    signs = _signs(view)
    if not signs or any(view.now - sign.looked > TIMEOUTS.sign_recent for sign in signs):
        return False
    begun = max(_step(view, sign) for sign in signs) > max(view.job.progress.base, -1)
    patience = view.job.spec.hang_timeout if begun else view.job.spec.start_timeout
    return min(sign.looked for sign in signs) - max(_advanced(view, sign) for sign in signs) > patience


def given_up(view: View) -> bool:
    """Whether a stop does not wait for the members, because none has reported for some time."""
    quiet = since(view)
    return quiet is not None and view.now - quiet > min(TIMEOUTS.tell_silence, view.job.spec.silence_timeout)


def watched(view: View) -> frozenset[str]:
    """Nodes whose signs of life the head needs: all members of a silent generation, or a waiting job's silent ones."""
    if view.job.current is not None:
        return frozenset() if since(view) is None else frozenset(member.node for member in view.job.members)
    here = {node.name for node in view.nodes if reports(view, node)}
    there = {machine.name for machine in view.machines}  # none: the cloud does not answer
    away = {member.node for member in view.job.last} - here
    return frozenset(away & there if there else away)


def observe(job: JobState, view: View) -> JobState:
    """The job with the newest step that signs of life show: a generation may have got that far before it ended."""
    step = max((_step(view, sign) for sign in _signs(view)), default=-1)
    return job.replace(reached=step) if step > job.reached else job


def seen(before: Sign | None, record: AliveRecord | None, now: float) -> Sign:
    """The sign after a read at `now`. before: the sign until then. record: what was read; None: there is no sign."""
    last = before.record if before else None
    if record is None:
        return replace(before, looked=now) if before and not last else Sign(now, now, now)
    changed, jobs = now, {each.job: now for each in record.every_job}
    if before and last and last.boot == record.boot:
        changed = before.changed if last.at == record.at else now
        same = [each.job for each in record.every_job if each == last.of(each.job)]
        jobs |= {job: before.jobs.get(job, before.advanced) for job in same}
    return Sign(changed, max(jobs.values()), now, record, jobs)


def news(view: View) -> tuple[str, str] | None:
    """(kind, text) for operators, if every member has been silent for some time. kind: which case it is."""
    quiet = since(view)
    told = min(TIMEOUTS.tell_silence, view.job.spec.silence_timeout / 2)
    if quiet is None or view.now - quiet < told:
        return None
    names = [member.node for member in view.job.members]
    who = f"the only node, {names[0]}, has" if len(names) == 1 else f"all {len(names)} nodes have"
    return _judged(view, f"{who} been silent for {told:.0f} s or more")


def _judged(view: View, who: str) -> tuple[str, str]:
    signs = _signs(view)
    limit = f"after {view.job.spec.silence_timeout:.0f} s of silence"
    if not view.machines:
        return "cloud", f"{who}; the cloud does not answer either: nothing is ended or replaced"
    unknown = any(view.now - sign.looked > TIMEOUTS.sign_recent for sign in signs)
    if unknown or len(signs) < len(view.job.members):
        return "bucket", f"{who}; looking in the bucket for signs of life; nothing is ended yet"
    if any(stopped(view, member.node) for member in view.job.members):
        return "dead", f"{who}, and the signs of life in the bucket have stopped: lost {limit}"
    if any(sign.looked - _advanced(view, sign) > _due(sign) for sign in signs):
        return "stuck", f"{who}; the signs of life in the bucket go on, but no step is completed: lost {limit}"
    return "cut", f"{who}, but the signs of life in the bucket go on: only the connection is cut, training goes on"


def _due(sign: Sign) -> float:
    """Seconds within which the next sign should have come."""
    every = sign.record.every if sign.record else 0.0
    return MISSED * min(every or TIMEOUTS.sign_pause, TIMEOUTS.sign_pause) + TIMEOUTS.sign_write


def _signs(view: View) -> list[Sign]:
    """The signs of the members, without the signs that other agents of the same names wrote."""
    found = [(view.signs.get(each.node), each.boot) for each in view.job.members]
    return [sign for sign, boot in found if sign and (sign.record is None or sign.record.boot == boot)]


def _advanced(view: View, sign: Sign) -> float:
    """When the sign last showed another step of this job. Other jobs of the node do not count."""
    return sign.jobs.get(view.job.id, sign.advanced)


def _step(view: View, sign: Sign) -> int:
    """The step of the current generation that the sign names; -1 if the sign is of another generation."""
    found = sign.record.of(view.job.id) if sign.record else None
    return found.step if found and found.generation == view.job.generation else -1


def _another(view: View, node: str, boot: str) -> bool:
    sign = view.signs.get(node)
    return sign is not None and sign.record is not None and sign.record.boot != boot
