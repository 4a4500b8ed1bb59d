"""What the head knows of the nodes, and when one counts as lost. Pure.

Lost takes two independent signals: the link (closed, or silent for `heartbeat_timeout`), and one of: the cloud says
the machine is gone, other members' collectives failed, or no member has completed a step since. The head's own
blindness (every node silent at once, or the head itself having stood still) is therefore never taken for a loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spotrun.head.job_state import JobState, Replacement
from spotrun.spec import JobSpec
from spotrun.wire import Report

HEARTBEAT = 0.5  # seconds between an agent's reports
REJOIN = 10.0  # seconds that agents take to find a new head at the most
ALONE = 300.0  # seconds of more patience while no node at all is heard: it may be the head that is cut off
LONGEST = 30.0  # seconds without a step that tell as much as three slow steps, if the member is silent for as long
GONE = ("stopping", "terminated", "gone")


@dataclass(frozen=True)
class Node:
    """An agent as the head sees it.

    heard: time of its newest report. cloud: its machine's state there, if known. since: since when this head has heard
    it say the phase that it is in; of an unfit one, also by its agents before, if they were only checking in between.
    due: when its machine ends, epoch seconds, if it retires now (`ends.mark`); 0: it does not.
    """

    report: Report
    connected: bool
    reported_at: float
    cloud: str | None = None
    since: float = 0.0
    due: float = 0.0

    @property
    def name(self) -> str:
        return self.report.node

    @property
    def noticed(self) -> bool:
        """Whether it will be taken, or retires. A rebalance recommendation alone is not that word."""
        return self.due > 0 or (self.report.notice is not None and self.report.notice.kind != "rebalance")

    @property
    def gone(self) -> bool:
        return self.cloud in ("terminated", "gone")

    @property
    def setup_failure(self) -> bool:
        return self.report.failure is not None and self.report.failure.kind == "setup"

    def expendable(self, view: View) -> bool:
        """Not a member of the generation that runs."""
        current = view.job.current
        return current is None or all(m.node != self.name or m.boot != self.report.boot for m in current.members)


@dataclass(frozen=True)
class Machine:
    """A machine of a pool as the cloud lists it.

    state: as in `Instance`; `unknown` of one that was listed until its zone ceased to answer.
    answered: when its agent, or a predecessor's of the same name, was last heard to say more than that it is checking.
    kind: the machine type. ends: as in `Instance`. retires: when it is drained and replaced because of that
    (`ends.planned`); 0: never.
    """

    name: str
    pool: str
    state: str
    created: float
    answered: float = 0.0
    kind: str = ""
    ends: float = 0.0
    retires: float = 0.0

    @property
    def joined(self) -> bool:
        """Whether its own agent has said what the machine is good for."""
        return self.answered >= self.created


@dataclass(frozen=True)
class Sign:
    """A node's sign of life in the bucket. Times are the head's, never the node's.

    changed: when the head first saw this sign. advanced: when it first saw this step. looked: when the bucket last
    answered a read of the sign. boot: of the agent that wrote it; "" if there is no sign. clock: time by the node's
    clock, only used to see that the sign is another. The other fields are as in `AliveRecord`.
    """

    changed: float
    advanced: float
    looked: float
    boot: str = ""
    clock: float = 0.0
    every: float = 0.0
    job: str = ""
    generation: int = 0
    step: int = -1


@dataclass(frozen=True)
class View:
    """All that a decision may rest on.

    expected: how many nodes the pools have been asked for. waiting_since: when the newest node became ready, or the
    job came. began: when this head started. awake_since: since when it has been running without a gap. vanished:
    members that this head has not heard and whose machines the cloud no longer has. machines: all that the cloud
    lists; none if the cloud does not answer. listed: whether it answered. replaced: the cluster's replacements, in
    order. signs: signs of life of the nodes that the head looks for in the bucket (`silence.watched`), by name.
    """

    now: float
    job: JobState
    nodes: tuple[Node, ...]
    expected: int = 0
    waiting_since: float = 0.0
    began: float = 0.0
    awake_since: float = 0.0
    vanished: frozenset[str] = frozenset()
    machines: tuple[Machine, ...] = ()
    listed: bool = True
    replaced: tuple[Replacement, ...] = ()
    signs: Mapping[str, Sign] = field(default_factory=dict)

    def members(self) -> list[Node | None]:
        """The current generation's nodes in rank order; None for one whose machine or agent is another now."""
        current = self.job.current
        known = {(node.name, node.report.boot): node for node in self.nodes}
        return [known.get((m.node, m.boot)) for m in current.members] if current else []

    def blind(self) -> bool:
        """Whether nodes of the newest generation may still be on their way to this head, which has just begun."""
        known = {(node.name, node.report.boot) for node in self.nodes}
        missing = any((member.node, member.boot) not in known for member in self.job.last)
        return missing and self.now - self.awake_since < REJOIN

    def eligible(self, spec: JobSpec) -> list[Node]:
        """Nodes that could be in a generation that begins now."""
        return [
            node
            for node in self.nodes
            if node.connected
            and not silent(self, node, spec)
            and node.report.job == self.job.id
            and node.report.phase not in ("checking", "unfit", "idle", "preparing")
            and not node.setup_failure
            and not node.noticed
            and node.cloud not in GONE
            and node.report.store
        ]


def silent(view: View, node: Node, spec: JobSpec) -> bool:
    """Whether nothing was heard of it for so long that something is wrong."""
    return view.now - max(node.reported_at, view.awake_since) > spec.heartbeat_timeout


def lost(view: View, spec: JobSpec) -> dict[str, str]:
    """Members of the current generation that are lost: name → kind (`kill`, `preempt`, `silent`)."""
    current = view.job.current
    if current is None:
        return {}
    found: dict[str, str] = {}
    newest = {node.name: node for node in view.nodes}
    for member, node in zip(current.members, view.members(), strict=True):
        others = [n for n in view.members() if n is not None and n is not node]
        if node is None and member.node in view.vanished and view.now - view.awake_since > 2 * spec.heartbeat_timeout:
            found[member.node] = "kill"
            continue
        kind = _lost(view, spec, node, newest.get(member.node), others)
        if kind:
            found[member.node] = kind
    return found


def _lost(view: View, spec: JobSpec, node: Node | None, newer: Node | None, others: list[Node]) -> str | None:
    if node is None:
        # Never seen by this head: it may be on its way back from the last head. Another incarnation of it that
        # reports is proof; else its peers' word is needed.
        if newer is not None:
            return "kill"
        quiet = view.now - view.awake_since > 2 * spec.heartbeat_timeout
        return "kill" if quiet and (_stalled(view, others, view.awake_since) or _peers_failed(view, others)) else None
    away = not node.connected or silent(view, node, spec)
    if not away:
        return None
    kind = "preempt" if node.noticed else "kill" if not node.connected else "silent"
    if node.gone:
        return kind
    if not others:
        return None  # the head's word against nobody's: only the cloud can decide
    if _peers_failed(view, others) or (silent(view, node, spec) and _stalled(view, others, node.reported_at)):
        return kind
    return None


def _peers_failed(view: View, others: list[Node]) -> bool:
    """Whether a collective failed elsewhere in this generation."""
    return any(
        n.report.generation == view.job.generation and n.report.failure and n.report.failure.kind == "peer"
        for n in others
    )


def _stalled(view: View, others: list[Node], last: float) -> bool:
    """Whether the others, who can be heard, do not get on: a step takes the whole generation.

    last: when the member in question was last heard.
    """
    heard = [n for n in others if n.connected and view.now - n.reported_at < 3 * HEARTBEAT]
    if not heard:
        return False
    newest = max((w.stepped_at for n in heard for w in n.report.workers), default=0.0)
    waited = view.now - max(newest, view.job.ordered_at)
    quiet = view.now - max(last, view.awake_since)
    return waited > max(1.0, 3 * view.job.progress.pace) or min(waited, quiet) > LONGEST
