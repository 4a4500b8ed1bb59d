"""The jobs that have not ended: which one is active, and what operators change about the others.

A job whose state in the bucket cannot be read is parked. A parked job keeps its place in the queue and its machines.
Agents get no orders, so they continue to train. The jobs behind a parked job wait. The head tries to read the state
again from time to time, and so does each new head.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotrun.errors import JobNotFound, SpotrunError, UnreadableError
from spotrun.head.job_state import Cause, EndGeneration, JobState, apply
from spotrun.spec import ClusterSpec, JobSpec, check_fit

if TYPE_CHECKING:
    from spotrun.head.head import Head

EVENTS = 1000  # newest ones of a job that are kept
TRY_EVERY = 10.0  # seconds between two tries to read the state of a parked job


@dataclass(frozen=True)
class Parked:
    """The first job in the queue, which cannot be read."""

    job: str
    reason: str  # why its state cannot be read
    tried: float  # when the head last tried

    @property
    def text(self) -> str:
        """What happened, and what an operator can do."""
        return (
            f"{self.job} is parked, with its machines: {self.reason}; a head of the version that wrote it can continue"
            f" it, `make stop ID={self.job}` takes it out of the queue"
        )

    def status(self) -> dict[str, Any]:
        """The part of the status document about the parked job."""
        return {"job": self.job, "reason": self.reason, "text": self.text}


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


async def phase(head: Head, job: str) -> str:
    """The phase of a job that has not ended."""
    if job in head.journal.held:
        return "held"
    try:
        return (await head.load(job)).phase
    except UnreadableError:
        return "parked"
    except JobNotFound:
        return "gone"


async def activate(head: Head) -> None:
    """Make the first job in the queue the active one. A job stays active until its end is in the bucket."""
    queue = await head.journal.read_queue()
    if head.job is not None and queue and queue[0] == head.job.id:
        if not head.job.ended_already or not head.journal.has(head.job):
            return
        await head.journal.dequeue(head.job.id)
        queue = await head.journal.read_queue()
    if head.parked is not None and head.parked.job not in queue[:1]:
        head.parked = None
    if not queue or (head.parked and head.clock() - head.parked.tried < TRY_EVERY):
        return
    try:
        job, events = await head.journal.take_up(queue[0], head.epoch, head.clock())
    except UnreadableError as error:
        before, head.parked = head.parked, Parked(queue[0], str(error), head.clock())
        if before is None or before.reason != head.parked.reason:
            head.add_event("job", head.parked.text)
    except JobNotFound as error:
        head.add_event("job", f"left out: {error}")
        await head.journal.dequeue(queue[0])
    else:
        head.parked = None
        # Events before the first job belong to it: nodes that connect again. Later ones belong to the last job.
        new = [] if head.job is not None else [event for event in head.events if event not in events]
        head.job, head.events = job, sorted(events + new, key=lambda event: float(event["at"]))[-EVENTS:]


async def relaunch(head: Head, job: str) -> None:
    """See `Head.relaunch`, which never runs this twice at the same time."""
    if job in head.journal.held:
        return await head.enqueue(job)
    state = await head.load(job)
    if not state.ended_already and not _is_astray(head, state):
        await head.change(lambda active, now: apply(active, EndGeneration(cause=Cause(kind="relaunch")), now), job)
        return
    while job in await head.journal.read_queue():  # its end is not in the bucket yet
        async with head.published:
            await head.published.wait()
    state = state.replace(phase="queued", reason="", ended=None, restarts=0, failure=None, stopping="", ending=None)
    await head.journal.replace(state.replace(counted_at=0.0, ordered_at=head.clock()))
    if head.job is not None and head.job.id == job:
        head.job = None
    await head.enqueue(job)


async def take_out(head: Head, job: str) -> bool:
    """Take a job that waits out of the queue; False if the job is active, has ended, or is not in the queue.

    The phase of the job becomes `stopped`. The state of a parked job is not changed.
    """
    async with head.taking:
        if head.job is not None and head.job.id == job:
            return False
        if job not in (*head.jobs, *head.journal.held) and not await _find_astray(head, job):
            return False
        await head.journal.dequeue(job)
        try:
            state = await head.journal.read(job, own=True)
        except UnreadableError:
            head.add_event("job", f"{job}: the operator has taken it out of the queue; its state has not been changed")
            return True
        except JobNotFound:
            head.add_event("job", f"{job}: the operator has taken it out of the queue; its state has been deleted")
            return True
        if state.ended_already:
            return False
        reason = "stopped by the operator before it ran"
        await head.journal.replace(state.replace(phase="stopped", reason=reason, ended=head.clock()))
    return True


def _is_astray(head: Head, state: JobState) -> bool:
    """Whether a job of this cluster has not ended, and is not in the queue.

    Its state and the queue are two objects. A head may be killed, or the bucket may refuse, between the two writes.
    """
    known = [*head.jobs, *head.journal.held, *([head.job.id] if head.job else [])]
    return state.cluster == head.cluster.name and not state.ended_already and state.id not in known


async def _find_astray(head: Head, job: str) -> bool:
    try:
        return _is_astray(head, await head.journal.read(job))
    except (JobNotFound, UnreadableError):
        return False
