"""A cluster in a cloud, as its operator holds it: stacks by Terraform, the bucket, the way in."""

from __future__ import annotations

from pathlib import Path

from scripts import control, preflight, queue, stacks
from scripts.home import home
from scripts.make_command import make
from scripts.ssh import HEAD, Access, Unreachable
from scripts.transports import Door, Iap, Ssm
from spotrun import cloud
from spotrun.cloud.local.layout import ensure_key
from spotrun.errors import CloudError, NotFound, SpecError, SpotrunError
from spotrun.machine import private_paths
from spotrun.spec import ClusterSpec, described
from spotrun.spec.names import bucket_url
from spotrun.store import Store, cluster_key, head_key, host_key, replaced_key

BOOT = 900.0  # seconds that a new head may take: its machine, its image's boot, its first look at the bucket
_LISTED = 10  # names in a message


def access(cluster: ClusterSpec, file: str) -> Access:
    """The way in. Raises `Unreachable` if the cluster is not up, `CloudError` without credentials."""
    found = _access(cluster, file)
    if found.store.find(host_key(cluster.name, HEAD)) is None:
        raise Unreachable(f"cluster {cluster.name} is not up; `{make(file, 'up')}` brings it up")
    return found


def bucket(cluster: ClusterSpec, file: str) -> Store:
    """The bucket, which may not be made yet. Raises `CloudError` without credentials."""
    return _access(cluster, file).store


def plan(cluster: ClusterSpec, file: str) -> bool:
    """Print what `up` would change; whether anything would."""
    preflight.check_tools(cluster)
    return _stacks(cluster, bucket_url(cluster, cloud.account(cluster)), file).plan()


def ready(cluster: ClusterSpec, file: str) -> control.Status:
    """`up`, unless the head is there already and knows this description: whoever only trains needs no Terraform."""
    way = _access(cluster, file)
    if way.store.find(host_key(cluster.name, HEAD)) is None or not _described(cluster, way.store):
        return up(cluster, file)
    # The bucket says that it is up as described: what is wrong with the way in is not mended by Terraform.
    return control.await_head(way, cluster.digest, BOOT)


def up(cluster: ClusterSpec, file: str) -> control.Status:
    """Have Terraform make what is missing, and wait for the head."""
    way = _access(cluster, file)
    _refuse_rebuild(cluster, way.store, file)
    preflight.check_tools(cluster)
    preflight.check_offers(cluster, file)
    preflight.check_quotas(cluster)
    made = _stacks(cluster, way.store.url, file)
    new = not made.exists("pools")
    if new and _machines(cluster):
        raise SpotrunError(
            f"cluster {cluster.name} is up, but Terraform knows nothing of it here: {_whereabouts(cluster)}; it would"
            " make a second one beside it"
        )
    preflight.check_images(cluster, made.document("pools"), file)
    if not made.has_head():  # also after a `down` that was broken off
        queue.hold(way.store, cluster.name)
    made.apply()
    _forget_gone(cluster, way.store)
    return control.await_head(way, cluster.digest, BOOT)


def unfinished(cluster: ClusterSpec, file: str) -> list[str]:
    """Jobs that the end of the cluster would interrupt. The bucket is asked: the head may be out of reach."""
    return queue.unfinished(_access(cluster, file).store, cluster.name, make(file, "down", "FORCE=1"))


def down(cluster: ClusterSpec, file: str, everything: bool) -> str:
    """Have Terraform take the machines away; what happened, in a line. A bucket with checkpoints is never deleted."""
    store = _access(cluster, file).store
    if everything:
        _refuse_contents(cluster, store, file)
    made = _stacks(cluster, store.url, file)
    made.destroy("pools")
    _refuse_leftovers(cluster)
    # Whoever looked at these now would take a cluster for up that is not.
    store.delete([head_key(cluster.name), replaced_key(cluster.name), *_of_machines(cluster, store)])
    if not everything:
        queue.hold(store, cluster.name)  # `cdktf deploy` can bring the cluster up too
        rest = f"its network and its bucket stay, {store.url}; `{make(file, 'down', 'ALL=1')}` removes them too"
        return f"cluster {cluster.name} is down; {rest}"
    _refuse_contents(cluster, store, file)  # a job may have written until its machines ended
    store.delete(_list(store, ""))
    made.destroy("base")
    return f"nothing is left of cluster {cluster.name}"


def _refuse_leftovers(cluster: ClusterSpec) -> None:
    """Raise `CloudError` if the cloud still has machines of a cluster that Terraform says is gone."""
    if left := _machines(cluster):
        raise CloudError(
            f"cluster {cluster.name} still has machines ({', '.join(left)}), and Terraform knows nothing of them here:"
            f" {_whereabouts(cluster)}"
        )


def _machines(cluster: ClusterSpec) -> list[str]:
    """Those that there are. Raises `CloudError` also if a single zone does not answer: it may have some."""
    nodes = cloud.ask(cluster, lambda each: each.nodes())
    return [node.name for node in nodes if node.state in ("provisioning", "running")]


def _whereabouts(cluster: ClusterSpec) -> str:
    """Where Terraform keeps what it knows, and where else that may be."""
    if cluster.state is not None:
        return f"state is {cluster.state}; did whoever made it say another, or none?"
    return f"its state is in {home() / 'terraform'}; whoever made it has it elsewhere, or in a bucket (key state)"


def _of_machines(cluster: ClusterSpec, store: Store) -> list[str]:
    """Keys of what machines say of themselves: how to reach them, and why they take no job."""
    return [key for what in ("hosts", "unfit") for key in _list(store, f"clusters/{cluster.name}/{what}")]


def _forget_gone(cluster: ClusterSpec, store: Store) -> None:
    """Delete what machines have left that are gone: no other comes by an EC2 machine's name and writes over it."""
    left = _of_machines(cluster, store)  # before the machines are listed: each is there before it writes
    if not left:
        return
    known = {HEAD, *(node.name for node in cloud.ask(cluster, lambda each: each.nodes()))}
    store.delete([key for key in left if Path(key).stem not in known])


def _described(cluster: ClusterSpec, store: Store) -> bool:
    return store.find(cluster_key(cluster.name)) == cluster.document().encode()


def _list(store: Store, prefix: str) -> list[str]:
    """All keys; none of a bucket that is gone, as after a `down` that was broken off."""
    try:
        return store.list(prefix)
    except NotFound:
        return []


def _access(cluster: ClusterSpec, file: str) -> Access:
    account = cloud.account(cluster)
    folder = home() / "clusters" / cluster.name
    private_paths.make_folder(folder.parent)
    private_paths.make_folder(folder)
    key = home() / "id_ed25519"
    ensure_key(key)
    store = Store.as_operator(bucket_url(cluster, account), cluster.region)
    return Access(cluster.name, store, _door(cluster, key), folder, file)


def _door(cluster: ClusterSpec, key: Path) -> Door:
    return Iap(cluster.project or "", key) if cluster.cloud == "gcp" else Ssm(cluster.region, key)


def _stacks(cluster: ClusterSpec, bucket: str, file: str) -> stacks.Stacks:
    """The stacks. Raises `SpotrunError` if the cluster stands elsewhere than its file says now.

    Terraform would look for it in the new place, find nothing, and forget machines that run on in the old one.
    """
    made = stacks.synthesize(cluster, file, home())
    if there := made.place():
        _refuse_move(there, _place(cluster, bucket), file)
    return made


def _place(cluster: ClusterSpec, bucket: str) -> stacks.Place:
    return stacks.Place(cluster.cloud, cluster.region, bucket, cluster.project)


def _refuse_move(there: stacks.Place, wanted: stacks.Place, file: str) -> None:
    if changes := moves(there, wanted):
        raise SpotrunError(
            f"{file}: {', '.join(changes)}: a cluster does not move; put that back, or first have it as it was and"
            f" `{make(file, 'down', 'ALL=1')}`"
        )


def moves(there: stacks.Place, wanted: stacks.Place) -> list[str]:
    """What of the place would change. Pure."""
    before, after = vars(there), vars(wanted)
    return [f"{key} is {after[key]} and was {before[key]}" for key in before if before[key] != after[key]]


def _refuse_rebuild(cluster: ClusterSpec, store: Store, file: str) -> None:
    """Raise `SpotrunError` if the network would change under what stands in it: AWS refuses that after long minutes."""
    document = store.find(cluster_key(cluster.name))  # of stack pools: there while the cluster is up
    if document is None:
        return
    try:
        before = described(document)
    except SpecError:
        return  # of another version; Terraform will tell
    _refuse_move(_place(before, store.url), _place(cluster, store.url), file)
    if changes := rebuilds(before, cluster):
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


def _refuse_contents(cluster: ClusterSpec, store: Store, file: str) -> None:
    """Raise `SpotrunError` that names what is in the bucket and not spotrun's to delete: checkpoints, users' data."""
    keys = _list(store, "")
    jobs = sorted({key.split("/")[1] for key in keys if key.startswith("jobs/") and "/checkpoints/" in key})
    own = (f"clusters/{cluster.name}/", "code/", "jobs/")
    others = [key for key in keys if not key.startswith(own)]
    if not jobs and not others:
        return
    what = [f"checkpoints of {_some(jobs)}"] if jobs else []
    what += [f"what spotrun did not write ({_some(others)})"] if others else []
    tool = "gcloud storage rm --recursive" if cluster.cloud == "gcp" else "aws s3 rm --recursive"
    raise SpotrunError(
        f"bucket {store.url} holds {' and '.join(what)}, which spotrun never deletes: copy what you need, remove it"
        f" (`{tool} {store.url}/…`), then `{make(file, 'down', 'ALL=1')}` again"
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
