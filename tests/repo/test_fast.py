"""What `make test-fast` leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import SLOW


@pytest.mark.parametrize("path", SLOW)
def test_what_is_slow_exists(path: str) -> None:
    assert (Path(__file__).parents[1] / path).exists()
