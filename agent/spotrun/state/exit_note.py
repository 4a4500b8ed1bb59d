"""Why a worker ended early: a file beside its control block, which it writes itself, and what NCCL wrote into its log.

Standard library only: the agent reads what a training script has written.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

LONGEST = 1000  # characters of a message
TRACEBACK = 20000  # characters

# How torch begins the reason for which its watchdog of NCCL ends a process (ProcessGroupNCCL.cpp, `Watchdog::run`).
_ENDED = "Process group watchdog thread terminated with exception: "
_STACK = re.compile(r"Exception raised from |frame #\d|\[rank\d+\]:")


def path_for(control: str | Path) -> Path:
    """Where the worker with that control block says why it ended early."""
    return Path(f"{control}.failure")  # not with_suffix: what follows the dot in its name is the local rank


def write(control: str | Path, kind: str, rank: int, message: str, traceback: str = "") -> None:
    """Write them: a JSON object (kind, rank, at, message, traceback)."""
    path = path_for(control)
    values = {"kind": kind, "rank": rank, "at": time.time(), "message": message[:LONGEST]}
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(values | {"traceback": traceback[-TRACEBACK:]}))
    os.replace(partial, path)


def summary(text: str) -> str:
    """An error's message as one line: its first one, and what NCCL says below `Last error:`."""
    lines = [line.strip() for line in text.strip().splitlines()]
    found: list[str] = []
    for number, line in enumerate(lines):
        if line.startswith("Last error:"):
            found = [line.removeprefix("Last error:").strip(), *lines[number + 1 :]]
    reason = []
    for line in found:
        if _STACK.match(line):
            break
        reason.append(line)
    return "; ".join(filter(None, [lines[0] if lines else "", *reason]))


def nccl_reason(tail: str) -> str:
    """Why torch has ended the process that wrote this log, in one line; "" if NCCL was not the reason."""
    _, found, text = tail.rpartition(_ENDED)
    return summary(text) if found else ""
