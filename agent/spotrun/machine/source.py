"""Which code of spotrun a process has. Processes that share memory, or hand each other values, must have the same.

If an operator brings a newer version beside a running cluster, machines that start later have the newer code.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import xxhash

_PACKAGE = Path(__file__).parents[1]


def digest(package: Path = _PACKAGE) -> str:
    """A hex digest of the names and contents of a package's Python files, as they are now. Takes 6 ms for spotrun."""
    found = xxhash.xxh3_64()
    for path in sorted(package.rglob("*.py")):
        with contextlib.suppress(OSError):  # it has just been replaced
            text = path.read_bytes()
            found.update(f"{path.relative_to(package)} {len(text)} ".encode())
            found.update(text)
    return found.hexdigest()


DIGEST = digest()  # of this process: import this module when it starts
STAMP = f"{DIGEST} {_PACKAGE}"  # a process that is forked also needs the files later
