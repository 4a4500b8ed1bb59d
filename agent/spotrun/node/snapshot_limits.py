"""How long a worker that is about to be killed gets for a snapshot under way."""

from __future__ import annotations

import math

from spotrun.state.control import Control

SETTLE = 2.0  # seconds that a worker gets at least to finish a snapshot before it is killed
LEAVE = 6.0  # seconds that a worker gets at least to leave a drain: it waits for the others and for its snapshot


def seconds_for_snapshot(control: Control, draining: bool) -> float:
    """How long to wait for a snapshot in progress: twice its usual time, but not longer than its steps took."""
    if draining:  # the worker leaves by itself once its snapshot is committed
        return max(LEAVE, 2 * control.expected)
    each = pace(control) or math.inf  # not known yet if the worker has just joined another generation
    worth = each * steps if (steps := steps_in_progress(control)) else 0.0
    return max(SETTLE, min(2 * control.expected, worth))


def pace(control: Control) -> float:
    """Seconds of a step in this generation; 0: none is done."""
    done = control.step - max(control.base, 0)
    return control.stepping / done if done > 0 else 0.0


def steps_in_progress(control: Control) -> int:
    """How many steps a snapshot in progress is ahead of the newest safe state; 0: none is in progress."""
    newest = max(control.begun, control.copied)
    return newest - max(control.committed, control.base, 0) if newest > control.committed else 0
