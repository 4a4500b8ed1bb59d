"""The jobs that have not ended: reading them from the bucket, and what operators change about them.

A job whose state in the bucket cannot be read is parked, and so is a job for which the head fails to plan. A parked
job keeps its place in the queue and its devices. Orders tell the agents to leave the job as it is, so it continues to
train. The head tries again from time to time, and so does each new head.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotrun.errors import JobNotFound, SpecError, SpotrunError, StoreError, UnreadableError
from spotrun.head.allocation.allocate import Claim
from spotrun.head.allocation.demand import pinned
from spotrun.head.capacity.observe import suited
from spotrun.head.job_state import Cause, EndGeneration, Finish, JobState, Stop, apply
from spotrun.head.planner import spending
from spotrun.head.predecessors import awaited, settle
from spotrun.head.status import held, row
from spotrun.head.view import View
from spotrun.spec import JobSpec, check_fit

if TYPE_CHECKING:
    from spotrun.head.head import Head

log = logging.getLogger(__name__)

TRY_EVERY = 10.0  # seconds between two tries to continue a parked job
AT_ONCE = 16  # jobs that are read at the same time
WRITTEN = 30.0  # seconds for a job's end to get into the bucket; `spotrun ctl` waits twice as long for an answer


@dataclass(frozen=True)
class Parked:
    """A job in the queue that the head leaves as it is."""

    job: str
    reason: str  # why the head cannot read or plan it
    tried: float  # when the head last tried

    @property
    def text(self) -> str:
        """What happened, and what an operator can do."""
        return (
            f"{self.job} is parked, with its machines: {self.reason}; a head of another version may be able to continue"
            f" it, `make stop ID={self.job}` takes it out of the queue"
        )

    def status(self) -> dict[str, Any]:
        """The part of the status document about the parked job."""
        return {"job": self.job, "reason": self.reason, "text": self.text}

    @property
    def row(self) -> dict[str, Any]:
        """The job's row in the list of jobs."""
        return {"id": self.job, "phase": "parked", "reason": self.reason}


async def submit(head: Head, job: dict[str, object], code: str) -> str:
    """See `Head.submit`."""
    state = await head.journal.create(await _accept(head, job, code))
    if unknown := sorted(job.keys() - JobSpec.model_fields.keys()):
        head.add_event("job", f"{state.id}: this head is of another version, and ignores {', '.join(unknown)}")
    await _enqueue(head, state.id, state)
    return state.id


async def _accept(head: Head, job: dict[str, object], code: str) -> JobState:
    """The state of a new job. code: SHA-256 of its bundle. Raises `SpecError`, `SpotrunError`."""
    cluster, now = head.cluster, head.clock()
    spec = JobSpec.kept(job)  # the operator's spotrun, which read the file, may be another version
    check_fit(spec, cluster)
    if spec.budget is not None:
        _check_prices(head, spec.name, spec.budget)
    if not re.fullmatch("[0-9a-f]{64}", code):
        raise SpotrunError(f"code {code[:80]!r} is not the sha256 of a bundle (64 hex digits)")
    spec = await head.predecessors.resolve(spec, cluster.name)
    spec = JobSpec.kept(spec.model_dump(mode="json"))  # every key is set now: a later version's default changes nothing
    state = JobState(
        id=f"{spec.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}",
        name=spec.name,
        cluster=cluster.name,
        code=code,
        spec=spec,
        after=awaited(spec),
        submitted=now,
        ordered_at=now,
    )
    if refused := head.scaler.placer.refusal(state):
        raise SpecError(f"job {spec.name}: {refused}")
    return state


async def brief(head: Head, job: str) -> dict[str, Any]:
    """The row of a job that has not ended, and that this head does not run."""
    if job in head.journal.held:
        with contextlib.suppress(JobNotFound, StoreError, UnreadableError):  # the head knows enough of it itself
            return row(await head.load(job)) | held(job)
        return held(job)
    try:
        return {"id": job, "phase": (await head.load(job)).phase}
    except UnreadableError as error:
        return head.parked.get(job, Parked(job, str(error), 0.0)).row
    except JobNotFound:
        return {"id": job, "phase": "gone"}


async def aside_in(head: Head, group: str) -> list[str]:
    """The held and parked jobs of a group. Those whose state cannot be read are left out: nobody knows their group."""
    found = []
    for job in (*head.journal.held, *head.parked):
        with contextlib.suppress(JobNotFound, UnreadableError):
            if (await head.journal.read(job)).spec.group == group:
                found.append(job)
    return found


def park(head: Head, job: str, reason: str, error: Exception | None = None) -> None:
    """Leave a job as it is for now. Operators are told once for each reason. error: for the head's log."""
    head.states.pop(job, None)
    head.completions.forget(job)
    head.parked[job] = parked = Parked(job, reason, head.clock())
    if not head.events.has(parked.text):
        head.add_event("job", parked.text)
        if error is not None:
            log.error("job %s: unexpected error", job, exc_info=error)
    head.requests.refuse(job, parked.text)


def set_aside(head: Head) -> dict[str, str]:
    """By job: why this head does not run it, and what an operator can do. These jobs are held or parked."""
    held = "has been held since the cluster was brought up"
    found = {job: f"job {job} {held}; `make relaunch ID={job}` continues it" for job in head.journal.held}
    return found | {job: each.text for job, each in head.parked.items()}


def parked_nodes(head: Head) -> frozenset[str]:
    """Nodes that have a parked job."""
    return frozenset(name for job in head.parked for name, _ in head.agents.work(job))


def left_alone(head: Head) -> tuple[str, ...]:
    """The jobs that agents leave as they are if they have no order about them: parked ones.

    Until this head has decided whose each device is, also all others: the last head may have given them devices, and a
    node that prepares a job would have to begin again.
    """
    return tuple(head.parked) if head.allocator.decided else (*head.parked, *head.states)


def pins(head: Head) -> list[Claim]:
    """The claims of parked jobs. An agent of version 1, which serves one job, takes no other one."""
    found = []
    for job in head.parked:
        for name, work in head.agents.work(job):
            report = head.agents.known[name].report
            if devices := work.devices if report.version > 1 else tuple(range(report.devices)):
                found.append(pinned(f"{job} on {name}", name, devices))
    return found


async def take_up(head: Head) -> None:
    """Read every job of the queue that this head does not run yet. Drop jobs that have ended and keep no node."""
    for state in [each for each in head.states.values() if each.over and head.journal.has(each)]:
        await head.journal.dequeue(state.id)
        head.let_go(state)
    queue = await head.journal.read_queue()
    head.parked = {job: parked for job, parked in head.parked.items() if job in queue}
    for state in [each for each in head.states.values() if each.id not in queue]:
        head.let_go(state)
    missing = [job for job in queue if job not in {*head.states, *head.coming} and _is_due(head, job)]
    for first in range(0, len(missing), AT_ONCE):
        some = (_take_up_one(head, job) for job in missing[first : first + AT_ONCE])
        for failed in await asyncio.gather(*some, return_exceptions=True):
            if failed is not None:
                raise failed
    if missing:
        head.states = {job: head.states[job] for job in queue if job in head.states}
    await _settle(head)


async def _settle(head: Head) -> None:
    """Let a job begin once its predecessors have ended as they should. Stop it if one of them ended otherwise."""
    now, ended = head.clock(), {job for job in head.states if head.journal.ended(job)}
    unended = {*head.jobs, *head.journal.held} - ended
    ends = await head.predecessors.read(head.states.values(), unended, now)
    for job in list(head.states.values()):
        head.states[job.id] = after = settle(job, ends, now)
        if after.stopping != job.stopping:
            head.add_event("job", after.stopping, job=job.id)
        elif job.blocked and not after.blocked:
            head.add_event("job", "waits for no job any more", job=job.id)
            head.scaler.look_now.set()


def _is_due(head: Head, job: str) -> bool:
    parked = head.parked.get(job)
    return parked is None or head.clock() - parked.tried >= TRY_EVERY


async def _take_up_one(head: Head, job: str) -> None:
    try:
        state, events, unknown = await head.journal.take_up(job, head.epoch, head.clock())
    except UnreadableError as error:
        park(head, job, str(error))
    except JobNotFound as error:
        head.add_event("job", f"left out: {error}")
        await head.journal.dequeue(job)
    else:
        head.parked.pop(job, None)
        head.states[job] = state
        head.events.load(job, events)
        if unknown:  # such as an operator's setting, before a return to this version
            head.add_event("job", f"this head is of another version, and ignores {', '.join(unknown)}", job=job)


async def relaunch(head: Head, job: str) -> None:
    """See `Head.relaunch`, which never runs this twice at the same time."""
    if job in head.journal.held:
        with contextlib.suppress(JobNotFound, UnreadableError):  # `take_up` says that it cannot be read
            state = _left_by_its_nodes(await head.load(job), head.clock())
            await head.journal.replace(state.replace(resumed_at=head.clock()))
        return await _enqueue(head, job)
    state = await head.load(job)
    if not state.ended_already and not _is_missing(head, state):
        _restart_workers(state, head.clock())  # refuses at once, also while the head takes no turns
        await head.change(_restart_workers, job)
        return
    if refused := _nothing_left(head, state):
        raise SpotrunError(refused)
    if job in head.states and state.kept_node:
        await head.change(lambda failed, now: apply(failed, Stop("the job is relaunched"), now), job, kept=True)
    await _until_written(head, job)
    state = _left_by_its_nodes(await head.load(job), head.clock()).replace(kept_node=None)
    state = state.replace(phase="queued", reason="", ended=None, restarts=0, failure=None, stopping="", ending=None)
    state = state.replace(new_workers=True)  # the old ones may be why it failed
    now = head.clock()
    await _enqueue(head, job, state.replace(counted_at=0.0, ordered_at=now, resumed_at=now, paused=""))
    if head.ended is not None and head.ended.id == job:
        head.ended = None


def _left_by_its_nodes(job: JobState, now: float) -> JobState:
    """A job that no head has run for some time: its nodes have ended it, and may train another job since then."""
    return apply(job, EndGeneration(cause=Cause(kind="relaunch")), now) if job.current is not None else job


def _restart_workers(job: JobState, now: float) -> JobState:
    """The job after its generation has ended. Raises `SpotrunError` if it does not train, or is about to stop that."""
    if job.stopping or job.ending:
        raise SpotrunError(f"job {job.id} is about to end; `make relaunch ID={job.id}` may continue it after that")
    if job.paused:
        raise SpotrunError(f"job {job.id} is paused; `make resume ID={job.id}` continues it")
    if job.current is None:
        raise SpotrunError(f"job {job.id} does not train now; it continues by itself when it can")
    return apply(job, EndGeneration(cause=Cause(kind="relaunch")), now)


async def _enqueue(head: Head, job: str, state: JobState | None = None) -> None:
    """Put a job at the end of the queue, and write its state, if one is given.

    The queue comes first: if the head dies in between, the next head takes the job out of the queue again. Otherwise
    the job would say that it is queued, and never run.
    """
    head.coming.add(job)
    try:
        await head.journal.enqueue(job)
        if state is not None:
            await head.journal.replace(state)
    finally:
        head.coming.discard(job)
        head.wake()
        head.scaler.look_now.set()


def _nothing_left(head: Head, state: JobState) -> str:
    """Why an ended job cannot be continued, and how to go on; empty if it can. Its machines would cost for nothing."""
    if state.phase == "succeeded":
        return f"job {state.id} has succeeded: nothing is left to do; `make rerun ID={state.id}` runs it as a new job"
    devices, wanted = head.fleet.rates.devices, state.spec.devices
    shares = {pool: (wanted or devices[pool]) / devices[pool] for pool in suited(state.spec, head.cluster)}
    prices = [head.fleet.prices.get(pool, 0.0) * share for pool, share in shares.items()]
    hourly = state.spec.nodes.min * min(prices, default=0.0)  # at least
    if spent := spending.exhausted(View(head.clock(), state, (), dearest=hourly)):
        return (
            f"job {state.id} cannot be continued: {spent}; first, `make budget ID={state.id} TO=` gives it more money"
        )
    return ""


async def set_budget(head: Head, job: str | None, budget: float) -> str:
    """Let a job cost so much in all, in USD. Returns its id. job: None: the only one that has not ended.

    The job may be held, or may have ended.
    """

    def change(state: JobState, _: float) -> JobState:
        if budget <= state.cost:
            raise SpotrunError(f"job {state.id} has cost ${state.cost:.2f} already; give it a larger budget than that")
        _check_prices(head, state.id, budget)
        return state.replace(budget=budget)

    if job is not None:
        state = await head.load(job)
    if job is None or not (state.over or job in head.journal.held or _is_missing(head, state)):
        return (await head.change(change, job, kept=True)).id
    async with head.changing_ended:
        await _until_written(head, job)
        state = change(await head.load(job), head.clock())
        await head.journal.replace(state)
        if head.ended is not None and head.ended.id == job:
            head.ended = state
    return job


def _check_prices(head: Head, job: str, budget: float) -> None:
    """Raise `SpotrunError` if it is not known what machines cost."""
    if unpriced := head.fleet.unpriced():
        raise SpotrunError(f"job {job}: budget: {budget:g}: cannot be kept: {unpriced}")


async def _until_written(head: Head, job: str) -> None:
    """Wait until the end of a job that has ended is in the bucket. Raises `StoreError` if that takes too long."""
    deadline = asyncio.get_running_loop().time() + WRITTEN
    while job in await head.journal.read_queue():
        try:
            async with asyncio.timeout_at(deadline), head.published:
                await head.published.wait()
        except TimeoutError:
            raise StoreError(f"the end of job {job} is not in the bucket yet; try again") from None


async def take_out(head: Head, job: str) -> bool:
    """Remove a job from the queue that this head does not run: parked, held or missing. False: there is no such job.

    The phase of the job becomes `stopped`. The state of a parked job is not changed.
    """
    async with head.taking:
        if job in head.states:
            return False
        if job not in (*head.jobs, *head.journal.held) and not await _find_missing(head, job):
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
        reason = "stopped by the operator" if state.generation else "stopped by the operator before it ran"
        await head.journal.replace(apply(state, Finish("stopped", reason), head.clock()))
    return True


def _is_missing(head: Head, state: JobState) -> bool:
    """Whether a job of this cluster has not ended, and the queue does not have it.

    Its state and the queue are two objects. A head may be killed, or the bucket may refuse, between the two writes.
    """
    known = [*head.jobs, *head.journal.held, *head.states]
    return state.cluster == head.cluster.name and not state.ended_already and state.id not in known


async def _find_missing(head: Head, job: str) -> bool:
    try:
        return _is_missing(head, await head.journal.read(job))
    except (JobNotFound, UnreadableError):
        return False
