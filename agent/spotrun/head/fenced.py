"""Objects that only the head writes. Each is replaced only if it is still what this head last read or wrote.

The lease alone is not enough: a head may be suspended after it has checked the lease and before it writes.
"""

from __future__ import annotations

import asyncio
import hashlib

from spotrun.errors import StoreError
from spotrun.store import Store, Version


class FencedStore:
    """The objects of one head. All methods raise `StoreError` when the bucket does not answer."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._versions: dict[str, Version | None] = {}
        self._unsure: dict[str, set[bytes]] = {}  # digests of writes that got no answer

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
        if unsure := self._unsure.get(key):
            found, version = await asyncio.to_thread(self._store.read, key)
            if found is not None and _digest(found) in unsure:  # the write arrived, its answer did not
                self._versions[key] = version
        try:
            self._versions[key] = await asyncio.to_thread(self._store.replace, key, data, self._versions[key])
        except (StoreError, asyncio.CancelledError):
            self._unsure.setdefault(key, set()).add(_digest(data))
            raise
        self._unsure.pop(key, None)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
