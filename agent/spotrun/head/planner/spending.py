"""The budget of a job: it ends early enough that its state is in the bucket before the money is spent. Pure."""

from __future__ import annotations

from spotrun.head.job_state import JobState
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import View

UPLOAD = 50e6  # bytes a second into the bucket, at least: half of what a small machine's network gives


def exhausted(view: View) -> str:
    """Why the job should stop now to keep its budget; empty if it may go on."""
    job, budget = view.job, view.job.cost_limit
    if budget is None:
        return ""
    if job.cost >= budget:
        return f"the budget of ${budget:g} is spent"
    if job.cost + reserve(view) < budget:
        return ""
    return f"${job.cost:.2f} of the budget of ${budget:g} are spent; the rest pays for saving its state"


def over(job: JobState) -> bool:
    """Whether the budget is spent: then not even an unsaved state keeps the job going."""
    return job.cost_limit is not None and job.cost >= job.cost_limit


def reserve(view: View) -> float:
    """USD until the state is in the bucket and the machines are gone, if the job stops now.

    All machines that are asked for count: one that has come a moment ago must not change the answer by too much.
    """
    return max(view.job.hourly, view.dearest) * closing(view.job) / 3600


def closing(job: JobState) -> float:
    """Seconds that a stop may take: some steps, the upload, and one look at the cloud."""
    steps = 3 * (job.progress.pace or job.pace)
    return steps + max(job.state_bytes / UPLOAD, job.upload) + TIMEOUTS.budget_margin
