"""Which nodes report, which can train, and which members of a generation are interrupted. Pure.

An interruption takes two independent signals. The first: the connection is closed, or silent for `heartbeat_timeout`.
The second: the cloud says that the machine is gone, other members' collectives failed, or no member has completed a
step since. So a head that cannot see (every node is silent at once, or the head was suspended) finds no interruption.
"""

from __future__ import annotations

from collections.abc import Mapping

from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import ENDING_STATES, FleetView, Machine, Node, View

HEARTBEAT = 0.5  # seconds between an agent's reports


def silent(view: View | FleetView, node: Node) -> bool:
    """Whether the node has not reported for so long that something is wrong."""
    quiet = view.now - max(node.reported_at, view.awake_since)
    return quiet > view.shortest_timeout and quiet > view.heartbeat_timeout(node)


def reports(view: View | FleetView, node: Node) -> bool:
    """Whether the node is connected and not silent."""
    return node.connected and not silent(view, node)


def may_be_lost(view: View, failed_at: float) -> bool:
    """Whether a member may still turn out to be lost, which would explain why a collective failed.

    failed_at: when it failed. Every member gets time to report after that, also one that has not begun the generation,
    or that this head has not seen. One that does not may be dead: then `interrupted` finds it.
    """
    reported_by = failed_at + TIMEOUTS.failure
    return view.now < reported_by or any(n is None or n.reported_at < reported_by for n in view.members())


def eligible(view: View) -> list[Node]:
    """Nodes that could be in a generation that begins now."""
    return [
        node
        for node in view.nodes
        if node.assigned
        and node.free
        and reports(view, node)
        and node.work.job == view.job.id
        and node.phase not in ("checking", "unfit", "idle", "preparing")
        and not node.setup_failure
        and not node.leaving
        and node.cloud not in ENDING_STATES
        and node.work.store
    ]


def had_joined(view: View | FleetView, machine: Machine) -> bool:
    """Whether the machine's agent had joined before this head began, and has not reported since."""
    if isinstance(view, FleetView):
        if machine.name in view.by_name:
            return False
        jobs = view.last.get(machine.name, ())
    else:
        if any(node.name == machine.name for node in view.nodes):
            return False
        jobs = (view.job,) if any(each.node == machine.name for each in view.job.last) else ()
    member = any(machine.created <= job.ordered_at for job in jobs)
    return member or view.joined.get(machine.name) == machine.created


def now_joined(view: FleetView) -> Mapping[str, float]:
    """The machines whose agents have joined, for the next head. Unchanged if the cloud does not answer."""
    if not view.machines:
        return view.joined
    joined = (each for each in view.machines if each.joined or view.joined.get(each.name) == each.created)
    return {each.name: each.created for each in joined}


def interrupted(view: View) -> dict[str, str]:
    """Members that are interrupted: name → kind (`kill`, `preempt`, `silent`)."""
    found: dict[str, str] = {}
    for member, node in zip(view.job.members, view.members(), strict=True):
        if (node is None or not reports(view, node)) and (kind := _interruption(view, member.node, node)):
            found[member.node] = kind
    return found


def _interruption(view: View, name: str, node: Node | None) -> str | None:
    """The kind of interruption of a member that does not report; None if there is none.

    node: None if it has not reported to this head.
    """
    others = [each for each in view.members() if each is not None and each is not node]
    if node is not None:
        kind = "preempt" if node.leaving else "kill" if not node.connected else "silent"
        gone, stalled = node.gone, silent(view, node) and _stalled(view, others, node.reported_at)
    elif any(each.name == name for each in view.nodes):
        return "kill"  # another agent of the same name reports
    elif view.now - view.awake_since <= 2 * view.job.spec.heartbeat_timeout:
        return None  # the agent may still be looking for this head
    else:
        kind, gone, stalled = "kill", name in view.vanished, _stalled(view, others, view.awake_since)
    return kind if gone or stalled or _peers_failed(view, others) else None


def _peers_failed(view: View, others: list[Node]) -> bool:
    """Whether a collective failed elsewhere in this generation."""
    return any(
        n.work.generation == view.job.generation and n.work.failure and n.work.failure.kind == "peer" for n in others
    )


def _stalled(view: View, others: list[Node], last: float) -> bool:
    """Whether the others report but complete no step: a step needs every member of the generation.

    last: when the member in question last reported.
    """
    names = {member.node for member in view.job.following.members} if view.job.following else set()
    reporting = [n for n in others if n.connected and view.now - n.reported_at < 3 * HEARTBEAT]
    if names:  # members that leave have no step to complete after their stop; the others may have gone on without them
        reporting = [n for n in reporting if n.name in names or (n.phase != "drained" and n.work.regroup != "waiting")]
    if not reporting:
        return False
    newest = max((w.stepped_at for n in reporting for w in (*n.work.workers, *n.work.before)), default=0.0)
    waited = view.now - max(newest, view.job.ordered_at)
    quiet = view.now - max(last, view.awake_since)
    return waited > max(1.0, 3 * view.job.progress.pace) or min(waited, quiet) > TIMEOUTS.slow_step
