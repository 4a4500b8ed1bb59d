"""Where this operator's state is: keys, local clusters, synthesized stacks, Terraform's state."""

from __future__ import annotations

import os
from pathlib import Path

from spotrun import private


def home() -> Path:
    """The folder. Raises `NotOursError` if it is somebody else's, or if others may write to it."""
    named = os.environ.get("SPOTRUN_HOME")
    found = Path(named or ".spotrun").absolute()
    if found.is_dir():
        private.check(found)
        if not named:  # ours by its name: a version before this one made it with a wider mode
            private.folder(found)
    return found
