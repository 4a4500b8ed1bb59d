"""A cluster in Google Cloud for tests, and what they wait for in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from spotrun.cloud.base import Instance
from spotrun.cloud.gcp import GcpCloud
from spotrun.errors import PartialError
from spotrun.spec import ClusterSpec
from tests.fakes import gce
from tests.fakes.gce import FakeGce
from tests.helpers import await_for

A, B = "us-central1-a", "us-central1-b"
CLUSTER = ClusterSpec.model_validate(
    {
        "name": "demo",
        "cloud": "gcp",
        "project": "my-project",
        "region": "us-central1",
        "pools": [
            {"name": "spot-a", "zone": A, "machine": "g2-standard-8", "max": 5},
            {"name": "spot-b", "zone": B, "machine": "g2-standard-8", "max": 5},
            {"name": "steady", "zone": A, "machine": "g2-standard-8", "max": 2, "market": "on-demand"},
        ],
    }
)


@contextlib.contextmanager
def project(cluster: ClusterSpec = CLUSTER) -> Iterator[FakeGce]:
    """A project with a cluster's groups. This process finds Compute Engine there."""
    with pytest.MonkeyPatch.context() as patch, gce.running(page=2) as fake:  # so that all that lists turns pages
        for name, value in fake.environment.items():
            patch.setenv(name, value)
        fake.add_cluster(cluster, bucket="gs://bucket")
        yield fake


async def listed(cloud: GcpCloud) -> list[Instance]:
    """The machines of all zones that answer."""
    try:
        return await cloud.nodes()
    except PartialError as error:
        found: list[Instance] = error.known
        return found


async def running(cloud: GcpCloud, pool: str, count: int) -> list[Instance]:
    """The machines of a pool, once there are so many, and all run."""

    async def look() -> tuple[list[Instance]] | None:
        found = [node for node in await listed(cloud) if node.pool == pool]
        return (found,) if [node.state for node in found] == ["running"] * count else None

    found = await await_for(look, what=f"{count} machines of {pool}")
    assert found is not None
    return found[0]


async def pool_of(cloud: GcpCloud, pool: str, count: int) -> list[Instance]:
    """Have a pool have so many machines."""
    await cloud.resize(pool, count)
    return await running(cloud, pool, count)


async def successor(cloud: GcpCloud, old: Instance) -> Instance:
    """The machine that has come in another's place, once it runs."""

    async def look() -> Instance | None:
        found = (node for node in await listed(cloud) if node.name == old.name and node.id != old.id)
        return next((node for node in found if node.state == "running"), None)

    found = await await_for(look, what=f"another {old.name}")
    assert found is not None
    return found
