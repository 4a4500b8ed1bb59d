"""Turn a job that an operator submits into a job's state, or refuse the job. Pure."""

from __future__ import annotations

import re
import time

from spotrun.errors import SpotrunError
from spotrun.head.job_state import JobState
from spotrun.spec import ClusterSpec, JobSpec, check_fit


def accept(job: dict[str, object], code: str, cluster: ClusterSpec, unpriced: str, now: float) -> JobState:
    """The state of a new job. code: SHA-256 of its bundle. unpriced: why a budget cannot be enforced; "" if it can.

    Raises `SpecError`, `SpotrunError`.
    """
    spec = JobSpec.kept(job)  # the operator's spotrun, which read the file, may be another version
    check_fit(spec, cluster)
    if spec.budget is not None and unpriced:
        raise SpotrunError(f"job {spec.name}: budget: {spec.budget:g}: could not be held: {unpriced}")
    if not re.fullmatch("[0-9a-f]{64}", code):
        raise SpotrunError(f"code {code[:80]!r} is not the sha256 of a bundle (64 hex digits)")
    return JobState(
        id=f"{spec.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}",
        name=spec.name,
        cluster=cluster.name,
        code=code,
        spec=spec,
        submitted=now,
        ordered_at=now,
    )
