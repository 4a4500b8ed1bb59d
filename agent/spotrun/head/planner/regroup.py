"""Generations that begin without a restart. Each of their workers is a survivor or has warmed up, and waits. Pure.

If any node's workers wait, the next generation has only nodes whose workers wait. Meanwhile, the workers of the other
nodes warm up. A restart of all workers would not be faster. If a generation that began without a restart makes no step,
the next one has new workers.
"""

from __future__ import annotations

from collections.abc import Iterator

from spotrun.head.job_state import Cause, in_doubt
from spotrun.head.planner.liveness import HEARTBEAT, eligible, reports
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import Node, View


def members(view: View, ready: list[Node], cause: Cause | None) -> list[Node] | None:
    """The nodes whose workers could go on together; None: the next generation begins with new workers.

    If these nodes are too few for a generation, other nodes will have warmed up soon. ready: all eligible nodes.
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
    # A restart of all workers would not be faster: new workers need the same set-up as those that warm up.
    warming = _warming(ready)
    late = view.now - max(_waiting_since(view, warming), view.awake_since) > job.spec.start_timeout
    return None if late or len(found) + len(warming) < job.spec.nodes.min else found


def reason(view: View) -> str:
    """Which nodes a job waits for, although it could begin at once with new workers; empty: it waits for none."""
    names = [node.name for node in _warming(eligible(view))]
    return f"waiting for {', '.join(names)} to warm up" if names and view.job.regroups else ""


def must_release(view: View, gone: dict[str, str]) -> bool:
    """Whether survivors must be told to leave the generation, because they may not notice that a peer is gone.

    Workers do not notice that a peer is silent. The head does not always know this either: the machine may have been
    replaced under the same name before the head found it silent, or it has never reported to this head, which is new.
    In both cases, `View.members` has None for the machine. If such a machine is gone, it counts as silent.
    """
    unseen = {member.node for member, node in zip(view.job.members, view.members(), strict=True) if node is None}
    quiet = "silent" in gone.values() or not unseen.isdisjoint(gone)
    return quiet and view.job.released is None and any(_late(view, _survivors(view, gone)))


def awaited(view: View, gone: dict[str, str]) -> bool:
    """Whether survivors will soon wait. They notice the end of a peer a moment before or after the head does."""
    survivors = _survivors(view, gone)
    if not any(_late(view, survivors)):
        return False
    if view.job.released:
        since = view.job.released.at
    else:  # the head has a report of each node in `gone`, or `must_release` would be true
        failed = [node.work.failure.at for node in survivors if node.work.failure]
        quiet = [node.reported_at + HEARTBEAT for node in view.members() if node is not None and node.name in gone]
        since = min([*failed, *quiet])
    # A worker notices the death of a peer in the exchange of gradients, and ends that step.
    pace = view.job.progress.pace or view.job.pace
    return view.now - since < min(TIMEOUTS.survivors + 2 * pace, TIMEOUTS.survivors_most)


def _survivors(view: View, gone: dict[str, str]) -> list[Node]:
    return [n for n in view.members() if n is not None and n.name not in gone and reports(view, n)]


def _late(view: View, survivors: list[Node]) -> Iterator[Node]:
    """Survivors whose workers could go on in another generation, but do not wait for it yet."""
    if view.job.regroups and not in_doubt(view.job, None):
        yield from (node for node in survivors if node.work.regroup == "able")


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
    """The nodes whose workers warm up, or will soon begin to."""
    return [node for node in ready if node.work.regroup in ("no", "able") and node.phase == "ready"]


def _waiting_since(view: View, warming: list[Node]) -> float:
    """The later of two moments: the last of these nodes became ready for its warm-up; the last generation ended."""
    return max([view.job.ordered_at, *(node.since for node in warming)])
