"""Managed instance groups for tests, with Google's semantics; `tests.fakes.gce` puts them behind Compute Engine's API.

A group keeps as many machines as its target size says, under names with a random end of four characters. A machine that
is taken comes back under its name and with another id. One whose `maxRunDuration` is over does not come back: its group
becomes smaller (https://cloud.google.com/compute/docs/release-notes, 29 April 2024). One that cannot be made is tried
again, with the error in the group's record. A group of flex machines makes none again. When a group shrinks by its
size, the machines that run go first: Google's order is arbitrary.
"""

from __future__ import annotations

import asyncio
import secrets
import string
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import Literal

from google.cloud import compute_v1

STOCKOUT = "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
_SUFFIX = string.ascii_lowercase + string.digits
_MARKETS: dict[str, Literal["spot", "flex", "on-demand"]] = {
    "SPOT": "spot",
    "FLEX_START": "flex",
    "STANDARD": "on-demand",
}
_ids = count(secrets.randbelow(1 << 40) + (1 << 60))


@dataclass
class Times:
    """How long things take, in seconds."""

    boot: float = 0.02  # until a machine runs
    stop: float = 0.02  # from a deletion to the machine's end
    recreate: float = 0.02  # until a machine's successor is made
    retry: float = 0.05  # until the group tries again to make a machine
    operation: float = 0.02  # until an operation is done
    notice: float = 30.0


@dataclass(frozen=True)
class Machine:
    """A machine as it is at this moment. metadata: its attributes. due: epoch seconds of its end, once under notice.
    image: what it booted from; empty: a template without disks."""

    name: str
    id: str
    zone: str
    machine_type: str
    market: Literal["spot", "flex", "on-demand"]
    labels: dict[str, str]
    metadata: dict[str, str]
    address: str
    status: str
    due: float | None
    image: str


@dataclass(frozen=True)
class Event:
    """created: a machine is there, and boots. running: it has booted. notice: it is preempted, and ends at `due`.
    gone: nothing of it is left."""

    kind: Literal["created", "running", "notice", "gone"]
    machine: Machine


@dataclass
class Vm:
    """An instance. taken: set when it will be taken; notice: seconds until then, if that is announced."""

    resource: compute_v1.Instance
    image: str = ""
    notice: float | None = None
    due: float | None = None
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, notice: float | None = None) -> None:
        """End it, `notice` seconds after saying so; None: at once. The second time cuts a notice short."""
        if not self.taken.is_set():
            self.notice = notice
            self.taken.set()
        elif notice is None:
            self.hurry.set()

    def seen(self) -> Machine:
        found = self.resource
        return Machine(
            name=found.name,
            id=str(found.id),
            zone=found.zone.rpartition("/")[2],
            machine_type=found.machine_type.rpartition("/")[2],
            market=_MARKETS[found.scheduling.provisioning_model],
            labels=dict(found.labels),
            metadata={item.key: item.value for item in found.metadata.items},
            address=found.network_interfaces[0].network_i_p,
            status=found.status,
            due=self.due,
            image=self.image,
        )


@dataclass
class Member:
    """An entry of a group, whose machine may be there or not. nudged: set when it should look at what is wanted."""

    name: str
    action: str = "CREATING"
    vm: Vm | None = None
    leaving: bool = False
    errors: list[compute_v1.Errors] = field(default_factory=list)
    nudged: asyncio.Event = field(default_factory=asyncio.Event)
    life: asyncio.Task[None] | None = None


@dataclass
class Limit:
    """How many machines may be there; any more fail with `code`."""

    most: int
    code: str
    message: str


class Group:
    """One managed instance group. To be used on the event loop only. boot: the image that is at a path now."""

    def __init__(
        self,
        resource: compute_v1.InstanceGroupManager,
        template: compute_v1.InstanceTemplate,
        times: Times,
        tell: Callable[[Event], None],
        boot: Callable[[str], str],
    ) -> None:
        self.resource, self.template, self.times = resource, template, times
        self.members: dict[str, Member] = {}
        self.errors: list[compute_v1.InstanceManagedByIgmError] = []
        self.limit: Limit | None = None
        self._tell, self._boot = tell, boot
        self._hosts = count(2)

    @property
    def zone(self) -> str:
        return self.resource.zone.rpartition("/")[2]

    @property
    def _repairs_nothing(self) -> bool:
        """As Google demands of groups with flex machines."""
        return bool(self.template.properties.scheduling.provisioning_model == "FLEX_START")

    def resize(self, size: int) -> None:
        self.resource.target_size = size
        self._adjust()

    def delete(self, names: Iterable[str]) -> None:
        """Remove members, and lower the size; those not here or leaving already are passed over."""
        for name in names:
            member = self.members.get(name)
            if member and not member.leaving:
                self.resource.target_size -= 1
                self._dismiss(member)

    def recreate(self, names: Iterable[str]) -> None:
        for name in names:
            vm = self.members[name].vm
            if vm is not None:
                self.members[name].action = "RECREATING"
                vm.take()

    def vms(self) -> list[Vm]:
        return [member.vm for member in self.members.values() if member.vm is not None]

    def managed(self) -> list[compute_v1.ManagedInstance]:
        return [self._managed(member) for _, member in sorted(self.members.items())]

    def add(self) -> Member:
        """A member whose machine is not made before `start`."""
        name = self._name()
        self.members[name] = Member(name)
        return self.members[name]

    def start(self, member: Member) -> None:
        member.life = asyncio.create_task(self._live(member))

    def nudge(self) -> None:
        """Try at once what failed: something has changed."""
        for member in self.members.values():
            member.nudged.set()

    def _managed(self, member: Member) -> compute_v1.ManagedInstance:
        found = compute_v1.ManagedInstance(
            name=member.name,
            instance=f"{self.resource.zone}/instances/{member.name}",
            current_action=member.action,
            last_attempt={"errors": {"errors": member.errors}} if member.errors else {},
        )
        if member.vm is not None:
            found.id = member.vm.resource.id
            found.instance_status = member.vm.resource.status
        return found

    def _adjust(self) -> None:
        staying = [member for member in self.members.values() if not member.leaving]
        for _ in range(self.resource.target_size - len(staying)):
            self.start(self.add())
        surplus = len(staying) - self.resource.target_size
        staying.sort(key=lambda each: each.vm is None or each.vm.resource.status != "RUNNING")
        for member in staying[: max(0, surplus)]:
            self._dismiss(member)

    def _name(self) -> str:
        while True:
            end = "".join(secrets.choice(_SUFFIX) for _ in range(4))
            name = f"{self.resource.base_instance_name}-{end}"
            if name not in self.members:
                return name

    def _dismiss(self, member: Member) -> None:
        member.leaving, member.action = True, "DELETING"
        member.nudged.set()
        if member.vm is not None:
            member.vm.take()

    async def _live(self, member: Member) -> None:
        """Make a member's machine, again and again, until it is dismissed."""
        while not member.leaving:
            if self._fails(member):
                await _until(member.nudged, self.times.retry)
                member.nudged.clear()
                continue
            await self._one_life(member)
            while self._repairs_nothing and not member.leaving:
                member.action = "NONE"
                await member.nudged.wait()
                member.nudged.clear()
            if not member.leaving:
                member.action = "RECREATING"
                await _until(member.nudged, self.times.recreate)
                member.nudged.clear()
        del self.members[member.name]

    def _fails(self, member: Member) -> bool:
        limit = self.limit
        if limit is None or len(self.vms()) < limit.most:
            member.errors = []
            return False
        message = f"Instance '{member.name}' creation failed: {limit.message}"
        member.errors = [compute_v1.Errors(code=limit.code, message=message)]
        self.errors.append(
            compute_v1.InstanceManagedByIgmError(
                timestamp=stamp(time.time()),
                error={"code": limit.code, "message": message},
                instance_action_details={
                    "action": member.action,
                    "instance": f"{self.resource.zone}/instances/{member.name}",
                },
            )
        )
        return True

    async def _one_life(self, member: Member) -> None:
        vm = member.vm = self._make(member.name)
        self._tell(Event("created", vm.seen()))
        if not await _until(vm.taken, self.times.boot):
            vm.resource.status, member.action = "RUNNING", "NONE"
            self._tell(Event("running", vm.seen()))
            if not await _until(vm.taken, vm.resource.scheduling.max_run_duration.seconds or None):
                self.delete([member.name])
        vm.resource.status = "STOPPING"
        if vm.notice is not None:
            vm.due = time.time() + vm.notice
            self._tell(Event("notice", vm.seen()))
            await _until(vm.hurry, vm.notice)
        else:
            await asyncio.sleep(self.times.stop)
        member.vm = None
        vm.resource.status = "TERMINATED"
        self._tell(Event("gone", vm.seen()))

    def _make(self, name: str) -> Vm:
        wanted, host = self.template.properties, next(self._hosts)
        image = next((self._boot(disk.initialize_params.source_image) for disk in wanted.disks if disk.boot), "")
        address = f"10.{sum(self.resource.name.encode()) % 256}.{host // 250}.{host % 250}"
        return Vm(
            compute_v1.Instance(
                id=next(_ids),
                name=name,
                zone=self.resource.zone,
                status="PROVISIONING",
                creation_timestamp=stamp(time.time()),
                machine_type=f"{self.resource.zone}/machineTypes/{wanted.machine_type}",
                labels=wanted.labels,
                metadata=wanted.metadata,
                scheduling=wanted.scheduling,
                network_interfaces=[{"name": "nic0", "network_i_p": address}],
            ),
            image,
        )


def stamp(now: float) -> str:
    """2026-11-21T08:00:00.123+00:00"""
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")


async def _until(event: asyncio.Event, seconds: float | None) -> bool:
    """Whether the event came within so long; None: wait for it."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
