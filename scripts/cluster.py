"""Bringing a cluster up and down, and finding the way into one that is up, wherever it is."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from scripts import control
from scripts.home import home
from scripts.make_command import LOCAL, make
from scripts.ssh import Access
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec, load_cluster
from spotrun.store import Store

__all__ = ["access", "bucket", "down", "home", "load", "plan", "ready", "up"]


def load(path: str) -> ClusterSpec:
    """A cluster file. Raises `SpecError`."""
    cluster = load_cluster(path)
    if cluster.bucket and "://" not in cluster.bucket:  # machines run in folders of their own
        return cluster.model_copy(update={"bucket": str(Path(cluster.bucket).absolute())})
    return cluster


def access(cluster: ClusterSpec, file: str = LOCAL) -> Access:
    """The way into a cluster that is up. file: its cluster file. Raises `Unreachable` if it is not up."""
    found: Access = _site(cluster).access(cluster, file)
    return found


def bucket(cluster: ClusterSpec, file: str = LOCAL) -> Store:
    """The cluster's bucket, whether or not the cluster is up. Raises `CloudError` without credentials."""
    found: Store = _site(cluster).bucket(cluster, file)
    return found


def plan(cluster: ClusterSpec, file: str) -> bool:
    """Print what `up` would change in the cloud; whether it would change anything. Raises `SpotrunError`."""
    if cluster.cloud == "local":
        raise SpotrunError(f"{file}: cloud local has no plan, it is not made by Terraform; `{make(file, 'up')}`")
    changes: bool = _site(cluster).plan(cluster, file)
    return changes


def up(cluster: ClusterSpec, file: str = LOCAL) -> control.Status:
    """Bring the cluster up, or what is missing of it, and wait for its head. The head's first status document."""
    status: dict[str, Any] = _site(cluster).up(cluster, file)
    return status


def ready(cluster: ClusterSpec, file: str = LOCAL) -> control.Status:
    """As `up`, but a cluster in a cloud that is up as described is left alone."""
    status: dict[str, Any] = _site(cluster).ready(cluster, file)
    return status


def down(cluster: ClusterSpec, force: bool, file: str = LOCAL, everything: bool = False) -> str:
    """Take the cluster down; what happened, in a line.

    force: also while jobs run, which `SpotrunError` lists otherwise. everything: of a cloud, also what `down` keeps for
    the next `up`: network, bucket, identities.
    """
    site = _site(cluster)
    jobs = [] if force else site.unfinished(cluster, file)
    if jobs:
        names = ", ".join(jobs)
        raise SpotrunError(
            f"cluster {cluster.name}: not ended yet: {names}; `{make(file, 'stop')}` saves a job's state and stops it,"
            f" `{make(file, 'down', 'FORCE=1')}` takes the machines from under it"
        )
    said: str = site.down(cluster, file, everything)
    return said


def _site(cluster: ClusterSpec) -> ModuleType:
    """The module that knows where such a cluster stands. Each is imported only when it is used."""
    if cluster.cloud == "local":
        from scripts import local

        return local
    from scripts import remote

    return remote
