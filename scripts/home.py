"""Where this operator's state is: keys, local clusters, synthesized stacks, Terraform's state."""

from __future__ import annotations

import os
from pathlib import Path

from spotrun.machine import private_paths


def home() -> Path:
    """The folder. Raises `NotOursError` if it belongs to another user, or if others may write to it."""
    named = os.environ.get("SPOTRUN_HOME")
    found = Path(named or ".spotrun").absolute()
    if found.is_dir():
        private_paths.check_folder(found)
        if not named:  # spotrun's own folder: an earlier version made it with a wider mode
            private_paths.make_folder(found)
    return found
