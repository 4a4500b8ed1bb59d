"""What to ask `allocate`, and which machines the jobs want of the pools. Both follow from jobs and nodes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from spotrun.head.allocation.allocate import Claim, Host
from spotrun.head.capacity.observe import claims, suited
from spotrun.head.capacity.place import Placements
from spotrun.head.capacity.situation import Placement
from spotrun.head.capacity.sizes import Need
from spotrun.head.job_state import JobState
from spotrun.head.planner import patience
from spotrun.head.planner.liveness import reports
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import ENDING_STATES, NO_WORK, FleetView, Node, bound
from spotrun.spec import ClusterSpec, devices_of
from spotrun.spec.fields import PRIORITY
from spotrun.wire import Member

Devices = tuple[int, ...]
Holdings = Mapping[str, Mapping[str, Devices]]  # the devices by job and node


@dataclass(frozen=True)
class Wish:
    """What jobs want of the pools."""

    needs: tuple[Need, ...] = ()
    keep: frozenset[str] = frozenset()  # machines that must not go


@dataclass(frozen=True)
class Question:
    """What `allocate` is asked."""

    claims: tuple[Claim, ...] = ()
    hosts: tuple[Host, ...] = ()  # machines that can be used now
    coming: tuple[Host, ...] = ()  # machines that can be used soon


def question(
    view: FleetView,
    cluster: ClusterSpec,
    sizes: Mapping[str, int],
    before: Holdings,
    placements: Placements,
    out: Set[str] = frozenset(),
    parked: Iterable[Claim] = (),
) -> Question:
    """What to ask now.

    sizes: what the cloud was asked for, by pool. before: what the last answer gave the jobs. placements: where each job
    may train. out: machines that no job can count on. parked: see `pinned`.
    """
    hosts = _hosts(view, cluster)
    names = {host.name for host in hosts}
    claims = [
        _claim(view, cluster, job, index, before, placements[job.id])
        for index, job in enumerate(view.jobs)
        if job.id in placements
    ]
    kept = (_keeping_claim(view, job.id, job.kept) for job in view.jobs if job.kept)
    return Question(
        claims=(*claims, *(claim for claim in (*parked, *kept) if claim.holds.keys() <= names)),
        hosts=tuple(hosts),
        coming=tuple(_coming(view, cluster, sizes, names, out)),
    )


def pinned(claim: str, node: str, devices: Devices) -> Claim:
    """A claim that keeps devices of a node from all other jobs: for example, those that a parked job's workers use."""
    return Claim(claim, priority=PRIORITY + 1, devices=len(devices), holds={node: devices})


def wish(
    view: FleetView,
    cluster: ClusterSpec,
    held: Holdings,
    placements: Placements,
    busy: Set[str] = frozenset(),
    parked: Set[str] = frozenset(),
    pins: Iterable[Claim] = (),
) -> Wish:
    """What the jobs want of the pools.

    held: the devices that jobs have, or that boot for them. busy: nodes whose agents still have a job that ended a
    moment ago. parked: nodes with a parked job. pins: the devices of parked jobs, see `pinned`.
    """
    keep = {*busy, *parked}
    for job in view.jobs:
        if claims(job):
            keep |= held.get(job.id, {}).keys()
        keep |= {member.node for member in bound(view, job)} | _holders(view, job)
    asking = [job for job in view.jobs if claims(job) or job.kept]
    needs = _needs(view, asking, cluster, held, placements, [pin for pin in pins if pin.devices])
    return Wish((*needs, Need(len(parked), has=frozenset(parked))) if parked else needs, frozenset(keep))


def _holders(view: FleetView, job: JobState) -> set[str]:
    """Nodes that hold, or may hold, a state of the job which the bucket does not have."""
    if job.ended_already:
        return set()
    nodes = [view.by_name[name] for name in view.reporting.get(job.id, ())]
    waits, works = job.current is None, {node.name: node.report.of(job.id) or NO_WORK for node in nodes}
    stays = waits and job.ending is None  # the end of a job has a limit of its own
    hopeless = {name for name, work in works.items() if stays and patience.hopeless(view, job, work)}
    found = {node.name for node in nodes if holds_unsaved(node, job)} - hopeless
    quiet = view.now - max(view.began, view.awake_since)
    if waits and quiet <= patience.patience(job, TIMEOUTS.last_holder):
        found |= {member.node for member in job.last if member.node not in view.by_name}
    return found


def holds_unsaved(node: Node, job: JobState) -> bool:
    """Whether the node holds a state of the job which the bucket does not have."""
    work = node.report.of(job.id)
    return work is not None and patience.held(work) > job.newest


def free(view: FleetView, node: Node, job: JobState, devices: Devices) -> bool:
    """Whether no other job trains on these devices of the node, or is about to."""
    others = [each for each in node.report.jobs if each.job != job.id]
    rivals = [member for other, member in view.memberships.get(node.name, ()) if other.id != job.id]
    if node.report.version < 2 and others:
        return False  # an older agent serves one job
    if not others and not rivals:
        return True
    taken = [each.devices for each in others]
    taken += [member.devices or _all(node.report.devices) for member in rivals]
    return set(devices or _all(node.report.devices)).isdisjoint(device for each in taken for device in each)


def _keeping_claim(view: FleetView, job: str, member: Member) -> Claim:
    """The claim of a failed job on the devices of its kept node."""
    return pinned(job, member.node, member.devices or _all(_count(view, member.node)))


def _claim(
    view: FleetView,
    cluster: ClusterSpec,
    job: JobState,
    index: int,
    before: Holdings,
    placement: Placement,
) -> Claim:
    # The members do not matter: a device that was taken from this job is another job's, even while this job drains.
    holds = {node: devices or _all(_count(view, node)) for node, devices in before.get(job.id, {}).items()}
    members = {member.node for member in job.members}
    last = (*job.last, *(job.following.members if job.following else ()))  # the second: as the drain has named them
    # All of its pools, also those whose numbers of devices nobody knows yet.
    pools = frozenset(job.spec.pools) if placement.use >= suited(job.spec, cluster) else placement.use
    avoids = frozenset(name for name, each in view.misfits.get(job.id, {}).items() if not each.over(view.now))
    return Claim(
        job=job.id,
        order=(job.submitted + job.spec.deadline if job.spec.deadline else math.inf, index),
        priority=job.rank,
        min=placement.min,
        max=placement.max,
        spares=placement.spares,
        devices=job.spec.devices or 0,
        pools=pools,
        prefers=tuple(dict.fromkeys(pool for need in placement.needs for pool in need.order)),
        holds={node: devices for node, devices in holds.items() if node not in avoids},
        standby=frozenset(holds.keys() - members) if members else frozenset(),
        keeps=frozenset(member.node for member in last) - holds.keys(),
        avoids=avoids,
        paused=not job.wants_nodes and not job.stopping,
    )


def _hosts(view: FleetView, cluster: ClusterSpec) -> list[Host]:
    """Nodes that can take jobs, and the members of generations: the planner decides about those."""
    found = {}
    for node in view.nodes:
        usable = reports(view, node) and node.report.phase == "ready" and node.cloud not in ENDING_STATES
        if not node.leaving and (usable or node.name in view.members):
            checks = node.report.phase == "checking"  # the agent counts the devices after the checks
            pool, count = node.report.pool, node.report.devices
            found[node.name] = Host(node.name, pool, max(count, _devices(cluster, pool)) if checks else count)
    listed = {machine.name: machine for machine in view.machines}
    for name, jobs in view.members.items():
        if name not in view.by_name:  # it has not reported to this head
            pool = listed[name].pool if name in listed else next(iter(jobs[0].spec.pools), cluster.pools[0].name)
            count = max(
                (max(m.devices, default=0) + 1 for job in jobs for m in job.members if m.node == name), default=1
            )
            found[name] = Host(name, pool, max(count, _devices(cluster, pool)))
    return list(found.values())


def _coming(
    view: FleetView, cluster: ClusterSpec, sizes: Mapping[str, int], hosts: Set[str], out: Set[str]
) -> Iterable[Host]:
    """Machines that boot, or that the cloud has been asked for."""
    leaving = {node.name for node in view.nodes if node.leaving}
    counts: dict[str, int] = {}
    for machine in view.machines:
        counts[machine.pool] = counts.get(machine.pool, 0) + 1
        expected = machine.state in ("provisioning", "running") and machine.name not in leaving
        if expected and machine.name not in hosts and machine.name not in out:
            yield Host(machine.name, machine.pool, _devices(cluster, machine.pool))
    for pool in cluster.pools:
        for index in range(sizes.get(pool.name, 0) - counts.get(pool.name, 0)):
            yield Host(f"{pool.name}#{index}", pool.name, _devices(cluster, pool.name), there=False)


def _needs(
    view: FleetView,
    jobs: Sequence[JobState],
    cluster: ClusterSpec,
    held: Holdings,
    placements: Placements,
    pins: Sequence[Claim],
) -> tuple[Need, ...]:
    found = []
    shared: dict[frozenset[str], list[tuple[JobState, int]]] = {}
    orders: dict[frozenset[str], tuple[str, ...]] = {}
    for job in jobs:
        # Only the pool of its node: pools of one need stand in for each other.
        kept = (Need(1, frozenset([view.pools[job.kept.node]])),) if job.kept and job.kept.node in view.pools else ()
        for need in placements[job.id].needs if job.id in placements else kept:
            if job.spec.devices is None:
                found.append(replace(need, has=_has(job, held)))
            else:
                shared.setdefault(need.pools, []).append((job, need.machines))
                orders[need.pools] = orders.get(need.pools) or need.order
    for pools, sharing in shared.items():
        has = frozenset(node for job, _ in sharing for node in _has(job, held))
        nodes = [(job.spec.devices or 0, job.id, wanted) for job, wanted in sharing]
        # If these jobs share a machine with a parked job, they cannot have all its devices.
        nodes += [(pin.devices, pin.job, 1) for pin in pins if pin.holds.keys() & has]
        devices = min(_devices(cluster, pool) for pool in pools)
        there = {node: _free_devices(view, cluster, node, held, pins) for node in has if view.pools.get(node) in pools}
        machines = max(_machines(nodes, devices), len(there) + _machines(_lacking(sharing, held, there), devices))
        found.append(Need(machines, pools, has, orders[pools]))
    return tuple(found)


def _lacking(
    sharing: Iterable[tuple[JobState, int]], held: Holdings, there: Mapping[str, int]
) -> Iterator[tuple[int, str, int]]:
    """The nodes of these jobs for which no machine that is there has room, in the form that `_machines` takes.

    No job moves to make room for another one. there: the free devices of each machine.
    """
    free = dict(sorted(there.items()))
    for job, wanted in sorted(sharing, key=lambda each: (-(each[0].spec.devices or 0), each[0].id)):
        mine, devices = held.get(job.id, {}), job.spec.devices or 0
        left = wanted - len(mine.keys() & free.keys())
        for node in free:
            if left > 0 and node not in mine and free[node] >= devices:
                free[node] -= devices
                left -= 1
        yield devices, job.id, max(0, left)


def _free_devices(view: FleetView, cluster: ClusterSpec, node: str, held: Holdings, pins: Iterable[Claim]) -> int:
    """How many devices of the machine no job has. Usually `held` has the claims of parked jobs (`pins`), too."""
    known = view.by_name.get(node)
    devices = known.report.devices if known else _devices(cluster, view.pools[node])
    taken = {device for each in (*held.values(), *(pin.holds for pin in pins)) for device in each.get(node, ())}
    return devices - len(taken)


def _machines(jobs: Iterable[tuple[int, str, int]], devices: int) -> int:
    """How many machines with `devices` devices each these jobs need: first fit, large nodes first.

    jobs: the devices of each node, the job's id, and how many nodes. Two nodes of one job are never on one machine.
    """
    room: list[int] = []
    for wanted, _, left in sorted(jobs, key=lambda each: (-each[0], each[1])):
        for index, free_devices in enumerate(room):
            if left and free_devices >= wanted:
                room[index] -= wanted
                left -= 1
        room += [devices - wanted] * left
    return len(room)


def _has(job: JobState, held: Holdings) -> frozenset[str]:
    return frozenset(held.get(job.id, ())) | ({job.kept.node} if job.kept else set())


def _devices(cluster: ClusterSpec, pool: str) -> int:
    """Devices of the pool's machines; 1 if that is not known before one has joined."""
    found = cluster.pool(pool)
    return (devices_of(found, cluster) if found else None) or 1


def _count(view: FleetView, name: str) -> int:
    return view.by_name[name].report.devices if name in view.by_name else 1


def _all(devices: int) -> Devices:
    return tuple(range(devices))
