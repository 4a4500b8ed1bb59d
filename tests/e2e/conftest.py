"""One local cluster for all end-to-end tests; each test runs a job of its own on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Harness, running

SPEC = {
    "name": "e2e",
    "cloud": "local",
    "pools": [{"name": "spot", "zone": "local-a", "max": 5}],
    "local": {"boot_delay": 0.1, "recreate_delay": 0.5},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole training runs: more time than a unit test before they count as hung."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with running(tmp_path_factory.mktemp("e2e"), SPEC) as harness:
        yield harness


@pytest.fixture
def cluster(_cluster: Harness) -> Iterator[Harness]:
    """The cluster with no job on it, all zones stocked."""
    yield _cluster
    try:
        _cluster.fault("restock", "local-a")
        if _cluster.status()["job"] and not _cluster.status()["job"]["ended"]:
            _cluster.ctl("stop")
            _cluster.until_ended()
    finally:
        print(_cluster.machine_logs())  # pytest shows this if the test has failed
