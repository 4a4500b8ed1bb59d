"""What a node does if the preparation of a job fails: how long a step may take, and which errors may pass."""

from __future__ import annotations

import re
from pathlib import Path

from spotrun.errors import CorruptError, HungError, InstallError, RequirementsError, SetupError, StoreError
from spotrun.spec import JobSpec

QUIET_TRIES = 3  # tries before an error that may pass is reported: the bucket or pip's index may be away for a moment
# Seconds for one step; `start_timeout` if that is longer. pip may have to compile packages.
PIP_LIMIT = 1800.0
IMPORT_LIMIT = 600.0
QUIET = 60.0  # seconds: if pip fails by itself after a longer try, that is reported at once
LATE = 1.0  # seconds more until the launcher is killed: meanwhile, the fork server writes where it is
SHOWN = 4  # calls in a message


def pip_limit(spec: JobSpec) -> float:
    """Seconds for each call of pip."""
    return max(PIP_LIMIT, spec.start_timeout)


def import_limit(spec: JobSpec) -> float:
    """Seconds for importing torch, and for the script's modules."""
    return max(IMPORT_LIMIT, spec.start_timeout)


def may_pass(error: Exception, took: float) -> bool:
    """Whether the next try may succeed. took: seconds of this one. A long build that fails would fail again."""
    never = isinstance(error, HungError | RequirementsError) or (isinstance(error, InstallError) and took > QUIET)
    return isinstance(error, StoreError | OSError | SetupError) and not never


def repeats(error: Exception) -> bool:
    """Whether other nodes and other tries would fail too."""
    return isinstance(error, CorruptError | RequirementsError)


def innermost_calls(path: Path) -> str:
    """Where the main thread was when faulthandler wrote this file; empty if there is none."""
    try:
        main = path.read_text(errors="replace").rpartition("(most recent call first):")[2]
    except OSError:
        return ""
    found = re.findall(r'^  File "([^<].*)", line (\d+) in (.*)$', main, re.MULTILINE)
    calls = [f"{file}:{line} ({name})" for file, line, name in found if not file.endswith("/launch/preload.py")]
    return f"; it was in {', called from '.join(calls[:SHOWN])}" if calls else ""
