"""What the head knows about nodes, machines and the job at one moment. Its decisions rest on this. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spotrun.head.fleet.record import Replacement
from spotrun.head.job_state import JobState
from spotrun.head.timeouts import TIMEOUTS
from spotrun.wire import AliveRecord, Report

ENDING_STATES = ("stopping", "terminated", "gone")  # of a machine that ends or has ended (`Node.cloud`)


@dataclass(frozen=True)
class Node:
    """A node: what its agent has reported, and the state of its machine."""

    report: Report  # the newest one
    connected: bool  # whether the agent is connected to this head
    reported_at: float  # when the newest report arrived
    cloud: str | None = None  # the state of its machine, or `gone`; None: the cloud has not answered
    since: float = 0.0
    """When its present phase began, as far as this head knows.

    An unfit node is checked again when its agent restarts. If the node is still unfit, its first unfit time counts.
    """
    due: float = 0.0  # when its machine ends, if the node retires now (`retirement.mark`); 0: it does not retire now

    @property
    def name(self) -> str:
        """The name of its machine."""
        return self.report.node

    @property
    def under_notice(self) -> bool:
        """Whether the cloud will take the machine. A rebalance recommendation alone does not say so."""
        return self.report.notice is not None and self.report.notice.kind != "rebalance"

    @property
    def leaving(self) -> bool:
        """Whether the node is about to leave: it is under notice, or it retires now."""
        return self.due > 0 or self.under_notice

    @property
    def gone(self) -> bool:
        """Whether its machine has ended. A machine that is stopping has not."""
        return self.cloud in ("terminated", "gone")

    @property
    def setup_failure(self) -> bool:
        return self.report.failure is not None and self.report.failure.kind == "setup"

    def expendable(self, view: View) -> bool:
        """Whether the node is no member of the current generation."""
        return all((m.node, m.boot) != (self.name, self.report.boot) for m in view.job.members)


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

    @property
    def joined(self) -> bool:
        """Whether the agent of this very machine has ended its first checks."""
        return self.answered >= self.created


@dataclass(frozen=True)
class Sign:
    """A node's sign of life in the bucket. Times are by the head's clock."""

    changed: float  # when the head first saw this sign
    advanced: float  # when the head first saw the sign's step
    looked: float  # when the head last read the bucket for the sign, and the bucket answered
    record: AliveRecord | None = None  # the sign itself; None: there is no sign


@dataclass(frozen=True)
class View:
    """What the head knows at one moment about one job, its nodes and the machines."""

    now: float  # the head's clock, epoch seconds
    job: JobState  # the active job
    nodes: tuple[Node, ...]  # the nodes whose agents have reported to this head
    expected: int = 0  # the sum of the sizes that the pools are set to
    waiting_since: float = 0.0  # when a node last became ready, or when the job was submitted, if that is later
    began: float = 0.0  # when this head started
    awake_since: float = 0.0  # since when this head has run without a pause
    vanished: frozenset[str] = frozenset()  # members that never reported to this head, and whose machines are gone
    machines: tuple[Machine, ...] = ()  # the machines that the cloud lists; empty if the cloud does not answer
    listed: bool = True  # whether the cloud answered
    replaced: tuple[Replacement, ...] = ()  # the cluster's replacements, in order
    signs: Mapping[str, Sign] = field(default_factory=dict)  # by node name, for the nodes in `silence.watched`

    def members(self) -> list[Node | None]:
        """The nodes of the current generation, in the order of their ranks.

        None stands for a member that has not reported to this head, or whose agent has been replaced by another one.
        """
        known = {(node.name, node.report.boot): node for node in self.nodes}
        return [known.get((m.node, m.boot)) for m in self.job.members]

    def blind(self) -> bool:
        """Whether this head began or woke up a moment ago, and a member of the newest generation is not back yet."""
        known = {(node.name, node.report.boot) for node in self.nodes}
        missing = any((member.node, member.boot) not in known for member in self.job.last)
        return missing and self.now - self.awake_since < TIMEOUTS.rejoin
