"""Why a worker ended early: a note that the worker writes beside its control block, and NCCL's reason in its log.

Standard library only: training scripts write the note, and the agent reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path

LONGEST = 1000  # characters of a message
TRACEBACK = 20000  # characters

# torch's NCCL watchdog writes this before the reason why it ends a process (ProcessGroupNCCL.cpp, `Watchdog::run`).
_ENDED = "Process group watchdog thread terminated with exception: "
_STACK = re.compile(r"Exception raised from |frame #\d|\[rank\d+\]:")


def path_for(control: str | Path) -> Path:
    """The note of the worker with that control block."""
    return Path(f"{control}.failure")  # not with_suffix: the part after the dot is the local rank


def write(control: str | Path, kind: str, rank: int, message: str, traceback: str = "", repeats: bool = False) -> None:
    """Write the note, if the memory has room for it: a JSON object with the values of a `wire.Failure`.

    Without a note, the exit code still tells a peer's death from an error of the script.
    """
    path = path_for(control)
    values = {"kind": kind, "rank": rank, "at": time.time(), "message": message[:LONGEST], "repeats": repeats}
    partial = path.with_suffix(".part")
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(values | {"traceback": traceback[-TRACEBACK:]}))
        os.replace(partial, path)


def summary(text: str) -> str:
    """An error's message on one line: its first line, and NCCL's text after `Last error:`."""
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
    """NCCL's reason, on one line, for which torch ended the process that wrote this log; "": there is none."""
    _, found, text = tail.rpartition(_ENDED)
    return summary(text) if found else ""
