"""The job's code on this node: fetching and unpacking the bundle, its packages, and what it imports.

A bundle comes from outside, so it is unpacked with `tarfile`'s data filter (PEP 706), within a size limit, and only
if its checksum is the one that was ordered.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import errno
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import zstandard

from spotrun.errors import CorruptError, SpotrunError
from spotrun.spec import bundle
from spotrun.store import Store, code_key

if TYPE_CHECKING or sys.version_info >= (3, 11, 4):  # Debian 12 has 3.11.2
    import tarfile
else:
    from backports import tarfile

MAX_ARCHIVE, MAX_UNPACKED, MAX_FILES = bundle.PACKED, bundle.BYTES, bundle.FILES
MAX_HEADER = 1 << 20  # bytes of all headers before one file
# What is this node's fault and not the archive's.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# What `pip install --target` would otherwise bring again, in another version than the launcher's own.
PINNED = ("torch", "numpy", "safetensors")


class SetupError(SpotrunError):
    """This node could not get the job's code or packages ready; another try may."""


def fetch(store: Store, sha256: str, folder: Path) -> Path:
    """The unpacked bundle, below `folder`; fetched unless it is there. Raises `StoreError`, `CorruptError`."""
    target = folder / sha256
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="new-", dir=folder) as scratch:
        archive, content = Path(scratch, "bundle"), Path(scratch, "content")
        store.fetch(code_key(sha256), archive)
        _check(archive, sha256)
        content.mkdir()
        unpack(archive, content, code_key(sha256))
        os.rename(content, target)
    return target


def unpack(archive: Path, target: Path, name: str) -> None:
    """Unpack a .tar.zst into `target`. Raises `CorruptError` for what is malformed, too large or leads out of it.

    Raises `SetupError` if it is this node that fails.
    """
    total = files = 0
    try:
        with (
            archive.open("rb") as file,
            zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(file) as plain,
            tarfile.open(fileobj=(source := _Rationed(plain, name)), mode="r|") as tar,  # type: ignore[call-overload]
        ):
            for member in tar:
                tar.members.clear()  # it would keep all of them, with their headers
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
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise SetupError(f"{name}: cannot be unpacked on this node: {error}") from None
        raise CorruptError(f"{name}: cannot be unpacked: {error}") from None


class _Rationed:
    """The plain archive, of which only `left` bytes more can be read: tarfile takes headers into memory whole.

    This holds for headers of every kind (PAX, GNU, sparse maps) and for chains of them.
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


async def install(requirements: tuple[str, ...], folder: Path, env: dict[str, str]) -> Path | None:
    """The folder with these packages, installed unless it is there; None if the agent's own environment has them all.

    Raises `SetupError`.
    """
    if not requirements:
        return None
    target = folder / hashlib.sha256("\n".join(requirements).encode()).hexdigest()[:16]
    if target.is_dir():
        return target
    if await _has(requirements, env):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="new-", dir=folder) as scratch:
        pins = Path(scratch, "constraints.txt")
        pins.write_text("".join(f"{name}=={version}\n" for name, version in _installed(PINNED)))
        content = Path(scratch, "content")
        code, output = await _pip("install", "--target", str(content), "-c", str(pins), *requirements, env=env)
        if code != 0:
            said = output.strip().splitlines()[-5:]
            raise SetupError(f"requirements {', '.join(requirements)}: pip failed: {' '.join(said)}")
        os.rename(content, target)
    return target


async def _has(requirements: tuple[str, ...], env: dict[str, str]) -> bool:
    """Whether nothing would be installed: with an image that has a job's packages, no node downloads them."""
    code, output = await _pip("install", "--dry-run", "--no-index", "--report", "-", *requirements, env=env)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return code == 0 and json.loads(output)["install"] == []
    return False


async def _pip(command: str, *args: str, env: dict[str, str]) -> tuple[int, str]:
    """(exit status, output) of pip."""
    # pip must not outlive the agent: the wrapper has the kernel see to it.
    wrapper = (
        f"from spotrun.machine.process import die_with_parent; die_with_parent({os.getpid()});"
        "import runpy; runpy.run_module('pip', run_name='__main__', alter_sys=True)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", wrapper, command, "--no-input", "--disable-pip-version-check", "--quiet", *args,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=env,
    )  # fmt: skip
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output.decode(errors="replace")


def imports(root: Path, script: str) -> list[str]:
    """Modules from outside the bundle that the script, and the bundle's modules it imports, import at top level."""
    places = [(root / script).parent, root]
    found: dict[str, None] = {}
    seen: set[Path] = set()
    todo = [root / script]
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in _top_level_imports(path):
            own = _own_module(name, places)
            if own is None:
                found.setdefault(name)
            else:
                todo += own
    return list(found)


def remove(folder: Path, keep: str | None = None) -> None:
    """Empty a folder of what is not `keep`."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name != keep:
                shutil.rmtree(path, ignore_errors=True)


def _check(archive: Path, sha256: str) -> None:
    if archive.stat().st_size > MAX_ARCHIVE:
        raise CorruptError(f"{code_key(sha256)}: refused: larger than {MAX_ARCHIVE >> 20} MiB")
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise CorruptError(f"{code_key(sha256)} is damaged: its sha256 is {found}; submit the job again")


def _installed(names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _top_level_imports(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # the worker will say so, with a traceback
    # Also those inside try, if and with, but not inside functions and classes.
    todo: list[ast.AST] = [*tree.body]
    while todo:
        node = todo.pop(0)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and node.module != "__future__":
            yield node.module
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler)]


def _own_module(name: str, places: list[Path]) -> list[Path] | None:
    """The files of a module if it is the bundle's; None if it is not."""
    first, *rest = name.split(".")
    for place in places:
        if (place / f"{first}.py").is_file():
            return [place / f"{first}.py"]
        if (place / first).is_dir():
            inner = place.joinpath(first, *rest)
            return [
                path
                for path in (place / first / "__init__.py", inner.with_suffix(".py"), inner / "__init__.py")
                if path.is_file()
            ]
    return None
