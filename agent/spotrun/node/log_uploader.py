"""Upload the logs of this node's workers to the bucket while the logs grow."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from spotrun.errors import SpotrunError
from spotrun.store import Store

log = logging.getLogger(__name__)

INTERVAL = 5.0  # seconds between uploads of a log that grows
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
        while True:
            await asyncio.sleep(INTERVAL)
            await self.upload()

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
                except SpotrunError as error:
                    log.warning("a log was not uploaded, trying again later: %s", error)
