"""Which steps are run, in what order, on which cluster, and what they cost at most. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from scripts.acceptance.record import Result
from scripts.acceptance.steps import MACHINES, STAGES, Stage, Step
from spotrun.cloud import prices
from spotrun.spec import ClusterSpec, PoolSpec
from spotrun.spec.cluster import HeadSpec
from spotrun.spec.machine_types import GPUS

# The first steps that need machines take this type: no GPU, the smallest with room for torch and a checkpoint.
SMALL = {"gcp": "e2-standard-4", "aws": "m5.xlarge"}
# Dollars for an hour on demand, for types that the table of GPU machines lacks: list prices of us-central1 and
# us-east-1, as docs/gcp.md and docs/aws.md have them for the head. Spot is never dearer.
LISTED = {"e2-standard-4": 0.134, "m5.xlarge": 0.192, "e2-small": 0.017, "e2-medium": 0.034, "t3.small": 0.0208,
          "t3.medium": 0.0416}  # fmt: skip


def has_gpus(pool: PoolSpec) -> bool:
    return pool.accelerator is not None or pool.machine in GPUS


def steady(cluster: ClusterSpec) -> list[str]:
    """The pools with on-demand machines with GPUs: before maintenance, Google gives these an hour of notice."""
    return [pool.name for pool in cluster.pools if has_gpus(pool) and pool.market == "on-demand"]


def small(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with small machines without GPUs, one pool in each zone. Unchanged if it has no GPUs.

    Each zone keeps a pool, because a network on AWS cannot lose a zone while it is up. No placement: small machines
    have none.
    """
    if cluster.cloud == "local" or not any(map(has_gpus, cluster.pools)):
        return cluster
    zones = list(dict.fromkeys(pool.zone for pool in cluster.pools))
    pools = tuple(
        PoolSpec(name=f"small-{number}", zone=zone, machine=SMALL[cluster.cloud], max=2)
        for number, zone in enumerate(zones, 1)
    )
    network = cluster.network.model_copy(update={"efa": False, "placement": False})
    return cluster.model_copy(update={"pools": pools, "network": network})


def cluster_of(cluster: ClusterSpec, stage: Stage) -> ClusterSpec:
    """The cluster in the form that a stage needs."""
    if stage == "moved":
        network = cluster.network.model_copy(update={"placement": not cluster.network.placement})
        return cluster.model_copy(update={"network": network})
    return cluster if stage in ("gpu", "gpus", "desk") else small(cluster)


def missing(step: Step, cluster: ClusterSpec) -> str:
    """Why a step can never be tried on this cluster; empty if it can."""
    if step.needs == "account" and cluster.cloud == "local":
        return "it needs an account of a cloud, and this is the local cloud"
    if step.clouds and cluster.cloud not in step.clouds:
        return f"it is only for {' and '.join(step.clouds)}, and this is {cluster.cloud}"
    if step.needs in ("gpu", "two gpus"):
        if cluster.cloud == "local":
            return "it needs machines with GPUs, and the local cloud has none"
        most = sum(pool.max for pool in cluster.pools if has_gpus(pool))
        if most < (2 if step.needs == "two gpus" else 1):
            wanted = "two machines with GPUs" if step.needs == "two gpus" else "a machine with GPUs"
            return f"it needs {wanted}, and the cluster's pools have at most {most}"
    if step.name == "maintenance notice" and not steady(cluster):
        return "no pool of the cluster has on-demand machines with GPUs"
    if step.name == "flex template" and not any(pool.market == "flex" for pool in cluster.pools):
        return "no pool of the cluster has market flex"
    if step.name == "efa layout" and not cluster.network.efa:
        return "network.efa is false in the cluster file"
    return ""


def blocked(step: Step, steps: Sequence[Step], results: Mapping[str, Result]) -> str:
    """Why a step would waste money now; empty if it would not.

    A failure stops the later stages, which cost more. A failed gate stops its own stage too. Nothing stops the end.
    """
    if step.stage == "end":
        return ""
    for other in steps:
        result = results.get(other.name)
        if other.stage == "end" or result is None or result.state != "failed" or other.name == step.name:
            continue
        if STAGES.index(other.stage) < STAGES.index(step.stage):
            return f"step {other.name!r} failed, and this one costs more"
        if other.gate and other.stage == step.stage and steps.index(other) < steps.index(step):
            return f"step {other.name!r} failed, and this one depends on it"
    return ""


def todo(
    steps: Sequence[Step], results: Mapping[str, Result], again: bool, standing: bool, cluster: ClusterSpec
) -> list[Step]:
    """The steps to run, in order.

    These are the steps that have not passed, the steps that bring up their cluster, and the end if a cluster is or will
    be up.
    """

    def due(step: Step) -> bool:
        return again or step.name not in results or results[step.name].state != "passed"

    work = [step for step in steps if due(step) and not step.sets_up and step.stage != "end"]
    stages = {step.stage for step in work if not missing(step, cluster)}
    setups = [step for step in steps if step.sets_up and (due(step) or stages.intersection(step.sets_up))]
    up = standing or any(not missing(step, cluster) for step in setups)
    end = [step for step in steps if step.stage == "end" and (up or due(step))]
    chosen = {step.name for step in (*work, *setups, *end)}
    return [step for step in steps if step.name in chosen]


def dollars(step: Step, cluster: ClusterSpec) -> float | None:
    """What a step costs at most, at on-demand prices; None: not known. Disks, traffic and requests add cents."""
    if step.stage == "desk" or cluster.cloud == "local":
        return 0.0
    staged = cluster_of(cluster, step.stage)
    head = _hourly(cluster.cloud, staged.head)
    count = MACHINES.get(step.stage, 0)
    known = [price for pool in staged.pools if (price := _hourly(cluster.cloud, pool)) is not None]
    if head is None or (count and not known):
        return None
    return (head + count * max(known, default=0.0)) * step.limit / 3600


def total(steps: Iterable[Step], cluster: ClusterSpec) -> tuple[float, bool]:
    """What the steps that can be tried cost at most, in dollars, and whether all prices are known."""
    found = [dollars(step, cluster) for step in steps if not missing(step, cluster)]
    return sum(filter(None, found)), None not in found


def _hourly(cloud: str, of: HeadSpec | PoolSpec) -> float | None:
    attached = of.accelerator if isinstance(of, PoolSpec) else None
    what = (cloud, of.zone, of.machine, *((attached.type, attached.count) if attached else ("", 0)))
    listed = prices.on_demand(*what)
    return listed if listed is not None else LISTED.get(of.machine, prices.spot(*what))
