"""Bringing a cluster up and down, and finding the way into one that is up."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from scripts import control
from scripts.hint import LOCAL, make
from scripts.ssh import Access, Unreachable
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec, load_cluster
from spotrun.store import Store

ACTIVE = ("queued", "starting", "running", "draining", "waiting", "finishing")
Status = dict[str, Any]


def home() -> Path:
    """Where this operator's state is: keys, local clusters."""
    return Path(os.environ.get("SPOTRUN_HOME") or ".spotrun").absolute()


def load(path: str) -> ClusterSpec:
    """A cluster file, of a cloud that this version can bring up. Raises `SpecError`, `SpotrunError`."""
    cluster = load_cluster(path)
    if cluster.cloud != "local":
        raise SpotrunError(
            f"{path}: cloud {cluster.cloud} comes with the cloud stacks, which this version does not have yet;"
            " clusters/local.yaml works everywhere"
        )
    if cluster.bucket and "://" not in cluster.bucket:  # machines run in folders of their own
        return cluster.model_copy(update={"bucket": str(Path(cluster.bucket).absolute())})
    return cluster


def access(cluster: ClusterSpec, file: str = LOCAL) -> Access:
    """The way into a cluster that is up. file: its cluster file. Raises `Unreachable` if it is not up."""
    from spotrun.cloud.local.layout import Layout

    layout = Layout.of(home(), cluster.name)
    if not layout.key.exists() or not layout.record.exists():
        raise Unreachable(f"cluster {cluster.name} is not up; `{make(file, 'up')}` brings it up")
    store = Store(cluster.bucket or str(layout.bucket))
    return Access(cluster.name, store, user="spotrun", key=layout.key, scratch=layout.state, file=file)


def up(cluster: ClusterSpec, file: str = LOCAL) -> Status:
    """Bring the cluster up, or what is missing of it, and wait for its head. The head's first status document."""
    from spotrun.cloud.local import client

    client.up(cluster, home())
    return control.await_head(access(cluster, file))


def down(cluster: ClusterSpec, force: bool, file: str = LOCAL) -> str:
    """Take the cluster down; what happened, in a line. Raises `SpotrunError` while a job runs, unless `force`."""
    from spotrun.cloud.local import client

    job = None if force else _active_job(cluster, file)
    if job is not None:
        raise SpotrunError(
            f"cluster {cluster.name}: job {job['id']} is {job['phase']}; `{make(file, 'stop')}` saves its state and"
            f" stops it, `{make(file, 'down', 'FORCE=1')}` takes the machines from under it"
        )
    client.down(cluster.name, home())
    bucket = cluster.bucket or home() / "local" / cluster.name / "bucket"
    return f"cluster {cluster.name} is down; its bucket stays: {bucket}"


def _active_job(cluster: ClusterSpec, file: str) -> Status | None:
    try:
        job: Status | None = control.ask(access(cluster, file), "status")["job"]
    except Unreachable:
        return None  # no head, no running job that anyone could stop
    return job if job is not None and job["phase"] in ACTIVE else None
