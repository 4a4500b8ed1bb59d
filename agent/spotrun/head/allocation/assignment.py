"""Which nodes each job has now and may count on, and what one job sees of the fleet. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from spotrun.head.allocation.allocate import allocate
from spotrun.head.allocation.demand import Devices, Holdings, Question, free
from spotrun.head.capacity.situation import Placement
from spotrun.head.fleet.classify import Condition
from spotrun.head.job_state import JobState
from spotrun.head.planner import patience
from spotrun.head.view import NO_WORK, FleetView, Node, View, bound, named


@dataclass(frozen=True)
class Assignment:
    """Whose each device is. Job ids and node names are the keys."""

    held: Holdings = field(default_factory=dict)  # what `allocate` says, for its next call
    assigned: Holdings = field(default_factory=dict)  # in addition, free nodes on which a job that waits gets ready
    expected: Holdings = field(default_factory=dict)  # in addition, machines that boot or that the cloud was asked for
    reasons: Mapping[str, str] = field(default_factory=dict)  # why a job has less than it could use

    def of(self, job: str) -> tuple[object, ...]:
        """The parts that are about one job."""
        return self.assigned.get(job), self.expected.get(job), self.reasons.get(job)


def assign(question: Question) -> Assignment:
    """Whose each device is now, and will be soon."""
    now = allocate(question.claims, question.hosts)
    held = {**now.kept, **now.nodes}
    if not question.coming and all(claim.job in now.nodes for claim in question.claims):
        return Assignment(held, held, held, now.reasons)
    claims = [replace(claim, holds=held.get(claim.job, {})) for claim in question.claims]
    soon = allocate(claims, [*question.hosts, *question.coming])
    taken = {(node, device) for nodes in held.values() for node, devices in nodes.items() for device in devices}
    here = {host.name for host in question.hosts}
    assigned, expected = dict(held), dict(held)
    for job, nodes in soon.nodes.items():
        more = {
            node: devices
            for node, devices in nodes.items()
            if node not in held.get(job, {}) and taken.isdisjoint((node, device) for device in devices)
        }
        expected[job] = {**held.get(job, {}), **more}
        if job not in now.nodes:
            assigned[job] = {**held.get(job, {}), **{n: d for n, d in more.items() if n in here}}
    return Assignment(held, assigned, expected, now.reasons)


def as_it_is(view: FleetView) -> Assignment:
    """Each job keeps the nodes that must stay its own, because the head does not see all nodes yet.

    Workers of the nodes that a drain has named may have gone on already.
    """
    nodes = {job.id: {each.node: each.devices for each in bound(view, job)} for job in view.jobs}
    mine = {job: found for job, found in nodes.items() if found}
    # The devices of a job that waits may be another job's. If it gets the same ones again, its workers can go on.
    waiting = {job.id: _working(view, job, mine) for job in view.jobs if job.wants_nodes and job.current is None}
    held = mine | {job: {**found, **mine.get(job, {})} for job, found in waiting.items() if found}
    return Assignment(held, mine, mine, {})


def _working(view: FleetView, job: JobState, taken: Mapping[str, Mapping[str, Devices]]) -> dict[str, Devices]:
    """The devices that the workers of a job have, by node, as its nodes report. taken: what jobs have, by job."""
    reports = {name: view.by_name[name].report.of(job.id) for name in view.reporting.get(job.id, ())}
    found = {name: work.devices for name, work in reports.items() if work is not None and work.devices}
    others = [each for other, each in taken.items() if other != job.id]
    return {
        name: devices
        for name, devices in found.items()
        if not any(name in each and (not each[name] or set(devices) & set(each[name])) for each in others)
    }


def job_view(
    view: FleetView,
    job: JobState,
    assignment: Assignment,
    conditions: Mapping[str, Condition],
    ready_at: float = 0.0,
    vanished: frozenset[str] = frozenset(),
    placed: Placement | None = None,
) -> View:
    """What a job sees. ready_at: when a node last became ready. vanished: as in `View`. placed: where it may train."""
    mine, expected = assignment.assigned.get(job.id, {}), assignment.expected.get(job.id, {})
    members = {member.node for member in (*named(job), *job.last)}
    misfits = view.misfits.get(job.id, {})
    names = members.union(mine, view.reporting.get(job.id, ()), misfits)
    known = (view.by_name[name] for name in sorted(names) if name in view.by_name)
    nodes = [_own(view, node, job, mine) for node in known]
    return View(
        now=view.now,
        job=job,
        nodes=tuple(nodes),
        expected=len(expected),
        waiting_since=max(ready_at, job.submitted),
        began=view.began,
        awake_since=view.awake_since,
        able_since=view.able_since,
        vanished=vanished,
        machines=view.machines,
        listed=view.listed,
        signs=view.signs,
        joined=view.unseen,
        conditions={name: conditions[name] for name in {**mine, **expected} if name in conditions},
        dearest=placed.hourly if placed else 0.0,
        rest_until=placed.rest_until if placed else None,
        misfits=misfits,
        queued=assignment.reasons.get(job.id, "") if any(id != job.id for id in assignment.held) else "",
    )


def keeps_state(view: View, node: Node) -> bool:
    """Whether a node that the job has left must keep its snapshot: neither the bucket nor another node has it."""
    own = patience.state(node)
    if own <= view.job.newest or view.job.ended_already:
        return False
    if view.job.ending is not None:
        return True  # each of them saves a part
    others = (n for n in view.nodes if n.assigned and not n.leaving and n.connected and n.name != node.name)
    return own > max(map(patience.state, others), default=(-1, -1))


def _own(view: FleetView, node: Node, job: JobState, mine: Mapping[str, Devices]) -> Node:
    """The node as the job sees it."""
    work = node.report.of(job.id) or NO_WORK
    if job.has_left_behind(node.report):
        work = work.replace(phase="ready", regroup="no", failure=None)  # its workers end, and new ones warm up
    if node.name not in mine:
        # The job gives up a member under notice. The member leaves with the drain that the notice causes.
        member = next((each for each in job.members if node.leaving and each.node == node.name), None)
        return replace(node, work=work, assigned=member is not None, devices=member.devices if member else ())
    devices = mine[node.name]
    return replace(node, work=work, devices=devices, free=free(view, node, job, devices))
