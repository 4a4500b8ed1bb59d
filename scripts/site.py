"""A cluster behind one interface, wherever it is: what the operator's commands need of it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from scripts import control
from scripts.make_command import LOCAL, make_command
from scripts.ssh import Access
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec, load_cluster
from spotrun.store import Store


class Site(Protocol):
    """A cluster as its operator's commands see it. One command uses one site, so it logs in to the cloud once."""

    @property
    def cluster(self) -> ClusterSpec:
        """What the cluster file describes."""

    @property
    def file(self) -> str:
        """The cluster file, which messages name in the commands that they propose."""

    def access(self) -> Access:
        """The way in. Raises `Unreachable` if the cluster is not up, `CloudError` without credentials."""

    def bucket(self) -> Store:
        """The bucket, whether or not the cluster is up. Raises `CloudError` without credentials."""

    def plan(self) -> bool:
        """Print what `up` would change in the cloud. Whether it would change anything. Raises `SpotrunError`."""

    def up(self) -> control.Status:
        """Start what is missing, and wait for the head. The head's first status document."""

    def ready(self) -> control.Status:
        """`up`, unless the cluster is up as described already."""

    def unfinished(self) -> list[str]:
        """The jobs that the end of the cluster would interrupt."""

    def down(self, everything: bool) -> str:
        """End all machines. What happened, in a line. everything: also network, bucket, identities of a cloud."""


def load(path: str) -> ClusterSpec:
    """A cluster file. Raises `SpecError`."""
    cluster = load_cluster(path)
    if cluster.bucket and "://" not in cluster.bucket:  # machines run in folders of their own
        return cluster.model_copy(update={"bucket": str(Path(cluster.bucket).absolute())})
    return cluster


def of_file(file: str) -> Site:
    """The cluster of a cluster file. Raises `SpecError`."""
    return site(load(file), file)


def site(cluster: ClusterSpec, file: str = LOCAL) -> Site:
    """The cluster that a description is about. Each kind's module is imported only when it is used."""
    if cluster.cloud == "local":
        from scripts.local_site import LocalSite

        return LocalSite(cluster, file)
    from scripts.cloud_site import CloudSite

    return CloudSite(cluster, file)


def take_down(found: Site, force: bool, everything: bool = False) -> str:
    """Take a cluster down. What happened, in a line. Raises `SpotrunError` if jobs run, unless `force` is true."""
    if jobs := [] if force else found.unfinished():
        raise SpotrunError(
            f"cluster {found.cluster.name}: not ended yet: {', '.join(jobs)}; `{make_command(found.file, 'stop')}`"
            f" saves a job's state and stops it, `{make_command(found.file, 'down', 'FORCE=1')}` ends it at once"
        )
    return found.down(everything)
