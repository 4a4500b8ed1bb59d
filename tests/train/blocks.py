"""A control block and a state for a writer whose agent is not part of the test."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spotrun.state.control import Control
from spotrun.train.encoding import Encoder


def block() -> Control:
    """A new control block. Its file has no name, so nothing stays of it."""
    with tempfile.TemporaryDirectory() as folder:
        return Control(Path(folder) / "control", create=True)


def encoding(value: Any) -> Callable[[Encoder], Any]:
    """A function that encodes this value as the state."""
    return lambda encoder: encoder.encode(value, "state")
