"""The agents: what each has said last, and the way to it while it is connected."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from spotrun.head.fleet import retirement
from spotrun.head.fleet.pools import Fleet
from spotrun.head.job_state import JobState
from spotrun.head.orders import bundle_of, order_for
from spotrun.head.planner import notice_fit
from spotrun.head.view import Machine, Node
from spotrun.wire import Order, Report

Send = Callable[[Order], None]
AddEvent = Callable[[str, str], None]


@dataclass
class KnownAgent:
    """An agent: its newest report, and the way to it while it is connected. since, answered: as in `Node`, `Machine`.

    unfit_since: since when it has been unfit or checking again; 0: it is not known to be unfit.
    """

    report: Report
    reported_at: float
    send: Send | None = None
    sent: Order | None = None
    since: float = 0.0
    answered: float = 0.0
    unfit_since: float = 0.0


class Agents:
    """Every agent that this head has heard of.

    add_event: where events go that operators should read. notice: seconds of notice that a pool's machines get.
    """

    def __init__(self, add_event: AddEvent, notice: Callable[[str], float] = lambda _: 0.0) -> None:
        self._notice = notice
        self._told: set[str] = set()  # jobs whose drains do not fit into a notice: said already
        self.known: dict[str, KnownAgent] = {}
        self.ready_at = 0.0  # when the newest one became ready
        self._add_event = add_event
        self._retired: set[Send] = set()  # links that a newer one of the same node has replaced

    def receive(self, report: Report, send: Send, now: float, made: float = 0.0) -> bool:
        """Take a report in; whether the cloud is worth a look. One of a link that has been replaced is passed over.

        made: when the node's machine was, as far as the cloud has told.
        """
        if send in self._retired:
            return False  # what a dead connection still had under way is older than what was heard since
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
            at = time.strftime("%H:%M", time.gmtime(report.coming.deadline))
            self._add_event(
                "notice",
                f"{report.node} will be taken at {at} UTC: {report.coming.kind}; it trains on until shortly before",
            )
        self._tell_trouble(report, last)
        self._tell_drain(report)
        sent = before.sent if before and before.send is send else None
        since = before.since if before and last and last.phase == report.phase and before.since >= made else now
        unfit_since = before.unfit_since if before and before.unfit_since >= made else 0.0  # not a predecessor's
        if report.phase == "unfit":
            # An agent that is restarted again and again is checked each time: that is no better than unfit.
            since = unfit_since = min(since, unfit_since or since)
        elif report.phase != "checking":
            unfit_since = 0.0
        answered = now if report.phase != "checking" else before.answered if before else 0.0
        self.known[report.node] = KnownAgent(report, now, send, sent, since, answered, unfit_since)
        return noticed

    def _tell_trouble(self, report: Report, last: Report | None) -> None:
        """An event when a node begins to fail at saving, when the reason changes, and when it succeeds again."""
        now, before = report.trouble, last.trouble if last else None
        if now is not None and (before is None or _words((before.message,)) != _words((now.message,))):
            self._add_event("checkpoint", f"{report.node} cannot save its part, and tries again: {now.message}")
        elif now is None and before is not None and report.parts:
            self._add_event("checkpoint", f"{report.node} saves again, after {before.tries} tries that failed")

    def _tell_drain(self, report: Report) -> None:
        """An event at a job's first measured snapshot, if no drain will fit into a notice."""
        if (
            report.job
            and report.job not in self._told
            and (why := notice_fit.too_long(report, self._notice(report.pool)))
        ):
            self._told.add(report.job)
            self._add_event("snapshot", why)

    def disconnect(self, node: str, send: Send) -> bool:
        """A link closed; whether it was the node's newest."""
        self._retired.discard(send)
        seen = self.known.get(node)
        if seen is None or seen.send is not send:
            return False
        seen.send, seen.sent = None, None
        self._add_event("link", f"{node} is not connected")
        return True

    def order(self, job: JobState | None, epoch: int) -> None:
        """Send each connected agent what it should be doing, if that is not what it was sent last."""
        active = None if job is None or job.ended_already else (job, bundle_of(job))
        for node, seen in self.known.items():
            order = order_for(*active, node, seen.report.boot, epoch) if active else Order(epoch=epoch)
            if seen.send is not None and order != seen.sent:
                seen.sent = order
                seen.send(order)

    def forget(self, kept: Collection[str]) -> None:
        """Drop those that are not connected, but for `kept`."""
        for name in [name for name, seen in self.known.items() if seen.send is None and name not in kept]:
            del self.known[name]

    def reports(self, job: str | None = None) -> list[Report]:
        """The newest report of each; those about one job."""
        return [seen.report for seen in self.known.values() if job in (None, seen.report.job)]

    def busy(self) -> bool:
        """Whether any that is connected holds a job still."""
        return any(seen.send is not None and seen.report.job for seen in self.known.values())

    def nodes(self, fleet: Fleet) -> tuple[Node, ...]:
        """Each as decisions see it."""
        states = {name: fleet.state_of(name, seen.reported_at, seen.report.pool) for name, seen in self.known.items()}
        return tuple(
            Node(seen.report, seen.send is not None, seen.reported_at, states[name], seen.since)
            for name, seen in self.known.items()
        )

    def machines(self, fleet: Fleet) -> tuple[Machine, ...]:
        """All that the cloud lists, with what was heard of them."""
        pools = {pool.name: pool for pool in fleet.cluster.pools}
        ends = retirement.planned(fleet.instances or (), pools)
        found = []
        for each in fleet.instances or ():
            seen = self.known.get(each.name)
            answered = seen.answered if seen else 0.0
            state = "unknown" if each.pool in fleet.away else each.state
            kind, retires = pools[each.pool].machine or "", ends.get(each.name, 0.0)
            found.append(Machine(each.name, each.pool, state, each.created, answered, kind, each.ends, retires))
        return tuple(found)


def _words(lines: tuple[str, ...]) -> list[str]:
    """Problems without their numbers, which change all the time (disk space)."""
    return [re.sub(r"\d+", "", line) for line in lines]
