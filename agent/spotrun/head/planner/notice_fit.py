"""Whether a drain fits into the notice that a pool's machines get. Pure."""

from __future__ import annotations

from spotrun.head.timeouts import TIMEOUTS
from spotrun.spec import ClusterSpec
from spotrun.spec.notices import EC2_NOTICE, GCE_NOTICE
from spotrun.wire import JobReport


def notice_of(cluster: ClusterSpec, pool: str) -> float:
    """Seconds from the notice of a preemption to the end of the pool's machines; 0: they are not preempted."""
    found = cluster.pool(pool)
    if found is None or found.market != "spot":
        return 0.0
    if found.notice is not None:
        return found.notice
    like_ec2 = cluster.cloud == "aws" or (cluster.cloud == "local" and cluster.local.metadata == "ec2")
    return EC2_NOTICE if like_ec2 else GCE_NOTICE


def too_long(node: str, work: JobReport, notice: float) -> str:
    """Why no drain of a job on a node fits into `notice` seconds; "" if one does, or if no snapshot was measured yet.

    A drain takes the rest of a step, and the time to copy, hash and commit a snapshot.
    """
    took = max((worker.took for worker in work.workers), default=0.0)
    if took == 0 or notice == 0:
        return ""
    pace = max((w.stepping / (w.step - w.base) for w in work.workers if w.step > w.base), default=0.0)
    if took + pace <= notice - TIMEOUTS.drain_margin:
        return ""
    return (
        f"a drain of {node} takes about {took + pace:.0f} s: {took:.0f} s for the snapshot and {pace:.1f} s for "
        f"a step. A preemption gives {notice:.0f} s of notice, so it will cost the steps since the newest snapshot"
    )
