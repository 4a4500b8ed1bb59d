"""A cluster of the local cloud, as its operator holds it."""

from __future__ import annotations

import shlex

from scripts import control, queue
from scripts.home import home
from scripts.make_command import make
from scripts.ssh import Access, Unreachable
from scripts.transports import Direct
from spotrun.cloud.local import cloud
from spotrun.cloud.local.layout import Layout
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec
from spotrun.store import Store, cluster_key


def access(cluster: ClusterSpec, file: str) -> Access:
    """The way in. Raises `Unreachable` if the cluster is not up."""
    layout = Layout.of(home(), cluster.name)
    if not layout.key.exists() or not layout.record.exists():
        raise Unreachable(f"cluster {cluster.name} is not up; `{make(file, 'up')}` brings it up")
    return Access(cluster.name, _store(cluster, layout), Direct("spotrun", layout.key), layout.state, file)


def bucket(cluster: ClusterSpec, file: str) -> Store:
    """The bucket, which is there without the cluster too."""
    layout = Layout.of(home(), cluster.name)
    layout.make()
    return _store(cluster, layout)


def up(cluster: ClusterSpec, file: str) -> control.Status:
    """Start what does not run, and wait for the head."""
    layout = Layout.of(home(), cluster.name)
    layout.make()
    store = _store(cluster, layout)
    store.put(cluster_key(cluster.name), cluster.document().encode())
    # Only the one that starts it: a second record would have the next head hold the jobs that run now.
    cloud.up(cluster, home(), starting=lambda: queue.hold(store, cluster.name))
    return control.await_head(access(cluster, file), cluster.digest)


ready = up  # which does nothing where there is nothing to do


def unfinished(cluster: ClusterSpec, file: str) -> list[str]:
    """Jobs that the end of the cluster would interrupt. If the head is out of reach, read the bucket."""
    try:
        return control.unfinished(access(cluster, file))
    except Unreachable:
        if not cloud.alive(cluster.name, home()):
            return []
        store = _store(cluster, Layout.of(home(), cluster.name))
        return queue.unfinished(store, cluster.name, make(file, "down", "FORCE=1"))


def down(cluster: ClusterSpec, file: str, everything: bool) -> str:
    """End every process of it; what happened, in a line. The bucket stays."""
    if not Layout.of(home(), cluster.name).state.is_dir():
        return _never_up(cluster, file)
    cloud.down(cluster.name, home())
    bucket = cluster.bucket or Layout.of(home(), cluster.name).bucket
    return f"cluster {cluster.name} is down; its bucket stays: {bucket}"


def _never_up(cluster: ClusterSpec, file: str) -> str:
    """The text for a `down` of a cluster that was never up. Raises `SpotrunError` if it is up with another home."""
    for other in cloud.homes(cluster.name):
        again = f"SPOTRUN_HOME={shlex.quote(str(other))} {make(file, 'down')}"
        raise SpotrunError(
            f"cluster {cluster.name} was never up with its state in {home()}; one of that name is up with its state in"
            f" {other}: `{again}` takes that one down"
        )
    return f"cluster {cluster.name} was never up with its state in {home()} (another folder: set SPOTRUN_HOME)"


def _store(cluster: ClusterSpec, layout: Layout) -> Store:
    return Store(cluster.bucket or str(layout.bucket))
