"""The node on which a job's script has failed for good, kept for a person (`JobSpec.keep_on_failure`). Pure.

The job has ended: nobody waits for the node. The job's state names the node and the time, so each head knows both.
"""

from __future__ import annotations

from spotrun.head.job_state import KeepNode, KeptNode, LetGo
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import Node, View


def keep_last(view: View) -> tuple[KeepNode, ...]:
    """Keep the node on which the script has failed, once the last state of the job is in the bucket."""
    node = next((each for each in view.nodes if each.name == view.job.failed_node), None)
    return keep(view, node) if node is not None else ()


def keep(view: View, node: Node) -> tuple[KeepNode, ...]:
    """Keep this node, on which the script has failed first; nothing if the job file does not ask for it.

    A node that leaves is not kept, and an operator who has stopped the job wants no node of it.
    """
    job, seconds = view.job, view.job.spec.keep_on_failure
    member = next((m for m in job.last if (m.node, m.boot) == (node.name, node.report.boot)), None)
    if seconds is None or member is None or job.stopping or node.leaving or node.gone:
        return ()
    made = next((each.created for each in view.machines if each.name == node.name), 0.0)
    return (KeepNode(KeptNode(member=member, until=view.now + seconds, made=made, place=node.work.place)),)


def let_go(view: View) -> tuple[LetGo, ...]:
    """Give the kept node back, if it is time."""
    job, kept = view.job, view.job.kept_node
    if kept is None:
        return ()
    if job.stopping:
        return (LetGo(job.stopping),)
    if view.now >= kept.until:
        return (LetGo("the time of keep_on_failure is over"),)
    # The machine costs until the cloud has ended it.
    spent = job.cost + job.hourly * TIMEOUTS.budget_margin / 3600
    if job.cost_limit is not None and spent >= job.cost_limit:
        return (LetGo(f"the budget of ${job.cost_limit:g} is spent"),)
    return (LetGo("its machine is gone"),) if _gone(view, kept) else ()


def _gone(view: View, kept: KeptNode) -> bool:
    """Whether the machine has ended. Another machine may have its name."""
    machine = next((each for each in view.machines if each.name == kept.member.node), None)
    if machine is not None:
        return machine.state in ("terminated", "gone") or 0 < kept.made < machine.created
    connected = any(node.name == kept.member.node and node.connected for node in view.nodes)
    # While a zone does not answer, a new head does not know its machines.
    return view.listed and not connected and view.now - view.awake_since > TIMEOUTS.rejoin
