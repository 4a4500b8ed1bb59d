"""A control block for a writer whose agent is not part of the test."""

from __future__ import annotations

import tempfile
from pathlib import Path

from spotrun.state.control import Control


def block() -> Control:
    """A new control block. Its file has no name, so nothing stays of it."""
    with tempfile.TemporaryDirectory() as folder:
        return Control(Path(folder) / "control", create=True)
