"""Resize requests of managed instance groups, with Google's semantics, for `tests.fakes.gce_api`.

A request raises the group's target size at once. Its machines are made all together, as soon as there is room for all.
https://cloud.google.com/compute/docs/instance-groups/about-resize-requests-mig
"""

from __future__ import annotations

import time
from collections.abc import Callable

from google.cloud import compute_v1

from tests.fakes.mig import Group, Member, stamp


class Requests:
    """Those of one group. To be used on the event loop only."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.made: dict[str, compute_v1.InstanceGroupManagerResizeRequest] = {}
        self._waiting: dict[str, list[Member]] = {}

    def insert(self, wanted: compute_v1.InstanceGroupManagerResizeRequest, refuse: Callable[[str], Exception]) -> None:
        """A new request. Raises what `refuse` makes of the reason why Google would refuse it."""
        scheduling = self.group.template.properties.scheduling
        if scheduling.provisioning_model != "FLEX_START" or not scheduling.max_run_duration.seconds:
            raise refuse("the template is not for flex-start machines with a run duration")
        if scheduling.instance_termination_action != "DELETE":
            raise refuse("the template does not delete machines at their end")
        if wanted.resize_by < 1 or wanted.name in self.made:
            raise refuse(f"{wanted.name} asks for {wanted.resize_by} machines, or is there already")
        wanted.creation_timestamp, wanted.state = stamp(time.time()), "ACCEPTED"
        self.made[wanted.name] = wanted
        self.group.resource.target_size += wanted.resize_by
        self._waiting[wanted.name] = [self.group.add() for _ in range(wanted.resize_by)]
        self.grant()

    def cancel(self, name: str) -> None:
        """Give up a request that waits. Its machines are wanted no longer."""
        self.made[name].state = "CANCELLED"
        self._drop(name)

    def fail(self, code: str, message: str) -> None:
        """Let the requests that wait fail."""
        for name in list(self._waiting):
            self.made[name].state = "FAILED"
            self.made[name].status = compute_v1.InstanceGroupManagerResizeRequestStatus(
                error={"errors": [{"code": code, "message": message}]}
            )
            self._drop(name)

    def grant(self) -> None:
        """Make the machines of each request for all of which there is room."""
        for name, members in list(self._waiting.items()):
            limit, there = self.group.limit, len(self.group.vms())
            if limit is None or limit.most - there >= len(members):
                self.made[name].state = "SUCCEEDED"
                del self._waiting[name]
                for member in members:
                    self.group.start(member)

    def _drop(self, name: str) -> None:
        members = self._waiting.pop(name)
        self.group.resource.target_size -= len(members)
        for member in members:
            del self.group.members[member.name]
