from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.regroups import Regroups


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in a tmpfs, as snapshots are in: CUDA locks no memory of a file on a disk."""
    with tempfile.TemporaryDirectory(prefix="spotrun-tests-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def job(memory: Path) -> Iterator[Regroups]:
    found = Regroups(memory)
    yield found
    try:
        print(found.state_and_log())  # pytest shows this if the test has failed
    finally:
        found.close()
