"""The job's code on this node: fetching and unpacking the bundle.

A bundle comes from outside. So it is unpacked with `tarfile`'s data filter (PEP 706) and within size limits, and only
if its checksum is the ordered one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import zstandard

from spotrun.backoff import read_twice
from spotrun.errors import CorruptError, SetupError
from spotrun.spec import bundle as limits
from spotrun.store import Store, code_key

if TYPE_CHECKING or sys.version_info >= (3, 11, 4):  # Debian 12 has 3.11.2
    import tarfile
else:
    from backports import tarfile

MAX_ARCHIVE, MAX_UNPACKED, MAX_FILES = limits.PACKED, limits.BYTES, limits.FILES
MAX_HEADER = 1 << 20  # bytes of all headers before one file
# These errors are this node's fault, not the archive's.
_NODE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def fetch(store: Store, sha256: str, folder: Path) -> Path:
    """Return the folder of the unpacked bundle below `folder`. Fetch the bundle unless that folder exists.

    Raises `StoreError`, `CorruptError`, `SetupError`.
    """
    target = folder / sha256
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="new-", dir=folder) as scratch:
        archive, content = Path(scratch, "bundle"), Path(scratch, "content")
        read_twice(partial(_fetch, store, sha256, archive), CorruptError)  # without it, the job fails for good
        content.mkdir()
        unpack(archive, content, code_key(sha256))
        move(content, target)
    return target


def copy(code: Path, folder: Path, fill: Callable[[Path], None] = lambda _: None) -> Path:
    """Return a copy of an unpacked bundle below `folder`, which the job may write to. Make it unless it exists.

    fill: called with the new copy, to add to it.
    """
    target = folder / code.name
    if not target.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="new-", dir=folder) as scratch:
            content = shutil.copytree(code, Path(scratch, "content"), symlinks=True)
            fill(content)
            move(content, target)
    return target


def move(content: Path, target: Path) -> None:
    """Move a folder to its place, unless another job has made the same one meanwhile."""
    try:
        os.rename(content, target)
    except OSError:
        if not target.is_dir():
            raise


def unpack(archive: Path, target: Path, name: str) -> None:
    """Unpack a .tar.zst into `target`. name: of the archive, for messages.

    Raises `CorruptError` if the archive is malformed or too large, or has a path outside `target`. Raises `SetupError`
    if this node fails, for example because its disk is full.
    """
    total = files = 0
    try:
        with (
            archive.open("rb") as file,
            zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(file) as plain,
            tarfile.open(fileobj=(source := _LimitedReader(plain, name)), mode="r|") as tar,  # type: ignore[call-overload]
        ):
            for member in tar:
                tar.members.clear()  # without this, tarfile keeps every member with its headers
                tar.pax_headers.clear()
                total, files = total + member.size, files + 1
                if total > MAX_UNPACKED or files > MAX_FILES:
                    raise CorruptError(f"{name}: refused: more than {MAX_UNPACKED >> 20} MiB or {MAX_FILES} files")
                if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
                    raise CorruptError(f"{name}: refused: {member.name!r} is a device or a pipe")
                if member.name.startswith("/") or ".." in Path(member.name).parts:
                    raise CorruptError(f"{name}: refused: {member.name!r} leads out of the bundle's folder")
                source.left = member.size + MAX_HEADER
                tar.extract(member, target, filter="data")
                source.left = MAX_HEADER
    except tarfile.FilterError as error:
        raise CorruptError(f"{name}: refused: {error}") from None
    except (tarfile.TarError, zstandard.ZstdError, EOFError, ValueError, LookupError, RecursionError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _NODE_ERRORS:
            raise SetupError(f"{name}: cannot be unpacked on this node: {error}") from None
        raise CorruptError(f"{name}: cannot be unpacked: {error}") from None


class _LimitedReader:
    """The decompressed archive. It refuses to be read beyond `left` more bytes.

    tarfile reads headers of every kind (PAX, GNU, sparse maps), and chains of headers, into memory as a whole.
    """

    def __init__(self, plain: zstandard.ZstdDecompressionReader, name: str) -> None:
        self.left = MAX_HEADER
        self._plain, self._name = plain, name

    def read(self, size: int) -> bytes:
        data = self._plain.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise CorruptError(f"{self._name}: refused: a header of more than {MAX_HEADER >> 20} MiB")
        return data


def _fetch(store: Store, sha256: str, archive: Path) -> None:
    store.fetch(code_key(sha256), archive)
    if archive.stat().st_size > MAX_ARCHIVE:
        raise CorruptError(f"{code_key(sha256)}: refused: larger than {MAX_ARCHIVE >> 20} MiB")
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise CorruptError(f"{code_key(sha256)} is damaged: its sha256 is {found}; submit the job again")
