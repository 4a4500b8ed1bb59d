"""Objects that only the head writes. Each is replaced only if it is still what this head last read or wrote.

The lease alone is not enough: a head may be suspended after it has checked the lease and before it writes.
"""

from __future__ import annotations

import asyncio
import hashlib

from spotrun.errors import ConflictError, StoreError
from spotrun.store import Store, Version

UNSURE = 100  # newest writes of an object that got no answer: they may still reach the bucket


class FencedStore:
    """The objects of one head. All methods raise `StoreError` when the bucket does not answer."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._versions: dict[str, Version | None] = {}
        self._unsure: dict[str, dict[bytes, None]] = {}  # digests of writes that got no answer, the oldest first

    async def find(self, key: str) -> bytes | None:
        """The object's bytes; None if there is none. From now on this head may replace the object."""
        self._unsure.pop(key, None)
        data, self._versions[key] = await asyncio.to_thread(self._store.read, key)
        return data

    async def put(self, key: str, data: bytes) -> None:
        """Write or replace the object. Raises `ConflictError` if another head has written it.

        An object that this head has not read before is replaced, whatever it contains.
        """
        if key not in self._versions:
            await self.find(key)
        if self._unsure.get(key):
            await self._adopt(key)
        while True:
            try:
                self._versions[key] = await asyncio.to_thread(self._store.replace, key, data, self._versions[key])
            except (StoreError, asyncio.CancelledError):
                self._note_unsure(key, _digest(data))
                raise
            except ConflictError:
                if not await self._adopt(key):
                    raise
            else:
                self._unsure.pop(key, None)
                return

    async def _adopt(self, key: str) -> bool:
        """Whether the object is a write of this head that arrived, but its answer did not. `put` then replaces it."""
        found, version = await asyncio.to_thread(self._store.read, key)
        unsure = self._unsure.get(key, {})
        if found is None or _digest(found) not in unsure:
            return False
        self._versions[key] = version
        del unsure[_digest(found)]  # it arrives once, so `put` has an end
        return True

    def _note_unsure(self, key: str, digest: bytes) -> None:
        unsure = self._unsure.setdefault(key, {})
        unsure[digest] = None
        if len(unsure) > UNSURE:
            del unsure[next(iter(unsure))]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
