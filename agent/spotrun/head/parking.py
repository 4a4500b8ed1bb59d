"""A job whose state in the bucket cannot be read: it is parked.

A parked job keeps its place in the queue and its machines. Agents get no orders, so they continue to train. The jobs
behind a parked job wait. The head tries to read the state again from time to time, and so does each new head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TRY_EVERY = 10.0  # seconds between two tries to read the state of a parked job


@dataclass(frozen=True)
class Parked:
    """The first job in the queue, which cannot be read."""

    job: str
    reason: str  # why its state cannot be read
    tried: float  # when the head last tried

    def waits(self, job: str, now: float) -> bool:
        """Whether it is too early to read this job's state again."""
        return job == self.job and now - self.tried < TRY_EVERY

    def status(self) -> dict[str, Any]:
        """The part of the status document about the parked job."""
        return {"job": self.job, "reason": self.reason, "text": text(self)}


def text(parked: Parked) -> str:
    """What happened, and what an operator can do."""
    return (
        f"{parked.job} is parked, with its machines: {parked.reason}; a head of the version that wrote it can continue"
        f" it, `make stop ID={parked.job}` takes it out of the queue"
    )


def no_job(parked: Parked | None) -> str:
    """Why there is no active job to change."""
    return f"no job is active; {text(parked)}" if parked else "no job is active"
