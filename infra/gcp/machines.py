"""What a stack must know of machine types, all of which are at https://cloud.google.com/compute/docs/machine-resource."""

from __future__ import annotations

import re
from typing import Literal

from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec, PoolSpec
from spotrun.spec.names import MAINTENANCE_NOTICE, PREEMPT_NOTICE

Placement = Literal["compact", "workload"]

_GPUS = re.compile(r"(a2|a3|a4|a4x|g2|g4)-")  # families whose machine types imply GPUs
# Families that take no Persistent Disk. https://cloud.google.com/compute/docs/disks/hyperdisks#machine-type-support
_HYPERDISK = re.compile(r"(a3-ultragpu|a4|a4x|c4|c4a|c4d|g4|h4d|m4|n4|n4a|n4d|x4)-")
# https://cloud.google.com/compute/docs/instance-groups/about-workload-policies; A4X needs a topology besides
_WORKLOAD = re.compile(r"(a3-(high|mega|ultra)gpu-8g|a4-.*|h4d-.*)")
# https://cloud.google.com/compute/docs/instances/placement-policies-overview: these are in none of its lists
_ANYWHERE = re.compile(r"(e2|f1|g1|n1|t2a|t2d)-")
_GPU_MAINTENANCE = 3600  # seconds of notice. https://cloud.google.com/compute/docs/gpus/gpu-host-maintenance
_RUN = (30, 120 * 86400)  # seconds. https://cloud.google.com/compute/docs/instances/limit-vm-runtime


def check(cluster: ClusterSpec) -> None:
    """Raise `SpotrunError` for what Google would refuse, before anything is written."""
    image(cluster.image, cluster.project or "")
    for pool in cluster.pools:
        run_seconds(pool)
        if cluster.network.placement:
            placement(pool)


def has_gpus(pool: PoolSpec) -> bool:
    return pool.accelerator is not None or _GPUS.match(pool.machine) is not None


def boot_disk(machine: str) -> str:
    """The type of disk to boot from."""
    return "hyperdisk-balanced" if _HYPERDISK.match(machine) else "pd-balanced"


def placement(pool: PoolSpec) -> Placement:
    """By which kind of policy a pool's machines get close to each other: one on each, or one on their group.

    Raises `SpotrunError` if Google does that for no machine of this type.
    """
    if _ANYWHERE.match(pool.machine):
        raise SpotrunError(
            f"pool {pool.name}: Google places no {pool.machine} close to others; take another machine type, or"
            " network.placement out of the cluster file"
        )
    return "workload" if _WORKLOAD.fullmatch(pool.machine) else "compact"


def terms(pool: PoolSpec) -> dict[str, str]:
    """What a machine is told of the notice that Google gives it: whole seconds, where they are not the usual ones."""
    found: dict[str, str] = {}
    if pool.notice is not None:
        found[PREEMPT_NOTICE] = f"{pool.notice:.0f}"
    if has_gpus(pool) and pool.market != "spot":  # a spot machine is preempted instead
        found[MAINTENANCE_NOTICE] = str(_GPU_MAINTENANCE)
    return found


def run_seconds(pool: PoolSpec) -> int | None:
    """After how long Google ends a machine of the pool. Raises `SpotrunError` if it cannot be that long."""
    if pool.max_run_duration is None:
        return None
    seconds = round(pool.max_run_duration)
    if not _RUN[0] <= seconds <= _RUN[1]:
        raise SpotrunError(f"pool {pool.name}: max_run_duration is {seconds} s; Google takes 30s to 120d")
    return seconds


def image(name: str | None, project: str) -> dict[str, str]:
    """What Terraform's `google_compute_image` is asked for: a project, and a name or a family, whose newest it finds.

    name: the cluster file's: a path as Google writes it, or an image's name in the project; None: family `spotrun`.
    Raises `SpotrunError`.
    """
    if name is None:
        return {"project": project, "family": "spotrun"}
    if re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        return {"project": project, "name": name}
    path = r"projects/([a-z0-9.:-]+)/global/images/(family/)?([a-z](?:[-a-z0-9]*[a-z0-9])?)"
    if match := re.fullmatch(path, name):
        return {"project": match[1], "family" if match[2] else "name": match[3]}
    raise SpotrunError(
        f"image is {name!r}; allowed: an image's name, or projects/<project>/global/images/ and a name or family/<name>"
    )
