"""A cluster in a cloud, as its operator holds it: stacks by Terraform, the bucket, the way in."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from scripts import control, preflight, stacks
from scripts.doors import Door, Iap, Ssm
from scripts.hint import make
from scripts.home import home
from scripts.ssh import HEAD, Access, Unreachable
from spotrun import cloud
from spotrun.cloud.local.layout import ensure_key
from spotrun.errors import CredentialsError, SpotrunError
from spotrun.spec import ClusterSpec
from spotrun.spec.names import bucket_url
from spotrun.store import Store, cluster_key, head_key, host_key, queue_key

BOOT = 900.0  # seconds that a new head may take: its machine, its image's boot, its first look at the bucket
_LISTED = 10  # jobs that a message names


def access(cluster: ClusterSpec, file: str) -> Access:
    """The way in. Raises `Unreachable` if the cluster is not up, `CloudError` without credentials."""
    found = _access(cluster, file)
    if found.store.find(host_key(cluster.name, HEAD)) is None:
        raise Unreachable(f"cluster {cluster.name} is not up; `{make(file, 'up')}` brings it up")
    return found


def plan(cluster: ClusterSpec, file: str) -> bool:
    """Print what `up` would change; whether anything would."""
    preflight.check_tools(cluster)
    cloud.account(cluster)
    return stacks.synthesize(cluster, file, home()).plan()


def ready(cluster: ClusterSpec, file: str) -> control.Status:
    """`up`, unless the head is there already and knows this description: whoever only trains needs no Terraform."""
    try:
        status = control.ask(access(cluster, file), "status")
        if status["head"].get("description") == cluster.digest:
            return dict(status)
    except CredentialsError:
        raise
    except SpotrunError:
        pass  # not up, or not as described
    return up(cluster, file)


def up(cluster: ClusterSpec, file: str) -> control.Status:
    """Have Terraform make what is missing, and wait for the head."""
    way = _access(cluster, file)
    _refuse_rebuild(cluster, way.store, file)
    preflight.check_tools(cluster)
    preflight.check_quotas(cluster)
    stacks.synthesize(cluster, file, home()).apply()
    return control.await_head(way, cluster.digest, BOOT)


def unfinished(cluster: ClusterSpec, file: str) -> list[str]:
    """Jobs that the end of the cluster would interrupt. The bucket is asked: the head may be out of reach."""
    data = _access(cluster, file).store.find(queue_key(cluster.name))
    try:
        return [str(job) for job in json.loads(data or b"[]")]
    except ValueError:
        raise SpotrunError(
            f"cluster {cluster.name}: its queue in the bucket is broken; FORCE=1 passes over it"
        ) from None


def down(cluster: ClusterSpec, file: str, everything: bool) -> str:
    """Have Terraform take the machines away; what happened, in a line. A bucket with checkpoints is never deleted."""
    stacks.check_tools()
    store = _access(cluster, file).store
    if everything:
        _refuse_checkpoints(cluster, store, file)
    made = stacks.synthesize(cluster, file, home())
    made.destroy("pools")
    # Whoever looked at these now would take a cluster for up that is not.
    store.delete([head_key(cluster.name), *store.list(f"clusters/{cluster.name}/hosts")])
    if not everything:
        again = make(file, "down", "ALL=1")
        return (
            f"cluster {cluster.name} is down; its network and its bucket stay, {store.url}; `{again}` removes them too"
        )
    store.delete(store.list(""))
    made.destroy("base")
    return f"nothing is left of cluster {cluster.name}"


def _access(cluster: ClusterSpec, file: str) -> Access:
    account = cloud.account(cluster)
    folder = home() / "clusters" / cluster.name
    folder.mkdir(parents=True, exist_ok=True)
    key = home() / "id_ed25519"
    ensure_key(key)
    store = Store.as_operator(bucket_url(cluster, account), cluster.region)
    return Access(cluster.name, store, _door(cluster, key), folder, file)


def _door(cluster: ClusterSpec, key: Path) -> Door:
    return Iap(cluster.project or "", key) if cluster.cloud == "gcp" else Ssm(cluster.region, key)


def _refuse_rebuild(cluster: ClusterSpec, store: Store, file: str) -> None:
    """Raise `SpotrunError` if the network would change under what stands in it: AWS refuses that after long minutes."""
    described = store.find(cluster_key(cluster.name))  # of stack pools: there while the cluster is up
    try:
        before = ClusterSpec.model_validate_json(described) if described else None
    except ValidationError:
        return  # of another version; Terraform will tell
    changes = rebuilds(before, cluster) if before else []
    if changes:
        raise SpotrunError(
            f"{file}: {', '.join(changes)}: this cannot change while it is up; `{make(file, 'down')}` first"
        )


def rebuilds(before: ClusterSpec, after: ClusterSpec) -> list[str]:
    """What would have the network made anew under the machines that stand in it. Pure."""
    if after.cloud != "aws":
        return []
    changed = [
        f"network.{key}" for key in ("cidr", "nat") if getattr(before.network, key) != getattr(after.network, key)
    ]
    zones = {after.head.zone, *(pool.zone for pool in after.pools)}
    left = sorted({before.head.zone, *(pool.zone for pool in before.pools)} - zones)
    return [*changed, *(f"zone {zone} is not used any more" for zone in left)]


def _refuse_checkpoints(cluster: ClusterSpec, store: Store, file: str) -> None:
    """Raise `SpotrunError` that names the jobs whose checkpoints are in the bucket."""
    jobs = sorted({key.split("/")[1] for key in store.list("jobs") if "/checkpoints/" in key})
    if not jobs:
        return
    named = ", ".join(jobs[:_LISTED]) + (f" and {len(jobs) - _LISTED} more" if len(jobs) > _LISTED else "")
    tool = "gcloud storage rm --recursive" if cluster.cloud == "gcp" else "aws s3 rm --recursive"
    raise SpotrunError(
        f"bucket {store.url} holds checkpoints, and those are never deleted by spotrun: {named};"
        f" copy what you need, remove them (`{tool} {store.url}/jobs`), then `{make(file, 'down', 'ALL=1')}` again"
    )
