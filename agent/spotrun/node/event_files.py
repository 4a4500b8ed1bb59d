"""TensorBoard's event files, which a script writes into its folders of `keep`: those that go into the bucket meanwhile.

The whole folders reach the bucket when the job has succeeded (`kept_folders`). That is too late for a job that fails,
that is watched, or that loses this node.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from spotrun.node.kept_folders import is_inside, is_plain, walk

NAMED = "tfevents"  # all their names have this
MOST = 200  # files of a job on this node; of more, the newest
LARGEST = 256 << 20  # bytes of a file: each upload sends all of it


def find(root: Path, folders: Sequence[str]) -> dict[Path, str]:
    """The event files in these folders below `root`, with their names there. Links are left out."""
    found = {path: name for folder in folders for path, name in _files(root, folder)}
    written = dict[Path, float]()
    for path in found:
        with contextlib.suppress(OSError):  # the script may remove its files
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_size <= LARGEST:
                written[path] = status.st_mtime
    return {path: found[path] for path in sorted(written, key=written.__getitem__)[-MOST:]}


def _files(root: Path, folder: str) -> Iterator[tuple[Path, str]]:
    with contextlib.suppress(OSError):  # the folder may not be there yet
        if is_inside(root, folder):
            for path in walk(root / folder):
                if NAMED in path.name and is_plain(name := path.relative_to(root).as_posix()):
                    yield path, name
