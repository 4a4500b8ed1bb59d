"""AWS's groups and instances, translated into pools and machines. Pure.

Two services answer, each with a delay. Auto Scaling knows which machines a group counts. EC2 knows what a machine is
and whether it runs. A machine is listed if either service has it, unless EC2 says that it has ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING

from spotrun.cloud.base import Ended, Instance, State
from spotrun.errors import CloudError
from spotrun.spec import ClusterSpec, names

if TYPE_CHECKING:
    from mypy_boto3_autoscaling.type_defs import AutoScalingGroupTypeDef
    from mypy_boto3_ec2.type_defs import InstanceTypeDef

# EC2's states: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-lifecycle.html. A stopped machine
# never comes back: a group's spot requests are one-time, and the group replaces machines that do not run.
_STATES: dict[str, State] = {
    "pending": "provisioning",
    "running": "running",
    "shutting-down": "stopping",
    "stopping": "stopping",
    "stopped": "stopping",
    "terminated": "terminated",
}
# A group no longer counts a member whose lifecycle state begins with one of these words.
# https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-lifecycle.html
_LEAVING = ("Terminat", "Detach")
# Seconds before the end of a Capacity Block, when AWS ends its machines.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-blocks.html
_BLOCK_ENDS = 1800.0
# The time in a machine's `StateTransitionReason`: `User initiated (2026-11-22 10:15:00 GMT)`.
_ENDED = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)$")
BLOCK = "capacity-block"  # EC2's lifecycle of a Capacity Block's machines


@dataclass(frozen=True)
class ScalingGroup:
    """A pool's Auto Scaling group."""

    pool: str  # the pool's name
    name: str  # the group's name
    arn: str  # the group's ARN
    zones: str  # the names of its zones, separated by commas
    size: int  # the desired capacity
    min: int  # the least capacity
    members: Mapping[str, str]  # lifecycle states by instance id
    suspended: str | None = None  # why the group launches no machines; None if it launches machines
    placed: bool = False  # whether its machines are in a placement group

    @property
    def counted(self) -> list[str]:
        """Ids of the machines that fill the group's size."""
        return [name for name, state in self.members.items() if not state.startswith(_LEAVING)]


@dataclass(frozen=True)
class Departures:
    """Machines that should end."""

    terminate: tuple[tuple[str, bool], ...]
    """The machines that their groups should terminate. With each: whether its group's size gets lower by one."""
    ungrouped: tuple[str, ...] = ()  # machines that run but are in no group
    unknown: tuple[str, ...] = ()  # names that no machine has


@dataclass(frozen=True)
class Lowering:
    """How to lower a group's size."""

    terminate: tuple[str, ...] = ()  # dead members to terminate; each of them lowers the size by one
    size: int | None = None  # the size to set after that; None: set no size


# `removal` or `replacement`. Arguments: asked, groups, known, terminated.
Rule = Callable[[Sequence[str], Sequence[ScalingGroup], Sequence[Instance], AbstractSet[str]], Departures]


def group_of(pool: str, said: AutoScalingGroupTypeDef) -> ScalingGroup:
    suspended = {each.get("ProcessName", ""): each.get("SuspensionReason", "") for each in said["SuspendedProcesses"]}
    return ScalingGroup(
        pool=pool,
        name=said["AutoScalingGroupName"],
        arn=said.get("AutoScalingGroupARN", ""),
        zones=",".join(said["AvailabilityZones"]),
        size=said["DesiredCapacity"],
        min=said["MinSize"],
        members={member["InstanceId"]: member["LifecycleState"] for member in said.get("Instances", [])},
        suspended=suspended.get("Launch"),
        placed=bool(said.get("PlacementGroup")),
    )


def instances(
    cluster: ClusterSpec,
    groups: Iterable[ScalingGroup],
    said: Iterable[InstanceTypeDef],
    blocks: Mapping[str, float] = MappingProxyType({}),
) -> list[Instance]:
    """The machines that exist or are being made, and machines that have ended (state `terminated`).

    blocks: epoch seconds when Capacity Blocks end, by the ids of their reservations.
    """
    member_of = {name: group for group in groups for name in group.members}
    found: dict[str, Instance] = {}
    for machine in said:
        tags = {tag["Key"]: tag["Value"] for tag in machine.get("Tags", [])}
        if tags.get(names.CLUSTER) != cluster.name or not tags.get(names.POOL):
            continue
        name = machine["InstanceId"]
        state = _STATES.get(machine["State"]["Name"], "stopping")
        group = member_of.get(name)
        if group and state in ("provisioning", "running") and group.members[name].startswith(_LEAVING):
            state = "stopping"
        found[name] = Instance(
            name=name,
            pool=tags[names.POOL],
            zone=machine["Placement"]["AvailabilityZone"],
            address=machine.get("PrivateIpAddress", ""),
            state=state,
            market="spot" if machine.get("InstanceLifecycle") == "spot" else "on-demand",
            created=machine["LaunchTime"].timestamp(),
            id=name,
            ends=max(0.0, blocks.get(machine.get("CapacityReservationId", ""), 0.0) - _BLOCK_ENDS),
        )
    for name, group in member_of.items():
        if name not in found and name in group.counted:
            # EC2 does not list the machine yet, so its time of creation is unknown. With a later time
            # than 0, the head would conclude that the machine is the successor of another one.
            spec = cluster.pool(group.pool)
            market = spec.market if spec else "on-demand"
            found[name] = Instance(name, group.pool, group.zones, "", "provisioning", market, 0.0, name)
    return sorted(found.values(), key=lambda machine: (machine.pool, machine.created, machine.name))


def ended(cluster: ClusterSpec, said: Iterable[InstanceTypeDef]) -> list[Ended]:
    """The terminated machines of which EC2 says when it began to end them: from then on they cost nothing.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-lifecycle.html
    """
    found = []
    for machine in said:
        tags = {tag["Key"]: tag["Value"] for tag in machine.get("Tags", [])}
        at = _ENDED.search(machine.get("StateTransitionReason", ""))
        if tags.get(names.CLUSTER) == cluster.name and at and machine["State"]["Name"] == "terminated":
            created = machine["LaunchTime"].timestamp()
            until = datetime.strptime(at[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
            found.append(Ended(machine["InstanceId"], tags.get(names.POOL, ""), created, created, max(created, until)))
    return found


def removal(
    asked: Sequence[str], groups: Sequence[ScalingGroup], known: Sequence[Instance], terminated: AbstractSet[str]
) -> Departures:
    """The machines to terminate so that each of `asked` ends, and lowers its pool's size by one.

    terminated: machines that were terminated before, and that their groups may still count. A machine that its group no
    longer counts is skipped. The group replaces such a machine, so the size stays. A machine may vanish between two
    lists. So an unknown name must not keep the other machines, which cost money. Raises `CloudError` for the head.
    """
    by_name = {machine.name: machine for machine in known}
    machines = [by_name[name] for name in asked if name in by_name]
    if any(machine.pool == names.HEAD for machine in machines):
        raise CloudError("the head cannot be removed; `make down` ends the cluster")
    member_of = {name: group for group in groups for name in group.counted}
    sizes = {group.pool: group.size for group in member_of.values()}
    found: list[tuple[str, bool]] = []
    for name in dict.fromkeys(machine.name for machine in machines):
        group = member_of.get(name)
        if group is None or name in terminated:
            continue
        # A group refuses a size below its least size.
        lower = sizes[group.pool] > group.min
        sizes[group.pool] -= lower
        found.append((name, lower))
    unknown = tuple(name for name in asked if name not in by_name)
    return Departures(tuple(found), _ungrouped(machines, member_of, terminated), unknown)


def replacement(
    asked: Sequence[str], groups: Sequence[ScalingGroup], known: Sequence[Instance], terminated: AbstractSet[str]
) -> Departures:
    """The machines to terminate so that each of `asked` is replaced. Raises `CloudError` for unknown names."""
    machines = _named(asked, known)
    member_of = {name: group for group in groups for name in group.counted}
    wanted = [name for name in dict.fromkeys(machine.name for machine in machines) if name in member_of]
    return Departures(
        tuple((name, False) for name in wanted if name not in terminated), _ungrouped(machines, member_of, terminated)
    )


def lowering(size: int, group: ScalingGroup, known: Sequence[Instance], terminated: AbstractSet[str]) -> Lowering:
    """How to lower a group to `size` without terminating a live machine. Size 0 terminates all machines.

    If a group's size is set below the number of its members, the group chooses which member to end. A member that
    died a moment ago still counts as a member. So dead members are removed by name, and the size is never set below the
    number of members that stay. Leaving members count as members that stay, because AWS's guide does not say that a
    group leaves them out.

    terminated: as in `removal`.
    """
    if size >= group.size or size == 0:
        return Lowering((), size)
    ended = {machine.name for machine in known if machine.state in ("stopping", "terminated")}
    dead = [name for name in group.counted if name in ended and name not in terminated]
    removed = tuple(dead[: group.size - size])
    least = max(size, len(group.members) - len(removed))
    return Lowering(removed, least if least < group.size - len(removed) else None)


def find(name: str, known: Sequence[Instance]) -> Instance:
    """The machine of this name. If there is none, raises `CloudError` with a list of the machines."""
    return _named([name], known)[0]


def no_machine(name: str, known: Sequence[Instance]) -> CloudError:
    """The exception for a name that no machine has, with a list of the machines."""
    alive = sorted(machine.name for machine in known if machine.state != "terminated")
    return CloudError(f"there is no machine {name!r}; machines: {', '.join(alive) or 'none'}")


def _named(asked: Sequence[str], known: Sequence[Instance]) -> list[Instance]:
    by_name = {machine.name: machine for machine in known}
    for name in asked:
        if name not in by_name:
            raise no_machine(name, known)
    return [by_name[name] for name in asked]


def _ungrouped(
    machines: Sequence[Instance], member_of: Mapping[str, ScalingGroup], terminated: AbstractSet[str]
) -> tuple[str, ...]:
    return tuple(
        m.name for m in machines if m.state == "running" and m.name not in member_of and m.name not in terminated
    )
