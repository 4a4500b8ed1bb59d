"""The folders that a job leaves in the bucket: upload them from a working folder, and fetch them into another one.

Files are streamed. Links stay links, and may lead only to places within their own folder. A file's checksum is checked
when the file is fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

import xxhash

from spotrun.backoff import Backoff, read_twice
from spotrun.document import problem
from spotrun.errors import CorruptError, NotFound, SetupError, SpotrunError, StoreError
from spotrun.folders import FoldersRef, Input, Keeping, KeptFile, KeptFiles
from spotrun.store import Store, kept_key
from spotrun.store.threads import at_once

log = logging.getLogger(__name__)

PAUSE = (1.0, 60.0)  # seconds between tries: the first pause, the longest
MOST = 20_000  # files of a job's folders: the list of them is read into memory
LIST = 32 << 20  # bytes of that list
AT_ONCE = 16  # small files that are uploaded or fetched at the same time
SMALL = 8 << 20  # bytes that a small file has, at most
_BLOCK = 1 << 20  # bytes that are read at once

Item = TypeVar("Item")


@dataclass
class _Attempt:
    """The upload of one generation's folders."""

    job: str
    root: Path
    folders: tuple[str, ...]
    generation: int
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Keeper:
    """Uploads a job's folders while they are wanted. changed: called when `keeping` has changed."""

    def __init__(self, store: Store, changed: Callable[[], None]) -> None:
        self.keeping: Keeping | None = None
        self._store, self._changed = store, changed
        self._attempt: _Attempt | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def want(self, job: str, root: Path, folders: tuple[str, ...], generation: int) -> None:
        """Upload the folders of this generation, and no longer those of another one."""
        if self._attempt is not None and self._attempt.generation == generation:
            return
        self.stop()
        self.keeping = Keeping(generation=generation)
        self._attempt = attempt = _Attempt(job, root, folders, generation)
        attempt.task = asyncio.create_task(self._run(attempt))
        self._tasks.add(attempt.task)
        attempt.task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Stop the upload."""
        if self._attempt is not None:
            self._attempt.stopped.set()
        self._attempt = self.keeping = None

    async def _run(self, attempt: _Attempt) -> None:
        backoff, uploaded = Backoff(*PAUSE), dict[str, KeptFile]()
        while not attempt.stopped.is_set():
            try:
                ref = await asyncio.to_thread(_upload, self._store, attempt, uploaded)
                return self._say(attempt, ref=ref)
            except CorruptError as error:
                return self._say(attempt, problem=str(error)[:500])
            except (SpotrunError, OSError) as error:
                if not attempt.stopped.is_set():
                    log.warning("job %s: its folders are not in the bucket, trying again: %s", attempt.job, error)
                    self._say(attempt, trouble=(str(error) or repr(error))[:500])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff.next()):
                    await attempt.stopped.wait()

    def _say(self, attempt: _Attempt, **found: object) -> None:
        if not attempt.stopped.is_set():
            self.keeping = Keeping(generation=attempt.generation).replace(**found)
            self._changed()


def fetch(store: Store, wanted: Input, root: Path) -> None:
    """Fetch a folder of another job into `root`, a folder that nobody else uses yet.

    Raises `CorruptError` if the folder is not what that job has left, `SetupError` if the disk is too small for it, and
    `StoreError`.
    """
    target = root / wanted.name
    if target.exists() or target.is_symlink():
        raise CorruptError(f"inputs.{wanted.name}: the job's own folder has {wanted.name} already: rename one of them")
    files, prefix = _list(store, wanted), f"{wanted.folder}/"
    mine = [
        each.model_copy(update={"name": each.name.removeprefix(prefix)})
        for each in files
        if each.name.startswith(prefix)
    ]
    size, free = sum(each.size for each in mine), shutil.disk_usage(root).free
    if size > free:
        raise SetupError(f"inputs.{wanted.name}: has {size >> 20} MiB, but only {free >> 20} MiB are free in {root}")
    target.mkdir(parents=True)

    def get(each: KeptFile) -> None:
        key = kept_key(wanted.job, wanted.ref.generation, each.at or prefix + each.name)
        read_twice(partial(_fetch_file, store, key, each, target), CorruptError)  # without it, the job fails for good

    _for_each(get, [(each, each.size) for each in mine if not each.link])
    for each in (each for each in mine if each.link):  # last, so that no file is written through a link
        (target / each.name).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(each.link, target / each.name)


def _for_each(call: Callable[[Item], None], sized: Sequence[tuple[Item, int]]) -> None:
    """Call for each item. Small files go side by side, because most of their time is waiting."""
    for _ in at_once(call, [item for item, size in sized if size <= SMALL], AT_ONCE, wait=True):
        pass
    for item in (item for item, size in sized if size > SMALL):
        call(item)


def _list(store: Store, wanted: Input) -> tuple[KeptFile, ...]:
    key = kept_key(wanted.job, wanted.ref.generation)
    try:
        data = store.get(key, LIST)
        if hashlib.sha256(data).hexdigest() != wanted.ref.sha256:
            raise CorruptError(f"inputs.{wanted.name}: {key} is not what {wanted.job} has left: its checksum differs")
        found = KeptFiles.model_validate_json(data)
    except NotFound:
        raise CorruptError(f"inputs.{wanted.name}: {key} has been deleted; run {wanted.job} again") from None
    except ValueError as error:
        raise CorruptError(f"inputs.{wanted.name}: {key} is not readable: {problem(error)}") from None
    if wanted.folder not in found.folders:
        raise CorruptError(f"inputs.{wanted.name}: {wanted.job} has left no folder {wanted.folder}")
    for each in found.files:
        inside = not each.link or _stays_inside(each.name, each.link, found.folders)
        if not (is_plain(each.name) and is_plain(each.at or each.name) and inside):
            raise CorruptError(f"inputs.{wanted.name}: {key}: refused: {each.name!r} leads out of its folder")
    return found.files


def _fetch_file(store: Store, key: str, file: KeptFile, target: Path) -> None:
    path = target / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        store.fetch(key, path, file.size)
    except NotFound:
        raise CorruptError(f"{key} has been deleted") from None
    except StoreError:
        if store.size(key) == file.size:
            raise
    if (path.stat().st_size, _digest(path)) != (file.size, file.xxh3):
        raise CorruptError(f"{key} is damaged: its size or its checksum is not the one in the list of files")


def _upload(store: Store, attempt: _Attempt, uploaded: dict[str, KeptFile]) -> FoldersRef:
    """Upload all files, except those that were uploaded before, then the list of them."""
    job, number = attempt.job, attempt.generation
    found = {name: path for folder in attempt.folders for name, path in _files(attempt.root, folder)}
    if len(found) > MOST:
        raise CorruptError(f"keep: {len(found)} files are too many, at most {MOST} are kept; pack them into an archive")

    def put(name: str) -> None:
        path = found[name]
        # Google Cloud tells the logs of workers, which it deletes after some time, by this end of their keys.
        at = f"{name}/file" if name.endswith(".log") else ""
        each = KeptFile(name=name, size=path.stat().st_size, xxh3=_digest(path), at=at)
        store.keep(kept_key(job, number, at or name), path, attempt.stopped.is_set)
        uploaded[name] = each

    _for_each(put, [(n, p.stat().st_size) for n, p in found.items() if n not in uploaded and not p.is_symlink()])
    uploaded |= {name: KeptFile(name=name, link=os.readlink(path)) for name, path in found.items() if path.is_symlink()}
    files = tuple(uploaded[name] for name in sorted(found))
    data = json.dumps(KeptFiles(folders=attempt.folders, files=files).model_dump(mode="json")).encode()
    _create(store, kept_key(job, number), data)
    return FoldersRef(generation=number, sha256=hashlib.sha256(data).hexdigest())


def _create(store: Store, key: str, data: bytes) -> None:
    """Write the list, unless it is in the bucket already: the answer to an earlier try may have got lost.

    Google Cloud then refuses this one, because nodes have no right to replace what was kept.
    """
    try:
        written = store.create(key, data)
    except StoreError:
        if store.find(key, LIST) is None:
            raise
        written = False
    if not written and store.get(key, LIST) != data:
        raise SpotrunError(f"{key} is in the bucket already, with other files")


def _files(root: Path, folder: str) -> Iterator[tuple[str, Path]]:
    """Files and links of a folder, with their names below the working folder. Raises `CorruptError`."""
    top = root / folder
    if not is_inside(root, folder):
        why = "is not a folder, or is a link" if os.path.lexists(top) else "does not exist when the script has ended"
        raise CorruptError(f"keep: {folder}: {why}")
    for path in sorted(walk(top)):
        name = path.relative_to(root).as_posix()
        kind = path.lstat().st_mode
        if not is_plain(name):
            raise CorruptError(f"keep: {name!r}: is not a name that a bucket can have; rename it")
        if stat.S_ISLNK(kind) and not _stays_inside(name, os.readlink(path), [folder]):
            raise CorruptError(f"keep: {name}: is a link out of {folder}; copy what it leads to")
        if not (stat.S_ISLNK(kind) or stat.S_ISREG(kind)):
            raise CorruptError(f"keep: {name}: is neither a file nor a folder nor a link")
        yield name, path


def is_inside(root: Path, folder: str) -> bool:
    """Whether there is such a folder below `root`, and no link on the way to it."""
    top = root / folder
    return top.is_dir() and top.resolve() == root.resolve() / folder


def walk(folder: Path) -> Iterator[Path]:
    """Everything below a folder except folders. It follows no link."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from walk(Path(entry.path))
            else:
                yield Path(entry.path)


def is_plain(name: str) -> bool:
    """Whether a file of this name lies below its working folder."""
    parts = name.split("/")
    return name.isprintable() and "\\" not in name and all(part not in ("", ".", "..") for part in parts)


def _stays_inside(name: str, link: str, folders: Sequence[str]) -> bool:
    """Whether a link of that name leads to a place within the same one of these folders."""
    if PurePosixPath(link).is_absolute() or not link.isprintable():
        return False
    target = os.path.normpath(os.path.join(os.path.dirname(name), link))
    return any(name.startswith(f"{each}/") and f"{target}/".startswith(f"{each}/") for each in folders)


def _digest(path: Path) -> str:
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()
