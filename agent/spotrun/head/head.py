"""The head's loop: reports in, orders out, the jobs' states in the bucket before anyone acts on them.

One task (`Head.run`) owns the jobs and changes them. Connections, the control socket and replacements only leave
documents, requests and answers for this task, and wake it. Another task (`Scaler.run`) asks the cloud. The head may be
killed at any point: the next head rebuilds everything from the bucket and from the agents' next reports.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from spotrun.cloud.base import Cloud
from spotrun.errors import ConflictError, SpotrunError, StoreError, UnreadableError
from spotrun.head import job_queue, lease, turn_timing
from spotrun.head.agents import Agents, Send
from spotrun.head.allocation.assignment import job_view, keeps_state
from spotrun.head.allocator import CONDITIONS, Allocator
from spotrun.head.clock import Clock
from spotrun.head.completions import Completions
from spotrun.head.costs import job_totals
from spotrun.head.costs.ledger import Ledger
from spotrun.head.events import Events
from spotrun.head.fleet import retirement
from spotrun.head.fleet.classify import Condition
from spotrun.head.fleet.pools import Fleet
from spotrun.head.fleet.replacements import Replacements
from spotrun.head.job_state import Cause, EndGeneration, Finish, JobState, LetGo, SetIdle, apply
from spotrun.head.journal import Journal
from spotrun.head.lease import Lease
from spotrun.head.life_signs import Signs
from spotrun.head.news import News, concerned
from spotrun.head.planner import idle, liveness, notice_fit, silence
from spotrun.head.planner.plan import plan
from spotrun.head.predecessors import Predecessors
from spotrun.head.presence import Presence
from spotrun.head.progress_writes import ProgressWrites
from spotrun.head.requests import Change, Requests
from spotrun.head.scaler import Scaler
from spotrun.head.status import event, recovery, status
from spotrun.head.stragglers import Stragglers
from spotrun.head.troubles import BUCKET, Troubles
from spotrun.head.view import FleetView, View, bound
from spotrun.spec import ClusterSpec
from spotrun.store import Store
from spotrun.wire import FORMAT, Report

log = logging.getLogger(__name__)

SHOWN = 50  # newest events in a status document
ACCOUNTS = "the machine time is counted later"  # what an error in the head means
TURN = "the head decides nothing, and tries again"


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
        self.predecessors, self.completions = Predecessors(self.journal), Completions(self.journal, self.wake)
        self.fleet, self.ledger = Fleet(cluster, cloud, self.clock), Ledger(store, cluster.name)
        self.events = Events(self.clock)
        self.add_event = self.events.add
        self.progress_writes = ProgressWrites(self.journal, self.events, lambda: self.states)
        self.scaler = Scaler(self, poll_seconds)
        notice, going = partial(notice_fit.notice_of, cluster), self.scaler.asked_to_go
        self.agents = Agents(self.add_event, notice, going)
        self.signs = Signs(store, cluster.name, self.fleet.listed, self.clock)
        self.news = News()
        asks = self.fleet.recreate, self.scaler.still_wanted
        self.replacements = Replacements(cluster.name, self.description, store, *asks, self.wake)
        self.states: dict[str, JobState] = {}  # the jobs that this head runs, in order of submission
        self.ended: JobState | None = None  # the job that ended last
        self.parked: dict[str, job_queue.Parked] = {}  # jobs in the queue that are left as they are
        self.troubles, self.allocator = Troubles(self.add_event), Allocator(self)
        self.published = asyncio.Condition()  # notified after each turn: what status() says may have changed
        self.taking = asyncio.Lock()  # held while jobs are taken up
        self.coming: set[str] = set()  # jobs that are in the queue, and whose states are about to be written
        self.changing_ended = asyncio.Lock()  # held while an operator changes a job that this head does not run
        self.requests, self.stragglers = Requests(), Stragglers()
        self.ended_at = 0.0  # when a job ended last, or let its kept node go
        self.presence = Presence()
        self._settled: dict[str, View] = {}  # by job: the view in which planning it last changed nothing
        self._uses: dict[str, job_totals.Uses] = {}  # by job: machine time that is not in its account yet

    # What connections and the control socket call.

    def receive(self, report: Report, send: Send) -> None:
        """A connection has received its agent's newest report. Mere progress waits for the next tick."""
        at = self.clock(), self.fleet.made(report.node)
        if self.agents.progress(report, send, *at):
            return
        if self.agents.receive(report, send, *at):
            self.scaler.look_now.set()
        self.news.of_nodes(report.node)

    def disconnect(self, node: str, send: Send) -> None:
        """A connection has closed. A newer connection of the same node is not touched."""
        if self.agents.disconnect(node, send):
            self.scaler.look_now.set()  # a closed connection alone ends nothing, and the cloud's answer wakes the loop
            if self.agents.lost_a_peer(node):
                self.news.of_nodes(node)

    def wake(self) -> None:
        """Take a turn about all jobs now: something has changed."""
        self.news.of_all()

    async def submit(self, job: dict[str, object], code: str) -> str:
        """Queue a job and return its id. Raises `SpecError`."""
        return await job_queue.submit(self, job, code)

    async def relaunch(self, job: str) -> None:
        """Continue an ended or a held job from its newest checkpoint; restart the workers of one that trains.

        A job that has not ended and is not in the queue is put back into it.
        """
        async with self.changing_ended:
            await job_queue.relaunch(self, job)

    async def change(self, change: Change, job: str | None = None, kept: bool = False) -> JobState:
        """Have the loop change a job. Returns the job when the change is in the bucket.

        job: None: the only job that has not ended. Raises `SpotrunError` if there is no such job.
        """
        answer = self.requests.add(change, job, kept)
        self.wake()
        return await answer

    async def load(self, job: str) -> JobState:
        """A job's state: from memory if this head runs it, else from the bucket."""
        if job in self.parked:
            raise UnreadableError(self.parked[job].text)
        return self.states.get(job) or await self.journal.read(job)

    @property
    def jobs(self) -> list[str]:
        """Ids of the jobs that have not ended, or keep a node, in order of submission."""
        return list(self.journal.queue or ())

    @property
    def job(self) -> JobState | None:
        """The job that a question without an id means: the first that trains, else that waits, else the last to end."""
        unended = [job for job in self.states.values() if not job.ended_already]
        ends = [job for job in (self.ended, *self.states.values()) if job and job.ended_already]
        ended = max(ends, key=lambda job: job.ended or 0.0, default=None)
        return next((job for job in unended if job.current), next(iter(unended), ended))

    def status(self, job: str | None = None) -> dict[str, Any]:
        """The status document as of now. job: the job that it is about; None: `self.job`."""
        view = self.fleet_view(self.clock())
        conditions = self.allocator.conditions(view)
        views = {each.id: self._job_view(view, each, conditions) for each in view.jobs}
        about = self.states.get(job) if job is not None else self.job
        document = status(self.cluster, self.epoch, about, view, views, conditions, self.fleet, self.scaler.places)
        document["head"]["description"] = self.description
        document["events"] = self.events.seen_from(about)[-SHOWN:]
        parked = next(iter(self.parked.values()), None)
        document |= {"parked": parked.status() if parked else None, "held": self.journal.held}
        return {"format": FORMAT, **document, "troubles": self.troubles.texts, **self.ledger.status()}

    def let_go(self, job: JobState) -> None:
        """Forget a job that has ended, or that is not in the queue any more."""
        for mine in (self.states, self._settled, self._uses):
            mine.pop(job.id, None)
        for each in (self.journal, self.completions, self.stragglers):
            each.forget(job.id)
        self.agents.forget_job(job.id)
        last = self.ended
        if job.ended_already:
            self.ended, self.ended_at = job, max(self.ended_at, job.ended or 0.0)
        if last is not self.ended and last is not None:
            self.events.forget(last.id)  # those of the job that ended last are kept
        elif not job.ended_already:
            self.events.forget(job.id)

    # The loop.

    async def run(self) -> None:
        """Run the jobs, until cancelled."""
        beside = [asyncio.create_task(w) for w in (self.signs.run(), self._watch_clock(), self.fleet.follow_market())]
        try:
            await self._turns()
        finally:
            for task in beside:
                task.cancel()
            closing = self.replacements.close(), self.completions.close(), self.progress_writes.close()
            await asyncio.gather(*beside, *closing, return_exceptions=True)

    async def _turns(self) -> None:
        await self.troubles.insist(self.journal.read_queue, self.ledger.read)
        self.presence = presence = Presence(self.clock())
        while True:
            nodes = await self.news.wait()
            now, began = self.clock(), time.thread_time()
            presence.tick(now)
            try:
                await self._turn(now, nodes)
                presence.wrote(now)
            except ConflictError as error:
                lease.give_way(self.epoch, str(error))
            except StoreError as error:
                # Orders and requests come after the write, so none was sent. The next turn tries again.
                log.warning("%s", error)
                if presence.refused(now):
                    self.requests.give_up(self.troubles.once(BUCKET, error))
                await asyncio.sleep(1.0)
            except Exception as error:
                self.troubles.note(TURN, error)
                await asyncio.sleep(1.0)
            else:
                self.troubles.clear(TURN, BUCKET)
            self.news.planned(nodes, time.thread_time() - began, bool(self.journal.queue))

    async def _watch_clock(self) -> None:
        """Notice when this process was suspended. A long turn does not count: reports arrive during it."""
        while True:
            await asyncio.sleep(turn_timing.TICK)
            self.presence.tick(self.clock())

    async def _turn(self, now: float, nodes: frozenset[str] | None = None) -> None:
        """Decide, write, order. nodes: as for `concerned`."""
        if self.lease is not None:
            await self.lease.check()
        await self.replacements.read(now)
        parked = set(self.parked)
        async with self.taking:
            await job_queue.take_up(self)
        if not parked <= self.parked.keys():
            self.allocator.forget()  # a job is back
        for answer in self.replacements.answers(now):
            self.add_event("cloud", answer)
        self.requests.apply(self.states, job_queue.set_aside(self), now)
        view = self.fleet_view(now)
        self.replacements.joined = liveness.now_joined(view)
        conditions, before = self.allocator.conditions(view), self.allocator.assignment
        self.allocator.look(view, conditions)
        self.troubles.attempt(ACCOUNTS, lambda: self._count(view, conditions), None)
        wanted: set[str] = set()
        for job in concerned(view, nodes, self._settled, before, self.allocator.assignment):
            self._settled.pop(job.id, None)
            try:
                wanted |= self._advance(job, view, conditions)
            except Exception as error:
                self._park(job.id, error)
        if nodes is None:  # only a turn about all jobs sees all their needs
            self.signs.want(frozenset(wanted))
        await self._write(now)
        self.requests.answer()
        now_view, acted = replace(view, jobs=self._active()), any(job.id not in self._settled for job in view.jobs)
        conditions = self.allocator.conditions(now_view) if acted else conditions
        self._order(now_view, conditions)
        async with self.published:
            self.published.notify_all()
        if CONDITIONS not in self.troubles:
            await self.scaler.replace(now_view, conditions)

    def _park(self, job: str, error: Exception) -> None:
        """Leave a job as it is after an error that nobody expected. The other jobs go on."""
        job_queue.park(self, job, f"unexpected error in the head: {error!r}"[:1000], error)

    def _count(self, view: FleetView, conditions: Mapping[str, Condition]) -> None:
        """Count the machine time since the last turn. It goes into a job's account when the job is planned."""
        fleet, expected = self.fleet, self.allocator.assignment.expected
        found = self.ledger.count(view, expected, conditions, fleet.rates, fleet.advice, self.scaler.places)
        for job in view.jobs:
            self._uses[job.id] = (*self._uses.get(job.id, ()), *found[job.id])

    def _advance(self, job: JobState, fleet: FleetView, conditions: Mapping[str, Condition]) -> frozenset[str]:
        """Observe, count, complete checkpoints, plan, apply. The nodes whose signs of life the job needs."""
        before, now, add_event = job, fleet.now, partial(self.add_event, job=job.id)
        uses = self._uses.pop(job.id, ())
        if job.ended_already:
            view = self._job_view(fleet, job, conditions)
            self._carry_out(replace(view, job=job_totals.count(job, view, uses, self.fleet.rates)))
            return frozenset()
        view = self._job_view(fleet, job, conditions)
        work = [node.work for node in view.nodes if node.work.job]
        taken = max((each.generation for each in work), default=0)
        if taken >= job.next_number:
            # Another head has used this number while both believed that they were the only one.
            job = apply(job, EndGeneration(cause=Cause(kind="head")), now).replace(generation=taken)
            view = self._job_view(fleet, job, conditions)
        wanted = self.signs.update(view, add_event)
        job = job_totals.observe(idle.observe(silence.observe(job, view), view), view)
        job = job_totals.count(job, view, uses, self.fleet.rates)
        job = self.stragglers.observe(replace(view, job=job), add_event)
        if said := recovery(before, job):
            add_event("recovered", said)
        if job.has_stepped and not before.has_stepped:
            view = self._job_view(fleet, job, conditions)  # from now on, other nodes may be left behind
        job, manifest = self.completions.advance(job, work, now)
        if manifest is not None:
            add_event("checkpoint", f"step {manifest.step} is in the bucket")
        self._carry_out(replace(view, job=job))
        return wanted

    def _carry_out(self, view: View) -> None:
        """Plan, and apply what is planned."""
        job = view.job
        for action in (actions := plan(view).actions):
            if said := event(job, action):
                self.add_event(*said, job=job.id)
            job = apply(job, action, view.now)
            if isinstance(action, Finish | EndGeneration | SetIdle | LetGo):
                self.scaler.look_now.set()
            if isinstance(action, Finish | LetGo):
                self.ended_at = view.now
        self.states[job.id] = job
        if not actions:
            self._settled[job.id] = view

    async def _write(self, now: float) -> None:
        """Put what has changed into the bucket. Nothing is ordered before that; mere progress is written meanwhile."""
        for failing, error in self.progress_writes.failures():
            self._park(failing, error)
        for job in self.states.values():
            self.progress_writes.begin(job, now)
        if urgent := [job for job in self.states.values() if self.journal.urgent(job)]:
            await self.check_epoch()
        written = (self.journal.write(job, self.events.of(job.id), now) for job in urgent)
        # All of them end before the next turn, which would otherwise write the same objects at the same time.
        for job, failed in zip(urgent, await asyncio.gather(*written, return_exceptions=True), strict=True):
            if isinstance(failed, Exception) and not isinstance(failed, SpotrunError):
                self._park(job.id, failed)
            elif failed is not None:
                raise failed

    def _order(self, view: FleetView, conditions: Mapping[str, Condition]) -> None:
        """Send orders to agents that are not silent."""
        # A silent agent would first obey old orders when it is back. One of version 1 would end its parked job.
        parked = job_queue.parked_nodes(self)
        awake = (node for node in view.nodes if not liveness.silent(view, node))
        told = (node.name for node in awake if node.report.version > 1 or node.name not in parked)
        nodes: dict[str, dict[str, tuple[int, ...] | None]] = {name: {} for name in told}
        for job in view.jobs:
            seen = self._settled.get(job.id) or self._job_view(view, job, conditions)
            stays = {member.node for member in bound(view, job)}
            for node in seen.nodes:
                needed = node.assigned and not job.ended_already
                knows = needed or node.name in stays or keeps_state(seen, node)
                if knows and node.name in nodes:
                    # Until devices are given to jobs, waiting workers keep theirs. An order without devices ends them.
                    working = None if self.allocator.decided else node.work.devices or None
                    nodes[node.name][job.id] = node.devices if node.assigned else working
        self.agents.order(view.jobs, nodes, self.epoch, job_queue.left_alone(self))

    def fleet_view(self, now: float) -> FleetView:
        """What the head knows now about all jobs, nodes and machines."""
        view = FleetView(
            now=now,
            jobs=self._active(),
            nodes=self.agents.nodes(self.fleet),
            expected=sum(self.fleet.sizes.values()),
            began=self.presence.began,
            awake_since=self.presence.awake_since,
            able_since=self.presence.able_since,
            machines=self.agents.machines(self.fleet),
            listed=self.fleet.instances is not None,
            listed_at=self.fleet.listed_at,
            ended=self.fleet.ended,
            replaced=self.replacements.replaced,
            signs=self.signs.found,
            joined=self.replacements.joined,
        )
        return retirement.mark(view)

    def _active(self) -> tuple[JobState, ...]:
        return tuple(job for job in self.states.values() if not job.over)

    def _job_view(self, view: FleetView, job: JobState, conditions: Mapping[str, Condition]) -> View:
        unseen = [member.node for member in job.members if member.node not in self.agents.known]
        gone = frozenset(n for n in unseen if self.fleet.state_of(n, job.ordered_at) in ("terminated", "gone"))
        ready, placed = self.agents.ready_at.get(job.id, 0.0), self.scaler.places.get(job.id)
        return job_view(view, job, self.allocator.assignment, conditions, ready, gone, placed)

    async def check_epoch(self) -> None:
        """Raises `SystemExit` when another head has taken over."""
        await lease.check(self.lease, self.store, self.cluster.name, self.epoch)
