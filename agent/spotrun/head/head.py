"""The head's loop: reports in, orders out, the job's state in the bucket before anyone acts on it.

One task (`run`) owns the job and changes it. Connections, the control socket and replacements only leave documents,
requests and answers for it and wake it up. Another (`watch_cloud`) asks the cloud. Whatever is killed here at any point
is rebuilt from the bucket and from the agents' next reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from spotrun.cloud.base import Cloud
from spotrun.errors import ConflictError, SpotrunError, StoreError, UnreadableError
from spotrun.head import accounting, capacity, job_queue, lease
from spotrun.head.agents import Agents, Send
from spotrun.head.clock import Clock
from spotrun.head.fleet import retirement
from spotrun.head.fleet.classify import classify
from spotrun.head.fleet.decide import decide, needed, wanted
from spotrun.head.fleet.pools import Fleet
from spotrun.head.fleet.record import Recreate, exhausted
from spotrun.head.fleet.replacements import Replacements
from spotrun.head.job_state import Cause, EndGeneration, Finish, JobState, SetIdle, apply, saved
from spotrun.head.journal import Journal
from spotrun.head.lease import Lease
from spotrun.head.life_signs import Signs
from spotrun.head.orders import manifests
from spotrun.head.planner import idle, liveness, notice_fit, silence
from spotrun.head.planner.plan import plan
from spotrun.head.status import event, status
from spotrun.head.view import View
from spotrun.spec import ClusterSpec, JobSpec
from spotrun.store import Store
from spotrun.wire import FORMAT, Report

log = logging.getLogger(__name__)

TICK = 0.25  # seconds between looks while a job is active; reports wake the loop at once
IDLE_TICK = 2.0
GAP = 2.0  # seconds: after a pause this long, the head no longer trusts what it knows about silent nodes

Change = Callable[[JobState, float], JobState]


class Head:
    """The head of one cluster."""

    def __init__(
        self,
        cluster: ClusterSpec,
        store: Store,
        cloud: Cloud,
        epoch: int,
        poll_seconds: float = 5.0,
        description: str = "",
        held: Lease | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """poll_seconds: between two looks at the cloud. description: digest of cluster.json. clock: epoch seconds."""
        self.cluster = cluster
        self.description = description or cluster.digest
        self.epoch = epoch
        self.store = store
        self.lease = held
        self.clock = clock or Clock()
        self.journal = Journal(store, cluster.name)
        self.fleet = Fleet(cluster, cloud)
        self.agents = Agents(self.add_event, partial(notice_fit.notice_of, cluster))
        self.signs = Signs(store, cluster.name, self.fleet.listed, self.clock)
        self._changed, self._look_now = asyncio.Event(), asyncio.Event()
        recreate, wake = self.fleet.recreate, self._changed.set
        self.replacements = Replacements(cluster.name, self.description, store, recreate, self._wanted, wake)
        self.job: JobState | None = None
        self.parked: job_queue.Parked | None = None  # the first job in the queue, if it cannot be read
        self.events: list[dict[str, Any]] = []
        self.published = asyncio.Condition()  # notified after each turn: what status() says may have changed
        self._poll_seconds = poll_seconds
        self.taking = asyncio.Lock()  # held while the first job of the queue may change
        self._relaunching = asyncio.Lock()  # two at once would write the same job's state
        self._requests: list[tuple[Change, asyncio.Future[JobState]]] = []
        self._answers: list[tuple[asyncio.Future[JobState], JobState]] = []  # given once they are in the bucket
        self._exhausted: frozenset[str] = frozenset()  # pools in which no more machines are replaced, as was noted
        self._removing: frozenset[str] = frozenset()  # machines that the last change of sizes removes
        self._began = self._ticked_at = self._awake_since = 0.0

    # What connections and the control socket call.

    def receive(self, report: Report, send: Send) -> None:
        """A connection has received its agent's newest report."""
        if self.agents.receive(report, send, self.clock(), self.fleet.made(report.node)):
            self._look_now.set()
        self._changed.set()

    def disconnect(self, node: str, send: Send) -> None:
        """A connection has closed. A newer connection of the same node is not touched."""
        if self.agents.disconnect(node, send):
            self._changed.set()
            self._look_now.set()

    def look(self) -> None:
        """Ask the cloud now, since its last answer may be out of date."""
        self._look_now.set()

    async def submit(self, job: dict[str, object], code: str) -> str:
        """Queue a job and return its id. Raises `SpecError`."""
        state = job_queue.accept(job, code, self.cluster, self.fleet.unpriced(), self.clock())
        state = await self.journal.create(state)
        if unknown := sorted(job.keys() - JobSpec.model_fields.keys()):
            self.add_event("job", f"{state.id}: this head is of another version, it ignores {', '.join(unknown)}")
        await self.enqueue(state.id)
        return state.id

    async def enqueue(self, job: str) -> None:
        """Put a job at the end of the queue."""
        await self.journal.enqueue(job)
        self._changed.set()
        self._look_now.set()

    async def relaunch(self, job: str) -> None:
        """Continue an ended or a held job from its newest checkpoint; restart the workers of an active one.

        A job that has not ended and is not in the queue is put back into it.
        """
        async with self._relaunching:
            await job_queue.relaunch(self, job)

    async def change(self, change: Change, job: str | None = None) -> JobState:
        """Have the loop change the active job; the job once that is in the bucket.

        Raises `SpotrunError` if none is active, or another than `job`.
        """

        def checked(active: JobState, now: float) -> JobState:
            if job not in (None, active.id):
                raise SpotrunError(f"job {job} is not active, {active.id} is")
            return change(active, now)

        future: asyncio.Future[JobState] = asyncio.get_running_loop().create_future()
        self._requests.append((checked, future))
        self._changed.set()
        return await future

    async def load(self, job: str) -> JobState:
        """A job's state: that of the active job from memory, that of another from the bucket."""
        if self.parked is not None and self.parked.job == job:
            raise UnreadableError(self.parked.text)
        return self.job if self.job is not None and self.job.id == job else await self.journal.read(job)

    @property
    def jobs(self) -> list[str]:
        """Ids of the jobs not yet ended, the active one first."""
        return list(self.journal.queue or ())

    def status(self) -> dict[str, Any]:
        """The status document as of now."""
        view = self._view(self.clock()) if self.job else None
        document = status(self.cluster, self.epoch, self.job, view, self.fleet, self.events)
        document["head"]["description"] = self.description
        parked = self.parked.status() if self.parked else None
        return {"format": FORMAT, **document, "parked": parked, "held": self.journal.held}

    def add_event(self, kind: str, text: str) -> None:
        """Add to the job's events."""
        self.events.append({"at": self.clock(), "kind": kind, "text": text})
        del self.events[: -job_queue.EVENTS]
        log.info("%s: %s", kind, text)

    # The loop.

    async def run(self) -> None:
        """Run the active job, until cancelled."""
        beside = [asyncio.create_task(work) for work in (self.signs.run(), self._watch_clock())]
        try:
            await self._turns()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await self.replacements.close()

    async def _turns(self) -> None:
        await self.journal.read_queue()
        self._began = self._ticked_at = self._awake_since = self.clock()
        while True:
            busy = bool(self.journal.queue)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK if busy else IDLE_TICK):  # wait_for may swallow a cancellation
                    await self._changed.wait()
            self._changed.clear()
            now = self.clock()
            self._tick(now)
            try:
                await self._turn(now)
            except ConflictError as error:
                lease.give_way(self.epoch, str(error))
            except StoreError as error:
                # Nothing was sent or asked that is not written; the next turn tries again.
                log.warning("%s", error)
                await asyncio.sleep(1.0)

    async def _watch_clock(self) -> None:
        """Notice when this process was suspended. A long turn does not count: reports arrive during it."""
        while True:
            await asyncio.sleep(TICK)
            self._tick(self.clock())

    def _tick(self, now: float) -> None:
        if now - self._ticked_at > GAP:
            self._awake_since = now
        self._ticked_at = now

    async def _turn(self, now: float) -> None:
        if self.lease is not None:
            await self.lease.check()
        await self.replacements.read()
        async with self.taking:
            await job_queue.activate(self)
        for answer in self.replacements.answers(now):
            self.add_event("cloud", answer)
        requests, self._requests = self._requests, []
        for change, future in requests:
            if future.done():
                continue  # the request was cancelled
            if self.job is None or self.job.ended_already:
                why = f"; {self.parked.text}" if self.parked else ""
                future.set_exception(SpotrunError(f"no job is active{why}"))
                continue
            try:
                self.job = change(self.job, now)
                self._answers.append((future, self.job))
            except SpotrunError as error:
                future.set_exception(error)
        if self.job is not None and not self.job.ended_already:
            self.job = await self._advance(self.job, now)
        if self.job is not None:
            if self.journal.urgent(self.job):
                await self._check_epoch()
            await self.journal.write(self.job, self.events, now)
        for future, changed in self._answers:
            if not future.done():
                future.set_result(changed)
        self._answers.clear()
        if self.parked is None:  # an order is complete: it cannot be made without the job's state
            self.agents.order(self.job, self.epoch)
        async with self.published:
            self.published.notify_all()
        found = decide(self._view(now)).recreate if self.job is not None else ()
        recreate = tuple(each for each in found if each.node not in self._removing)
        if self.replacements.pending(recreate):
            await self._check_epoch()
            await self.replacements.begin(recreate, now)

    async def _advance(self, job: JobState, now: float) -> JobState:
        """Observe, count, complete checkpoints, plan, apply."""
        interrupted = bool(job.interruptions) and job.interruptions[-1].seconds is None
        taken = max((report.generation for report in self.agents.reports(job.id)), default=0)
        if taken > job.generation:
            # Another head has used this number, when both believed to be the only one. So it is not free any more.
            job = apply(job, EndGeneration(cause=Cause(kind="head")), now).replace(generation=taken)
        self.job = job
        view = self._view(now)
        self.signs.update(view, self.add_event)
        job = idle.observe(silence.observe(job, view), view)
        job = liveness.remember_joined(accounting.count(accounting.observe(job, view), view, self.fleet.prices), view)
        if interrupted and job.interruptions[-1].seconds is not None:
            last = job.interruptions[-1]
            self.add_event("recovered", f"after {last.seconds:.1f} s, {last.steps_lost} steps lost ({last.kind})")
        for manifest in manifests(job, self.agents.reports(), now):
            found = await self.journal.complete(manifest, job.spec.keep)
            self.add_event("checkpoint", f"step {manifest.step} is in the bucket")
            job = saved(job, tuple(found), manifest, now)
        self.job = job
        for action in plan(self._view(now)).actions:
            if said := event(job, action):
                self.add_event(*said)
            job = apply(job, action, now)
            if isinstance(action, Finish | EndGeneration | SetIdle):
                self._look_now.set()
        return job

    def _view(self, now: float) -> View:
        assert self.job is not None
        unseen = [member.node for member in self.job.members if member.node not in self.agents.known]
        view = View(
            now=now,
            job=self.job,
            nodes=self.agents.nodes(self.fleet),
            expected=sum(self.fleet.sizes.values()),
            waiting_since=max(self.agents.ready_at, self.job.submitted),
            began=self._began,
            awake_since=self._awake_since,
            vanished=frozenset(
                name for name in unseen if self.fleet.state_of(name, self.job.ordered_at) in ("terminated", "gone")
            ),
            machines=self.agents.machines(self.fleet),
            listed=self.fleet.instances is not None,
            replaced=self.replacements.replaced,
            signs=self.signs.found,
        )
        return retirement.mark(view)

    def _wanted(self, action: Recreate) -> bool:
        if self.job is None or action.node in self._removing:
            return False
        view = self._view(self.clock())
        return any((e.node, e.created) == (action.node, action.created) for e in wanted(view, classify(view)))

    # The machines.

    async def watch_cloud(self) -> None:
        """Ask what there is and say what there should be, for ever. A cloud that does not answer changes nothing.

        Raises `SystemExit` when another head has taken over.
        """
        while True:
            try:
                await self._check_epoch()
                for problem in await self.fleet.look():
                    self.add_event("cloud", f"pool {problem.pool}: {problem.message}")
                machines = needed(self.journal.queue, self.job, self.agents.busy(), self.clock())
                if machines is not None:
                    await self._scale(machines)
                self._forget()
            except SpotrunError as error:
                log.warning("%s", error)
            self._changed.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_seconds):
                    await self._look_now.wait()
            self._look_now.clear()

    async def _scale(self, machines: int) -> None:
        if self.job is None:
            found = capacity.decide(capacity.Observation(self.fleet.pools(), machines))
            return await self.fleet.scale(found.sizes, found.remove)
        view = self._view(self.clock())
        fleet = decide(view, self.fleet.pools(), machines)
        spent = exhausted(view.replaced, view.now)
        for pool in sorted(spent - self._exhausted):
            self.add_event("cloud", f"pool {pool}: {fleet.reasons[pool]}")
        self._exhausted, self._removing = spent, frozenset(fleet.remove)
        return await self.fleet.scale(fleet.resize, fleet.remove)

    async def _check_epoch(self) -> None:
        await lease.check(self.lease, self.store, self.cluster.name, self.epoch)

    def _forget(self) -> None:
        """Drop agents whose machines are gone for good, unless the generation still counts on them."""
        members = {member.node for member in self.job.members} if self.job else set()
        unknown = {name for name, seen in self.agents.known.items() if seen.report.pool in self.fleet.away}
        self.agents.forget(self.fleet.names() | members | unknown)
