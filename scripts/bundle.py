"""The code bundle: a job's folder as one archive, named after its content.

Equal folders give equal archives, because names are sorted, and times and owners are left out. So an archive that is
already in the bucket is not sent again.

Files that a `.gitignore` excludes are left out. A `.gitignore` counts if it is in the folder, below it, or above it up
to the repository's root. A `.spotrunignore` in one of these places has the same syntax and takes precedence. A file
that looks like a secret is refused, unless a line in a `.spotrunignore` allows it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard
from pathspec import GitIgnoreSpec

from scripts import secret_files
from spotrun.errors import SpotrunError
from spotrun.spec import bundle as limits
from spotrun.store import Store, code_key
from spotrun.text import count

LEVEL = 9  # of the compression; another level gives another archive, with another name
ALWAYS_OUT = {".git", ".venv", "__pycache__", ".spotrun"}
FRESH = 1800.0  # seconds; an older object is sent again, as a head may be about to remove it (`head/code_sweep.py`)
OWN, GIT = ".spotrunignore", ".gitignore"
_SHOWN = 3  # files in a message
_LESS = f"In {GIT} or {OWN}, name the files that the job does not need. For data, see docs/training.md#data"


@dataclass(frozen=True)
class Bundle:
    """What was packed."""

    sha256: str  # of the archive, which is at `code_key(sha256)`
    size: int  # bytes of the archive
    files: int  # the number of files in the archive
    bytes: int  # the sizes of the files, added up
    largest: tuple[tuple[str, int], ...]  # names and bytes of the largest files
    sent: bool  # False if the bucket had the archive

    def __str__(self) -> str:
        """bundle 3f2a…: 12 files, 1.2 MB (80.3 kB packed); the largest: a.bin (1.0 MB), train.py (4.1 kB)"""
        packed = f"{_size(self.size)} packed" + ("" if self.sent else ", in the bucket already")
        largest = ", ".join(f"{name} ({_size(size)})" for name, size in self.largest)
        files = count(self.files, "file")
        return f"bundle {self.sha256[:12]}: {files}, {_size(self.bytes)} ({packed}); the largest: {largest}"


@dataclass(frozen=True)
class _Ignores:
    """The ignore files that apply to a folder: each file's folder and patterns, innermost last."""

    git: tuple[tuple[Path, GitIgnoreSpec], ...] = ()
    own: tuple[tuple[Path, GitIgnoreSpec], ...] = ()

    def plus(self, folder: Path) -> _Ignores:
        """These, and the ignore files in the folder itself."""
        return _Ignores(self.git + _read(folder, GIT), self.own + _read(folder, OWN))

    def verdict(self, path: Path, is_folder: bool) -> tuple[bool, bool]:
        """Whether the path stays out, and whether a `.spotrunignore` explicitly allows it.

        As in git, the innermost ignore file with a matching pattern counts, and in this file the last such pattern.
        """
        for own, files in ((True, self.own), (False, self.git)):
            for base, spec in reversed(files):
                found = spec.check_file(path.relative_to(base).as_posix() + ("/" if is_folder else "")).include
                if found is not None:
                    return found, own and not found
        return False, False


def check(folder: Path, script: str, limit: int = limits.BYTES) -> list[Path]:
    """The files of the bundle. Raises `SpotrunError` if the script would be missing, or a file cannot be sent."""
    names = files(folder, limit)
    if Path(script) not in names:
        raise SpotrunError(f"{folder / script}: a {GIT} or {OWN} excludes the job's script, so no node would get it")
    return names


def upload(store: Store, folder: Path, script: str, limit: int = limits.BYTES) -> Bundle:
    """Pack a job's folder into the bucket. Raises `SpotrunError` as `check` does."""
    names = check(folder, script, limit)
    sizes = {name.as_posix(): (folder / name).lstat().st_size for name in names}
    largest = tuple(sorted(sizes.items(), key=lambda item: -item[1])[:_SHOWN])
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "bundle.tar.zst")
        with path.open("w+b") as archive:
            sha256, size = pack(folder, names, archive)
        if size > limits.PACKED:
            raise SpotrunError(f"{folder}: {_size(size)} packed; a bundle may have at most {_size(limits.PACKED)}")
        age = store.age(code_key(sha256))
        sent = age is None or age > FRESH
        if sent:
            store.put(code_key(sha256), path)
    return Bundle(sha256, size, len(names), sum(sizes.values()), largest, age is None)


def pack(folder: Path, names: list[Path], out: BinaryIO) -> tuple[str, int]:
    """Write the archive of these files. Returns its sha256 and its size in bytes."""
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    with (
        compressor.stream_writer(out, closefd=False) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in names:
            path = folder / name
            with _explained(path):
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


def files(folder: Path, limit: int = limits.BYTES) -> list[Path]:
    """The bundle's files, relative to `folder`, sorted. Raises `SpotrunError` if one of them cannot be sent."""
    root = folder.resolve()
    wanted = dict(_walk(root, root, _outer_ignores(root)))
    found = sorted(wanted)
    sizes = {name: (root / name).lstat().st_size for name in found}
    if len(found) > limits.FILES:
        raise SpotrunError(f"{folder}: {len(found)} files; a bundle may have at most {limits.FILES}. {_LESS}")
    if sum(sizes.values()) > limit:
        largest = sorted(found, key=lambda name: -sizes[name])[:_SHOWN]
        shown = ", ".join(f"{name} ({_size(sizes[name])})" for name in largest)
        raise SpotrunError(
            f"{folder}: {_size(sum(sizes.values()))} of files; a bundle may have at most {_size(limit)}. The largest:"
            f" {shown}. {_LESS}"
        )
    _refuse_secrets(folder, root, [name for name in found if not wanted[name]])
    return found


def _refuse_secrets(folder: Path, root: Path, names: list[Path]) -> None:
    """Raise `SpotrunError` if files look like secrets. The message names them, and the lines that allow them."""
    found = {}
    for name in names:
        with _explained(root / name):
            if what := secret_files.kind(root, name):
                found[name] = what
    if not found:
        return
    shown = list(found.items())[:_SHOWN]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    lines = ", ".join(f"`!/{_escaped(name)}`" for name, _ in shown)
    what = ", ".join(f"{name} ({kind})" for name, kind in shown)
    raise SpotrunError(
        f"{folder}: {what}{more}: a bundle with secrets can be read on each node and in the bucket. Exclude them in"
        f" {GIT} or {OWN}; or, to send them on purpose, write {lines} into {folder / OWN}"
    )


def _walk(folder: Path, root: Path, ignores: _Ignores) -> Iterator[tuple[Path, bool]]:
    """Each file, and whether a `.spotrunignore` explicitly allows it."""
    ignores = ignores.plus(folder)
    with _explained(folder):
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    for entry in entries:
        path = Path(entry.path)
        inner = entry.is_dir(follow_symlinks=False)
        out, wanted = ignores.verdict(path, inner)
        if entry.name in ALWAYS_OUT or out:
            continue
        if inner:
            yield from _walk(path, root, ignores)
        elif entry.is_symlink():
            if _leads_out(path, root):
                raise SpotrunError(
                    f"{path}: a link to {os.readlink(path)}, which nodes do not have; copy the file here, or exclude"
                    f" the link in {GIT} or {OWN}"
                )
            with _explained(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.stat()  # a link to itself is an error; a link to a missing file is sent
            yield path.relative_to(root), wanted
        elif entry.is_file(follow_symlinks=False):  # sockets, pipes and devices stay out
            yield path.relative_to(root), wanted


def _leads_out(link: Path, root: Path) -> bool:
    """Whether a link leads out of `root`, also if only for a part of its way: on a node, `root` has another name."""
    target = os.readlink(link)
    way = os.path.normpath(link.parent.relative_to(root) / target)
    return target.startswith("/") or way.split("/")[0] == ".." or not Path(os.path.realpath(link)).is_relative_to(root)


def _read(folder: Path, name: str) -> tuple[tuple[Path, GitIgnoreSpec], ...]:
    path = folder / name
    with _explained(path):
        if not path.is_file():
            return ()
        return ((folder, GitIgnoreSpec.from_lines(path.read_text("utf-8", "replace").splitlines())),)


def _outer_ignores(root: Path) -> _Ignores:
    """The ignore files of the folders above, up to the repository's root; none if there is no repository."""
    above = [root, *root.parents]
    top = next((index for index, folder in enumerate(above) if (folder / ".git").exists()), 0)
    ignores = _Ignores()
    for folder in reversed(above[1 : top + 1]):
        ignores = ignores.plus(folder)
    return ignores


def _escaped(name: Path) -> str:
    """A file's name as a pattern."""
    text = re.sub(r"([\\*?\[])", r"\\\1", name.as_posix())
    return text[:-1] + "\\ " if text.endswith(" ") else text


def _member(name: Path, path: Path) -> tarfile.TarInfo:
    info = path.lstat()
    member = tarfile.TarInfo(name.as_posix())
    if stat.S_ISLNK(info.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
    else:
        member.size = info.st_size
    member.mode = 0o755 if info.st_mode & stat.S_IXUSR else 0o644
    return member


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an OSError about `path` into a message."""
    try:
        yield
    except OSError as error:
        raise SpotrunError(f"{path}: cannot be packed: {error.strerror or error}") from None


def _size(count: int) -> str:
    if count >= 1 << 20:
        return f"{count / (1 << 20):.1f} MB"
    return f"{count / 1024:.1f} kB" if count >= 1024 else f"{count} bytes"
