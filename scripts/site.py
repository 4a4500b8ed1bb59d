"""One interface to a cluster, whether it is local or in a cloud, for the operator's commands."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from scripts import control
from scripts.make_command import LOCAL, make_command
from scripts.ssh import Access
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec, load_cluster
from spotrun.store import Store

_NAMED = 5  # jobs that a message names; it counts the others


class Site(Protocol):
    """A cluster as its operator's commands see it. One command uses one site, so it logs in to the cloud once."""

    @property
    def cluster(self) -> ClusterSpec:
        """What the cluster file describes."""

    @property
    def file(self) -> str:
        """The cluster file, which messages name in the commands that they propose."""

    def access(self) -> Access:
        """How to reach the head. Raises `Unreachable` if the cluster is not up, `CloudError` without credentials."""

    def bucket(self) -> Store:
        """The bucket, whether or not the cluster is up. Raises `CloudError` without credentials."""

    def plan(self) -> bool:
        """Print what `up` would change in the cloud. Returns whether that is anything. Raises `SpotrunError`."""

    def up(self) -> control.Status:
        """Start what is missing, and wait for the head. Returns the head's first status document."""

    def ready(self) -> control.Status:
        """As `up`, but does nothing if the cluster is already up as described."""

    def unfinished(self) -> list[control.Unfinished]:
        """The jobs that `make down` would interrupt, or whose kept nodes it would take."""

    def down(self, everything: bool) -> str:
        """End all machines. Returns what happened, in a line. everything: also a cloud's network and bucket."""


def load(path: str) -> ClusterSpec:
    """A cluster file. Raises `SpecError`."""
    cluster = load_cluster(path)
    if cluster.bucket and "://" not in cluster.bucket:  # machines run in folders of their own
        return cluster.model_copy(update={"bucket": str(Path(cluster.bucket).absolute())})
    return cluster


def of_file(file: str) -> Site:
    """The site of a cluster file's cluster. Raises `SpecError`."""
    return site(load(file), file)


def site(cluster: ClusterSpec, file: str = LOCAL) -> Site:
    """The site of a cluster. The module of its cloud is imported only here, when it is used."""
    if cluster.cloud == "local":
        from scripts.local_site import LocalSite

        return LocalSite(cluster, file)
    from scripts.cloud_site import CloudSite

    return CloudSite(cluster, file)


def take_down(found: Site, force: bool, everything: bool = False) -> str:
    """Take a cluster down. Returns what happened, in a line. Raises `SpotrunError` if jobs run and `force` is false."""
    if unfinished := [] if force else found.unfinished():
        raise SpotrunError(f"cluster {found.cluster.name}: {_said(found, unfinished)}")
    return found.down(everything)


def _said(found: Site, unfinished: list[control.Unfinished]) -> str:
    """What a cluster still has, and how to end that."""
    jobs, kept = [each.job for each in unfinished if not each.node], [each for each in unfinished if each.node]
    said, again = [], make_command(found.file, "down", "FORCE=1")
    if jobs:
        named = jobs if len(jobs) <= _NAMED else [*jobs[:_NAMED], f"{len(jobs) - _NAMED} more"]
        stop = make_command(found.file, "stop", *([f"ID={jobs[0]}"] if len(jobs) > 1 else []))
        said.append(f"not ended yet: {', '.join(named)}; `{stop}` saves a job's state and stops it")
    for each in kept[:_NAMED]:
        stop = make_command(found.file, "stop", f"ID={each.job}")
        said.append(f"{each.job} has failed and keeps node {each.node} for SSH; `{stop}` lets it go")
    return f"{'; '.join(said)}, `{again}` ends {'it' if len(unfinished) == 1 else 'all'} at once"
