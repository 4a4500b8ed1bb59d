"""Pools of Google's Flex-start machines: their groups get machines by resize requests, which wait in Google's queue.

A request gets all its machines at once, or goes on waiting, at no cost. The group's target size grows as soon as the
request is made. The machines are not preempted, and end after the template's `max_run_duration`, at most a week.
https://cloud.google.com/compute/docs/instance-groups/about-resize-requests-mig
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from google.cloud import compute_v1

from spotrun.cloud.base import Instance, Problem
from spotrun.cloud.gcp.api import OPTIONS, Api
from spotrun.cloud.gcp.errors import kind_of, one_line, refusal
from spotrun.cloud.gcp.instances import epoch
from spotrun.errors import CredentialsError, QuotaError, StockoutError
from spotrun.spec import PoolSpec

_WAITING = {"CREATING", "ACCEPTED"}
_PAUSE = 300.0  # seconds after a request that failed until the next one
_MAKING = 60.0  # seconds that Google may take to make a request


@dataclass(frozen=True)
class Request:
    """A resize request of a group."""

    name: str  # its name
    machines: int  # how many machines it asks for
    state: Literal["waiting", "failed", "over"]  # over: it has got its machines, or was cancelled
    at: float  # epoch seconds when it was made
    code: str = ""  # Google's code of its error, or of what it waits for; empty if there is none
    message: str = ""  # Google's message with the code
    made: bool = True  # whether Google has made it; until then, the target size may lack its machines


@dataclass(frozen=True)
class Change:
    """How a group gets another size."""

    cancel: tuple[Request, ...]  # requests to cancel, the newest first
    ask: int = 0  # machines to request


class Queue:
    """The resize requests of groups. group: project, zone and name, as the requests of the API have them."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._asked: dict[str, tuple[str, float]] = {}  # by pool: the name of the last request, and when it was sent

    async def requests(self, pool: str, group: dict[str, str]) -> list[Request]:
        """All that Google keeps, the newest first."""
        wanted = compute_v1.ListInstanceGroupManagerResizeRequestsRequest(**group)
        found = await self._api.ask(
            f"resize requests of pool {pool}", lambda c: [request(each) for each in c.resizes.list(wanted, **OPTIONS)]
        )
        return sorted(found, key=lambda each: each.at, reverse=True)

    async def change(self, pool: str, group: dict[str, str], target: int, size: int) -> int:
        """Bring a group's target size to `size` by requests; the target size after that.

        The target size stays higher than `size` if too many machines exist. It stays as it is while Google makes the
        last request: this may take longer than a look at the cloud, and a second request would get machines too. After
        a request has failed, raises `CloudError` for some time instead of asking Google again.
        """
        known = await self.requests(pool, group)
        if self._is_making(pool, known):
            return target
        plan = plan_change(target, size, known)
        for each in plan.cancel:
            cancel = compute_v1.CancelInstanceGroupManagerResizeRequestRequest(**group, resize_request=each.name)
            await self._api.change(f"pool {pool}: cancel {each.name}", cancel, lambda c: c.resizes.cancel_unary)
        if plan.ask:
            last = known[0] if known else None
            if last is not None and last.state == "failed" and time.time() - last.at < _PAUSE:
                raise refusal(f"pool {pool}: the last request for machines", last.code, last.message)
            body = compute_v1.InstanceGroupManagerResizeRequest(
                name=f"{group['instance_group_manager']}-{uuid.uuid4().hex[:8]}", resize_by=plan.ask
            )
            insert = compute_v1.InsertInstanceGroupManagerResizeRequestRequest(
                **group, instance_group_manager_resize_request_resource=body
            )
            what = f"pool {pool}: request {plan.ask} machines"
            self._asked[pool] = body.name, time.time()
            try:
                await self._api.change(what, insert, lambda c: c.resizes.insert_unary)
            except (StockoutError, QuotaError, CredentialsError):
                del self._asked[pool]  # Google has refused it. After other errors, the request may have arrived.
                raise
        return target - sum(each.machines for each in plan.cancel) + plan.ask

    def _is_making(self, pool: str, known: Sequence[Request]) -> bool:
        """Whether Google may still make the last request for this pool."""
        now = time.time()
        name, at = self._asked.get(pool, ("", 0.0))
        unseen = now - at < _MAKING and all(each.name != name for each in known)
        return unseen or any(not each.made and now - each.at < _MAKING for each in known)


def plan_change(target: int, size: int, known: Sequence[Request]) -> Change:
    """Which requests to cancel, the newest first, and how many machines to request then.

    A request cannot be made smaller. So the one that is too large is cancelled, and the rest is requested again.
    """
    cancel: list[Request] = []
    for each in known:
        if target > size and each.state == "waiting":
            cancel.append(each)
            target -= each.machines
    return Change(tuple(cancel), max(0, size - target))


def diagnose(pool: PoolSpec, known: Sequence[Request], before: Sequence[Problem]) -> list[Problem]:
    """Why a flex pool is smaller than its size, or than the head wanted: what waits, and what failed last."""
    waiting = [each for each in known if each.state == "waiting"]
    last = known[0] if known else None
    what = f"{pool.market} {pool.machine}"
    if waiting:
        machines = sum(each.machines for each in waiting)
        text = f"the request for {machines} {what} waits for its turn in zone {pool.zone}"
        coded = next((each for each in waiting if each.code), None)
        if coded is None or kind_of(coded.code) == "stockout":
            found = Problem(pool.name, "queue", text, waiting[-1].at)
        else:
            found = Problem(pool.name, kind_of(coded.code), f"{text}: {coded.code}: {coded.message}", coded.at)
    elif last is not None and last.state == "failed" and time.time() - last.at < 2 * _PAUSE:
        text = f"the request for {last.machines} {what} failed: {last.code}: {last.message}"
        found = Problem(pool.name, kind_of(last.code), text, last.at)
    else:
        return []
    same = (each for each in before if (each.kind, each.message) == (found.kind, found.message))
    return [next(same, found)]


def dear(pool: PoolSpec, nodes: Sequence[Instance]) -> list[Problem]:
    """Whether a flex pool has machines that Google does not run as Flex-start machines: these cost the full price.

    An older Terraform provider is said to make such templates silently:
    https://github.com/hashicorp/terraform-provider-google/issues/24172
    """
    found = [node for node in nodes if (node.pool, node.state) == (pool.name, "running") and node.market != "flex"]
    if not found:
        return []
    names = ", ".join(f"{node.name} ({node.market})" for node in found)
    text = f"not Flex-start machines, at another price: {names}; remove the pool from the cluster file: docs/gcp.md"
    return [Problem(pool.name, "other", text, min(node.created for node in found))]


def request(found: compute_v1.InstanceGroupManagerResizeRequest) -> Request:
    """Google's description of a resize request as a `Request`."""
    status = found.status
    errors = [*status.error.errors, *status.last_attempt.error.errors]
    state: Literal["waiting", "failed", "over"] = "over"
    if found.state in _WAITING:
        state = "waiting"
    elif found.state == "FAILED":
        state = "failed"
    code, message = (errors[0].code, one_line(errors[0].message)) if errors else ("", "")
    at, made = epoch(found.creation_timestamp), found.state != "CREATING"
    return Request(found.name, found.resize_by, state, at, code, message, made)
