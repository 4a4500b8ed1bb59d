"""What a decision may rest on: nodes, machines, and the job, as the head knows them at one moment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spotrun.head.fleet.record import Replacement
from spotrun.head.job_state import JobState
from spotrun.head.timeouts import TIMEOUTS
from spotrun.wire import AliveRecord, Report

GONE = ("stopping", "terminated", "gone")


@dataclass(frozen=True)
class Node:
    """An agent as the head sees it."""

    report: Report  # the newest one
    connected: bool
    reported_at: float  # when the newest report arrived
    cloud: str | None = None  # the state of its machine, if the cloud has told it
    since: float = 0.0
    """When this head first received its present phase. An unfit phase continues through checks after agent restarts."""
    due: float = 0.0  # when its machine ends, if the node retires now (`retirement.mark`); 0: it does not retire

    @property
    def name(self) -> str:
        return self.report.node

    @property
    def under_notice(self) -> bool:
        """Whether the cloud will take the machine. A rebalance recommendation alone does not say so."""
        return self.report.notice is not None and self.report.notice.kind != "rebalance"

    @property
    def noticed(self) -> bool:
        """Whether the node leaves: it is under notice, or retires."""
        return self.due > 0 or self.under_notice

    @property
    def gone(self) -> bool:
        return self.cloud in ("terminated", "gone")

    @property
    def setup_failure(self) -> bool:
        return self.report.failure is not None and self.report.failure.kind == "setup"

    def expendable(self, view: View) -> bool:
        """Not a member of the current generation."""
        return all((m.node, m.boot) != (self.name, self.report.boot) for m in view.job.members)


@dataclass(frozen=True)
class Machine:
    """A machine of a pool as the cloud lists it."""

    name: str
    pool: str
    state: str  # as in `Instance`; `unknown` if its zone has stopped answering
    created: float
    answered: float = 0.0  # when an agent of this name last reported another phase than checking
    kind: str = ""  # the machine type
    ends: float = 0.0  # as in `Instance`
    retires: float = 0.0  # when it is drained and replaced because of that end (`retirement.planned`); 0: never

    @property
    def joined(self) -> bool:
        """Whether its own agent has said what the machine is good for."""
        return self.answered >= self.created


@dataclass(frozen=True)
class Sign:
    """A node's sign of life in the bucket. Times are by the head's clock."""

    changed: float  # when the head first saw this sign
    advanced: float  # when the head first saw this step
    looked: float  # when the bucket last answered a read of the sign
    record: AliveRecord | None = None  # None: there is no sign


@dataclass(frozen=True)
class View:
    """All that a decision may rest on."""

    now: float
    job: JobState
    nodes: tuple[Node, ...]
    expected: int = 0  # how many machines the pools have been asked for
    waiting_since: float = 0.0  # when the newest node became ready, or the job was submitted
    began: float = 0.0  # when this head started
    awake_since: float = 0.0  # since when this head has run without a gap
    vanished: frozenset[str] = frozenset()  # members that never reported to this head, and whose machines are gone
    machines: tuple[Machine, ...] = ()  # all that the cloud lists; none if the cloud does not answer
    listed: bool = True  # whether the cloud answered
    replaced: tuple[Replacement, ...] = ()  # the cluster's replacements, in order
    signs: Mapping[str, Sign] = field(default_factory=dict)  # by name, of the nodes in `silence.watched`

    def members(self) -> list[Node | None]:
        """The current generation's nodes in rank order; None for one whose machine or agent is another now."""
        known = {(node.name, node.report.boot): node for node in self.nodes}
        return [known.get((m.node, m.boot)) for m in self.job.members]

    def blind(self) -> bool:
        """Whether nodes of the newest generation may still be on their way to this head, which has just begun."""
        known = {(node.name, node.report.boot) for node in self.nodes}
        missing = any((member.node, member.boot) not in known for member in self.job.last)
        return missing and self.now - self.awake_since < TIMEOUTS.rejoin
