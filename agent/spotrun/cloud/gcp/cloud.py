"""The `Cloud` protocol on Google Compute Engine.

`preempt` with notice calls `simulateMaintenanceEvent`. This is Google's own way to test a preemption
(https://cloud.google.com/compute/docs/instances/simulating-host-maintenance). The metadata server gives notice. The
spot machine ends within 30 s, or after the pool's `notice`. Google offers no other length of notice.

`preempt` without notice calls `instances.delete`. Google then presses the machine's power button without notice.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TypeVar

from google.cloud import compute_v1

from spotrun.cloud import prices
from spotrun.cloud.base import Advice, Ended, Instance, Problem, Shortfall
from spotrun.cloud.gcp import flex, quotas
from spotrun.cloud.gcp.advice import Adviser
from spotrun.cloud.gcp.api import OPTIONS, Api
from spotrun.cloud.gcp.instances import (
    Failure,
    Member,
    Repair,
    diagnose,
    failure,
    instance,
    member,
    repairs,
    under_repair,
)
from spotrun.errors import CloudError, GoneError, PartialError
from spotrun.spec import ClusterSpec, PoolSpec
from spotrun.spec.names import CLUSTER, HEAD, group
from spotrun.spec.notices import GCE_NOTICE

T = TypeVar("T")

_AT_ONCE = 1000  # machines that one request may name


class GcpCloud:
    """The machines of a cluster in Google Cloud. Methods accept a machine's name or id, and `head`."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster
        self.api = Api(cluster.project or "")
        self._zones = {HEAD: cluster.head.zone, **{pool.name: pool.zone for pool in cluster.pools}}
        self._problems: dict[str, list[Problem]] = {}
        self._adviser = Adviser(cluster, self.api)
        self._queue = flex.Queue(self.api)
        # Requests for flex machines say how many more. Two changes at once would both count the same missing machine.
        self._changing = {pool: asyncio.Lock() for pool in self._zones}
        self._listed: dict[str, list[Instance]] = {}  # by zone: the machines of the last answer
        self._repairs: dict[str, list[Repair]] = {}  # by zone: those whose hosts were repaired then

    async def nodes(self) -> list[Instance]:
        # Zone by zone: an aggregated list silently omits zones that Google cannot reach at the moment.
        zones = sorted(set(self._zones.values()))
        found, silent = await _ask_each({zone: self._nodes_in(zone) for zone in zones})
        known = sorted((each for part in found.values() for each in part), key=lambda each: each.name)
        if silent:
            raise PartialError(known, {p: str(silent[zone]) for p, zone in self._zones.items() if zone in silent})
        return known

    async def sizes(self) -> dict[str, int]:
        """As in `Cloud`. Pools that Terraform has not made are left out."""
        found, silent = await _ask_each({pool.name: self._size_if_any(pool.name) for pool in self.cluster.pools})
        known = {name: size for name, size in found.items() if size is not None}
        if silent:
            raise PartialError(known, {name: str(error) for name, error in silent.items()})
        return known

    async def ended(self) -> list[Ended]:
        """As in `Cloud`. Always empty, because Google Cloud forgets a deleted machine."""
        return []

    async def resize(self, pool: str, size: int) -> None:
        """As in `Cloud`. Only size 0 ends live machines. Other sizes are raised to the number of live machines."""
        most = self._pool(pool).max
        if not 0 <= size <= most:
            raise CloudError(f"pool {pool}: size {size} is not allowed; its cluster file says 0 to {most}")
        if self._is_flex(pool):
            async with self._changing[pool]:
                if await self._queue_for(pool, size) == size or size:
                    return
        elif size and await self._lower(pool, size):
            return
        request = compute_v1.ResizeInstanceGroupManagerRequest(**self._group(pool), size=size)
        await self.api.change(f"pool {pool}: resize to {size}", request, lambda c: c.groups.resize_unary)

    async def remove(self, names: Sequence[str]) -> None:
        by_pool, problem = await self._find_members(names)
        if HEAD in by_pool:
            raise CloudError("the head cannot be removed; `make down` ends the cluster")
        await asyncio.gather(*(self._remove(pool, [m.name for m in members]) for pool, members in by_pool.items()))
        if problem:  # one that cannot be removed must not keep the others, which cost money
            raise problem

    async def recreate(self, names: Sequence[str]) -> None:
        by_pool, problem = await self._find_members(names)
        if problem:
            raise problem
        wanted = {pool: [m.name for m in members if m.replaceable] for pool, members in by_pool.items()}
        await asyncio.gather(*(self._replace(pool, each) for pool, each in wanted.items() if each))

    async def preempt(self, name: str, notice: float | None = None) -> None:
        """As in `Cloud`. `notice` 0 kills any machine. Any other `notice` must be the pool's usual one."""
        if notice is not None and notice <= 0:
            return await self.kill(name)
        node = await self._find(name)
        pool = self.cluster.pool(node.pool)
        usual = (pool.notice if pool else None) or GCE_NOTICE
        if notice not in (None, usual):
            raise CloudError(f"notice {notice:g} is not possible: Google gives {usual:g} s of notice, or none (0)")
        if node.market != "spot":
            what = f"machine {node.name} is {node.market}"
            raise CloudError(f"{what}, and the cloud preempts only spot machines; kill it instead")
        if node.state == "stopping":
            return
        if node.state != "running":
            raise CloudError(f"machine {node.name} is {node.state}; wait until it is running")
        request = compute_v1.SimulateMaintenanceEventInstanceRequest(**self._machine(node))
        what = f"machine {node.name}: preempt"
        await self.api.change(what, request, lambda c: c.instances.simulate_maintenance_event_unary)

    async def kill(self, name: str) -> None:
        """Delete a machine without notice. Its group makes a new one. Returns before the machine has ended."""
        node = await self._find(name)
        if node.state == "terminated":
            raise CloudError(f"machine {node.name} is terminated already")
        request = compute_v1.DeleteInstanceRequest(**self._machine(node), no_graceful_shutdown=True)
        await self.api.change(f"machine {node.name}: kill", request, lambda c: c.instances.delete_unary)

    async def prices(self) -> dict[str, float]:
        """As in `Cloud`. Prices are from the table that spotrun ships. Pools without a price there are left out.

        The table has no prices of flex machines. The on-demand price counts, which is the most that they cost.
        """
        found = {pool.name: _price(pool) for pool in self.cluster.pools}
        return {name: price for name, price in found.items() if price is not None}

    async def advice(self) -> dict[str, Advice]:
        """As in `Cloud`, for spot pools. Google is asked every ten minutes."""
        return await self._adviser.advice()

    async def problems(self) -> list[Problem]:
        found, silent = await _ask_each({pool.name: self._problems_of(pool) for pool in self.cluster.pools})
        known = found | {name: self._problems.get(name, []) for name in silent}
        flexible = (pool for pool in self.cluster.pools if pool.market == "flex")
        dear = {pool.name: flex.dear(pool, self._listed.get(pool.zone, [])) for pool in flexible}
        for pool in self.cluster.pools:
            repaired = under_repair(pool, self._repairs.get(pool.zone, ()))
            known[pool.name] = known[pool.name] + dear.get(pool.name, []) + repaired
        return [problem for pool in self.cluster.pools for problem in known[pool.name]]

    async def shortfalls(self) -> list[Shortfall]:
        """As in `Cloud`, and for the head's machine too. Compares the quotas of the project and of the region."""
        region = compute_v1.GetRegionRequest(project=self.api.project, region=self.cluster.region)
        project = compute_v1.GetProjectRequest(project=self.api.project)
        regional, general, nodes = await asyncio.gather(
            self.api.ask(f"quotas of {region.region}", lambda c: quotas.read(c.regions.get(region, **OPTIONS).quotas)),
            self.api.ask("quotas of the project", lambda c: quotas.read(c.projects.get(project, **OPTIONS).quotas)),
            self.nodes(),
        )
        running = Counter(node.pool for node in nodes if node.state != "terminated")
        return quotas.compare(self.cluster, {**regional, **general}, running)

    async def close(self) -> None:
        await self.api.close()

    # Requests to Google.

    async def _nodes_in(self, zone: str) -> list[Instance]:
        request = compute_v1.ListInstancesRequest(
            project=self.api.project, zone=zone, filter=f"labels.{CLUSTER} = {self.cluster.name}"
        )
        found = await self.api.ask(
            f"machines in {zone}",
            lambda c: [(instance(each), each.status) for each in c.instances.list(request, **OPTIONS)],
        )
        self._repairs[zone] = repairs(found, self._repairs.get(zone, ()), time.time())
        # Google replaces no flex machine that has ended: see `_size`.
        ended = ("flex", "terminated")
        there = self._listed[zone] = [each for each, _ in found if (each.market, each.state) != ended]
        return there

    async def _size_if_any(self, pool: str) -> int | None:
        try:
            return await self._size(pool)
        except GoneError:
            return None

    async def _size(self, pool: str) -> int:
        """The target size, without flex machines that have ended: their group counts them, and replaces none."""
        target = await self._target(pool)
        return target - len(await self._ended(pool)) if target and self._is_flex(pool) else target

    async def _target(self, pool: str) -> int:
        request = compute_v1.GetInstanceGroupManagerRequest(**self._group(pool))
        return await self.api.ask(f"pool {pool}", lambda c: c.groups.get(request, **OPTIONS).target_size)

    async def _ended(self, pool: str) -> list[str]:
        """Flex machines that have stopped for ever, or that Google has deleted, such as at the end of their time."""
        members = await self._members(pool)
        return [each.name for each in members if each.action == "NONE" and (each.ended or not each.there)]

    async def _queue_for(self, pool: str, size: int) -> int:
        """Give a flex pool this size, as far as resize requests can. Returns the size that it has afterwards."""
        ended = await self._ended(pool)
        left = max(0, await self._target(pool) - len(ended))
        if ended:  # the group may list them for some time after that, so it is not asked again
            await self._delete(pool, ended)
        return await self._queue.change(pool, self._group(pool), left, size)

    async def _replace(self, pool: str, names: Sequence[str]) -> None:
        """Have machines replaced. A flex pool requests other machines, and is smaller until these come."""
        if not self._is_flex(pool):
            return await self._recreate(pool, names)
        async with self._changing[pool]:
            size = await self._size(pool)
            await self._delete(pool, names)
            await self._queue_for(pool, size)

    async def _members(self, pool: str) -> list[Member]:
        request = compute_v1.ListManagedInstancesInstanceGroupManagersRequest(**self._group(pool))
        return await self.api.ask(
            f"machines of pool {pool}",
            lambda c: [member(each) for each in c.groups.list_managed_instances(request, **OPTIONS)],
        )

    async def _failures(self, pool: str) -> list[Failure]:
        request = compute_v1.ListErrorsInstanceGroupManagersRequest(**self._group(pool))
        return await self.api.ask(
            f"errors of pool {pool}", lambda c: [failure(each) for each in c.groups.list_errors(request, **OPTIONS)]
        )

    async def _problems_of(self, pool: PoolSpec) -> list[Problem]:
        if pool.market == "flex":
            known = await self._queue.requests(pool.name, self._group(pool.name))
            queued = self._problems[pool.name] = flex.diagnose(pool, known, self._problems.get(pool.name, ()))
            return queued
        try:
            members = await self._members(pool.name)
        except GoneError as error:  # one missing group must not hide the others
            last = self._problems.get(pool.name) or [Problem(pool.name, "other", str(error), time.time())]
            self._problems[pool.name] = last
            return last
        short = any(each.pending for each in members)
        failures = await self._failures(pool.name) if short else []
        before = self._problems.get(pool.name, ())
        placed = bool(self.cluster.network.placement)
        found = self._problems[pool.name] = diagnose(pool, members, failures, before, time.time(), placed)
        return found

    async def _lower(self, pool: str, size: int) -> bool:
        """Delete machines that do not exist yet, until the pool has `size` machines or no such machine is left.

        Returns whether the pool was larger. Machines that the head did not see may run by now. So the size is not set:
        Google would choose which machines end.
        """
        surplus = await self._size(pool) - size
        if surplus <= 0:
            return False
        pending = [each.name for each in await self._members(pool) if each.pending]
        if pending:
            await self._delete(pool, pending[:surplus])
        return True

    async def _remove(self, pool: str, names: Sequence[str]) -> None:
        async with self._changing[pool]:
            await self._delete(pool, names)

    async def _delete(self, pool: str, names: Sequence[str]) -> None:
        for urls in _urls(self._zones[pool], names):
            body = compute_v1.InstanceGroupManagersDeleteInstancesRequest(
                instances=urls,
                skip_instances_on_validation_error=True,  # one that is already being deleted must not stop the others
            )
            request = compute_v1.DeleteInstancesInstanceGroupManagerRequest(
                **self._group(pool), instance_group_managers_delete_instances_request_resource=body
            )
            what = f"pool {pool}: remove {', '.join(names)}"
            await self.api.change(what, request, lambda c: c.groups.delete_instances_unary)

    async def _recreate(self, pool: str, names: Sequence[str]) -> None:
        for urls in _urls(self._zones[pool], names):
            body = compute_v1.InstanceGroupManagersRecreateInstancesRequest(instances=urls)
            request = compute_v1.RecreateInstancesInstanceGroupManagerRequest(
                **self._group(pool), instance_group_managers_recreate_instances_request_resource=body
            )
            what = f"pool {pool}: recreate {', '.join(names)}"
            await self.api.change(what, request, lambda c: c.groups.recreate_instances_unary)

    # Names, and what they stand for.

    def _is_flex(self, pool: str) -> bool:
        spec = self.cluster.pool(pool)
        return spec is not None and spec.market == "flex"

    def _group(self, pool: str) -> dict[str, str]:
        name = group(self.cluster.name, pool)
        return {"project": self.api.project, "zone": self._zones[pool], "instance_group_manager": name}

    def _machine(self, node: Instance) -> dict[str, str]:
        return {"project": self.api.project, "zone": node.zone, "instance": node.name}

    def _pool(self, name: str) -> PoolSpec:
        pool = self.cluster.pool(name)
        if pool is None:
            known = ", ".join(sorted(pool.name for pool in self.cluster.pools))
            raise CloudError(f"there is no pool {name!r} to resize; pools: {known}")
        return pool

    async def _find(self, name: str) -> Instance:
        silent: CloudError | None = None
        try:
            nodes = await self.nodes()
        except PartialError as error:
            nodes, silent = error.known, error
        found = next((n for n in nodes if name in (n.name, n.id) or name == n.pool == HEAD), None)
        if found is None:
            raise silent or _unknown(name, (node.name for node in nodes))
        return found

    async def _find_members(self, names: Sequence[str]) -> tuple[dict[str, list[Member]], CloudError | None]:
        """The group members with these names, by pool, and what is wrong with the first name that no group has.

        Groups list machines before they exist. `nodes` does not.
        """
        known, silent = await _ask_each({pool: self._members(pool) for pool in self._zones})
        found: dict[str, list[Member]] = {}
        missing = []
        for name in names:
            each = next(((p, m) for p in known for m in known[p] if name in (m.name, m.id) or name == p == HEAD), None)
            if each is None:
                missing.append(name)
            else:
                found.setdefault(each[0], []).append(each[1])
        if not missing:
            return found, None
        if silent:  # the machine may be there
            return found, next(iter(silent.values()))
        return found, await self._no_member(missing[0], [m.name for members in known.values() for m in members])

    async def _no_member(self, name: str, members: Sequence[str]) -> CloudError:
        try:
            node = await self._find(name)
        except CloudError:
            return _unknown(name, members)
        return CloudError(f"machine {node.name} is {node.state} but is in no group of the cluster: delete it by hand")


async def _ask_each(questions: Mapping[str, Awaitable[T]]) -> tuple[dict[str, T], dict[str, CloudError]]:
    """The answers, and the `CloudError` of each question that failed with one.

    If every question failed, raises the first error. Raises every error that is not a `CloudError`.
    """
    said = dict(zip(questions, await asyncio.gather(*questions.values(), return_exceptions=True), strict=True))
    failed = {name: each for name, each in said.items() if isinstance(each, CloudError)}
    found: dict[str, T] = {}
    for name, each in said.items():
        if isinstance(each, BaseException):
            if name not in failed or len(failed) == len(said):
                raise each
        else:
            found[name] = each
    return found, failed


def _unknown(name: str, known: Iterable[str]) -> CloudError:
    return CloudError(f"there is no machine {name!r}; machines: {', '.join(sorted(known)) or 'none'}")


def _urls(zone: str, names: Sequence[str]) -> Iterable[list[str]]:
    urls = [f"zones/{zone}/instances/{name}" for name in names]
    return (urls[start : start + _AT_ONCE] for start in range(0, len(urls), _AT_ONCE))


def _price(pool: PoolSpec) -> float | None:
    look = prices.spot if pool.market == "spot" else prices.on_demand
    attached = pool.accelerator
    return look("gcp", pool.zone, pool.machine, attached.type if attached else "", attached.count if attached else 0)
