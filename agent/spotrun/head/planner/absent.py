"""Machines that an earlier head heard and that this head does not hear. Pure.

They are not booting: their agents had joined. The head waits for such a machine as long as an agent needs to find a new
head, and as long as the state that the machine may hold is worth (`stake`). Then another machine takes its place.
"""

from __future__ import annotations

from spotrun.head import view as health
from spotrun.head.job_state import JobState, Recreate
from spotrun.head.planner import patience, silence
from spotrun.head.view import Machine, View
from spotrun.spec import JobSpec

HOLDER = 3600.0  # seconds: the longest wait for a machine that may be the only one to hold the newest state


def remember(job: JobState, view: View) -> JobState:
    """The job with the machines whose agents have joined, for the next head. Unchanged if the cloud does not answer."""
    if not view.machines:
        return job
    joined = {
        each.name: each.created for each in view.machines if each.joined or job.joined.get(each.name) == each.created
    }
    return job if joined == job.joined else job.model_copy(update={"joined": joined})


def served(view: View, machine: Machine) -> bool:
    """Whether the machine's agent had joined before this head began, and has not been heard since."""
    job = view.job
    if any(node.name == machine.name for node in view.nodes):
        return False
    member = any(each.node == machine.name for each in job.last) and machine.created <= job.ordered_at
    return member or job.joined.get(machine.name) == machine.created


def unheard(view: View, spec: JobSpec) -> tuple[Recreate, ...]:
    """Machines for which the head has waited long enough. `health` decides about members of the current generation."""
    members = {member.node for member in view.job.current.members} if view.job.current else set()
    waited = view.now - max(view.began, view.awake_since)
    return tuple(
        Recreate(each.name, each.pool, created=each.created)
        for each in view.machines
        if each.state == "running" and each.name not in members and served(view, each)
        if waited > _patience(view, spec, each)
    )


def _patience(view: View, spec: JobSpec, machine: Machine) -> float:
    job = view.job
    heard = [n for n in view.nodes if n.connected and not health.silent(view, n, spec)]
    alone = 0.0 if heard else silence.alone(view, machine.name, spec)
    held = (n.report.snapshot.generation for n in heard if n.report.job == job.id and n.report.snapshot)
    if max(held, default=-1) >= job.generation or all(each.node != machine.name for each in job.last):
        return max(alone, patience.MARGIN)
    return max(alone, patience.patience(job, HOLDER))
