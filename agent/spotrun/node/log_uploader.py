"""Upload the logs of a job's workers on this node to the bucket while the logs grow, and keep them within bounds.

Other files that grow are uploaded in the same way, without times and bounds.

A worker's output has no times. So the agent looks at the length of each log now and then, and writes the length into a
text beside the log. A line of this text has epoch seconds and bytes. Readers take the times of the log's lines from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spotrun.node import cleanup, log_tail
from spotrun.store import Store, times_key

log = logging.getLogger(__name__)

INTERVAL = 5.0  # seconds between uploads of a log that grows
LONGEST = 256 << 20  # bytes of a log; one that grows beyond that begins again, because all jobs share the disk
STRETCH = 4 << 20  # bytes; a log of n times this size is uploaded n times less often: each upload sends all of it
SEARCHING = 0.01  # share of the time that the search for other files may take
LOOK = 60.0  # seconds between two looks whether a process still has an old log open, at least


class _Times:
    """When a log had which size. An old log is measured less often: whenever its age has grown by 0.1 %."""

    def __init__(self) -> None:
        self.notes: list[tuple[float, int]] = []

    def note(self, size: int) -> None:
        """The log has this size now."""
        now = time.time()
        if self.notes and size < self.notes[-1][1]:
            self.notes = []  # the log has begun again
        if not size or (self.notes and size == self.notes[-1][1]):
            return
        pause = max(INTERVAL / 5, (now - self.notes[0][0]) / 1000) if self.notes else 0.0
        # The last line is replaced until it is old enough. So the log's end always has a time.
        if len(self.notes) > 1 and self.notes[-1][0] - self.notes[-2][0] < pause:
            self.notes[-1] = (now, size)
        else:
            self.notes.append((now, size))

    @property
    def text(self) -> bytes:
        return "".join(f"{at:.3f} {size}\n" for at, size in self.notes).encode()


class GrowingFiles:
    """Files that grow, and the objects in the bucket that they are copied to.

    find: the files, with their keys. It is called in another thread. A search that takes long is repeated less often.
    """

    def __init__(self, store: Store, find: Callable[[], Mapping[Path, str]]) -> None:
        self._store, self._search = store, find
        self._found: Mapping[Path, str] = {}
        self._search_at = 0.0  # monotonic seconds: the next search is not before that
        self._uploaded: dict[Path, tuple[int, float]] = {}  # size, and monotonic seconds of the upload
        self._troubles: dict[Path, str] = {}  # why the newest upload failed: each is told once
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """Upload files that have grown, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            await self.upload()

    async def upload(self, all: bool = False) -> None:
        """Upload the files that have grown and are due; all: also those that are not due."""
        async with self._lock:
            for path, key in (await self._find(all)).items():
                try:
                    if await self._upload(path, key, all):
                        self._troubles.pop(path, None)
                except FileNotFoundError:
                    continue  # the worker has not written to it yet
                except Exception as error:  # the script may do anything to its files
                    if self._troubles.get(path) != (why := str(error) or repr(error)):
                        log.warning("%s was not uploaded, trying again: %s", key, why)
                    self._troubles[path] = why

    async def _find(self, now: bool) -> Mapping[Path, str]:
        began = time.monotonic()
        if now or began >= self._search_at:
            try:
                self._found = await asyncio.to_thread(self._search)
            except Exception as error:  # the script may do anything to its folders
                log.warning("cannot look for the job's files that grow, trying again later: %r", error)
            self._search_at = began + (time.monotonic() - began) / SEARCHING
        return self._found

    async def _upload(self, path: Path, key: str, all: bool) -> bool:
        """Upload a file if it has grown and is due. Returns whether that was done."""
        size, now = path.stat().st_size, time.monotonic()
        done, at = self._uploaded.get(path, (0, 0.0))
        if size == done or not (all or now - at >= INTERVAL * size / STRETCH):
            return False
        await asyncio.to_thread(self._store.put, key, path)
        self._uploaded[path] = (size, now)
        return True


class LogUploader(GrowingFiles):
    """Log files, whose lines get times, and which stay within bounds."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, dict)
        self._keys: dict[Path, str] = {}
        self._times: dict[Path, _Times] = {}
        self._kept: set[Path] = set()  # logs to which workers write, or may write
        self._lasting: set[Path] = set()  # those of them that `turn_page` leaves
        self._looked = -LOOK  # monotonic seconds of the last look at open logs

    def turn_page(self) -> None:
        """From now on, workers write to the logs that are followed next, not to those before."""
        self._kept = set(self._lasting)

    def follow(self, path: Path, key: str, lasts: bool = False) -> None:
        """Upload this log to that key. lasts: workers may write to it again after `turn_page`."""
        self._keys[path] = key
        self._kept.add(path)
        if lasts:
            self._lasting.add(path)

    def forget(self) -> None:
        self._keys, self._uploaded, self._troubles, self._times = {}, {}, {}, {}
        self._kept, self._lasting = set(), set()

    async def upload(self, all: bool = False) -> None:
        await super().upload(all)
        old = [path for path in self._keys if path not in self._kept]
        if old and time.monotonic() - self._looked >= LOOK:
            self._looked = time.monotonic()
            for path in await asyncio.to_thread(self._complete, old):
                if path not in self._kept:
                    self._remove(path)

    def _complete(self, paths: Sequence[Path]) -> list[Path]:
        """Those of these logs that no process has open, and that are in the bucket."""
        used = set(cleanup.open_files(os.path.realpath(os.path.commonpath(paths))))
        unused = [path for path in paths if os.path.realpath(path) not in used]
        return [path for path in unused if self._uploaded.get(path, (0, 0.0))[0] == log_tail.size(path)]

    def _remove(self, path: Path) -> None:
        for known in (self._keys, self._uploaded, self._troubles, self._times):
            known.pop(path, None)
        with contextlib.suppress(OSError):  # it was never written, or the folder has other logs
            path.unlink(missing_ok=True)
            path.parent.rmdir()

    async def run(self) -> None:
        """Upload logs that have grown, until cancelled."""
        shortening = asyncio.create_task(self._shorten())
        try:
            await super().run()
        finally:
            shortening.cancel()

    async def _find(self, now: bool) -> Mapping[Path, str]:
        return dict(self._keys)

    async def _upload(self, path: Path, key: str, all: bool) -> bool:
        times = self._times.setdefault(path, _Times())
        times.note(path.stat().st_size)
        text = times.text
        done = await super()._upload(path, key, all)
        if done:
            await asyncio.to_thread(self._store.put, times_key(key), text)
        return done

    async def _shorten(self) -> None:
        """Look at the length of each log now and then, beside the uploads, which may take long."""
        while True:
            await asyncio.sleep(INTERVAL / 5)
            for path in list(self._keys):
                with contextlib.suppress(OSError):
                    shorten(path)
                    self._times.setdefault(path, _Times()).note(path.stat().st_size)


def shorten(path: Path) -> None:
    """Empty a log that is too long. A worker appends to its log, so its next line comes first in the file."""
    if path.stat().st_size > LONGEST:
        os.truncate(path, 0)
        with path.open("a") as file:
            file.write(f"spotrun: this log was longer than {LONGEST >> 20} MiB; all before this line was removed\n")
