"""Asks the cloud which machines there are, sets the sizes of pools, and has machines replaced."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from spotrun.errors import ConflictError, SpotrunError
from spotrun.head import lease
from spotrun.head.allocation.demand import wish
from spotrun.head.capacity.place import Placements
from spotrun.head.fleet.classify import Condition, classify
from spotrun.head.fleet.decide import decide, wanted
from spotrun.head.fleet.record import Recreate, exhausted
from spotrun.head.job_queue import parked_nodes, pins
from spotrun.head.placer import Placer
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import FleetView

if TYPE_CHECKING:
    from spotrun.head.head import Head

log = logging.getLogger(__name__)

SIZES = "the pools keep their sizes"  # what an error means, for operators


class Scaler:
    """Sizes of pools and replacements, for one head. poll_seconds: between two looks at the cloud."""

    def __init__(self, head: Head, poll_seconds: float) -> None:
        self.look_now = asyncio.Event()  # ask the cloud now, because its last answer may be out of date
        self.removing: frozenset[str] = frozenset()  # machines that the last change of sizes removes
        self._going: dict[str, float] = {}  # machines that no job wants, and that should end: when each was made
        self.placer = Placer(head)
        self._head, self._poll_seconds = head, poll_seconds
        self._exhausted: frozenset[str] = frozenset()  # pools where no more machines are replaced, as an event has said

    @property
    def places(self) -> Placements:
        """Where each job may train."""
        return self.placer.placements

    async def run(self) -> None:
        """Ask the cloud and scale the pools, until cancelled. While the cloud does not answer, nothing changes.

        Raises `SystemExit` when another head has taken over.
        """
        while True:
            await self.look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_seconds):
                    await self.look_now.wait()
            self.look_now.clear()

    async def look(self) -> None:
        """Ask the cloud, wake the head's loop, and scale the pools. Raises `SystemExit` as `run` does."""
        head, before = self._head, self._head.fleet.seen()
        try:
            await head.check_epoch()
            try:
                found = await head.fleet.look()
            finally:
                seen = head.fleet.seen()
                head.news.of_nodes(*(name for name in before | seen if before.get(name) != seen.get(name)))
            await asyncio.sleep(0)  # let the head's loop decide first: workers may wait for its orders
            for problem in found:
                head.add_event("cloud", f"pool {problem.pool}: {problem.message}")
            await self.placer.learn(head.fleet_view(head.clock()))
            try:
                await self._scale(head.clock())
            finally:  # a pool may refuse its size at each look
                self.forget()
                await head.ledger.write()
        except ConflictError as error:
            lease.give_way(head.epoch, str(error))
        except SpotrunError as error:
            log.warning("%s", error)
        except Exception as error:
            head.troubles.note(SIZES, error)
        else:
            head.troubles.clear(SIZES)

    async def replace(self, view: FleetView, conditions: Mapping[str, Condition]) -> None:
        """Ask the cloud to replace machines. conditions: of the machines of the view."""
        head = self._head
        found = decide(view, conditions).recreate if view.jobs else ()
        recreate = tuple(each for each in found if each.node not in self.removing)
        if head.replacements.pending(recreate):
            await head.check_epoch()
            await head.replacements.begin(recreate, view.now)

    def still_wanted(self, action: Recreate) -> bool:
        """Whether that machine should still be replaced."""
        if action.node in self.removing:
            return False
        view = self._head.fleet_view(self._head.clock())
        return any((e.node, e.created) == (action.node, action.created) for e in wanted(view, classify(view)))

    def asked_to_go(self, node: str) -> bool:
        """Whether the cloud was asked to end this machine, because no job wants it."""
        return node in self._going and self._head.fleet.made(node) in (0.0, self._going[node])

    def forget(self) -> None:
        """Forget agents whose machines are gone for ever, unless these are members of a generation."""
        head = self._head
        members = {member.node for job in head.states.values() for member in job.members}
        unknown = {name for name, seen in head.agents.known.items() if seen.report.pool in head.fleet.away}
        head.agents.forget(head.fleet.names() | members | unknown)
        self._going = {name: made for name, made in self._going.items() if name in head.agents.known}

    async def _scale(self, now: float) -> None:
        head = self._head
        known = head.states.keys() | head.parked.keys()
        if head.journal.queue is None or not known >= set(head.journal.queue):
            return  # which machines are needed is not known yet
        view = head.fleet_view(now)
        ended_at = max(head.ended_at, head.presence.began)  # a job may have ended under the last head
        busy = head.agents.busy() if now - ended_at < TIMEOUTS.last_logs else frozenset()
        conditions = classify(view)
        places = self.placer.look(view, conditions)
        expected, parked = head.allocator.assignment.expected, parked_nodes(head)
        wanted_now = wish(view, head.cluster, expected, places, busy, parked, pins(head))
        fleet = decide(view, conditions, head.fleet.pools(), wanted_now)
        spent = exhausted(view.replaced, view.now)
        for pool in sorted(spent - self._exhausted):
            head.add_event("cloud", f"pool {pool}: {fleet.reasons[pool]}")
        resize, remove = fleet.resize, fleet.remove
        if head.parked:  # a parked job keeps its machines, and the head may not know which these are
            resize, remove = {pool: n for pool, n in resize.items() if n > head.fleet.sizes.get(pool, 0)}, ()
        self._exhausted, self.removing = spent, frozenset(remove)
        emptied = [name for pool, size in resize.items() if size == 0 for name in head.fleet.names(pool)]
        self._going |= {name: head.fleet.made(name) for name in (*remove, *emptied)}
        if resize or remove:
            await head.check_epoch()  # the cloud may have taken long to answer
        before, unremoved = head.fleet.refusals, head.fleet.unremoved
        try:
            await head.fleet.scale(resize, remove)
        finally:
            for problem in head.fleet.refusals:
                if problem not in before:
                    head.add_event("cloud", f"pool {problem.pool}: {problem.message}")
            if head.fleet.unremoved not in ("", unremoved):
                head.add_event("cloud", f"machines are not removed: {head.fleet.unremoved}")
