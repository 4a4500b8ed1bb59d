"""A job whose state in the bucket cannot be read: it is parked.

A parked job keeps its place in the queue and its machines. The agents get no orders, so what trains goes on. The jobs
behind a parked job wait. The head tries to read the state again from time to time, and so does each new head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotrun.errors import SpotrunError, StoreError, UnreadableError

if TYPE_CHECKING:
    from spotrun.head.head import Head
    from spotrun.head.job_state import JobState

TRY_EVERY = 10.0  # seconds between two tries to read the state of a parked job


@dataclass(frozen=True)
class Parked:
    """job: its id. reason: why its state cannot be read. tried: when the head last tried, in epoch seconds."""

    job: str
    reason: str
    tried: float

    def waits(self, job: str, now: float) -> bool:
        """Whether it is too early to read this job's state again."""
        return job == self.job and now - self.tried < TRY_EVERY

    def status(self) -> dict[str, Any]:
        """The part of the status document about the parked job."""
        return {"job": self.job, "reason": self.reason, "text": text(self)}


def text(parked: Parked) -> str:
    """What happened, and what to do."""
    return (
        f"{parked.job} is parked, with its machines: {parked.reason}; a head of the version that wrote it goes on with"
        f" it, `make stop ID={parked.job}` takes it out of the queue"
    )


def no_job(parked: Parked | None) -> str:
    """Why there is no active job to act on."""
    return f"no job is active; {text(parked)}" if parked else "no job is active"


async def phase(head: Head, job: str) -> str:
    """The phase of a job that has not ended."""
    if job in head.journal.held:
        return "held"
    try:
        return (await head.load(job)).phase
    except UnreadableError:
        return "parked"
    except StoreError:
        raise
    except SpotrunError:  # somebody has deleted its state
        return "gone"


def astray(head: Head, state: JobState) -> bool:
    """Whether a job of this cluster has not ended, and is not in the queue.

    Its state and the queue are two objects: a head may be killed, or the bucket may refuse, after the first write.
    """
    known = [*head.jobs, *head.journal.held, *([head.job.id] if head.job else [])]
    return state.cluster == head.cluster.name and not state.ended_already and state.id not in known


async def take_out(head: Head, job: str) -> bool:
    """Take a job that is not active out of the queue; False if it is active, or not in the queue.

    The phase of a waiting job becomes `stopped`, also of one that is `astray`. The state of a parked job is not
    changed.
    """
    async with head.taking:
        if head.job is not None and head.job.id == job:
            return False
        if job not in (*head.jobs, *head.journal.held) and not await _is_astray(head, job):
            return False
        await head.journal.dequeue(job)
        try:
            state = await head.journal.read(job, own=True)
        except UnreadableError:
            head.add_event("job", f"{job}: the operator has taken it out of the queue; its state is left as it is")
            return True
        except StoreError:
            raise
        except SpotrunError:
            head.add_event("job", f"{job}: the operator has taken it out of the queue; its state is gone")
            return True
        if state.ended_already:
            return False
        reason = "stopped by the operator before it ran"
        await head.journal.replace(state.replace(phase="stopped", reason=reason, ended=head.clock()))
    return True


async def _is_astray(head: Head, job: str) -> bool:
    try:
        return astray(head, await head.journal.read(job))
    except StoreError:
        raise
    except SpotrunError:  # there is no such job, or it cannot be read
        return False
