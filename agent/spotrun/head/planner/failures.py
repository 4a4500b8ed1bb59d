"""Which failure of a generation counts, and which is the last one of its job."""

from __future__ import annotations

from spotrun.head.job_state import JobState
from spotrun.head.planner.liveness import may_be_lost
from spotrun.head.view import Node, View
from spotrun.wire import Failure


def final(job: JobState) -> bool:
    """Whether no restart follows the job's newest failure: the script would fail in the same way, or too often."""
    failure, often = job.failure, job.restarts > job.spec.max_restarts
    return failure is not None and (often or (failure.kind == "user" and failure.repeats))


def of_the_script(reporting: list[Node], gone: dict[str, str]) -> tuple[Failure, Node] | None:
    """The earliest failure of the script itself. Failures on a node that leaves do not count.

    A worker that a signal ended is not counted, because NCCL ends survivors by a signal when a peer is gone. For such
    workers see `unexplained`.
    """
    found = [
        (node.work.failure, node)
        for node in reporting
        if node.phase == "failed" and node.work.failure and node.work.failure.kind not in ("peer", "signal")
        if not node.leaving and not node.gone and node.name not in gone
    ]
    return min(found, key=lambda item: item[0].at) if found else None


def unexplained(view: View, reporting: list[Node]) -> tuple[Failure, Node] | None:
    """The failure to count if a worker was killed or a collective failed, although no member is lost.

    None if there is no such failure, or if a member may still turn out to be lost.
    """
    found = [(n.work.failure, n) for n in reporting if n.phase == "failed" and n.work.failure]
    if not found or view.blind():
        return None
    failure, node = min(found, key=lambda item: (item[0].kind == "peer", item[0].at))
    if may_be_lost(view, failure.at):
        return None
    if failure.kind == "peer" and (done := [n.name for n in reporting if n.phase == "succeeded"]):
        what = f"the script ended on {', '.join(done)}, while others trained"
        failure = failure.replace(message=f"{what}: {failure.message}")
    return failure, node
