"""The agents: the newest report of each, and its connection."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from spotrun.head.fleet import retirement
from spotrun.head.fleet.pools import Fleet
from spotrun.head.job_state import JobState
from spotrun.head.orders import order_for
from spotrun.head.planner import notice_fit
from spotrun.head.view import Machine, Node
from spotrun.wire import Bundle, Order, Report

Send = Callable[[Order], None]
AddEvent = Callable[[str, str], None]


@dataclass
class KnownAgent:
    """An agent that has connected to this head."""

    report: Report  # the newest one
    reported_at: float
    send: Send | None = None  # sends an order over the newest connection; None: not connected
    sent: Order | None = None  # the newest order sent over that connection
    since: float = 0.0  # as in `Node`
    answered: float = 0.0  # as in `Machine`
    unfit_since: float = 0.0  # when it became unfit; checking again does not end that. 0: it is not known to be unfit


class Agents:
    """All agents that this head knows. notice: seconds of notice that the machines of a pool get."""

    def __init__(self, add_event: AddEvent, notice: Callable[[str], float] = lambda _: 0.0) -> None:
        self._notice = notice
        self._long_drains: set[str] = set()  # jobs with an event that their drains do not fit into a notice
        self.known: dict[str, KnownAgent] = {}
        self.ready_at = 0.0  # when an agent last became ready
        self._add_event = add_event
        self._retired: set[Send] = set()  # connections that a newer one of the same node has replaced

    def receive(self, report: Report, send: Send, now: float, made: float = 0.0) -> bool:
        """Keep a report, unless a newer connection of the node exists. True: the cloud should be asked now.

        made: when the cloud made the node's machine; 0: not known.
        """
        if send in self._retired:
            return False  # reports of the newer connection are newer
        before = self.known.get(report.node)
        if before and before.send is not None and before.send is not send:
            self._retired.add(before.send)
        last = before.report if before and before.report.boot == report.boot else None
        noticed = report.notice is not None and (last is None or last.notice is None)
        if last is None:
            self._add_event("node", f"{report.node} joined")
        if report.phase == "ready" and (last is None or last.phase != "ready"):
            self.ready_at = now
        if report.unfit and (last is None or _words(last.unfit) != _words(report.unfit)):
            self._add_event("unfit", f"{report.node} takes no job: {'; '.join(report.unfit)}")
        if report.notice and noticed:
            self._add_event("notice", f"{report.node} will be taken: {report.notice.kind}")
        if report.coming and (last is None or last.coming is None):
            taken = f"will be taken at {time.strftime('%H:%M', time.gmtime(report.coming.deadline))} UTC"
            text = f"{report.node} {taken}: {report.coming.kind}; it trains on until shortly before"
            self._add_event("notice", text)
        self._add_saving_event(report, last)
        self._add_drain_event(report)
        sent = before.sent if before and before.send is send else None
        since = before.since if before and last and last.phase == report.phase and before.since >= made else now
        unfit_since = before.unfit_since if before and before.unfit_since >= made else 0.0  # of this machine only
        if report.phase == "unfit":
            # An agent that restarts again and again is checked each time, so checking must not end this.
            since = unfit_since = min(since, unfit_since or since)
        elif report.phase != "checking":
            unfit_since = 0.0
        answered = now if report.phase != "checking" else before.answered if before else 0.0
        self.known[report.node] = KnownAgent(report, now, send, sent, since, answered, unfit_since)
        return noticed

    def _add_saving_event(self, report: Report, last: Report | None) -> None:
        """An event when a node starts to fail at saving, when the reason changes, and when it succeeds again."""
        now, before = report.trouble, last.trouble if last else None
        if now is not None and (before is None or _words((before.message,)) != _words((now.message,))):
            self._add_event("checkpoint", f"{report.node} cannot save its part, and tries again: {now.message}")
        elif now is None and before is not None and report.parts:
            self._add_event("checkpoint", f"{report.node} saves again, after {before.tries} tries that failed")

    def _add_drain_event(self, report: Report) -> None:
        """An event when the first snapshot of a job shows that no drain will fit into a notice."""
        if not report.job or report.job in self._long_drains:
            return
        if why := notice_fit.too_long(report, self._notice(report.pool)):
            self._long_drains.add(report.job)
            self._add_event("snapshot", why)

    def disconnect(self, node: str, send: Send) -> bool:
        """A connection has closed. True if it was the node's newest one."""
        self._retired.discard(send)
        agent = self.known.get(node)
        if agent is None or agent.send is not send:
            return False
        agent.send, agent.sent = None, None
        self._add_event("connection", f"{node} is not connected")
        return True

    def order(self, job: JobState | None, epoch: int) -> None:
        """Send each connected agent its order, if the order has changed."""
        bundle = None
        if job is not None and not job.ended_already:
            bundle = Bundle(id=job.id, code=job.code, job=job.spec.model_dump(mode="json"))  # the same for all agents
        for node, agent in self.known.items():
            order = order_for(job, bundle, node, agent.report.boot, epoch) if job and bundle else Order(epoch=epoch)
            if agent.send is not None and order != agent.sent:
                agent.sent = order
                agent.send(order)

    def forget(self, kept: Collection[str]) -> None:
        """Drop agents that are not connected, except `kept`."""
        for name in [name for name, agent in self.known.items() if agent.send is None and name not in kept]:
            del self.known[name]

    def reports(self, job: str | None = None) -> list[Report]:
        """The newest report of each agent, or of each agent that has this job."""
        return [agent.report for agent in self.known.values() if job in (None, agent.report.job)]

    def busy(self) -> bool:
        """Whether a connected agent still has a job."""
        return any(agent.send is not None and agent.report.job for agent in self.known.values())

    def nodes(self, fleet: Fleet) -> tuple[Node, ...]:
        """The agents as decisions see them."""
        found = []
        for name, agent in self.known.items():
            state = fleet.state_of(name, agent.reported_at, agent.report.pool)
            found.append(Node(agent.report, agent.send is not None, agent.reported_at, state, agent.since))
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
            found.append(Machine(each.name, each.pool, state, each.created, answered, kind, each.ends, retires))
        return tuple(found)


def _words(lines: tuple[str, ...]) -> list[str]:
    """Problems without their numbers, which keep changing (such as free disk space)."""
    return [re.sub(r"\d+", "", line) for line in lines]
