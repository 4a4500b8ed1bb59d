"""A Google Cloud project with one cluster, and spotrun's module for it; a cluster of the local cloud."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spotrun.spec import ClusterSpec
from tests.helpers import wait_for

if TYPE_CHECKING:
    from spotrun.cloud.gcp import GcpCloud
    from tests.cloud.local_cluster import Cluster
    from tests.fakes.gce import FakeGce


@pytest.fixture
def gcp_cluster() -> ClusterSpec:
    """The cluster in the project. A test module that needs another one has a fixture of this name."""
    from tests.fakes.on_gcp import CLUSTER  # not at the top: Google's library takes seconds to import

    return CLUSTER


@pytest.fixture
def gce(gcp_cluster: ClusterSpec) -> Iterator[FakeGce]:
    from tests.fakes.on_gcp import project

    with project(gcp_cluster) as fake:
        yield fake


@pytest.fixture
async def cloud(gce: FakeGce, gcp_cluster: ClusterSpec) -> AsyncIterator[GcpCloud]:
    from spotrun.cloud.gcp import GcpCloud

    found = GcpCloud(gcp_cluster)
    yield found
    await found.close()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A local cluster, which is not up yet."""
    from spotrun.cloud.local.cloud import down
    from tests.cloud.local_cluster import Cluster

    found = Cluster(tmp_path)
    yield found
    if found.cloud is not None:
        await found.cloud.close()
    await asyncio.to_thread(down, "tiny", tmp_path)


@pytest.fixture
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """After the test, local clusters have left no process, and nothing in memory."""
    from spotrun.cloud.local.layout import Layout
    from tests.cloud.local_cluster import is_gone

    yield
    for home in (tmp_path, tmp_path / "other"):
        layout = Layout.of(home, "tiny")
        if not layout.record.is_dir():  # a folder is in the way of the record: that cloud has never started
            wait_for(functools.partial(is_gone, layout), what="the end of everything")
