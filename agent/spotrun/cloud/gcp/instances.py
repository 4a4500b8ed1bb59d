"""Translates Google's machines and groups into our words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from google.cloud import compute_v1

from spotrun.cloud.base import NEAR, Instance, Problem, State
from spotrun.cloud.gcp.errors import Kind, kind_of, one_line
from spotrun.spec import PoolSpec
from spotrun.spec.names import POOL

# https://cloud.google.com/compute/docs/instances/instance-lifecycle
STATES: dict[str, State] = {
    "PENDING": "provisioning",
    "PROVISIONING": "provisioning",
    "STAGING": "provisioning",
    "RUNNING": "running",
    "REPAIRING": "stopping",  # its host failed, and nothing runs there until the repair
    "PENDING_STOP": "stopping",
    "STOPPING": "stopping",
    "SUSPENDING": "stopping",
    "DEPROVISIONING": "stopping",
    "STOPPED": "terminated",
    "SUSPENDED": "terminated",
    "TERMINATED": "terminated",
}
_LEAVING = {"DELETING", "ABANDONING"}
_MAKING = {"CREATING", "CREATING_WITHOUT_RETRIES", "RECREATING"}
_PREEMPTIBLE_RUN = 86400  # seconds. https://cloud.google.com/compute/docs/instances/preemptible
_RECENT = 600.0  # seconds; a group keeps its errors for longer, but old ones say nothing about the present


@dataclass(frozen=True)
class Member:
    """An entry of a group: a machine that the group has or wants."""

    name: str  # the machine's name
    id: str  # the machine's id; empty if there is no machine
    there: bool  # whether the machine exists at this moment
    action: str  # what the group does with it
    errors: tuple[tuple[str, str], ...] = ()  # code and message of each error of the last attempt
    ended: bool = False  # whether the machine exists, and has stopped for ever

    @property
    def pending(self) -> bool:
        """Whether the group wants the machine, and it does not exist yet."""
        return not self.there and self.action not in _LEAVING

    @property
    def replaceable(self) -> bool:
        """Whether the machine exists, and is not being replaced or removed."""
        return self.there and self.action not in _LEAVING | _MAKING


@dataclass(frozen=True)
class Failure:
    """An error from a group's record."""

    name: str  # the machine's name
    code: str  # Google's code
    message: str  # Google's message
    at: float  # epoch seconds


@dataclass(frozen=True)
class Repair:
    """A machine whose host Google repairs."""

    name: str  # the machine's name
    pool: str  # its pool
    since: float  # epoch seconds when the repair was first seen


def instance(found: compute_v1.Instance) -> Instance:
    """A machine of the cluster, for the protocol. Its label names its pool."""
    model = found.scheduling.provisioning_model
    spot = model == "SPOT" or found.scheduling.preemptible
    return Instance(
        name=found.name,
        pool=found.labels.get(POOL, ""),
        zone=found.zone.rpartition("/")[2],
        address=found.network_interfaces[0].network_i_p if found.network_interfaces else "",
        state=STATES.get(found.status, "provisioning"),
        market="spot" if spot else "flex" if model == "FLEX_START" else "on-demand",
        created=epoch(found.creation_timestamp),
        id=str(found.id),
        ends=_end(found),
    )


def member(found: compute_v1.ManagedInstance) -> Member:
    return Member(
        name=found.name or found.instance.rpartition("/")[2],
        id=str(found.id) if found.id else "",
        there=bool(found.instance_status),
        action=found.current_action,
        ended=STATES.get(found.instance_status) == "terminated",
        errors=tuple((error.code, error.message) for error in found.last_attempt.errors.errors),
    )


def failure(found: compute_v1.InstanceManagedByIgmError) -> Failure:
    name = found.instance_action_details.instance.rpartition("/")[2]
    return Failure(name, found.error.code, found.error.message, epoch(found.timestamp))


def diagnose(
    pool: PoolSpec,
    members: Sequence[Member],
    failures: Sequence[Failure],
    before: Sequence[Problem],
    now: float,
    placed: bool = False,
) -> list[Problem]:
    """Why a pool is smaller than its size; empty if it has its size.

    failures: the group's record. before: the pool's problems at the last look. They stay while machines are missing,
    because between two attempts Google does not repeat the last error. placed: network.placement is true.
    """
    missing = {each.name: each for each in members if each.pending}
    if not missing:
        return []
    past = [each for each in failures if each.name in missing and now - each.at < _RECENT]
    said = [error for each in missing.values() for error in each.errors] + [(f.code, f.message) for f in past]
    found: dict[Kind, Problem] = {}
    for code, message in said:
        kind = kind_of(code)
        if kind not in found:
            first = [each.at for each in before if each.kind == kind] or [f.at for f in past if kind_of(f.code) == kind]
            text = _describe(pool, kind, code, message, len(missing), placed)
            found[kind] = Problem(pool.name, kind, text, min(first, default=now))
    return [*found.values(), *(problem for problem in before if problem.kind not in found)]


def repairs(found: Iterable[tuple[Instance, str]], before: Iterable[Repair], now: float) -> list[Repair]:
    """The machines under repair. found: machines with Google's words for their states. before: as at the last look."""
    since = {each.name: each.since for each in before}
    return [Repair(each.name, each.pool, since.get(each.name, now)) for each, status in found if status == "REPAIRING"]


def under_repair(pool: PoolSpec, known: Iterable[Repair]) -> list[Problem]:
    """Why a pool has fewer machines than its size, although its group counts and replaces none of them.

    With local SSDs, Google tries for an hour to save their data, unless the template says otherwise:
    https://cloud.google.com/compute/docs/reference/rest/v1/instances (`localSsdRecoveryTimeout`)
    """
    mine = [each for each in known if each.pool == pool.name]
    if not mine:
        return []
    names = ", ".join(each.name for each in mine)
    text = f"Google repairs the host of {names} in zone {pool.zone}, which may take an hour"
    return [Problem(pool.name, "other", text, min(each.since for each in mine))]


def _describe(pool: PoolSpec, kind: Kind, code: str, message: str, missing: int, placed: bool) -> str:
    if kind == "stockout":
        what = f"{pool.market} {pool.machine}"
        return f"zone {pool.zone} has no more {what} at present: {missing} missing ({code})" + (NEAR if placed else "")
    # The message begins with one machine's name, but other machines may have the same problem.
    told = one_line(message).rpartition("creation failed: ")[2]
    return f"{missing} missing: {code}: {told}"


def _end(found: compute_v1.Instance) -> float:
    """When Google ends the machine because of `max_run_duration`; 0: never.

    Google knows this time once the machine runs. A preemptible machine of the old kind, before spot, ends after a day
    at the latest.
    """
    known = epoch(found.resource_status.scheduling.termination_timestamp)
    old = found.scheduling.preemptible and found.scheduling.provisioning_model != "SPOT"
    seconds = found.scheduling.max_run_duration.seconds or (_PREEMPTIBLE_RUN if old else 0)
    return known or (epoch(found.creation_timestamp) + seconds if seconds else 0.0)


def epoch(text: str) -> float:
    """Epoch seconds of Google's 2026-11-21T08:00:00.123-08:00; 0 of an empty text."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0
