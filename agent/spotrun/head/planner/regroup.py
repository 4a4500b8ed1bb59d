"""Generations that begin without a restart. Each of their workers is a survivor or has warmed up, and waits. Pure.

If any node's workers wait, the next generation has only nodes whose workers wait. Meanwhile, the workers of the other
nodes warm up. A restart of all workers would not be faster. If no workers wait, but those of enough nodes warm up, the
head waits for these. If a generation that began without a restart makes no step, the next one has new workers, unless
another member was lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from spotrun.head.job_state import Action, Cause, EndGeneration, JobState, Start, in_doubt
from spotrun.head.planner import patience
from spotrun.head.planner.liveness import HEARTBEAT, eligible, may_be_lost, reports
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import ENDING_STATES, Node, View
from spotrun.wire import Member


def members(view: View, ready: list[Node], cause: Cause | None) -> list[Node] | None:
    """The nodes whose workers could go on together; None: the next generation begins with new workers.

    If these nodes are too few for a generation, the workers of other nodes will soon wait. ready: all eligible nodes.
    """
    job = view.job
    if not job.regroups or in_doubt(job, cause):
        return None
    early = called_back(view, ready)
    found = [node for node in ready if node.waits]
    soon = {node.name for node in (*early, *found)} | {node.name for node in ready if _returns(view, node)}
    last = {(member.node, member.boot) for member in job.last}
    if any((node.name, node.report.boot) in last and node.name not in soon and node.phase != "ready" for node in ready):
        return None  # a survivor cannot go on: without it, the generation would be smaller than it can be
    if early:
        return []  # the workers of these nodes will soon wait
    warming = _warming(view, ready)
    if not found and sum(_returns(view, node) or _sets_up(view, node) for node in warming) < job.spec.nodes.min:
        return None  # too few have begun the set-up: new workers are as fast
    if len(found) >= job.spec.nodes.min:
        return found
    # A restart of all workers would not be faster: new workers need the same set-up as those that warm up.
    late = view.now - max(_waiting_since(view, warming), view.awake_since) > job.spec.start_timeout
    return None if late or len(found) + len(warming) < job.spec.nodes.min else found


def following(view: View, cause: Cause) -> Start | None:
    """The generation after a drain that is ordered now. None: none follows at once, or its nodes are not known yet.

    All members that stay must be able to go on. These members and the nodes that have warmed up must be at least `min`.
    """
    job = view.job
    if not job.regroups or in_doubt(job, cause) or cause.kind in ("stop", "pause"):
        return None
    found = [node for node in view.members() if node is not None]
    here = [node for node in found if node.assigned and not node.leaving and node.cloud not in ENDING_STATES]
    able = (n.work.generation == job.generation and n.work.regroup == "able" and reports(view, n) for n in here)
    same = {(member.node, member.devices) for member in job.members}
    if not here or len(found) < len(job.members) or not all(able) or any((n.name, n.devices) not in same for n in here):
        return None
    names = {member.node for member in job.members}
    warm = [node for node in eligible(view) if node.name not in names and node.waits]
    chosen = [*here, *sorted(warm, key=lambda node: node.name)][: job.spec.nodes.max]
    enough = len(chosen) >= job.spec.nodes.min and chosen[0].work.store
    return start(chosen, cause, regroup=True) if enough else None


def catch_up(view: View) -> tuple[Action, ...]:
    """Begin the generation that the drain has named, once all members that stay have stopped.

    If it cannot begin any more, and one of these has joined it, end the current one: then the agents call back the
    workers that have joined. (): wait, or begin another generation.
    """
    job, wanted = view.job, view.job.following
    if wanted is None:
        return ()
    joined = gone_on(view)
    known = {(node.name, node.report.boot): node for node in view.nodes}
    nodes = [(member, known.get((member.node, member.boot))) for member in wanted.members]
    cause, others = job.draining.cause if job.draining else None, _others([node for _, node in nodes if node])
    begun = Start(wanted.members, wanted.store, cause, True, planned=True, others=others)
    formed = any(worker.phases[2] for node in joined for worker in node.work.workers)  # then all members are there
    # After the drain's end, another job can get a node. Then the generation that the drain has named ends by itself.
    # If the job gets that node back, the node may still end its old workers. Until they have ended, it is idle.
    there = view.blind() or all(node is not None and node.assigned and node.phase != "idle" for _, node in nodes)
    if formed and (job.draining is not None or there):
        return (begun,)
    if job.draining is None or view.blind():
        return ()
    names = {member.node for member in wanted.members}
    stay = [node for member, node in zip(job.members, view.members(), strict=True) if member.node in names]
    if not all(node is not None and (node in joined or node.phase == "drained") for node in stay):
        return ()
    usable = all(node is not None and _is_usable(view, member, node, node in joined) for member, node in nodes)
    if usable and not job.stopping:
        return (begun,)
    return (EndGeneration(job.draining.cause),) if any(node in joined for node in stay) else ()


def gone_on(view: View) -> list[Node]:
    """The nodes that have already joined the generation after the drain."""
    wanted = view.job.following
    if wanted is None:
        return []
    boots = {(member.node, member.boot) for member in wanted.members}
    nodes = [node for node in view.nodes if node.work.generation == wanted.number]
    return [node for node in nodes if (node.name, node.report.boot) in boots]


def _is_usable(view: View, member: Member, node: Node, joined: bool) -> bool:
    """Whether the node can be in the generation after the drain. It may leave later: then that generation drains.

    joined: whether it is in that generation already.
    """
    here = node.assigned and node.cloud not in ENDING_STATES and reports(view, node)
    waits = node.waits and node.devices == member.devices
    return here and (waits or (joined and node.work.regroup in ("able", "waiting")))


def start(nodes: list[Node], cause: Cause | None, regroup: bool) -> Start:
    """A generation of these nodes, in the order of their ranks. All members use the store of rank 0."""
    found = tuple(
        Member(node=n.name, boot=n.report.boot, address=n.report.address, devices=n.devices, share=n.share)
        for n in nodes
    )
    return Start(found, nodes[0].work.store, cause, regroup=regroup, others=_others(nodes))


def _others(nodes: list[Node]) -> tuple[str, ...]:
    """The nodes whose code of spotrun is not that of the first one. Agents of old versions do not tell their code."""
    told = [node for node in nodes if node.report.code]
    return tuple(node.name for node in told if node.report.code != told[0].report.code)


def reason(view: View) -> str:
    """Which nodes a job waits for, although it could begin at once with new workers; empty: it waits for none."""
    found = _warming(view, eligible(view)) if view.job.regroups else []
    back = [node.name for node in found if _returns(view, node)]
    new = [node.name for node in found if node.name not in back]
    waits = (back, "to leave the last generation"), (new, "to warm up")
    return "; ".join(f"waiting for {', '.join(names)} {what}" for names, what in waits if names)


def must_release(view: View, gone: dict[str, str]) -> bool:
    """Whether survivors must be told to leave the generation, because they may not notice that a peer is gone.

    Workers do not notice that a peer is silent, also one under notice: its connections have not ended. The head does
    not always know this either: the machine may have been replaced under the same name before the head found it silent,
    or it has never reported to this head, which is new. In both cases, `View.members` has None for the machine. If such
    a machine is gone, it counts as silent. Workers on GPUs may not notice that a peer is gone: a collective of NCCL
    waits for it. Workers that form a process group do not notice it either. After a regroup, the head does not know
    until the first step whether they still form it.
    """
    late, unseen = list(_late(view, _survivors(view, gone))), _unseen(view)
    quiet = any(node.name in gone for node in view.members() if node is not None and node.connected)
    unnoticed = quiet or not unseen.isdisjoint(gone) or any(node.work.needs_release for node in late)
    return (unnoticed or view.job.no_step_since_regroup) and view.job.released is None and bool(late)


def could_leave(view: View, leaving: Collection[str] = ()) -> bool:
    """Whether workers of a member could leave the generation now, and go on in another one.

    leaving: members that do not count, because they will be gone.
    """
    return any(_late(view, _survivors(view, leaving)))


def awaited(view: View, gone: dict[str, str]) -> bool:
    """Whether survivors will soon wait. They notice the end of a peer a moment before or after the head does.

    A new head first waits until all of them have reported, but no longer than agents need to find it.
    """
    if _may_report(view, {*gone, *(view.job.released.node.split(", ") if view.job.released else ())}):
        return True
    survivors = _survivors(view, gone)
    late = list(_late(view, survivors))
    if not late:
        return False
    if view.job.released:
        since = view.job.released.at
    else:  # the head has a report of each node in `gone`, or `must_release` would be true
        failed = [node.work.failure.at for node in survivors if node.work.failure]
        quiet = [node.reported_at + HEARTBEAT for node in view.members() if node is not None and node.name in gone]
        since = min([*failed, *quiet])
    # A worker notices the death of a peer in the exchange of gradients, and ends that step.
    pace = view.job.progress.pace or view.job.pace
    limit = min(TIMEOUTS.survivors + 2 * pace, TIMEOUTS.survivors_most)
    return view.now - since < limit + (TIMEOUTS.abort if any(node.work.needs_release for node in late) else 0.0)


def _may_report(view: View, lost: set[str]) -> bool:
    """Whether this head is new, and a member that is not lost may still report to it."""
    return view.blind() and not _unseen(view) <= lost


def _unseen(view: View) -> set[str]:
    """The members whose machines have not reported to this head."""
    return {member.node for member, node in zip(view.job.members, view.members(), strict=True) if node is None}


def _survivors(view: View, gone: Collection[str]) -> list[Node]:
    return [n for n in view.members() if n is not None and n.name not in gone and reports(view, n)]


def _late(view: View, survivors: list[Node]) -> Iterator[Node]:
    """Survivors whose workers could go on in another generation, but do not wait for it yet."""
    if view.job.regroups:
        able = (n for n in survivors if n.work.regroup == "able")
        yield from (n for n in able if not _in_later_generation(view, n))


def failed(view: View, node: Node) -> bool:
    """Whether a member could not join the generation without a restart, or not in time.

    A failed collective does not count while another member may still turn out to be lost. A new head first waits until
    agents have had time to find it.
    """
    job, work, failure = view.job, node.work, node.work.failure
    if not job.no_step_since_regroup:
        return False
    if work.generation == job.generation and work.phase == "failed":
        unexplained = failure is not None and failure.kind == "peer" and not may_be_lost(view, failure.at)
        return unexplained and not view.blind()
    waited = view.now - max(job.ordered_at, view.awake_since)
    restored = work.generation == job.generation and work.phase != "starting"
    return not restored and waited > max(time_to_join(job), job.spec.start_timeout if _fetches(view, node) else 0.0)


def _fetches(view: View, node: Node) -> bool:
    """Whether the node's workers are in the process group, and may wait for a state from the bucket, which may be slow.

    That is so if no member has a snapshot as new as the bucket's.
    """
    grouped = bool(node.work.workers) and all(worker.phases[2] for worker in node.work.workers)
    return grouped and all(n is None or patience.state(n) < view.job.newest for n in view.members())


def time_to_join(job: JobState) -> float:
    """Seconds that the members of a generation without a restart may take until all have the state."""
    return TIMEOUTS.regroup + job.state_bytes / TIMEOUTS.regroup_rate


def _warming(view: View, ready: list[Node]) -> list[Node]:
    """The nodes whose workers will soon wait: they warm up, are about to begin that, or return from a generation."""
    begins = (node for node in ready if node.work.regroup in ("no", "able") or not node.fits)
    new = (node for node in begins if node.phase == "ready")
    return [*new, *(node for node in ready if _returns(view, node))]


def _returns(view: View, node: Node) -> bool:
    """Whether the node's workers did not leave their generation when others did, because the node was silent.

    When it is back, its agent calls them back. Then they wait, or new ones warm up. It may also turn out to be lost.
    Soon after the end of a generation, this is also true for workers that leave it late for another reason.
    """
    job, work = view.job, node.work
    if not work.workers or work.regroup != "able" or work.generation > job.generation:
        return False
    if work.generation < job.generation or job.current is None:
        return view.now - max(job.ordered_at, node.reports_since) < TIMEOUTS.regroup
    if view.now - max(node.reported_at, view.awake_since) > TIMEOUTS.failure:
        return True
    back = job.released is not None and node.reports_since > job.released.at
    return back and view.now - node.reports_since < TIMEOUTS.regroup


def _sets_up(view: View, node: Node) -> bool:
    """Whether the node's workers warm up on the devices that the job has there.

    A node that has been ready for longer than `start_timeout` does not count: its warm-up may hang.
    """
    young = view.now - max(node.since, view.awake_since) <= view.job.spec.start_timeout
    return young and bool(node.work.devices) and node.fits


def called_back(view: View, ready: list[Node]) -> list[Node]:
    """The nodes whose workers are called back: they are in a generation that does not begin, and will soon leave it."""
    job = view.job
    if job.current is None and view.now - max(job.ordered_at, view.awake_since) > TIMEOUTS.regroup:
        return []  # their agents would have ended these workers by now
    return [node for node in ready if _in_later_generation(view, node)]


def _in_later_generation(view: View, node: Node) -> bool:
    """Whether the node's workers are in a generation that the head has not begun, and do not wait."""
    return node.work.generation > view.job.generation and node.work.regroup == "able"


def _waiting_since(view: View, warming: list[Node]) -> float:
    """The later of two moments: the last of these nodes became ready for its warm-up; the last generation ended."""
    return max([view.job.ordered_at, *(node.since for node in warming)])
