"""Remove code from the bucket that no job refers to: its job was never submitted, or the job's folder was deleted.

All jobs of all clusters in this bucket count. Ended jobs count too, because they may be relaunched. When an operator
submits a job, the code is sent again if the bucket has had it for longer than half of `AGE`. So no code is removed
while its job is being submitted.
"""

from __future__ import annotations

import asyncio
import json
import logging

from spotrun.errors import NotFound, StoreError
from spotrun.store import Store, job_key

log = logging.getLogger(__name__)

FIRST, EVERY = 600.0, 6 * 3600.0  # seconds from a head's start to the first look, and between two looks
AGE = 3600.0  # seconds for which all code stays


class Sweeper:
    """Sweeps one bucket. A job's code never changes, so each job's state is read only once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, str] = {}  # key of a job's state: the sha256 of its code

    async def run(self) -> None:
        """Sweep from time to time, until cancelled. If the bucket does not answer, wait for the next time."""
        await asyncio.sleep(FIRST)
        while True:
            try:
                for key in await asyncio.to_thread(self.sweep):
                    log.info("removed %s: no job refers to it", key)
            except StoreError as error:
                log.warning("code that no job refers to was not removed: %s", error)
            await asyncio.sleep(EVERY)

    def sweep(self) -> list[str]:
        """Remove unused code, and return its keys. Raises `StoreError`, also if a job's state cannot be read."""
        old = [key for key in self._store.list("code") if self._is_old(key)]
        if not old:
            return []
        used = self._references()  # read after the code was listed: a job's code is in the bucket before its state
        gone = [key for key in old if not any(sha256 in key for sha256 in used) and self._is_old(key)]
        self._store.delete(gone)
        return gone

    def _is_old(self, key: str) -> bool:
        return (self._store.age(key) or 0.0) > AGE

    def _references(self) -> set[str]:
        keys = {job_key(job, "state.json") for job in self._store.folders("jobs")}
        # A file system still lists a job's folder when its files are gone. So ask for each state.
        there = (key for key in keys & self._known.keys() if self._store.exists(key))
        self._known = {key: self._known[key] for key in there}
        for key in sorted(keys - set(self._known)):
            try:
                code = json.loads(self._store.get(key))["code"]
            except NotFound:
                continue
            except (ValueError, KeyError, TypeError, RecursionError):
                code = None
            if not isinstance(code, str):
                raise StoreError(f"{self._store.url}: {key} does not say which code its job has")
            if code:
                self._known[key] = code
        return set(self._known.values())
