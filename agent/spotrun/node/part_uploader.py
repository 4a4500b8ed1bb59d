"""Put this node's part of a checkpoint into the bucket.

The part is copied from the snapshot once. If the upload fails (a bucket that refuses, a quota), it is tried again from
the copy, with growing pauses, as long as the head orders that part. A failure is reported as `Trouble`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from spotrun.backoff import Backoff
from spotrun.errors import CorruptError, SpotrunError
from spotrun.state import slots
from spotrun.state.shards import write_part
from spotrun.store import Store, checkpoint_key
from spotrun.wire import FileRef, Part, StateRef, Trouble

log = logging.getLogger(__name__)

PAUSE = (1.0, 60.0)  # seconds between tries: the first pause, the longest
FORGOTTEN = 600.0  # seconds after the last failure until the trouble is forgotten, if no part is wanted


@dataclass(frozen=True)
class Wanted:
    """A part that the head orders."""

    job: str  # its id
    slots: Path  # folder of the job's snapshots
    ref: StateRef  # the snapshot
    index: int  # of this part
    parts: int  # how many there are


@dataclass
class _Attempt:
    """The work on one wanted part. After `stopped` is set, it ends as soon as its thread has finished."""

    wanted: Wanted
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[Part | None] | None = None


class Saver:
    """Saves at most one part at a time; its owner calls `hold` in each turn. scratch: a folder on disk for the copy.

    changed: called when `part`, `late` or `trouble` may differ.
    """

    def __init__(self, store: Store, scratch: Path, changed: Callable[[], None]) -> None:
        self.trouble: Trouble | None = None  # why the newest try failed; None once a part is in the bucket
        self._store, self._scratch, self._changed = store, scratch, changed
        self._now: _Attempt | None = None
        self._failed_at = 0.0  # monotonic seconds
        self._threads: set[asyncio.Task[Part | None]] = set()  # tasks of attempts that may still work

    @property
    def part(self) -> Part | None:
        """The wanted part, once it is in the bucket."""
        task = self._now.task if self._now else None
        return task.result() if task is not None and task.done() else None

    @property
    def late(self) -> int | None:
        """The wanted step, if no slot holds its snapshot: the head then chooses a later step."""
        task = self._now.task if self._now else None
        return self._now.wanted.ref.step if self._now and task and task.done() and task.result() is None else None

    def hold(self, wanted: Wanted | None, awaited: bool = False) -> None:
        """Save this part and no other. awaited: workers have yet to commit its snapshot.

        Raises an unexpected error of an attempt: that is a bug.
        """
        if self._now is not None and self._now.wanted != wanted:
            self.drop()
        if wanted is None:
            if self.trouble and time.monotonic() - self._failed_at > FORGOTTEN:
                self.trouble = None
            return
        if self._now is None:
            self._now = _Attempt(wanted)
        if self._now.task is None and not awaited:
            self._now.task = asyncio.create_task(self._save(self._now))
            self._threads.add(self._now.task)
            self._now.task.add_done_callback(self._ended)
        elif self._now.task is not None and self._now.task.done():
            self._now.task.result()

    def drop(self) -> None:
        """Stop the current attempt; no part is wanted."""
        if self._now is not None:
            self._now.stopped.set()
        self._now = None

    def forget(self) -> None:
        """Stop the current attempt and forget the trouble: the node has another job."""
        self.drop()
        self.trouble = None

    def _ended(self, task: asyncio.Task[Part | None]) -> None:
        self._threads.discard(task)
        self._changed()

    async def _save(self, attempt: _Attempt) -> Part | None:
        """The part once it is in the bucket; None if the snapshot is not there, or the attempt was stopped."""
        with contextlib.ExitStack() as stack:
            copy: _Copy | None = None
            backoff = Backoff(*PAUSE)
            while not attempt.stopped.is_set():
                try:
                    copy = copy or _Copy(attempt.wanted, self._folder(stack))
                    part = await asyncio.to_thread(_advance, self._store, copy)
                except CorruptError as error:
                    log.warning("step %s is not saved, its snapshot is not whole: %s", attempt.wanted.ref.step, error)
                    return None
                except (SpotrunError, OSError) as error:
                    self._fail(attempt, str(error) or repr(error))
                else:
                    self.trouble = None if part and not attempt.stopped.is_set() else self.trouble
                    return part
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff.next()):
                        await attempt.stopped.wait()
        return None

    def _folder(self, stack: contextlib.ExitStack) -> Path:
        """A new folder for a copy, until the stack is closed. Raises OSError: a full disk has no room for a folder."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="part-", dir=self._scratch, ignore_cleanup_errors=True)
        return Path(stack.enter_context(folder))

    def _fail(self, attempt: _Attempt, message: str) -> None:
        """Record the failure. `since` is the first failure in a row, also if the steps differ."""
        if attempt.stopped.is_set():
            return
        step, now = attempt.wanted.ref.step, time.time()
        log.warning("checkpoint part of step %s is not in the bucket, trying again: %s", step, message)
        before, self._failed_at = self.trouble, time.monotonic()
        since, tries = (before.since, before.tries + 1) if before else (now, 1)
        self.trouble = Trouble(step=step, message=message[:500], since=since, at=now, tries=tries)
        self._changed()


@dataclass
class _Copy:
    """The copy of a part. files: in `folder`; None: not copied yet. uploaded: names of files in the bucket."""

    wanted: Wanted
    folder: Path
    files: tuple[FileRef, ...] | None = None
    whole: str = ""
    uploaded: set[str] = field(default_factory=set)


def _advance(store: Store, copy: _Copy) -> Part | None:
    """Copy the part and upload its files, as far as that is not done; None if no slot holds the snapshot.

    The slot is locked while the part is copied, not while it is uploaded. Raises `StoreError`, `CorruptError`,
    OSError.
    """
    wanted = copy.wanted
    if copy.files is None and not _copied(copy):
        return None
    assert copy.files is not None
    for file in copy.files:
        if file.name not in copy.uploaded:
            store.keep(checkpoint_key(wanted.job, wanted.ref.step, file.name), copy.folder / file.name)
            copy.uploaded.add(file.name)
    return Part(
        step=wanted.ref.step,
        generation=wanted.ref.generation,
        index=wanted.index,
        parts=wanted.parts,
        files=copy.files,
        whole=copy.whole,
    )


def _copied(copy: _Copy) -> bool:
    """Whether the part could be copied out of a slot."""
    wanted = copy.wanted
    for slot, record in slots.newest(wanted.slots, wanted.job):
        if record.order != (wanted.ref.generation, wanted.ref.step):
            continue
        with slots.reading(wanted.slots, slot):
            held = slots.read(wanted.slots, slot)
            if held is None or held.order != record.order:
                return False  # overwritten before it could be held
            _check_room(copy.folder, record.size // wanted.parts)
            written = write_part(wanted.slots, slot, wanted.index, wanted.parts, copy.folder)
        copy.files = tuple(FileRef(name=name, size=size, xxh3=xxh3) for name, _, size, xxh3 in written)
        copy.whole = held.xxh3
        return True
    return False


def _check_room(folder: Path, size: int) -> None:
    """Raise OSError if the disk has no room for `size` bytes: without this, each try would fill the disk."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(f"no room for a part of {size >> 20} MiB in {folder.parent}: {free >> 20} MiB are free")
