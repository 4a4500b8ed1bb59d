"""The `Cloud` protocol on AWS.

The head asks often, so each look takes few requests. For up to 50 pools and 1000 machines, these are three to Auto
Scaling and one to EC2. Each pool that lacks machines takes one more, and prices take one every few minutes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from spotrun.cloud.aws import activities, fault_injection, instances, quotas
from spotrun.cloud.aws.advice import Adviser
from spotrun.cloud.aws.api import Clients, ask, call
from spotrun.cloud.aws.errors import about, refusal
from spotrun.cloud.aws.instances import BLOCK, ScalingGroup
from spotrun.cloud.aws.prices import Prices
from spotrun.cloud.base import Advice, Ended, Instance, Problem, Shortfall
from spotrun.errors import CloudError
from spotrun.spec import ClusterSpec, names

if TYPE_CHECKING:
    from mypy_boto3_autoscaling.type_defs import ActivityTypeDef
    from mypy_boto3_ec2.type_defs import InstanceTypeDef

_GROUPS, _MACHINES, _ACTIVITIES = 50, 1000, 100  # the most that AWS gives at once
_BLOCKS_FOR = 600.0  # seconds to keep the ends of Capacity Blocks
_LATE = 600.0  # seconds; for so long a group may count a machine that was terminated
_LOOK_BACK = 900.0  # seconds; a new head counts launches that failed up to this long before its start
_BY_A_PERSON = "User suspended"  # the beginning of Auto Scaling's reason if a person has suspended a process
_GONE = "No managed instance found"  # Auto Scaling's message if a machine has already left its group
log = logging.getLogger(__name__)


class AwsCloud:
    """The `Cloud` protocol. A machine's name is its instance id.

    page: the most items in one answer; default: the most that AWS gives.
    """

    def __init__(self, cluster: ClusterSpec, page: int | None = None) -> None:
        self._cluster = cluster
        self._clients = Clients(cluster.region)
        self._page = page
        self._changing = threading.Lock()
        self._terminated: dict[str, float] = {}  # machines terminated here, and when by the monotonic clock
        self._ended: list[Ended] = []
        self._last_full: dict[str, float] = {}  # by pool: when it last had all its machines
        self._problems: dict[str, Problem] = {}
        self._blocks: dict[str, float] = {}  # epoch seconds when Capacity Blocks end, by reservation; 0: not known
        self._blocks_until = 0.0
        self._blocks_refused = False
        self._prices = Prices(cluster, self._clients, page or _MACHINES)
        self._adviser = Adviser(cluster, self._clients)

    async def nodes(self) -> list[Instance]:
        """Every machine of the cluster, also the head's, except machines that have ended."""
        return [machine for machine in await ask(self._known) if machine.state != "terminated"]

    async def ended(self) -> list[Ended]:
        """As in `Cloud`. Asks nothing: these are the machines that the last call of `nodes` has seen."""
        return self._ended

    async def sizes(self) -> dict[str, int]:
        return {pool: group.size for pool, group in (await ask(self._groups)).items() if pool != names.HEAD}

    async def resize(self, pool: str, size: int) -> None:
        """As in `Cloud`. Only size 0 ends live machines. Other sizes are raised to the number of live machines."""
        spec = self._cluster.pool(pool)
        if spec is None:
            known = ", ".join(sorted(each.name for each in self._cluster.pools))
            raise CloudError(f"there is no pool {pool!r} to resize; pools: {known}")
        if not 0 <= size <= spec.max:
            raise CloudError(f"pool {pool}: size {size} is not allowed; its cluster file says 0 to {spec.max}")
        try:
            await ask(self._resize, pool, size)
        except CloudError as error:
            raise about(f"pool {pool}: resize to {size}", error) from error

    async def remove(self, names: Sequence[str]) -> None:
        """As in `Cloud`. A machine that has already ended is skipped, and its pool keeps its size."""
        await ask(self._end, instances.removal, list(names))

    async def recreate(self, names: Sequence[str]) -> None:
        """As in `Cloud`. The new machine has another name. A machine that has already ended is skipped."""
        await ask(self._end, instances.replacement, list(names))

    async def preempt(self, name: str, notice: float | None = None) -> None:
        """As in `Cloud`. EC2's notice is 120 s long; see `fault_injection.interrupt` for others.

        `notice` 0 terminates any machine of the cluster at once, even an on-demand machine. Its group makes another.
        """
        if notice is not None and notice <= 0:
            return await self.recreate([name])
        known = await ask(self._known)
        machine = instances.find(name, known)
        if machine.market != "spot":
            raise CloudError(f"machine {name} is on-demand, and the cloud preempts only spot machines; kill it instead")
        if machine.state != "running":
            raise CloudError(f"machine {name} is {machine.state}; wait until it is running")
        group = (await ask(self._groups)).get(machine.pool)
        if group is None:
            raise CloudError(f"machine {name} is in pool {machine.pool}, which is no longer in the cluster file")
        await fault_injection.interrupt(self._clients, self._cluster.name, group.arn, name, notice)

    async def prices(self) -> dict[str, float]:
        """As in `Cloud`: spot prices from EC2, on-demand prices from the shipped table."""
        return await ask(self._prices.by_pool)

    async def advice(self) -> dict[str, Advice]:
        """As in `Cloud`, for spot pools. AWS is asked every ten minutes."""
        return await ask(self._adviser.advice)

    async def problems(self) -> list[Problem]:
        return await ask(self._find_problems)

    async def shortfalls(self) -> list[Shortfall]:
        return await ask(quotas.look, self._clients, self._cluster)

    async def close(self) -> None:
        await ask(self._clients.close)

    # What exists.

    def _groups(self) -> dict[str, ScalingGroup]:
        """The groups by pool, with the head's. Pools that Terraform has not made are absent."""
        pools = {names.group(self._cluster.name, p): p for p in (names.HEAD, *(p.name for p in self._cluster.pools))}
        wanted = list(pools)
        paginator = self._clients.autoscaling.get_paginator("describe_auto_scaling_groups")
        found: dict[str, ScalingGroup] = {}
        for first in range(0, len(wanted), _GROUPS):
            pages = paginator.paginate(
                AutoScalingGroupNames=wanted[first : first + _GROUPS],
                PaginationConfig={"PageSize": self._page or _GROUPS},
            )
            for page in pages:
                for said in page["AutoScalingGroups"]:
                    pool = pools[said["AutoScalingGroupName"]]
                    found[pool] = instances.group_of(pool, said)
        return found

    def _described(self) -> Iterator[InstanceTypeDef]:
        pages = self._clients.ec2.get_paginator("describe_instances").paginate(
            Filters=[{"Name": f"tag:{names.CLUSTER}", "Values": [self._cluster.name]}],
            PaginationConfig={"PageSize": self._page or _MACHINES},
        )
        for page in pages:
            for reservation in page["Reservations"]:
                yield from reservation["Instances"]

    def _known(self) -> list[Instance]:
        said = list(self._described())
        self._ended = instances.ended(self._cluster, said)
        return instances.instances(self._cluster, self._groups().values(), said, self._block_ends(said))

    def _block_ends(self, said: Iterable[InstanceTypeDef]) -> dict[str, float]:
        """When the Capacity Blocks of these machines end, by reservation. Blocks can be extended: AWS is asked again.

        Without an answer, the ends stay as they were known last, and the log says so once.
        """
        wanted = {each.get("CapacityReservationId", "") for each in said if each.get("InstanceLifecycle") == BLOCK}
        if wanted and (time.monotonic() >= self._blocks_until or wanted - self._blocks.keys()):
            self._blocks_until = time.monotonic() + _BLOCKS_FOR
            self._blocks = dict.fromkeys(wanted, 0.0) | self._blocks
            try:
                found = self._clients.ec2.describe_capacity_reservations(CapacityReservationIds=sorted(wanted))
                for each in found["CapacityReservations"]:
                    if "EndDate" in each and "CapacityReservationId" in each:
                        self._blocks[each["CapacityReservationId"]] = each["EndDate"].timestamp()
            except (ClientError, BotoCoreError) as error:
                if not self._blocks_refused:
                    log.warning("AWS does not say when the Capacity Blocks end: %s", refusal(error))
                self._blocks_refused = True
        return self._blocks

    # Changes.

    def _end(self, rule: instances.Rule, asked: list[str]) -> None:
        """Have groups terminate machines. Tries all of them, then raises the last refusal."""
        with self._changing:
            groups = list(self._groups().values())
            known = instances.instances(self._cluster, groups, self._described())
            leaving = rule(asked, groups, known, self._still_listed(groups))
            refused: CloudError | None = None
            for name, lower in leaving.terminate:
                try:
                    call(self._terminate, name, lower)
                except CloudError as error:
                    refused = about(f"machine {name}", error)
            for name in leaving.unknown:
                refused = instances.no_machine(name, known)
            for name in leaving.ungrouped:
                refused = CloudError(f"machine {name} runs but is in no group of the cluster: terminate it by hand")
            if refused:
                raise refused

    def _resize(self, pool: str, size: int) -> None:
        with self._changing:
            groups = self._groups()
            group = groups.get(pool)
            if group is None or size == 0 or size >= group.size:
                return self._set_size(pool, size)
            known = instances.instances(self._cluster, [group], self._described())
            lowering = instances.lowering(size, group, known, self._still_listed(groups.values()))
            for name in lowering.terminate:
                self._terminate(name, lower=True)
            if lowering.size is not None:
                self._set_size(pool, lowering.size)

    def _set_size(self, pool: str, size: int) -> None:
        self._clients.autoscaling.set_desired_capacity(
            AutoScalingGroupName=names.group(self._cluster.name, pool), DesiredCapacity=size, HonorCooldown=False
        )

    def _terminate(self, name: str, lower: bool) -> None:
        try:
            self._clients.autoscaling.terminate_instance_in_auto_scaling_group(
                InstanceId=name, ShouldDecrementDesiredCapacity=lower
            )
        except ClientError as error:
            if _GONE not in error.response["Error"]["Message"]:
                raise
            log.info("%s has already left its group", name)
        self._terminated[name] = time.monotonic()

    def _still_listed(self, groups: Iterable[ScalingGroup]) -> AbstractSet[str]:
        """Machines terminated here lately that groups still list. One that a group counts for long has not ended."""
        listed, since = {name for group in groups for name in group.members}, time.monotonic() - _LATE
        self._terminated = {n: at for n, at in self._terminated.items() if n in listed and at > since}
        return self._terminated.keys()

    # Problems.

    def _find_problems(self) -> list[Problem]:
        groups, now = self._groups(), time.time()
        found: dict[str, Problem] = {}
        for pool in self._cluster.pools:
            group, last = groups.get(pool.name), self._problems.get(pool.name)
            if group is None:
                missing = names.group(self._cluster.name, pool.name)
                text = f"there is no Auto Scaling group {missing}; `make up` makes it"
                found[pool.name] = Problem(pool.name, "other", text, last.at if last else now)
                continue
            if len(group.counted) >= group.size:
                self._last_full[pool.name] = now
                continue
            since = self._last_full.setdefault(pool.name, now - _LOOK_BACK)
            group = self._resumed(group)
            problem = activities.problem(pool, group, self._activities(group.name), since, now, last)
            if problem is not None:
                found[pool.name] = problem
        self._problems = found
        return list(found.values())

    def _resumed(self, group: ScalingGroup) -> ScalingGroup:
        """The group, which launches machines again if AWS has stopped that: it does so after a day without success.

        https://docs.aws.amazon.com/autoscaling/ec2/userguide/as-suspend-resume-processes.html
        """
        if group.suspended is None or group.suspended.startswith(_BY_A_PERSON):
            return group
        try:
            call(
                lambda: self._clients.autoscaling.resume_processes(
                    AutoScalingGroupName=group.name, ScalingProcesses=["Launch"]
                )
            )
        except CloudError as error:
            log.warning("%s", error)
            return group
        return replace(group, suspended=None)

    def _activities(self, group: str) -> Iterator[ActivityTypeDef]:
        """Newest first. Each page is requested when it is needed, because AWS keeps six weeks of activities."""
        pages = self._clients.autoscaling.get_paginator("describe_scaling_activities").paginate(
            AutoScalingGroupName=group, PaginationConfig={"PageSize": self._page or _ACTIVITIES}
        )
        for page in pages:
            yield from page["Activities"]
