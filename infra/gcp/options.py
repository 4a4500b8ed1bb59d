"""How Google runs a pool's machines: options of instance templates, from the cluster file. Pure."""

from __future__ import annotations

import re
from typing import Any

from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec, PoolSpec
from spotrun.spec.machine_types import Placement, google_has_gpus, google_has_persistent_disk, google_placement
from spotrun.spec.names import MAINTENANCE_NOTICE, PREEMPT_NOTICE

_GPU_MAINTENANCE = 3600  # seconds of notice. https://cloud.google.com/compute/docs/gpus/gpu-host-maintenance
_RUN = (30, 120 * 86400)  # seconds. https://cloud.google.com/compute/docs/instances/limit-vm-runtime
_FLEX_RUN = (600, 7 * 86400)  # https://cloud.google.com/compute/docs/instances/about-flex-start-vms
_MODELS = {"spot": "SPOT", "flex": "FLEX_START", "on-demand": "STANDARD"}


def check(cluster: ClusterSpec) -> None:
    """Raise `SpotrunError` for what Google would refuse, before anything is written."""
    image(cluster.image, cluster.project or "")
    for pool in cluster.pools:
        run_seconds(pool)
        if cluster.network.placement:
            placement(pool)


def has_gpus(pool: PoolSpec) -> bool:
    return pool.accelerator is not None or google_has_gpus(pool.machine)


def boot_disk(machine: str) -> str:
    """The type of disk to boot from."""
    return "pd-balanced" if google_has_persistent_disk(machine) else "hyperdisk-balanced"


def placement(pool: PoolSpec) -> Placement | None:
    """The kind of policy that places a pool's machines close to each other. Raises `SpotrunError` if none does.

    None: Google accepts no policy for this pool of market flex, but places a request's machines together if it can.
    """
    flex = pool.market == "flex"
    found = google_placement(pool.machine, flex)
    if found is None and not flex:
        raise SpotrunError(
            f"pool {pool.name}: Google places no {pool.machine} close to others; choose another machine type, or"
            " remove network.placement from the cluster file"
        )
    return found


def terms(pool: PoolSpec) -> dict[str, str]:
    """The metadata about Google's notices: whole seconds, where they differ from the usual ones."""
    found: dict[str, str] = {}
    if pool.notice is not None:
        found[PREEMPT_NOTICE] = f"{pool.notice:.0f}"
    if has_gpus(pool) and pool.market != "spot":  # a spot machine is preempted instead
        found[MAINTENANCE_NOTICE] = str(_GPU_MAINTENANCE)
    return found


def scheduling(pool: PoolSpec, placed: bool = False) -> dict[str, Any]:
    """How Google runs a pool's machines: which it may take, and what it does with machines that it has taken.

    placed: a policy puts the machines close to each other.
    """
    spot, seconds = pool.market == "spot", run_seconds(pool)
    steady = pool.market == "on-demand"
    fixed = not steady or placed or has_gpus(pool)  # cannot be moved to another host while they run
    found: dict[str, Any] = {
        "provisioning_model": _MODELS[pool.market],
        "on_host_maintenance": "TERMINATE" if fixed else "MIGRATE",
        "automatic_restart": steady,
    }
    if spot:
        found["preemptible"] = True  # the API also wants its old word for spot
    if spot or seconds:
        found["instance_termination_action"] = "DELETE"  # a stopped machine would cost money, and its group would wait
    if seconds:
        found["max_run_duration"] = {"seconds": seconds}
    return found


def run_seconds(pool: PoolSpec) -> int | None:
    """Seconds after which Google ends a machine of the pool. Raises `SpotrunError` if Google refuses the number."""
    if pool.max_run_duration is None:
        return None
    seconds = round(pool.max_run_duration)
    least, most = _FLEX_RUN if pool.market == "flex" else _RUN
    if not least <= seconds <= most:
        allowed = "10m to 7d for market flex" if pool.market == "flex" else "30s to 120d"
        raise SpotrunError(f"pool {pool.name}: max_run_duration is {seconds} s; Google allows {allowed}")
    return seconds


def reservation(pool: PoolSpec) -> dict[str, str] | None:
    """Which reservations a pool's machines may use. Google demands that those of market flex use none."""
    return {"type": "NO_RESERVATION"} if pool.market == "flex" else None


def repair(pool: PoolSpec) -> dict[str, str]:
    """What a group does when a machine has ended. Google demands that it does nothing for market flex.

    A preempted machine is recreated from the group's present template, not from its old one:
    https://cloud.google.com/compute/docs/instance-groups/update-on-repair
    """
    if pool.market == "flex":
        return {"default_action_on_failure": "DO_NOTHING"}
    return {"default_action_on_failure": "REPAIR", "force_update_on_repair": "YES"}


def image(name: str | None, project: str) -> dict[str, str]:
    """The arguments of Terraform's `google_compute_image`: a project, and an image's name or a family of images. Of
    a family, Google takes the newest image.

    name: as in the cluster file: Google's path, or an image's name in the project; None: family `spotrun`. Raises
    `SpotrunError`.
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
