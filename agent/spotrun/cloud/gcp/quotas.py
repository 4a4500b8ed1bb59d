"""Which quotas of the project are too small for a pool. `make up` checks this before it makes anything. Pure.

`regions.get` and `projects.get` show the older quotas. Quotas of newer machine families (H100 and later, the vCPUs of
G2 and A3) are only in the Cloud Quotas API, so nothing is known about them here. If such a quota is too small, the
pool's problems say QUOTA_EXCEEDED.

Local SSD is uncertain. Google counts the disks of some families by a quota for each family and region
(LOCAL_SSD_TOTAL_GB_PER_VM_FAMILY), which only the Cloud Quotas API has, and the older quotas may show 0 for what has no
limit. So a limit of 0 says nothing, and a shortfall is only a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from google.cloud import compute_v1

from spotrun.cloud.base import Market, Shortfall
from spotrun.spec import ClusterSpec, PoolSpec
from spotrun.spec.cluster import IMAGE_GB
from spotrun.spec.machine_types import (
    google_gpu_quota,
    google_has_gpus,
    google_has_persistent_disk,
    google_local_ssd,
    google_vcpus,
)
from spotrun.spec.names import HEAD

_WEEK = 7 * 86400  # seconds
_LOCAL_SSD = ("LOCAL_SSD_TOTAL_GB", "PREEMPTIBLE_LOCAL_SSD_GB")


@dataclass(frozen=True)
class Quota:
    """A quota, in its metric's own unit."""

    limit: float  # what the project may use
    used: float  # what the project uses now


@dataclass(frozen=True)
class MachineUse:
    """What one machine uses of the quotas."""

    family: str  # the family of its machine type
    vcpus: int  # 0: not known
    gpu: str = ""  # the metric that counts its GPUs
    gpus: int = 0  # how many GPUs that metric counts
    ssd: float = 0.0  # GB of Persistent Disk on SSD
    local_ssd: float = 0.0  # GB of Local SSD


def read(found: Iterable[compute_v1.Quota]) -> dict[str, Quota]:
    """The quotas, by metric."""
    return {quota.metric: Quota(quota.limit, quota.usage) for quota in found}


def compare(cluster: ClusterSpec, quotas: Mapping[str, Quota], running: Mapping[str, int]) -> list[Shortfall]:
    """The quotas that are too small for all the machines of a pool.

    Each pool is looked at alone, because pools replace each other and are never all full. running: how many machines
    each pool has now. What these machines use of a quota counts as free.
    """
    head = PoolSpec(name=HEAD, zone=cluster.head.zone, machine=cluster.head.machine, market="on-demand", disk=IMAGE_GB)
    pools = {HEAD: head, **{pool.name: pool for pool in cluster.pools}}
    needs = {name: _needs(machine_use(pool), _terms(pool), quotas) for name, pool in pools.items()}
    own: dict[str, float] = {}
    for name, amounts in needs.items():
        for metric, amount in amounts.items():
            own[metric] = own.get(metric, 0.0) + amount * running.get(name, 0)
    found = []
    for name, pool in pools.items():
        for metric, amount in needs[name].items():
            used = max(quotas[metric].used - own[metric], 0.0)
            needed = amount * pool.max
            if needed > quotas[metric].limit - used:
                found.append(Shortfall(name, metric, quotas[metric].limit, needed, used, metric not in _LOCAL_SSD))
    return found


def machine_use(pool: PoolSpec) -> MachineUse:
    """What one machine of a pool uses, as the name of its machine type says."""
    family, vcpus = pool.machine.partition("-")[0], google_vcpus(pool.machine)
    ssd = float(pool.disk) if google_has_persistent_disk(pool.machine) else 0.0
    if pool.accelerator is not None:
        model = pool.accelerator.type.removeprefix("nvidia-").removeprefix("tesla-").replace("-", "_").upper()
        return MachineUse(family, vcpus, f"NVIDIA_{model}_GPUS", pool.accelerator.count, ssd)
    quota, gpus = google_gpu_quota(pool.machine)
    return MachineUse(family, vcpus, quota, gpus, ssd, google_local_ssd(pool.machine))


def _terms(pool: PoolSpec) -> Market | Literal["either"]:
    """How Google counts a pool's machines: as its market says, or by either of the two quotas.

    The latter holds for on-demand machines with GPUs that end within a week:
    https://cloud.google.com/compute/docs/instances/limit-vm-runtime
    """
    brief = pool.max_run_duration is not None and pool.max_run_duration <= _WEEK
    gpus = pool.accelerator is not None or google_has_gpus(pool.machine)
    return "either" if pool.market == "on-demand" and brief and gpus else pool.market


def _needs(one: MachineUse, terms: Market | Literal["either"], quotas: Mapping[str, Quota]) -> dict[str, float]:
    """How much one machine uses of each quota in `quotas`."""
    family = f"{one.family.upper()}_CPUS"
    general = "CPUS" if one.family in ("n1", "e2", "f1", "g1") else ""
    cpus = family if family in quotas else general
    local = {metric: quotas[metric] for metric in _LOCAL_SSD if metric in quotas and quotas[metric].limit > 0}
    found = {
        _counted(cpus, "PREEMPTIBLE_CPUS", terms, quotas): float(one.vcpus),
        _counted(one.gpu, f"PREEMPTIBLE_{one.gpu}", terms, quotas): float(one.gpus),
        "CPUS_ALL_REGIONS": float(one.vcpus),
        "GPUS_ALL_REGIONS": float(one.gpus),
        "INSTANCES": 1.0,
        "SSD_TOTAL_GB": one.ssd,
    }
    if (metric := _counted(*_LOCAL_SSD, terms, local)) in local:
        found[metric] = one.local_ssd
    return {metric: amount for metric, amount in found.items() if amount and metric in quotas}


def _counted(standard: str, preemptible: str, terms: Market | Literal["either"], quotas: Mapping[str, Quota]) -> str:
    """Which of the two quotas counts a machine. https://cloud.google.com/compute/resource-usage

    Spot and flex machines count against the standard quota until Google grants the project a preemptible quota. After
    that they count against the preemptible one only. A preemptible quota that was never granted shows as 0.
    For machines that may use either, the larger quota is taken.
    """
    of_spot, of_standard = quotas.get(preemptible), quotas.get(standard)
    if terms == "either" and of_spot is not None and of_standard is not None:
        return preemptible if of_spot.limit > of_standard.limit else standard
    if terms in ("on-demand", "either"):
        return standard
    if of_spot is not None and (of_spot.limit > 0 or (of_standard is not None and of_standard.limit == 0)):
        return preemptible
    return standard
