"""Upload the logs of a job's workers on this node to the bucket while the logs grow, and keep them within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path

from spotrun.store import Store

log = logging.getLogger(__name__)

INTERVAL = 5.0  # seconds between uploads of a log that grows
LONGEST = 256 << 20  # bytes of a log; one that grows beyond that begins again, because all jobs share the disk
STRETCH = 4 << 20  # bytes; a log of n times this size is uploaded n times as seldom, as each upload sends all of it


class LogUploader:
    """Log files, and the objects in the bucket that they are copied to."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys: dict[Path, str] = {}
        self._uploaded: dict[Path, tuple[int, float]] = {}  # size, and monotonic seconds of the upload
        self._lock = asyncio.Lock()

    def follow(self, path: Path, key: str) -> None:
        self._keys[path] = key

    def forget(self) -> None:
        self._keys, self._uploaded = {}, {}

    async def run(self) -> None:
        """Upload logs that have grown, until cancelled."""
        shortening = asyncio.create_task(self._shorten())
        try:
            while True:
                await asyncio.sleep(INTERVAL)
                await self.upload()
        finally:
            shortening.cancel()

    async def upload(self, all: bool = False) -> None:
        """Upload the logs that have grown and are due; all: also those that are not due."""
        async with self._lock:
            for path, key in list(self._keys.items()):
                try:
                    size, now = path.stat().st_size, time.monotonic()
                    done, at = self._uploaded.get(path, (0, 0.0))
                    if size != done and (all or now - at >= INTERVAL * size / STRETCH):
                        await asyncio.to_thread(self._store.put, key, path)
                        self._uploaded[path] = (size, now)
                except FileNotFoundError:
                    continue  # the worker has not written to it yet
                except Exception as error:  # the script may do anything to its log
                    log.warning("a log was not uploaded, trying again later: %s", str(error) or repr(error))

    async def _shorten(self) -> None:
        """Look at the length of each log now and then: an upload may take long."""
        while True:
            await asyncio.sleep(INTERVAL / 5)
            for path in list(self._keys):
                with contextlib.suppress(OSError):
                    shorten(path)


def shorten(path: Path) -> None:
    """Empty a log that is too long. A worker appends to its log, so its next line comes first in the file."""
    if path.stat().st_size > LONGEST:
        os.truncate(path, 0)
        with path.open("a") as file:
            file.write(f"spotrun: this log was longer than {LONGEST >> 20} MiB; everything before is removed\n")
