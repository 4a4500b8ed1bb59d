"""A Google Cloud project with one cluster, and spotrun's module for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from spotrun.cloud.gcp import GcpCloud
    from tests.fakes.gce import FakeGce


@pytest.fixture
def gce() -> Iterator[FakeGce]:
    from tests.fakes.on_gcp import project  # not at the top: Google's library takes seconds to import

    with project() as fake:
        yield fake


@pytest.fixture
async def cloud(gce: FakeGce) -> AsyncIterator[GcpCloud]:
    from spotrun.cloud.gcp import GcpCloud
    from tests.fakes.on_gcp import CLUSTER

    found = GcpCloud(CLUSTER)
    yield found
    await found.close()
