"""The folders that a job leaves in the bucket, before it counts as succeeded. Pure.

The node of rank 0 uploads the folders, while the last state is uploaded. If the node is gone before they are in the
bucket, the folders are lost: the job continues from its newest state, and its script ends once more.
"""

from __future__ import annotations

from spotrun.head.job_state import Action, Finish, KeepFolders, Resume, SetEnding
from spotrun.head.planner import patience
from spotrun.head.planner.liveness import reports
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import View
from spotrun.wire import Member


def decide(view: View, keeper: Member, saving: tuple[Action, ...] | None) -> tuple[Action, ...] | None:
    """What to do while the folders are not in the bucket; None: the end of the job does not wait for them.

    saving: what the job's last state needs; None: it is in the bucket.
    """
    job = view.job
    assert job.ending is not None
    if job.stopping and saving is None:
        return (Finish("stopped", f"{job.stopping}; the folders of keep are not in the bucket"),)
    node = next((each for each in view.nodes if (each.name, each.report.boot) == (keeper.node, keeper.boot)), None)
    if node is None or node.gone:
        if view.blind() or saving is not None:
            return None if saving is not None else ()
        return (Resume(f"{keeper.node}, which had the folders to keep, is gone"),)
    found = node.work.keeping if node.work.keeping and node.work.keeping.generation == job.generation else None
    if found and found.ref:
        return (KeepFolders(found.ref),)
    if saving is not None:
        return None
    if found and found.problem:
        return (Finish("failed", found.problem),)
    if not reports(view, node) and view.now - max(view.awake_since, node.reported_at) > patience.patience(
        job, TIMEOUTS.save
    ):
        return (Resume(f"{keeper.node}, which had the folders to keep, does not report"),)
    if patience.overdue(view):
        why = f" ({found.trouble})" if found and found.trouble else ""
        return (Finish("failed", f"the folders of keep were not uploaded by {keeper.node} in time{why}"),)
    if job.ending.deadline == 0:
        return (SetEnding(job.ending.replace(deadline=view.now + TIMEOUTS.save)),)
    return ()
