"""Why a group has fewer machines than its size, from its scaling activities. Pure.

https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-verify-scaling-activity.html
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from spotrun.cloud.aws.errors import cause, tidy
from spotrun.cloud.aws.instances import ScalingGroup
from spotrun.cloud.base import NEAR, Problem
from spotrun.spec import PoolSpec

if TYPE_CHECKING:
    from mypy_boto3_autoscaling.type_defs import ActivityTypeDef

_LAUNCH = "Launching a new EC2 instance"
_FAILED = ("Failed", "Cancelled")


def problem(
    pool: PoolSpec,
    group: ScalingGroup,
    said: Iterable[ActivityTypeDef],
    since: float,
    now: float,
    last: Problem | None = None,
) -> Problem | None:
    """Why a pool is smaller than its size, if AWS gives a reason.

    said: activities, newest first. Later ones are not read once the answer is known.
    since: when the pool last had its size. Older failures say nothing about the present.
    last: the problem found last time. If the kind is the same, its time is kept.
    """
    missing = group.size - len(group.counted)
    if missing <= 0:
        return None
    if group.suspended is not None:
        why = tidy(group.suspended) or "no reason given"
        command = f"aws autoscaling resume-processes --auto-scaling-group-name {group.name} --scaling-processes Launch"
        message = f"{group.name} launches nothing ({why}): {missing} missing; `{command}`"
        found = Problem(pool.name, "other", message, now)
    else:
        failure = last_failure(said, since)
        if failure is None:
            return None
        words = tidy(failure.get("StatusMessage", "")) or failure["StatusCode"]
        kind, what = cause(words), f"{pool.market} {pool.machine}"
        message = {
            "stockout": f"zone {pool.zone} has no more {what} at present: {missing} missing ({words})"
            + (NEAR if group.placed else ""),
            "quota": f"the account may not have more {what}: {missing} missing ({words}); "
            "ask for more in Service Quotas",
            "other": f"no {what} could be launched: {missing} missing ({words})",
        }[kind]
        found = Problem(pool.name, kind, message, failure["StartTime"].timestamp())
    return replace(found, at=last.at) if last is not None and last.kind == found.kind else found


def last_failure(said: Iterable[ActivityTypeDef], since: float) -> ActivityTypeDef | None:
    """The newest failed launch. None: there is none, or a launch that began after the end of that one has succeeded."""
    recovered = 0.0
    for activity in said:
        began = activity["StartTime"].timestamp()
        if began < since:
            return None
        if not activity.get("Description", "").startswith(_LAUNCH):
            continue
        if activity["StatusCode"] == "Successful":
            recovered = max(recovered, began)
        elif activity["StatusCode"] in _FAILED:
            # Launches that were requested together begin together, and one may succeed while another fails.
            ended = activity.get("EndTime", activity["StartTime"]).timestamp()
            return activity if recovered <= ended else None
    return None
