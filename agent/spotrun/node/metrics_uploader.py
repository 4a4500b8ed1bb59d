"""Upload what a job's script logs on this node to the bucket, block by block (`spotrun.state.points`).

The blocks lie in `<folder>/<generation>/`. Only the file names say what comes next, so a restarted agent goes on
with the blocks that it finds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from spotrun.errors import SpotrunError
from spotrun.state import points
from spotrun.store import Store, extras_key, metrics_key, substitute_key

log = logging.getLogger(__name__)

LOOK = 1.0  # seconds between looks at the folder; also between two blocks of a node with a notice
LAST = 4.0  # seconds that the last upload waits for one that still runs
INTERVAL = (2.0, 10.0)  # seconds between two blocks of a generation: at its beginning, and in the long run
SLOWER = 60.0  # a block lasts the generation's age ÷ this, within `INTERVAL`
ROTATION = 10.0  # seconds of a substitute's block
KEPT = 3  # blocks of a substitute that stay while the generation goes on: rank 0's node loses at most its last block
WAITING = 256 << 20  # bytes on the disk that wait for the bucket; beyond that the oldest block is dropped


class MetricsUploader:
    """The blocks of one job in `folder`, on their way to the bucket."""

    def __init__(self, store: Store, job: str, folder: Path) -> None:
        self._store, self._job, self._folder = store, job, folder
        self._seen: dict[Path, float] = {}  # monotonic seconds when each folder and each growing block was first seen
        self._ended: set[Path] = set()  # folders of substitutes whose generation has ended
        self._lock = threading.Lock()  # held by the thread that uploads: `upload` may have been cancelled meanwhile
        self._wake = asyncio.Event()
        self._hurries = False
        self._troubles: set[str] = set()  # since the last upload that succeeded: each is told once

    def hurry(self) -> None:
        """The machine will be taken: from now on, upload as soon as possible."""
        self._hurries = True
        self._wake.set()

    def soon(self) -> None:
        """Upload the points that there are now, because a checkpoint has reached the bucket."""
        for path in [path for path in list(self._seen) if path.suffix == points.PART]:
            self._seen[path] = -math.inf
        self._wake.set()

    async def run(self) -> None:
        """Upload blocks that are due, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK):
                    await self._wake.wait()
            self._wake.clear()
            await self.upload()

    async def upload(self, all: bool = False) -> None:
        """Upload the blocks that are due; all: end the growing ones too, because their processes have ended or wait."""
        await asyncio.to_thread(self._upload, all)

    def _upload(self, all: bool) -> None:
        if all:
            self._ended.update(each for _, folder in self._generations() for each in points.substitutes(folder))
        if not self._lock.acquire(timeout=LAST if all else LOOK):
            return  # another call uploads at the moment
        try:
            for generation, folder in self._generations():
                self._upload_folder(generation, folder, metrics_key, all)
                self._upload_folder(generation, folder / points.EXTRAS, extras_key, all)
                for each in points.substitutes(folder):
                    self._upload_substitute(generation, each)
            self._limit()
            self._tidy()
        finally:
            self._lock.release()

    def _upload_folder(self, generation: int, folder: Path, key: Callable[[str, int, int], str], all: bool) -> None:
        try:
            self._take_due(folder, all)
            self._send(generation, folder, key)
        except SpotrunError as error:
            self._complain(str(error))
        except OSError as error:  # the script may do anything to its files
            self._complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))

    def _upload_substitute(self, generation: int, folder: Path) -> None:
        """Upload what a substitute has logged, once its generation has ended. Until then, keep the newest blocks."""
        if folder in self._ended:
            return self._upload_folder(generation, folder, partial(_key_of, folder.name), all=True)
        with contextlib.suppress(OSError):
            self._take_due(folder, False, (ROTATION, ROTATION))
            for _, path in [each for each in points.blocks(folder) if each[1].suffix == points.TAKEN][:-KEPT]:
                path.unlink()

    def _complain(self, trouble: str) -> None:
        if trouble not in self._troubles and len(self._troubles) < 20:
            self._troubles.add(trouble)
            log.warning("job %s: metrics were not uploaded, trying again: %s", self._job, trouble)

    def _generations(self) -> list[tuple[int, Path]]:
        try:
            names = os.listdir(self._folder)
        except OSError:  # no worker has logged here yet
            return []
        return sorted((int(name), self._folder / name) for name in names if re.fullmatch("[0-9]{4,9}", name))

    def _take_due(self, folder: Path, all: bool, interval: tuple[float, float] = INTERVAL) -> None:
        """End the growing block of a generation, if it is time. interval: as `INTERVAL`."""
        now = time.monotonic()
        began = self._seen.setdefault(folder, now)
        shortest, longest = (LOOK, LOOK) if self._hurries else interval
        due = min(longest, max(shortest, (now - began) / SLOWER))
        for path in (path for _, path in points.blocks(folder) if path.suffix == points.PART):
            if not all and now - self._seen.setdefault(path, now) < due:
                continue
            if points.take(path, insist=all):
                self._seen.pop(path, None)

    def _send(self, generation: int, folder: Path, key: Callable[[str, int, int], str]) -> None:
        """Upload the blocks that are complete, in order, and remove them here."""
        for number, path in points.blocks(folder):
            if path.suffix != points.TAKEN:
                continue
            # An object that is there already is this block: the answer to its upload got lost.
            self._store.create(key(self._job, generation, number), points.compress(_read(path)))
            self._troubles.clear()
            path.unlink()
            self._seen.pop(path.with_suffix(points.PART), None)  # it is there if the script's process ended the block

    def _limit(self) -> None:
        """Drop the oldest blocks if too many wait for the bucket."""
        waiting = list(self._complete())
        excess = sum(size for _, size in waiting) - WAITING
        for path, size in waiting:
            if excess <= 0:
                return
            log.warning("job %s: the oldest metrics are lost: %d MiB wait for the bucket", self._job, WAITING >> 20)
            path.unlink(missing_ok=True)
            excess -= size

    def _tidy(self) -> None:
        """Remove the empty folders of generations that are over, because each look goes through all folders."""
        for _, folder in self._generations()[:-1]:
            for each in (*points.substitutes(folder), folder / points.EXTRAS, folder):
                with contextlib.suppress(OSError):  # it has blocks that wait, or there is none
                    each.rmdir()
                    self._seen.pop(each, None)
                    self._ended.discard(each)

    def _complete(self) -> Iterator[tuple[Path, int]]:
        for _, folder in self._generations():
            substitutes = [path for each in points.substitutes(folder) for path in _blocks(each)]
            for path in (*_blocks(folder), *_blocks(folder / points.EXTRAS), *substitutes):
                with contextlib.suppress(OSError):
                    if path.suffix == points.TAKEN and path.is_file():
                        yield path, path.lstat().st_size


def _key_of(rank: str, job: str, generation: int, block: int) -> str:
    return substitute_key(job, generation, rank, block)


def _blocks(folder: Path) -> list[Path]:
    try:
        return [path for _, path in points.blocks(folder)]
    except OSError:
        return []


def _read(path: Path) -> bytes:
    """A block's bytes. The folder is open to the job's code, so the path may lead anywhere. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is not a file")
        return file.read(points.MOST)
