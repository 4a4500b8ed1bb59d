"""The code bundle: a job's folder as one archive, named after its content.

Equal folders give equal bytes (sorted, no times, no owners), so what is in the bucket already is not sent again. What
`.gitignore` files exclude stays out: those in the folder, below it, and above it up to the repository's root.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard
from pathspec import GitIgnoreSpec

from spotrun.errors import SpotrunError
from spotrun.store import Store, code_key

LIMIT = 256 << 20  # bytes of all files together; code is smaller, data belongs into the bucket
LEVEL = 9  # part of what names a bundle: another level is another archive
ALWAYS_OUT = {".git", ".venv", "__pycache__", ".spotrun"}
_Ignores = list[tuple[Path, GitIgnoreSpec]]  # innermost last


@dataclass(frozen=True)
class Bundle:
    """What was packed. sha256: of the archive, which is at `code_key(sha256)`. size: bytes of the archive."""

    sha256: str
    size: int
    files: int
    sent: bool  # False: the bucket had it


def upload(store: Store, folder: Path, script: str, limit: int = LIMIT) -> Bundle:
    """Pack a job's folder into the bucket. Raises `SpotrunError` if the script would be missing or it is too large."""
    names = files(folder, limit)
    if Path(script) not in names:
        raise SpotrunError(f"{folder / script}: a .gitignore excludes the job's script, so no node would get it")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "bundle.tar.zst")
        with path.open("w+b") as archive:
            sha256, size = pack(folder, names, archive)
        sent = not store.exists(code_key(sha256))
        if sent:
            store.put(code_key(sha256), path)
    return Bundle(sha256, size, len(names), sent)


def pack(folder: Path, names: list[Path], out: BinaryIO) -> tuple[str, int]:
    """Write the archive of these files; its sha256 and its size in bytes."""
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    with (
        compressor.stream_writer(out, closefd=False) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in names:
            path = folder / name
            with _Explained(path):
                tar_member = _member(name, path)
                if tar_member.isfile():
                    with path.open("rb") as file:
                        tar.addfile(tar_member, file)
                else:
                    tar.addfile(tar_member)
    size = out.tell()
    out.seek(0)
    digest = hashlib.sha256()
    while block := out.read(1 << 20):
        digest.update(block)
    return digest.hexdigest(), size


def files(folder: Path, limit: int = LIMIT) -> list[Path]:
    """What goes into the bundle, relative to `folder`, sorted. Raises `SpotrunError` for what cannot."""
    root = folder.resolve()
    found = sorted(_walk(root, root, _outer_ignores(root)))
    sizes = {name: (root / name).lstat().st_size for name in found}
    if sum(sizes.values()) > limit:
        largest = sorted(found, key=lambda name: -sizes[name])[:3]
        shown = ", ".join(f"{name} ({_megabytes(sizes[name])})" for name in largest)
        raise SpotrunError(
            f"{folder}: {_megabytes(sum(sizes.values()))} of files, a bundle takes at most {_megabytes(limit)}; the"
            f" largest: {shown}. Put data into the bucket, and what is not code into .gitignore"
        )
    return found


def _walk(folder: Path, root: Path, ignores: _Ignores) -> Iterator[Path]:
    ignores = ignores + _ignores_in(folder)
    with _Explained(folder):
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    for entry in entries:
        path = Path(entry.path)
        inner = entry.is_dir(follow_symlinks=False)
        if entry.name in ALWAYS_OUT or _is_ignored(path, inner, ignores):
            continue
        if inner:
            yield from _walk(path, root, ignores)
        elif entry.is_symlink():
            if not Path(os.path.realpath(path)).is_relative_to(root) or os.readlink(path).startswith("/"):
                raise SpotrunError(
                    f"{path}: a link to {os.readlink(path)}, which nodes do not have; copy the file here, or put the"
                    " link into .gitignore"
                )
            with _Explained(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.stat()  # a link to itself leads nowhere; one to what is not there yet may go along
            yield path.relative_to(root)
        elif entry.is_file(follow_symlinks=False):  # sockets, pipes and devices stay out
            yield path.relative_to(root)


def _is_ignored(path: Path, is_folder: bool, ignores: _Ignores) -> bool:
    """As git decides: the last matching pattern of the innermost file that has one."""
    for base, spec in reversed(ignores):
        name = path.relative_to(base).as_posix() + ("/" if is_folder else "")
        verdict = spec.check_file(name).include
        if verdict is not None:
            return verdict
    return False


def _ignores_in(folder: Path) -> _Ignores:
    path = folder / ".gitignore"
    with _Explained(path):
        if not path.is_file():
            return []
        return [(folder, GitIgnoreSpec.from_lines(path.read_text("utf-8", "replace").splitlines()))]


def _outer_ignores(root: Path) -> _Ignores:
    """Of the folders above, up to the repository's root; none if this is in no repository."""
    above = [root, *root.parents]
    top = next((index for index, folder in enumerate(above) if (folder / ".git").exists()), 0)
    return [found for folder in reversed(above[1 : top + 1]) for found in _ignores_in(folder)]


def _member(name: Path, path: Path) -> tarfile.TarInfo:
    info = path.lstat()
    member = tarfile.TarInfo(name.as_posix())
    if stat.S_ISLNK(info.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
    else:
        member.size = info.st_size
    member.mode = 0o755 if info.st_mode & stat.S_IXUSR else 0o644
    return member


class _Explained:
    """Turns an OSError about `path` into a message."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, OSError):
            raise SpotrunError(f"{self._path}: cannot be packed: {error.strerror or error}") from None


def _megabytes(size: int) -> str:
    return f"{size / (1 << 20):.1f} MB"
