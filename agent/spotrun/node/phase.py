"""What the workers of one generation do on this node, in a word. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from spotrun.state.control import EXIT_DRAINED
from spotrun.wire import Failure

Phase = Literal["starting", "running", "drained", "failed", "succeeded"]


def phase_of(codes: Sequence[int | None], failure: Failure | None, group_failed: bool, restored: bool) -> Phase:
    """The group's phase, from its workers' exit codes. None: that worker still runs."""
    # A worker may lose its peers just before it drains. If another worker here has drained, the snapshot exists.
    drained = EXIT_DRAINED in codes and (failure is None or failure.kind == "peer") and not group_failed
    if None in codes:
        if failure is not None and not drained:
            return "failed"
        return "running" if restored else "starting"
    if drained:
        return "drained"
    return "succeeded" if failure is None and not any(codes) else "failed"
