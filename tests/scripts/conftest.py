"""A stand-in head and nodes, over real SSH."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.cluster import Machines, machines


@pytest.fixture
def standin(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path) as found:
        yield found
