"""Keeps where each job may train. Asks `place` again when something has changed, and keeps the history of the pools."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spotrun.document import is_newer, problem
from spotrun.errors import ConflictError, SpotrunError
from spotrun.head import job_queue
from spotrun.head.capacity.history import Histories, learn
from spotrun.head.capacity.observe import claims, demand, situation
from spotrun.head.capacity.place import Placements, place
from spotrun.head.capacity.promise import refusal
from spotrun.head.capacity.situation import Placement, Situation
from spotrun.head.fenced import FencedStore
from spotrun.head.fleet.classify import Condition
from spotrun.head.job_state import JobState
from spotrun.head.view import FleetView
from spotrun.store import history_key

if TYPE_CHECKING:
    from spotrun.head.head import Head

log = logging.getLogger(__name__)

PLACES = "each job may train where it did, and nowhere else"  # what an error means, for operators
WRITE_EVERY = 60.0  # seconds between two writes of the history; a head that dies may lose as much


class Placer:
    """The placements of one head's jobs, and the history of its pools."""

    def __init__(self, head: Head) -> None:
        self.placements: Placements = {}
        self.histories = Histories()
        self._head = head
        self._fenced, self._key = FencedStore(head.store), history_key(head.cluster.name)
        self._written: Histories | None = None  # None: the history of earlier heads has not been read yet
        self._is_newer = False  # whether that history is of a later version: then it stays
        self._seen: Any = None  # a summary of what the last placements were made from
        self._wake: float | None = None  # when to ask again though nothing has changed

    def look(self, view: FleetView, conditions: Mapping[str, Condition]) -> Placements:
        """The placements now. They are made again if the cloud was asked since, or if jobs or nodes have changed.

        Raises an unexpected error if there are no earlier placements: a job without one would lose its nodes.
        """
        jobs = [(job.id, job.wants_nodes, job.rank, job.generation, job.current is None) for job in view.jobs]
        holders = sorted(self._head.allocator.assignment.held)
        states = {name: each.state for name, each in conditions.items()}
        leaving = [node.name for node in view.nodes if node.leaving]
        seen = (id(self._head.fleet.instances), jobs, holders, states, leaving)
        if seen != self._seen or (self._wake is not None and self._wake <= view.now):
            before = self.placements
            self._seen = None  # after an error, try again
            self.placements = self._place(view, conditions, before)
            if PLACES not in self._head.troubles:
                self._seen = seen
            self._wake = min((each.wake for each in self.placements.values() if each.wake is not None), default=None)
            self._tell(before)
        return self.placements

    def _place(self, view: FleetView, conditions: Mapping[str, Condition], before: Placements) -> Placements:
        def work() -> Placements:
            return place(self.situation(view, conditions), before)

        return self._head.troubles.attempt(PLACES, work, before) if before else work()

    def situation(self, view: FleetView, conditions: Mapping[str, Condition]) -> Situation:
        """What the policies see now."""
        fleet, holders = self._head.fleet, self._head.allocator.assignment.held
        pools = tuple(
            replace(pool, states={name: conditions[name].state for name in pool.states if name in conditions})
            for pool in fleet.pools()
        )
        known = fleet.prices, self.histories.of(), fleet.advice
        return situation(view, self._head.cluster, pools, *known, holders, job_queue.pins(self._head))

    def refusal(self, job: JobState) -> str:
        """Why the deadline of a new job cannot be promised; empty if it can, or if the work is not known."""
        view, cluster = self._head.fleet_view(self._head.clock()), self._head.cluster
        seen = self.situation(view, self._head.allocator.conditions(view))
        # These jobs ask for no machines now, but their deadlines have been promised too.
        quiet = [
            replace(demand(view, cluster, each, index), wants=True)
            for index, each in enumerate(view.jobs)
            if each.resting and each.spec.deadline and not (claims(each) or each.paused or each.stopping)
        ]
        seen = replace(seen, demands=(*seen.demands, *quiet))
        return refusal(seen, demand(view, cluster, job, len(view.jobs)))

    async def learn(self, view: FleetView) -> None:
        """Count what the last look at the cloud has shown. If the bucket does not answer, the head goes on without.

        Raises `ConflictError` when another head has written the history.
        """
        fleet = self._head.fleet
        if not view.listed:
            return
        try:
            if self._written is None:
                self.histories = self._written = self._read(await self._fenced.find(self._key))
            leaving = {node.name for node in view.nodes if node.leaving}
            running: dict[str, dict[str, float]] = {}
            for machine in view.machines:
                if machine.state == "running" and machine.name not in leaving:
                    running.setdefault(machine.pool, {})[machine.name] = machine.created
            replaced = {each.node for each in view.replaced}
            self.histories = learn(self.histories, view.now, fleet.pools(), running, replaced)
            changed = self.histories.pools != self._written.pools and not self._is_newer
            if changed and (view.now - self._written.at >= WRITE_EVERY or self._shrunk(self._written)):
                await self._fenced.put(self._key, self.histories.model_dump_json().encode())
                self._written = self.histories
        except ConflictError:
            raise
        except SpotrunError as error:
            log.warning("%s: %s", self._key, error)

    def _shrunk(self, written: Histories) -> bool:
        """Whether a pool is smaller now, or empty.

        Else the next head would count the machines that this one ended as taken, and the time since then as theirs.
        """
        pairs = ((pool, self.histories.pools.get(name, pool)) for name, pool in written.pools.items())
        return any(old.size > new.size or (old.machines and not new.machines) for old, new in pairs)

    def _tell(self, before: Placements) -> None:
        for job, placement in self.placements.items():
            if _gist(placement) != _gist(before.get(job)) and placement.reason:
                self._head.add_event("machines", placement.reason, job=job)

    def _read(self, data: bytes | None) -> Histories:
        try:
            return Histories.model_validate_json(data) if data is not None else Histories()
        except ValueError as error:
            log.warning("%s is not readable, the history starts again: %s", self._key, problem(error))
            self._is_newer = is_newer(error)
            return Histories()


def _gist(placement: Placement | None) -> Any:
    """The part of a placement whose change makes an event."""
    return placement and (placement.use, {pool for need in placement.needs for pool in need.pools}, placement.max)
