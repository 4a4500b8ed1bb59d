"""Generations that begin without a restart: their workers wait for them, or have warmed up. Pure.

If any node's workers wait, the next generation has only nodes whose workers wait. The others warm up meanwhile: that
takes no longer than a restart of all. If the workers do not go on well, the generation after that has new ones.
"""

from __future__ import annotations

from spotrun.head.job_state import Cause, in_doubt
from spotrun.head.planner.liveness import HEARTBEAT, eligible, reports
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import Node, View


def members(view: View, ready: list[Node], cause: Cause | None) -> list[Node] | None:
    """The nodes whose workers could go on together; None: the next generation begins with new workers.

    There may be too few of them for a generation: then others are about to have warmed up. ready: all eligible nodes.
    """
    job = view.job
    if not job.regroups or in_doubt(job, cause):
        return None
    found = [node for node in ready if node.work.regroup == "waiting"]
    last = {(member.node, member.boot) for member in job.last}
    others = [node for node in ready if node not in found and node.phase != "ready"]
    if not found or any((node.name, node.report.boot) in last for node in others):
        return None  # a survivor cannot go on: without it, the generation would be smaller than it can be
    if len(found) >= job.spec.nodes.min:
        return found
    # New workers on all nodes would need as long as these for their set-up.
    warming = _warming(ready)
    late = view.now - max(_waiting_since(view, warming), view.awake_since) > job.spec.start_timeout
    return None if late or len(found) + len(warming) < job.spec.nodes.min else found


def reason(view: View) -> str:
    """What a job waits for that could begin with new workers, but not yet with those that wait."""
    names = [node.name for node in _warming(eligible(view))]
    return f"waiting for {', '.join(names)} to warm up" if names and view.job.regroups else ""


def awaited(view: View, gone: dict[str, str]) -> bool:
    """Whether survivors are about to wait: they notice the end of a peer a moment after the head, or before it."""
    if not view.job.regroups or in_doubt(view.job, None):
        return False
    survivors = [n for n in view.members() if n is not None and n.name not in gone and reports(view, n)]
    late = [node for node in survivors if node.work.regroup == "able"]
    if not late or "silent" in gone.values():
        return False  # a worker whose peer is silent does not notice it
    failed = [node.work.failure.at for node in survivors if node.work.failure]
    quiet = [node.reported_at + HEARTBEAT for node in view.members() if node is not None and node.name in gone]
    since = min([*failed, *quiet], default=view.now)
    # A worker notices the death of a peer in the exchange of gradients, and ends that step.
    pace = view.job.progress.pace or view.job.pace
    return view.now - since < min(TIMEOUTS.survivors + 2 * pace, TIMEOUTS.survivors_most)


def failed(view: View, node: Node) -> bool:
    """Whether a member could not join the generation without a restart, or not in time."""
    job = view.job
    if job.current is None or not job.current.regroup or job.progress.step > job.progress.base:
        return False
    work = node.work
    if work.generation == job.generation and work.phase == "failed":
        return work.failure is not None and work.failure.kind == "peer"
    waited = view.now - max(job.ordered_at, view.awake_since)
    restored = work.generation == job.generation and work.phase != "starting"
    return not restored and waited > TIMEOUTS.regroup + job.state_bytes / TIMEOUTS.regroup_rate


def _warming(ready: list[Node]) -> list[Node]:
    """The nodes whose workers warm up, or are about to begin that."""
    return [node for node in ready if node.work.regroup in ("no", "able") and node.phase == "ready"]


def _waiting_since(view: View, warming: list[Node]) -> float:
    """When the last of these nodes became ready for its warm-up, or the last generation ended, if that is later."""
    return max([view.job.ordered_at, *(node.since for node in warming)])
