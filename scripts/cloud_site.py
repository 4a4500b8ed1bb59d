"""A cluster in a cloud, for the operator's commands: its stacks (Terraform), its bucket, SSH to its head."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts import console, control, preflight, queue, stacks
from scripts.home import home
from scripts.make_command import make_command
from scripts.ssh import HEAD, Access, Unreachable
from scripts.transports import Iap, Ssm, Transport
from spotrun import cloud
from spotrun.cloud.local.layout import ensure_key
from spotrun.errors import CloudError, NotFound, PartialError, SpecError, SpotrunError
from spotrun.machine import private_paths
from spotrun.spec import ClusterSpec, described
from spotrun.spec.names import bucket_url
from spotrun.store import CHECKPOINTS, CODE, JOBS, KEPT, Store, cluster_key, head_key, host_key, replaced_key

BOOT = 900.0  # seconds to wait for a new head: its machine is made and boots, and it reads the bucket
END = 1200.0  # seconds to wait for machines that shut down; those with 8 GPUs take many minutes
PAUSE = 10.0  # seconds between two looks at these machines
TRIES = 3  # to destroy stack pools
_LISTED = 10  # names in a message
_ALIVE = ("provisioning", "running")  # the states of machines that have not begun to end


@dataclass(frozen=True)
class CloudSite:
    """A `Site` whose machines Terraform and a cloud make."""

    cluster: ClusterSpec
    file: str

    def access(self) -> Access:
        if not self._published():
            raise Unreachable(f"cluster {self.cluster.name} is not up; `{self._make('up')}` brings it up")
        return self._access

    def bucket(self) -> Store:
        """The bucket, which may not exist yet."""
        return self._access.store

    def plan(self) -> bool:
        preflight.check_tools(self.cluster)
        return self._stacks(bucket_url(self.cluster, self._account)).plan()

    def ready(self) -> control.Status:
        """Do `up`, unless a head with this description is there already: then training needs no Terraform."""
        description = self.bucket().find(cluster_key(self.cluster.name))
        if not self._published() or description != self.cluster.document().encode():
            return self.up()
        # The bucket says that the cluster is up. If its head does not answer, Terraform cannot change that.
        return control.await_head(self._access, self.cluster.digest, BOOT)

    def up(self) -> control.Status:
        cluster, store = self.cluster, self.bucket()
        self._refuse_rebuild()
        preflight.check_tools(cluster)
        preflight.check_offers(cluster, self.file)
        with cloud.asking(cluster) as ask:
            preflight.check_quotas(cluster, ask)
            preflight.check_disk_key(cluster)
            terraform = self._stacks(store.url)
            if not terraform.exists("pools") and _machines(ask):
                raise SpotrunError(
                    f"cluster {cluster.name} is up, but Terraform knows nothing of it here: {self._other_state()}."
                    " Terraform would make a second cluster beside it"
                )
            document = terraform.document("pools")
            preflight.check_images(cluster, document, self.file)
            preflight.check_endpoints(cluster, document, self.file)
            if not terraform.has_head():  # true also after an interrupted `down`
                queue.hold(store, cluster.name)
            try:
                terraform.apply()
                _forget_gone(cluster, store, ask)
                return control.await_head(self._access, cluster.digest, BOOT)
            except BaseException:  # Ctrl-C too
                again, down = self._make("up"), self._make("down")
                console.warn(f"spotrun: what is up now costs money: `{again}` goes on, `{down}` takes it down")
                raise

    def unfinished(self) -> list[control.Unfinished]:
        """As in `Site`. The bucket is asked, because the head may be out of reach."""
        return queue.unfinished(self.bucket(), self.cluster.name, self._make("down", "FORCE=1"))

    def down(self, everything: bool) -> str:
        """Have Terraform remove the machines. A bucket with results of jobs is never deleted."""
        cluster, store = self.cluster, self.bucket()
        if everything:
            self._refuse_contents()
        terraform = self._stacks(store.url)
        made = terraform.exists("base")
        if everything and not made and _is_there(store):
            raise SpotrunError(
                f"cluster {cluster.name} has a bucket, {store.url}, but Terraform knows nothing of it and of its"
                f" network here, and can remove neither: {self._other_state()}"
            )
        with cloud.asking(cluster) as ask:
            _destroy_pools(cluster, terraform, ask)
            if left := _machines(ask):
                raise CloudError(
                    f"cluster {cluster.name} still has machines ({', '.join(left)}), and Terraform knows nothing of"
                    f" them here: {self._other_state()}"
                )
        # With these objects in the bucket, the cluster would seem to be up.
        store.delete([head_key(cluster.name), replaced_key(cluster.name), *_of_machines(cluster, store)])
        if not everything:
            queue.hold(store, cluster.name)  # `cdktf deploy` can bring the cluster up too
            if not made:
                return f"cluster {cluster.name} is not up, and Terraform knows of no part of it here"
            rest = f"its network and its bucket stay, {store.url}; `{self._make('down', 'ALL=1')}` removes them too"
            return f"cluster {cluster.name} is down; {rest}"
        self._refuse_contents()  # a job may have written until its machines ended
        store.delete(_list(store, ""))
        terraform.destroy("base")
        return f"nothing is left of cluster {cluster.name}"

    @functools.cached_property
    def _account(self) -> str:
        """The account or project of the operator's login."""
        return cloud.account(self.cluster)

    @functools.cached_property
    def _access(self) -> Access:
        """How to reach the head and the bucket, even before there is a head. A command logs in to the cloud once."""
        folder = home() / "clusters" / self.cluster.name
        private_paths.make_folder(folder.parent)
        private_paths.make_folder(folder)
        key = home() / "id_ed25519"
        ensure_key(key)
        url = bucket_url(self.cluster, self._account)
        store = Store.as_operator(url, self.cluster.region)
        return Access(self.cluster.name, store, transport(self.cluster, key), folder, self.file)

    def _published(self) -> bool:
        """Whether a head has put its host keys into the bucket: the cluster is up, or is starting."""
        return self.bucket().find(host_key(self.cluster.name, HEAD)) is not None

    def _make(self, target: str, *variables: str) -> str:
        return make_command(self.file, target, *variables)

    def _stacks(self, bucket: str) -> stacks.Stacks:
        """The stacks. Raises `SpotrunError` if the cluster exists in another place than its file and the login say now.

        Terraform would look for the cluster in the new place, find nothing, and forget machines that still run in the
        old place.
        """
        made = stacks.synthesize(self.cluster, self.file, home())
        if there := made.place():
            self._refuse_move(there, _place(self.cluster, bucket))
            # With the key `bucket`, nothing else of a place tells the account.
            if self.cluster.cloud == "aws" and there.account not in (None, self._account):
                raise SpotrunError(
                    f"{self.file}: you are signed in to account {self._account}, and account {there.account} has the"
                    f" cluster {self.cluster.name}: sign in to that one, or name its profile in AWS_PROFILE"
                )
        return made

    def _refuse_move(self, there: stacks.Place, wanted: stacks.Place) -> None:
        if changes := moves(there, wanted):
            raise SpotrunError(
                f"{self.file}: {', '.join(changes)}: a cluster does not move. Change it back; then, to have it in the"
                f" new place, run `{self._make('down', 'ALL=1')}` and change it again"
            )

    def _refuse_rebuild(self) -> None:
        """Raise `SpotrunError` if the network of a cluster that is up would change: AWS refuses that after minutes."""
        document = self.bucket().find(cluster_key(self.cluster.name))
        if document is None:  # stack pools makes this document, so the cluster is not up
            return
        try:
            before = described(document)
        except SpecError as error:  # of another version
            return self._refuse_nodes(str(error))
        url = self.bucket().url
        self._refuse_move(_place(before, url), _place(self.cluster, url))
        if changes := rebuilds(before, self.cluster):
            raise SpotrunError(
                f"{self.file}: {', '.join(changes)}: this cannot change while the cluster is up; run"
                f" `{self._make('down')}` first"
            )
        self._refuse_ends(before)

    def _refuse_ends(self, before: ClusterSpec) -> None:
        """Raise `SpotrunError` if the change would end machines at once: jobs would lose them without a drain."""
        most = limits(before, self.cluster)
        if not most:
            return
        with cloud.asking(before) as ask:
            known, silent = _nodes(ask)
        if unknown := [pool for pool in most if pool in silent]:
            raise CloudError(
                f"{self.file}: pool {', '.join(unknown)}: this change may end machines at once, and the cloud does not"
                f" say which there are: {silent[unknown[0]]}. Change this back for now. A pool in another zone can be"
                " added"
            )
        there = Counter(node.pool for node in known if node.state in _ALIVE)
        over = [pool for pool in most if there[pool] > most[pool]]
        if over:
            found = (f"pool {pool} has {there[pool]} machines and could keep {most[pool]}" for pool in over)
            raise SpotrunError(
                f"{self.file}: {'; '.join(found)}: the cloud would end the others at once. Wait until the jobs have"
                f" ended, or stop them first: `{self._make('stop')}`; if a failed job keeps a node, let it go:"
                f" `{self._make('stop', 'ID=…')}`"
            )

    def _refuse_nodes(self, why: str) -> None:
        """Raise `SpotrunError` if there are nodes. why: why it is not known what a change would do to them."""
        with cloud.asking(self.cluster) as ask:
            nodes = ask(lambda each: each.nodes())
        if there := sorted(node.name for node in nodes if node.pool != HEAD and node.state in _ALIVE):
            raise SpotrunError(
                f"{self.file}: cluster {self.cluster.name} has machines ({_some(there)}), and `{self._make('up')}` may"
                f" end them at once, because {why}. Wait until the jobs have ended, or stop them first:"
                f" `{self._make('stop')}`"
            )

    def _refuse_contents(self) -> None:
        """Raise `SpotrunError` that names what must not be deleted from the bucket: jobs' results, users' data."""
        store = self.bucket()
        keys = _list(store, "")
        own = (f"clusters/{self.cluster.name}/", CODE, JOBS)
        others = [key for key in keys if not key.startswith(own)]
        what = [
            f"{name} of {_some(jobs)}"
            for name, folder in (("checkpoints", CHECKPOINTS), ("kept folders", KEPT))
            if (jobs := _with(folder, keys))
        ]
        what += [f"what spotrun did not write ({_some(others)})"] if others else []
        if not what:
            return
        tool = "gcloud storage rm --recursive" if self.cluster.cloud == "gcp" else "aws s3 rm --recursive"
        raise SpotrunError(
            f"bucket {store.url} holds {' and '.join(what)}, which spotrun never deletes: copy what you need, remove it"
            f" (`{tool} {store.url}/…`), then `{self._make('down', 'ALL=1')}` again"
        )

    def _other_state(self) -> str:
        """Where Terraform looks for its state, and why the state of this cluster may be elsewhere."""
        if self.cluster.state is not None:
            return f"state is {self.cluster.state}; was the cluster made with another state, or none?"
        return f"its state is in {home() / 'terraform'}; the cluster was made with another state (key state)"


def moves(there: stacks.Place, wanted: stacks.Place) -> list[str]:
    """What would change about the cluster's place. Pure."""
    before, after = vars(there), vars(wanted)
    keys = ("cloud", "region", "bucket", "project")
    return [f"{key} is {after[key]} and was {before[key]}" for key in keys if before[key] != after[key]]


def rebuilds(before: ClusterSpec, after: ClusterSpec) -> list[str]:
    """Changes that would make the cloud replace the network while machines are in it. Pure."""
    if after.cloud != "aws":
        return []
    old, new, old_head, new_head = before.network, after.network, before.head.zone, after.head.zone
    changed = [f"network.{key}" for key in ("cidr", "nat") if getattr(old, key) != getattr(new, key)]
    zones = {new_head, *(pool.zone for pool in after.pools)}
    left = sorted({old_head, *(pool.zone for pool in before.pools)} - zones)
    if old_head != new_head:  # Terraform would replace the NAT gateway, or the endpoints: nodes lose the internet
        changed.append(f"head.zone is {new_head} and was {old_head}")
    return [*changed, *(f"zone {zone} is not used any more" for zone in left)]


def limits(before: ClusterSpec, after: ClusterSpec) -> dict[str, int]:
    """By pool: how many machines could stay, if Terraform's changes may end some. Pure.

    A group that goes takes its machines with it. AWS ends what is more than a group's new `MaxSize`, and replaces what
    is not of its new market: https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_UpdateAutoScalingGroup.html
    """
    found: dict[str, int] = {}
    for old in before.pools:
        new, aws = after.pool(old.name), after.cloud == "aws"
        if new is None or (new.market != old.market if aws else new.zone != old.zone):
            found[old.name] = 0
        elif aws and new.max < old.max:
            found[old.name] = new.max
    return found


def _destroy_pools(cluster: ClusterSpec, terraform: stacks.Stacks, ask: cloud.Ask) -> None:
    """Destroy stack pools, on AWS again after the last machine has ended. Raises `CloudError`.

    AWS keeps a placement group until its machines have ended. Terraform waits for that for a few minutes only
    (https://github.com/hashicorp/terraform-provider-aws/issues/21460).
    """
    for tries in range(1, TRIES + 1):
        try:
            return terraform.destroy("pools")
        except CloudError:
            if cluster.cloud != "aws" or tries == TRIES or not _await_ends(ask):
                raise


def _await_ends(ask: cloud.Ask) -> bool:
    """Wait for machines that shut down. Whether all have ended. Raises `CloudError`."""
    begun, told = time.monotonic(), False
    while nodes := ask(lambda each: each.nodes()):
        if any(node.state != "stopping" for node in nodes) or time.monotonic() - begun > END:
            return False
        if not told:
            names = _some(sorted(node.name for node in nodes))
            why = "AWS keeps their placement groups until then, and then Terraform tries again"
            console.warn(f"spotrun: waits up to {END / 60:.0f} minutes for machines that shut down ({names}): {why}")
        told = True
        time.sleep(PAUSE)
    return True  # also if the last one has ended only now


def _place(cluster: ClusterSpec, bucket: str) -> stacks.Place:
    return stacks.Place(cluster.cloud, cluster.region, bucket, cluster.project)


def _nodes(ask: cloud.Ask) -> tuple[list[cloud.Instance], Mapping[str, str]]:
    """The machines, and why the cloud does not tell those of some pools, by pool."""
    try:
        return ask(lambda each: each.nodes()), {}
    except PartialError as error:
        return error.known, error.missing


def _machines(ask: cloud.Ask) -> list[str]:
    """Names of the machines. Raises `CloudError` also if one zone does not answer: it may have machines."""
    nodes = ask(lambda each: each.nodes())
    return [node.name for node in nodes if node.state in _ALIVE]


def _of_machines(cluster: ClusterSpec, store: Store) -> list[str]:
    """Keys of the documents that machines write about themselves: how to reach them, and why they take no job."""
    return [key for what in ("hosts", "unfit") for key in _list(store, f"clusters/{cluster.name}/{what}")]


def _forget_gone(cluster: ClusterSpec, store: Store, ask: cloud.Ask) -> None:
    """Delete the documents of machines that are gone: on EC2, no new machine has an old name and overwrites them."""
    left = _of_machines(cluster, store)  # listed before the machines: a machine exists before it writes
    if left:
        known, silent = _nodes(ask)
        names = {HEAD, *(node.name for node in known)}
        store.delete([key for key in left if Path(key).stem not in names and not silent])


def _list(store: Store, prefix: str) -> list[str]:
    """All keys; none if the bucket is gone, as after an interrupted `down`."""
    try:
        return store.list(prefix)
    except NotFound:
        return []


def _is_there(store: Store) -> bool:
    """Whether the bucket exists."""
    try:
        store.list("clusters")
    except NotFound:
        return False
    return True


def _with(folder: str, keys: list[str]) -> list[str]:
    """The jobs that have something in this folder."""
    return sorted({key.split("/")[1] for key in keys if key.startswith(JOBS) and key.split("/")[2:3] == [folder]})


def _some(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def transport(cluster: ClusterSpec, key: Path) -> Transport:
    """How SSH reaches the head in the cluster's cloud."""
    return Iap(cluster.project or "", key) if cluster.cloud == "gcp" else Ssm(cluster.region, key)
