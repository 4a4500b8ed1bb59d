"""The agents: the newest report of each, and its connection."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from spotrun.head.fleet import retirement
from spotrun.head.fleet.pools import Fleet
from spotrun.head.job_state import JobState, as_accepted
from spotrun.head.orders import JobOrders
from spotrun.head.planner import notice_fit
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import Machine, Misfit, Node, is_taken
from spotrun.spec import JobSpec
from spotrun.text import count
from spotrun.wire import Bundle, JobReport, Order, Report

Send = Callable[[Order], None]
AddEvent = Callable[[str, str], None]
Devices = tuple[int, ...]


@dataclass
class KnownAgent:
    """An agent that has connected to this head."""

    report: Report  # the newest one
    reported_at: float
    reports_since: float  # as in `Node`
    send: Send | None = None  # sends an order over the newest connection; None: not connected
    sent: Order | None = None  # the newest order sent over that connection
    since: float = 0.0  # as in `Node`
    answered: float = 0.0  # as in `Machine`
    unfit_since: float = 0.0  # when it became unfit; another check does not reset this. 0: it is not known to be unfit


class Agents:
    """All agents that this head knows.

    notice: seconds of notice that the machines of a pool get. asked_to_go: whether this node's machine should end.
    """

    def __init__(
        self,
        add_event: AddEvent,
        notice: Callable[[str], float] = lambda _: 0.0,
        asked_to_go: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._notice, self._asked_to_go = notice, asked_to_go
        self._away: dict[str, set[str]] = {}  # nodes that are not connected, as an event has said, and their jobs
        self._long_drains: set[str] = set()  # jobs whose drains do not fit into a notice, as an event has said
        self.known: dict[str, KnownAgent] = {}
        self.ready_at: dict[str, float] = {}  # when an agent last became ready for a job
        self._misfits: dict[str, dict[str, Misfit]] = {}  # by node and job
        self._bundles: dict[str, tuple[JobSpec, Bundle]] = {}
        self._orders: dict[str, JobOrders] = {}
        self._add_event = add_event
        self._retired: set[Send] = set()  # connections that a newer one of the same node has replaced

    def progress(self, report: Report, send: Send, now: float, made: float = 0.0) -> bool:
        """Keep a report in which only progress is new. False: more is new, so call `receive`."""
        agent = self.known.get(report.node)
        if agent is None or agent.send is not send or agent.since < made or agent.report.essence != report.essence:
            return False
        if now - agent.reported_at > TIMEOUTS.failure:
            return False  # the agent is back
        agent.report, agent.reported_at = report, now
        if report.phase != "checking":
            agent.answered = now
        for work in report.jobs:
            self._note(report, work, now, agent.sent)
        return True

    def receive(self, report: Report, send: Send, now: float, made: float = 0.0) -> bool:
        """Keep a report, unless the node has a newer connection. Returns whether to ask the cloud now.

        made: when the cloud made the node's machine; 0: not known.
        """
        if send in self._retired:
            return False  # reports of the newer connection are newer
        before = self.known.get(report.node)
        if before and before.send is not None and before.send is not send:
            self._retired.add(before.send)
        last = before.report if before and before.report.boot == report.boot else None
        noticed = is_taken(report) and not (last and is_taken(last))
        if last is None:
            self._misfits.pop(report.node, None)
        self._add_joined_event(report.node, before, last)
        for job in self._orders.keys() & (_ready_jobs(report) - (_ready_jobs(last) if last else set())):
            self.ready_at[job] = now
        if report.unfit and (last is None or _words(last.unfit) != _words(report.unfit)):
            self._add_event("unfit", f"{report.node} takes no job: {'; '.join(report.unfit)}")
        if report.notice and (noticed or last is None or last.notice is None):
            what = "will be" if noticed else "may soon be"
            self._add_event("notice", f"{report.node} {what} taken: {report.notice.kind}")
        if report.coming and (last is None or last.coming is None):
            taken = f"will be taken at {time.strftime('%Y-%m-%d %H:%M', time.gmtime(report.coming.deadline))} UTC"
            text = f"{report.node} {taken}: {report.coming.kind}; it trains on until shortly before"
            self._add_event("notice", text)
        sent = before.sent if before and before.send is send else None
        for work in report.jobs:
            self._add_saving_event(report.node, work, last.of(work.job) if last else None)
            self._note(report, work, now, sent)
        same = last is not None and _phases(last) == _phases(report)
        since = before.since if before and same and before.since >= made else now
        unfit_since = before.unfit_since if before and before.unfit_since >= made else 0.0  # of this machine only
        if report.phase == "unfit":
            # An agent that restarts again and again is checked each time. So a check must not reset this time.
            since = unfit_since = min(since, unfit_since or since)
        elif report.phase != "checking":
            unfit_since = 0.0
        answered = now if report.phase != "checking" else before.answered if before else 0.0
        back = before.reports_since if before and last and now - before.reported_at <= TIMEOUTS.failure else now
        self.known[report.node] = KnownAgent(report, now, back, send, sent, since, answered, unfit_since)
        return noticed

    def _note(self, report: Report, work: JobReport, now: float, sent: Order | None) -> None:
        """Note what a report says about a job, even if it says the same as before. sent: the newest order."""
        if sent is None or sent.job(work.job) is None:
            return  # not a job that it was told to set up: its reports may name any number of others
        before = self._misfits.get(report.node, {}).get(work.job)
        if work.failure is not None and work.failure.kind == "setup":
            again = before is None or before.over(now)  # the job has gone back to the node
            if again:
                self._add_event("node", f"{report.node}: {work.job} cannot be set up: {work.failure.message}")
            times = (before.times if before else 0) + again
            self._misfits.setdefault(report.node, {})[work.job] = Misfit(now, times)
        elif before is not None and work.store:
            self._misfits[report.node][work.job] = Misfit(before.at, 0)
        self._add_drain_event(report, work)

    def _add_joined_event(self, node: str, before: KnownAgent | None, last: Report | None) -> None:
        """An event when a node joins, and when one is back that was not connected. last: of the same boot."""
        if last is None:
            self._away.pop(node, None)
            self._add_event("node", f"{node} joined")
        elif before and before.send is None and self._away.pop(node, None) is not None:
            self._add_event("connection", f"{node} is connected again")

    def _add_saving_event(self, node: str, work: JobReport, last: JobReport | None) -> None:
        """An event when a node starts to fail at saving, when the reason changes, and when it succeeds again."""
        now, before = work.trouble, last.trouble if last else None
        if now is not None and (before is None or _words((before.message,)) != _words((now.message,))):
            self._add_event("checkpoint", f"{node} cannot save its part, and tries again: {now.message}")
        elif now is None and before is not None and work.parts:
            tries = count(before.tries, "failed try", "failed tries")
            self._add_event("checkpoint", f"{node} saves again, after {tries}")

    def _add_drain_event(self, report: Report, work: JobReport) -> None:
        """An event when the first snapshot of a job shows that no drain will fit into a notice."""
        if work.job in self._long_drains:
            return
        if why := notice_fit.too_long(report.node, work, self._notice(report.pool)):
            self._long_drains.add(work.job)
            self._add_event("snapshot", why)

    def disconnect(self, node: str, send: Send) -> bool:
        """A connection has closed. True if it was the node's newest one."""
        self._retired.discard(send)
        agent = self.known.get(node)
        if agent is None or agent.send is not send:
            return False
        agent.send, agent.sent = None, None
        if not self._asked_to_go(node):
            self._away[node] = {work.job for work in agent.report.jobs}
            self._add_event("connection", f"{node} is not connected")
        return True

    def lost_a_peer(self, node: str) -> bool:
        """Whether an agent reports for a job of this node that a peer is gone."""
        jobs = {work.job for work in self.known[node].report.jobs}
        works = (work for agent in self.known.values() for work in agent.report.jobs if work.job in jobs)
        return any(work.failure is not None and work.failure.kind == "peer" for work in works)

    def order(
        self,
        jobs: Sequence[JobState],
        nodes: Mapping[str, Mapping[str, Devices | None]],
        epoch: int,
        parked: tuple[str, ...],
    ) -> None:
        """Send each connected agent its order, if the order has changed.

        nodes: for each agent that gets an order, the jobs that it should know, with its devices for each; None: the job
        has none there any more. parked: jobs that agents leave as they are.
        """
        for job in jobs:
            wanted = JobOrders(job, self._bundle(job))
            if job.id not in self._orders or not self._orders[job.id].same(wanted):
                self._orders[job.id] = wanted
        known = {job.id: job for job in jobs}
        for node, agent in self.known.items():
            if agent.send is None or node not in nodes:
                continue
            boot = agent.report.boot
            found = tuple(
                self._orders[job].of(node, boot, devices, fits=not known[job].has_left_behind(agent.report))
                for job, devices in nodes[node].items()
            )
            if agent.sent is None or (agent.sent.jobs, agent.sent.parked) != (found, parked):
                agent.sent = Order(epoch=epoch, jobs=found, parked=parked)
                agent.send(agent.sent)

    def _bundle(self, job: JobState) -> Bundle:
        """The same object for as long as the job's code and file stay the same."""
        known = self._bundles.get(job.id)
        inputs, size = job.inputs, job.state_bytes
        if known is None or known[0] is not job.spec or (known[1].inputs, known[1].state_bytes) != (inputs, size):
            spec = as_accepted(job.spec)
            bundle = Bundle(id=job.id, code=job.code, job=spec, inputs=inputs, state_bytes=size)
            known = self._bundles[job.id] = (job.spec, bundle)
        return known[1]

    def forget_job(self, job: str) -> None:
        """Drop what is known about a job that has ended."""
        self.ready_at.pop(job, None)
        self._bundles.pop(job, None)
        self._orders.pop(job, None)
        self._long_drains.discard(job)
        for misfits in self._misfits.values():
            misfits.pop(job, None)
        for node in [node for node, jobs in self._away.items() if job in jobs]:
            self._away[node].discard(job)
            if not self._away[node]:
                del self._away[node]  # nobody waits for it any more

    def forget(self, kept: Collection[str]) -> None:
        """Drop agents that are not connected, except `kept`."""
        for name in [name for name, agent in self.known.items() if agent.send is None and name not in kept]:
            del self.known[name]
            self._misfits.pop(name, None)
            self._away.pop(name, None)

    def work(self, job: str) -> list[tuple[str, JobReport]]:
        """What each agent last reported about a job, with the node's name."""
        found = ((name, agent.report.of(job)) for name, agent in self.known.items())
        return [(name, work) for name, work in found if work is not None]

    def busy(self) -> frozenset[str]:
        """Connected agents that still have a job."""
        return frozenset(name for name, agent in self.known.items() if agent.send is not None and agent.report.jobs)

    def nodes(self, fleet: Fleet) -> tuple[Node, ...]:
        """The agents as decisions see them."""
        found = []
        for name, agent in self.known.items():
            state = fleet.state_of(name, agent.reported_at, agent.report.pool)
            node = Node(
                agent.report,
                connected=agent.send is not None,
                reported_at=agent.reported_at,
                reports_since=agent.reports_since,
                cloud=state,
                since=agent.since,
                misfits=dict(self._misfits.get(name, {})),
            )
            found.append(node)
        return tuple(found)

    def machines(self, fleet: Fleet) -> tuple[Machine, ...]:
        """The machines that the cloud lists, with what their agents have reported."""
        pools = {pool.name: pool for pool in fleet.cluster.pools}
        ends = retirement.planned(fleet.instances or (), pools)
        found = []
        for each in fleet.instances or ():
            agent = self.known.get(each.name)
            answered = agent.answered if agent else 0.0
            state = "unknown" if each.pool in fleet.away else each.state
            kind, retires = pools[each.pool].machine or "", ends.get(each.name, 0.0)
            times = (each.ends, retires, each.started)
            found.append(Machine(each.name, each.pool, state, each.created, answered, kind, *times))
        return tuple(found)


def _phases(report: Report) -> tuple[str, ...]:
    return (report.phase, *(f"{work.job} {work.phase}" for work in report.jobs))


def _ready_jobs(report: Report) -> set[str]:
    """Jobs whose workers could start on this node now."""
    return {work.job for work in report.jobs if work.phase == "ready"}


def _words(lines: tuple[str, ...]) -> list[str]:
    """Problems without their numbers, which keep changing (such as free disk space)."""
    return [re.sub(r"\d+", "", line) for line in lines]
