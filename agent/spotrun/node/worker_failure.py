"""Why a worker has ended early, or has left its generation."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from spotrun.spec import JobSpec
from spotrun.state import exit_note
from spotrun.state.control import EXIT_PEER, Control
from spotrun.text import clean
from spotrun.wire import Failure

TAIL = 1 << 16  # bytes at the end of a log that are searched for NCCL's reason, or for the last lines
LINES = 20  # lines at the end of a log that stand for a traceback, if there is none


def read(control: Path, log: Path, rank: int, code: int) -> Failure:
    """The failure that a worker has reported; without a report, what its exit code means.

    If the script or a signal has ended the worker without a traceback, as `sys.exit` does, the failure has the end of
    the log instead. A failure that repeats needs none: its message names the line. control: path of its control block.
    log: path of its output.
    """
    found = _reported(control, log, rank, code)
    if found.traceback or found.repeats or found.kind not in ("user", "signal"):
        return found
    lines = clean(_tail(log).decode(errors="replace")).rstrip().splitlines()[-LINES:]
    return found.replace(traceback="\n".join(lines)[-exit_note.TRACEBACK :])


def why_hung(controls: Iterable[Control], spec: JobSpec) -> str:
    """What the workers of a generation, which hang, have not done in time."""
    known = [(each.entered, each.restored, each.step > max(each.base, 0)) for each in controls]
    if any(stepped for *_, stepped in known):
        return f"no step was completed for {spec.hang_timeout:g} s (hang_timeout in the job file)"
    if not any(entered for entered, *_ in known):
        missing = "the script has not called spotrun.init"
    elif not any(restored for _, restored, _ in known):
        missing = "none of run.track, run.train and run.fit was called, or no state was restored,"
    else:
        missing = "no step was completed"
    return f"{missing} in the first {spec.start_timeout:g} s (start_timeout in the job file)"


def _reported(control: Path, log: Path, rank: int, code: int) -> Failure:
    with contextlib.suppress(OSError, ValueError, TypeError, ValidationError):
        found = Failure(**json.loads(exit_note.path_for(control).read_text()))
        # The script may have written any text there, and one report has all jobs of the node.
        message, trace = found.message[: exit_note.LONGEST], found.traceback[-exit_note.TRACEBACK :]
        return found.replace(message=message, traceback=trace)

    def failure(kind: Literal["user", "peer", "signal"], message: str) -> Failure:
        return Failure(kind=kind, rank=rank, at=time.time(), message=message)

    if code == -signal.SIGABRT:  # torch ends a worker like this when a collective fails in NCCL: a peer is gone
        return failure("peer", _abort_reason(log))
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return failure("signal", f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else ""))
    if code == EXIT_PEER:
        return failure("peer", "a collective failed")
    return failure("user", f"the script exited with code {code}")


def _abort_reason(log: Path) -> str:
    why = exit_note.nccl_reason(_tail(log).decode(errors="replace"))
    return f"ended by SIGABRT: {why}"[: exit_note.LONGEST] if why else "ended by SIGABRT"


def _tail(path: Path) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return file.read(TAIL)
    return b""
