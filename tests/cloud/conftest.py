"""A Google Cloud project with one cluster, and spotrun's module for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest

from spotrun.spec import ClusterSpec

if TYPE_CHECKING:
    from spotrun.cloud.gcp import GcpCloud
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
