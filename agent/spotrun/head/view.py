"""What the head knows at one moment, about the fleet (`FleetView`) and one job (`View`). Decisions rest on it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from spotrun.cloud.base import Ended
from spotrun.head.fleet.record import Replacement
from spotrun.head.job_state import JobState
from spotrun.head.timeouts import TIMEOUTS
from spotrun.spec import JobSpec
from spotrun.wire import AliveRecord, JobReport, Member, Report

if TYPE_CHECKING:
    from spotrun.head.fleet.classify import Condition

T = TypeVar("T")

HEARTBEAT_TIMEOUT: float = JobSpec.model_fields["heartbeat_timeout"].default  # seconds, for nodes without a job
ENDING_STATES = ("stopping", "terminated", "gone")  # of a machine that ends or has ended (`Node.cloud`)


NO_WORK = JobReport()  # of a node that does nothing for a job


@dataclass(frozen=True)
class Misfit:
    """What the head knows about the failed set-ups of a job on a node."""

    at: float  # when the newest report of a failure came
    times: int  # how often it has failed in succession; a job goes back to the node after each time. 0: it succeeded

    def over(self, now: float) -> bool:
        """Whether the job may go back to the node."""
        return now - self.at >= TIMEOUTS.setup_again


@dataclass(frozen=True)
class Node:
    """A node: what its agent has reported, and the state of its machine."""

    report: Report  # the newest one
    work: JobReport = NO_WORK  # the part of it about the job of the view
    connected: bool = False  # whether the agent is connected to this head
    reported_at: float = 0.0  # when the newest report arrived
    reports_since: float = 0.0  # since when its reports have come without a pause, as far as this head knows
    cloud: str | None = None  # the state of its machine, or `gone`; None: the cloud has not answered
    since: float = 0.0
    """When its present phase began, or a job's phase on it, as far as this head knows.

    An unfit node is checked again when its agent restarts. If the node is still unfit, its first unfit time counts.
    """
    due: float = 0.0  # when its machine ends, if the node retires now (`retirement.mark`); 0: it does not retire now
    devices: tuple[int, ...] = ()  # the devices that the job of the view has there; (): all of them
    assigned: bool = True  # whether the job of the view has devices there
    free: bool = True  # whether no other job trains on these devices any more
    misfits: Mapping[str, Misfit] = field(default_factory=dict)  # by job: those whose set-up has failed here

    @property
    def name(self) -> str:
        """The name of its machine."""
        return self.report.node

    @property
    def share(self) -> float:
        """Which part of its devices the job of the view has."""
        return len(self.devices) / self.report.devices if self.devices else 1.0

    @property
    def phase(self) -> str:
        """What it does for the job of the view; `checking` or `unfit` if it takes no job."""
        return self.work.phase if self.report.phase == "ready" else self.report.phase

    @property
    def doing(self) -> tuple[str, float]:
        """What a node that does not train yet is doing, and since when, in epoch seconds by its clock."""
        if self.report.phase == "checking":
            return "checking the machine", self.report.since
        return self.work.doing, self.work.doing_since

    @property
    def under_notice(self) -> bool:
        """Whether the cloud will take the machine."""
        return is_taken(self.report)

    @property
    def leaving(self) -> bool:
        """Whether the node is about to leave: it is under notice, or it retires now."""
        return self.due > 0 or self.under_notice

    @property
    def gone(self) -> bool:
        """Whether its machine has ended. A machine that is stopping has not."""
        return self.cloud in ("terminated", "gone")

    @property
    def fits(self) -> bool:
        """Whether its workers are on the devices that the job has there. Otherwise their agent ends them soon.

        True for an agent of an older version, which does not report the devices.
        """
        devices = self.devices or range(self.report.devices)
        return not self.work.devices or set(devices) == set(self.work.devices)

    @property
    def waits(self) -> bool:
        """Whether its workers wait for a generation, and their agent will not end them."""
        return self.work.regroup == "waiting" and self.fits

    @property
    def setup_failure(self) -> bool:
        return self.work.failure is not None and self.work.failure.kind == "setup"


def is_taken(report: Report) -> bool:
    """Whether the cloud will take the machine. A rebalance recommendation alone does not say so."""
    return report.notice is not None and report.notice.kind != "rebalance"


@dataclass(frozen=True)
class Machine:
    """A machine of a pool as the cloud lists it."""

    name: str  # as in `Instance`
    pool: str  # the name of its pool
    state: str  # as in `Instance`; `unknown` while its pool's zone does not answer
    created: float  # epoch seconds when the cloud made the machine
    answered: float = 0.0  # when an agent of this name last reported a phase other than `checking`
    kind: str = ""  # the machine type
    ends: float = 0.0  # as in `Instance`
    retires: float = 0.0  # when the head plans to drain and replace it before it ends (`retirement.planned`); 0: never
    started: float = 0.0  # as in `Instance`

    @property
    def joined(self) -> bool:
        """Whether the agent of this very machine has ended its first checks."""
        return self.answered >= self.created


@dataclass(frozen=True)
class Sign:
    """A node's sign of life in the bucket. Times are by the head's clock."""

    changed: float  # when the head first saw this sign
    advanced: float  # when the head first saw the newest step of any job of the node
    looked: float  # when the head last read the bucket for the sign, and the bucket answered
    record: AliveRecord | None = None  # the sign itself; None: there is no sign
    jobs: Mapping[str, float] = field(default_factory=dict)  # as `advanced`, for each job by id


@dataclass(frozen=True)
class FleetView:
    """What the head knows at one moment about all jobs, nodes and machines of the cluster."""

    now: float  # the head's clock, epoch seconds
    jobs: tuple[JobState, ...]  # those that have not ended, and those that keep a node
    nodes: tuple[Node, ...]  # the nodes whose agents have reported to this head; `work` is of no job
    expected: int = 0  # the sum of the sizes that the pools are set to
    began: float = 0.0  # when this head started
    awake_since: float = 0.0  # since when this head has run without a pause
    able_since: float = -math.inf  # since when it has been able to act: as in `Presence`
    machines: tuple[Machine, ...] = ()  # the machines that the cloud lists; empty if the cloud does not answer
    listed: bool = True  # whether the cloud answered
    listed_at: float = 0.0  # when the cloud was asked for `machines`
    ended: tuple[Ended, ...] = ()  # machines of which the cloud says when they ended
    replaced: tuple[Replacement, ...] = ()  # the cluster's replacements, in order
    signs: Mapping[str, Sign] = field(default_factory=dict)  # by node name, for the nodes in `silence.watched`
    joined: Mapping[str, float] = field(default_factory=dict)  # machines whose agents have joined: when each was made

    @cached_property
    def by_id(self) -> Mapping[str, JobState]:
        """The jobs by their ids."""
        return {job.id: job for job in self.jobs}

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        """The nodes by their names."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def pools(self) -> Mapping[str, str]:
        """The pool of each machine and node, by name."""
        found = {machine.name: machine.pool for machine in self.machines}
        return found | {node.name: node.report.pool for node in self.nodes}

    @cached_property
    def unseen(self) -> Mapping[str, float]:
        """Those of `joined` whose agents have not reported to this head."""
        return {name: made for name, made in self.joined.items() if name not in self.by_name}

    @cached_property
    def reporting(self) -> Mapping[str, tuple[str, ...]]:
        """By job: the names of the nodes that report about it, and that may hold a state of it."""
        involved = {job.id: job.involved for job in self.jobs}
        found: dict[str, list[str]] = {}
        for node in self.nodes:
            for work in node.report.jobs:
                if node.name in involved.get(work.job, ()):
                    found.setdefault(work.job, []).append(node.name)
        return {job: tuple(names) for job, names in found.items()}

    @cached_property
    def misfits(self) -> Mapping[str, Mapping[str, Misfit]]:
        """By job and node: the set-ups that have failed."""
        found: dict[str, dict[str, Misfit]] = {}
        for node in self.nodes:
            for job, misfit in node.misfits.items():
                found.setdefault(job, {})[node.name] = misfit
        return found

    @cached_property
    def memberships(self) -> Mapping[str, tuple[tuple[JobState, Member], ...]]:
        """By node name: the jobs whose current generation the node is in, and its `Member` there."""
        return _by_node((member.node, (job, member)) for job in self.jobs for member in job.members)

    @cached_property
    def members(self) -> Mapping[str, tuple[JobState, ...]]:
        """By node name: the jobs whose current generation the node is in."""
        return {node: tuple(job for job, _ in found) for node, found in self.memberships.items()}

    @cached_property
    def kept(self) -> frozenset[str]:
        """The nodes of failed jobs that are kept for a person."""
        return frozenset(job.kept_node.member.node for job in self.jobs if job.kept_node)

    @cached_property
    def last(self) -> Mapping[str, tuple[JobState, ...]]:
        """By node name: the jobs whose newest generation the node is or was in."""
        return _by_node((member.node, job) for job in self.jobs for member in job.last)

    def blind(self) -> bool:
        """Whether this head began or woke up a moment ago, and a node is not back yet.

        That is a member of a newest generation, a member of one that a drain has named, or a node that the last head
        could give to a job. Without the third kind, jobs of low priority would begin again where a job of higher
        priority waits for that node.
        """
        if self.now - self.awake_since >= TIMEOUTS.rejoin:
            return False
        there = {machine.name: machine.created for machine in self.machines if machine.state == "running"}
        known = self.by_name
        missing = (
            name not in known and (not self.listed or there.get(name) == made) for name, made in self.joined.items()
        )
        return any(missing) or _blind(self, self.jobs)

    def work(self, node: Node) -> list[tuple[JobState, JobReport]]:
        """What a node reports about jobs that have not ended, or that keep a node."""
        return [(self.by_id[each.job], each) for each in node.report.jobs if each.job in self.by_id]

    def believes(self, node: Node, job: str) -> bool:
        """Whether what the node reports about the job counts, see `JobState.involved`."""
        return node.name in self.reporting.get(job, ())

    @cached_property
    def shortest_timeout(self) -> float:
        """The least that `heartbeat_timeout` can be."""
        return min([HEARTBEAT_TIMEOUT, *(job.spec.heartbeat_timeout for job in self.jobs)])

    def heartbeat_timeout(self, node: Node) -> float:
        """Seconds without a report after which something is wrong with the node."""
        jobs = {each.job for each in node.report.jobs} | {job.id for job in self.last.get(node.name, ())}
        found = [self.by_id[job].spec.heartbeat_timeout for job in jobs if job in self.by_id]
        return max(found, default=HEARTBEAT_TIMEOUT)


@dataclass(frozen=True)
class View:
    """What the head knows at one moment about one job, its nodes and the machines."""

    now: float  # the head's clock, epoch seconds
    job: JobState
    nodes: tuple[Node, ...]  # its members, the nodes on which it has devices, and others that may hold a state of it
    expected: int = 0  # the nodes that it has or will have soon
    waiting_since: float = 0.0  # when a node last became ready for it, or when it was submitted, if that is later
    began: float = 0.0  # when this head started
    awake_since: float = 0.0  # since when this head has run without a pause
    able_since: float = -math.inf  # since when it has been able to act: as in `Presence`
    vanished: frozenset[str] = frozenset()  # members that never reported to this head, and whose machines are gone
    machines: tuple[Machine, ...] = ()  # the machines that the cloud lists; empty if the cloud does not answer
    listed: bool = True  # whether the cloud answered
    signs: Mapping[str, Sign] = field(default_factory=dict)  # by node name, for the nodes in `silence.watched`
    joined: Mapping[str, float] = field(default_factory=dict)  # joined, but silent so far: `FleetView.unseen`
    conditions: Mapping[str, Condition] = field(default_factory=dict)  # of machines that it has or will have soon
    dearest: float = 0.0  # USD an hour with all machines that are asked for; 0: not known
    rest_until: float | None = None  # as in its placement
    misfits: Mapping[str, Misfit] = field(default_factory=dict)  # by node: where the set-up has failed
    queued: str = ""  # why other jobs have the devices that it wants; empty: they do not

    @property
    def shortest_timeout(self) -> float:
        """The least that `heartbeat_timeout` can be."""
        return self.job.spec.heartbeat_timeout

    def heartbeat_timeout(self, node: Node) -> float:
        """Seconds without a report after which something is wrong with the node."""
        return self.job.spec.heartbeat_timeout

    def members(self) -> list[Node | None]:
        """The nodes of the current generation, in the order of their ranks.

        None stands for a member that has not reported to this head, or whose agent has been replaced by another one.
        """
        return self._members

    @cached_property
    def _members(self) -> list[Node | None]:
        known = {(node.report.node, node.report.boot): node for node in self.nodes}
        return [known.get((m.node, m.boot)) for m in self.job.members]

    def blind(self) -> bool:
        """Whether this head began or woke up a moment ago, and a node of the job is not back yet.

        That is a member of the newest generation, or of the one that a drain has named: its workers may have joined it.
        """
        return _blind(self, (self.job,))


def named(job: JobState) -> tuple[Member, ...]:
    """The members of the generation that the drain under way has named; none if no such drain is under way."""
    return job.following.members if job.draining and job.following else ()


def bound(view: View | FleetView, job: JobState) -> tuple[Member, ...]:
    """The nodes that must stay the job's. Those that a drain has named are among them until its time is over."""
    late = job.draining is not None and view.now > max(job.draining.deadline, view.awake_since + TIMEOUTS.drain)
    return job.bound if late else (*named(job), *job.bound)


def _blind(view: View | FleetView, jobs: Iterable[JobState]) -> bool:
    if view.now - view.awake_since >= TIMEOUTS.rejoin:
        return False
    known = {node.name for node in view.nodes}  # if another agent reports from a machine, the member is gone
    return any(member.node not in known for job in jobs for member in (*job.last, *named(job)))


def _by_node(pairs: Iterable[tuple[str, T]]) -> dict[str, tuple[T, ...]]:
    found: dict[str, list[T]] = {}
    for node, each in pairs:
        found.setdefault(node, []).append(each)
    return {node: tuple(each) for node, each in found.items()}
