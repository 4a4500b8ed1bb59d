"""This node's newest snapshot, and the upload of its workers' logs while they grow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path

from spotrun.errors import SpotrunError
from spotrun.state import slots
from spotrun.store import Store
from spotrun.wire import StateRef

log = logging.getLogger(__name__)

LOG_INTERVAL = 5.0  # seconds between uploads of a log that grows
LOG_STRETCH = 4 << 20  # bytes; a log of n times this size is uploaded n times as seldom, as it goes up whole


def newest(folder: Path, job: str) -> StateRef | None:
    """The newest committed snapshot in a slot folder."""
    found = slots.newest(folder, job)
    return StateRef(generation=found[0][1].generation, step=found[0][1].step) if found else None


def kept(memory: Path) -> tuple[str, StateRef] | None:
    """(job, its newest committed snapshot) of what an agent before this one has left in memory; None: nothing."""
    folders = sorted(memory.iterdir()) if memory.is_dir() else []
    found = ((folder.name, newest(folder / "slots", folder.name)) for folder in folders if (folder / "slots").is_dir())
    return next(((job, ref) for job, ref in found if ref is not None), None)


class Logs:
    """Log files that follow into the bucket."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys: dict[Path, str] = {}
        self._done: dict[Path, tuple[int, float]] = {}  # size uploaded, when
        self._lock = asyncio.Lock()

    def follow(self, path: Path, key: str) -> None:
        self._keys[path] = key

    def forget(self) -> None:
        self._keys, self._done = {}, {}

    async def run(self) -> None:
        """Upload what has grown, for ever."""
        while True:
            await asyncio.sleep(LOG_INTERVAL)
            await self.upload()

    async def upload(self, all: bool = False) -> None:
        """Upload logs that have grown and are due; `all`: due or not. A bucket that is away is logged."""
        async with self._lock:
            for path, key in list(self._keys.items()):
                with contextlib.suppress(FileNotFoundError):
                    size, now = path.stat().st_size, time.monotonic()
                    done, at = self._done.get(path, (0, 0.0))
                    if size == done or (not all and now - at < LOG_INTERVAL * size / LOG_STRETCH):
                        continue
                    try:
                        await asyncio.to_thread(self._store.put, key, path)
                    except SpotrunError as error:
                        log.warning("log not uploaded, trying again later: %s", error)
                        return
                    self._done[path] = (size, now)
