"""Upload this node's part of a checkpoint to the bucket.

The part is copied from the snapshot once. If the upload fails (a bucket that refuses, a quota), the uploader tries
again from the copy, with growing pauses, for as long as the head orders that part. A failure is reported as `Trouble`.
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
from spotrun.state.shards import sketch, write_part
from spotrun.store import Store, checkpoint_key
from spotrun.wire import FileRef, Part, StateRef, Trouble

log = logging.getLogger(__name__)

PAUSE = (1.0, 60.0)  # seconds between tries: the first pause, the longest
HURRIED = 1.0  # the longest pause on a machine that will be taken
FORGOTTEN = 600.0  # seconds from the last failure until the trouble is forgotten, while no part is wanted


@dataclass(frozen=True)
class WantedPart:
    """A part that the head orders."""

    job: str  # its id
    slots: Path  # folder of the job's snapshots
    ref: StateRef  # the snapshot
    index: int  # of this part
    parts: int  # how many parts the checkpoint has


@dataclass
class _Attempt:
    """The work on one wanted part."""

    wanted: WantedPart
    stopped: bool = False  # if true, the attempt ends soon
    again: asyncio.Event = field(default_factory=asyncio.Event)  # set: the pause between two tries ends
    task: asyncio.Task[Part | None] | None = None  # None: the snapshot is not committed yet


class PartUploader:
    """Uploads at most one part at a time. Its owner calls `want` in each turn.

    scratch: a folder on disk for the copy. changed: called when `part`, `late` or `trouble` may have changed.
    """

    def __init__(self, store: Store, scratch: Path, changed: Callable[[], None]) -> None:
        self.trouble: Trouble | None = None  # why the newest try failed; None once a part is in the bucket
        self._store, self._scratch, self._changed = store, scratch, changed
        self._attempt: _Attempt | None = None
        self._longest = PAUSE[1]  # seconds of a pause, at most
        self._failed_at = 0.0  # monotonic seconds
        self._tasks: set[asyncio.Task[Part | None]] = set()  # of all attempts that still work, stopped ones too

    @property
    def part(self) -> Part | None:
        """The wanted part, once it is in the bucket."""
        task = self._attempt.task if self._attempt else None
        return task.result() if task is not None and task.done() else None

    @property
    def late(self) -> int | None:
        """The wanted step, if no slot holds its snapshot: the head then chooses a later step."""
        task = self._attempt.task if self._attempt else None
        missing = task is not None and task.done() and task.result() is None
        return self._attempt.wanted.ref.step if self._attempt and missing else None

    def want(self, wanted: WantedPart | None, awaited: bool = False) -> None:
        """Upload this part and no other. awaited: the workers have not committed its snapshot yet."""
        if self._attempt is not None and self._attempt.wanted != wanted:
            self.stop()
        if wanted is None:
            if self.trouble and time.monotonic() - self._failed_at > FORGOTTEN:
                self.trouble = None
            return
        if self._attempt is None:
            self._attempt = _Attempt(wanted)
        if self._attempt.task is None and not awaited:
            self._attempt.task = asyncio.create_task(self._run(self._attempt))
            self._tasks.add(self._attempt.task)
            self._attempt.task.add_done_callback(self._ended)
        elif self._attempt.task is not None and self._attempt.task.done():
            self._attempt.task.result()  # raises an unexpected error: that is a bug

    def hurry(self) -> None:
        """The machine will be taken: try again now, and from now on after short pauses."""
        self._longest = HURRIED
        if self._attempt is not None:
            self._attempt.again.set()

    def stop(self) -> None:
        """Stop the current attempt; no part is wanted. An upload in progress ends soon after."""
        if self._attempt is not None:
            self._attempt.stopped = True
            self._attempt.again.set()
        self._attempt = None

    def forget(self) -> None:
        """Stop the current attempt and forget the trouble: the node has another job."""
        self.stop()
        self.trouble = None

    def _ended(self, task: asyncio.Task[Part | None]) -> None:
        self._tasks.discard(task)
        self._changed()

    async def _run(self, attempt: _Attempt) -> Part | None:
        """The part once it is in the bucket; None if no slot has the snapshot, or the attempt was stopped."""
        with contextlib.ExitStack() as stack:
            copy: _Copy | None = None
            backoff = Backoff(*PAUSE)
            while not attempt.stopped:
                try:
                    copy = copy or _Copy(attempt.wanted, self._make_folder(stack))
                    part = await asyncio.to_thread(_copy_and_upload, self._store, copy, lambda: attempt.stopped)
                except CorruptError as error:
                    log.warning("step %s is not saved, its snapshot is damaged: %s", attempt.wanted.ref.step, error)
                    return None
                except (SpotrunError, OSError) as error:
                    self._fail(attempt, str(error) or repr(error))
                else:
                    self.trouble = None if part and not attempt.stopped else self.trouble
                    return part
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(backoff.next(), self._longest)):
                        await attempt.again.wait()
                attempt.again.clear()
        return None

    def _make_folder(self, stack: contextlib.ExitStack) -> Path:
        """Make a folder for a copy. The stack removes it. Raises OSError: a full disk has no room even for a folder."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="part-", dir=self._scratch, ignore_cleanup_errors=True)
        return Path(stack.enter_context(folder))

    def _fail(self, attempt: _Attempt, message: str) -> None:
        """Record the failure. `since` is the first failure in a row, even if the steps differ."""
        if attempt.stopped:
            return
        step, now = attempt.wanted.ref.step, time.time()
        log.warning("checkpoint part of step %s is not in the bucket, trying again: %s", step, message)
        before, self._failed_at = self.trouble, time.monotonic()
        since, tries = (before.since, before.tries + 1) if before else (now, 1)
        self.trouble = Trouble(step=step, message=message[:500], since=since, at=now, tries=tries)
        self._changed()


@dataclass
class _Copy:
    """The copy of a part."""

    wanted: WantedPart
    folder: Path
    files: tuple[FileRef, ...] | None = None  # in `folder`; None: not copied yet
    whole: str = ""  # xxh3 of the snapshot
    sketch: dict[str, str] = field(default_factory=dict)  # as `Part.sketch`
    uploaded: set[str] = field(default_factory=set)  # names of the files that are in the bucket
    took: float = 0.0  # seconds of the copy, and of the uploads that succeeded, in all tries together


def newest_snapshot(folder: Path, job: str) -> StateRef | None:
    """The newest committed snapshot in a slot folder."""
    found = slots.newest(folder, job)
    return StateRef(generation=found[0][1].generation, step=found[0][1].step) if found else None


def left_in_memory(tmpfs: Path) -> list[str]:
    """The jobs whose snapshots an earlier agent has left in memory."""
    folders = sorted(tmpfs.iterdir()) if tmpfs.is_dir() else []
    return [folder.name for folder in folders if newest_snapshot(folder / "slots", folder.name)]


def _copy_and_upload(store: Store, copy: _Copy, stopped: Callable[[], bool]) -> Part | None:
    """Copy the part and upload its files, unless that is done already. None: no slot has the snapshot.

    Raises `StoreError`, `CorruptError`, OSError, and `UploadStopped` soon after `stopped` says so.
    """
    wanted, began = copy.wanted, time.monotonic()
    if copy.files is None:
        if not _copy(copy):
            return None
        copy.took = time.monotonic() - began
    assert copy.files is not None
    for file in copy.files:
        if file.name not in copy.uploaded:
            began = time.monotonic()
            store.keep(checkpoint_key(wanted.job, wanted.ref.step, file.name), copy.folder / file.name, stopped)
            copy.uploaded.add(file.name)
            copy.took += time.monotonic() - began
    return Part(
        step=wanted.ref.step,
        generation=wanted.ref.generation,
        index=wanted.index,
        parts=wanted.parts,
        files=copy.files,
        whole=copy.whole,
        sketch=copy.sketch,
        took=copy.took,
    )


def _copy(copy: _Copy) -> bool:
    """Copy the part out of its slot, which is locked meanwhile. False: no slot has the snapshot."""
    wanted = copy.wanted
    for slot, record in slots.newest(wanted.slots, wanted.job):
        if record.order != (wanted.ref.generation, wanted.ref.step):
            continue
        with slots.reading(wanted.slots, slot):
            held = slots.read(wanted.slots, slot)
            if held is None or held.order != record.order:
                return False  # it was overwritten before the slot was locked
            for left in copy.folder.iterdir():  # of a try in which the disk filled up
                left.unlink()
            _check_room(copy.folder, record.size // wanted.parts)
            written = write_part(wanted.slots, slot, wanted.index, wanted.parts, copy.folder)
            copy.sketch = sketch(wanted.slots, slot) if wanted.parts > 1 else {}
        copy.files = tuple(FileRef(name=name, size=size, xxh3=xxh3) for name, _, size, xxh3 in written)
        copy.whole = held.xxh3
        return True
    return False


def _check_room(folder: Path, size: int) -> None:
    """Raise OSError if the disk has no room for `size` bytes: without this check, each try would fill the disk."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(f"no room for a part of {size >> 20} MiB in {folder.parent}: {free >> 20} MiB are free")
