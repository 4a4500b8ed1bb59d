"""Keeps the conditions of the machines and the assignment of devices. Decides both again when something has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from spotrun.head import job_queue
from spotrun.head.allocation.assignment import Assignment, as_it_is, assign
from spotrun.head.allocation.demand import Question, question
from spotrun.head.fleet.classify import NOT_COMING, Condition, classify
from spotrun.head.view import FleetView

if TYPE_CHECKING:
    from spotrun.head.head import Head

# What an error means, for operators.
CONDITIONS = "the conditions of the machines stay as they were, and no machine is replaced"
DEVICES = "each job keeps the devices that it had, and gets no others"


class Allocator:
    """The conditions and the assignment of one head. After an error that nobody expected, both stay as they were."""

    def __init__(self, head: Head) -> None:
        self.assignment = Assignment()
        self._head = head
        self._conditions: Mapping[str, Condition] = {}  # as they were last known
        self._question: Question | None = None  # the one that `assignment` answers; None: the head could not see

    @property
    def decided(self) -> bool:
        """Whether the assignment is more than what jobs hold already: the head sees all nodes."""
        return self._question is not None

    def conditions(self, view: FleetView) -> Mapping[str, Condition]:
        """The condition of each machine."""
        self._conditions = self._head.troubles.attempt(CONDITIONS, lambda: classify(view), self._conditions)
        return self._conditions

    def forget(self) -> None:
        """Forget the assignment: from now on, each job has the devices of its generation."""
        self._question = None

    def look(self, view: FleetView, conditions: Mapping[str, Condition]) -> None:
        """Decide whose each device is."""
        if view.blind() or self._question is None:
            self._question, self.assignment = None, as_it_is(view)
        if not view.blind():
            self._head.troubles.attempt(DEVICES, lambda: self._decide(view, conditions), None)

    def _decide(self, view: FleetView, conditions: Mapping[str, Condition]) -> None:
        head, held = self._head, self.assignment.held
        places = head.scaler.placer.look(view, conditions)
        out = {name for name, each in conditions.items() if each.state in NOT_COMING}
        asked = question(view, head.cluster, head.fleet.sizes, held, places, out, job_queue.pins(head))
        if asked != self._question:
            self._question, self.assignment = asked, assign(asked)
