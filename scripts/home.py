"""Where this operator's state is: keys, local clusters, synthesized stacks, Terraform's state."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    return Path(os.environ.get("SPOTRUN_HOME") or ".spotrun").absolute()
