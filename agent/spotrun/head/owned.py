"""Objects that only the head writes. Each is replaced only if it is still what this head last read or wrote.

The lease alone is not enough: a head may be suspended between its last look at the lease and its write.
"""

from __future__ import annotations

import asyncio

from spotrun.store import Store, Version


class Owned:
    """The objects of one head. All methods raise `StoreError` when the bucket does not answer."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._versions: dict[str, Version | None] = {}

    async def find(self, key: str) -> bytes | None:
        """The object's bytes; None if there is no such object. From now on this head may replace the object."""
        data, self._versions[key] = await asyncio.to_thread(self._store.read, key)
        return data

    async def put(self, key: str, data: bytes) -> None:
        """Write or replace the object. Raises `ConflictError` if another head has written it.

        An object that this head has not read before is replaced, whatever it contains.
        """
        if key not in self._versions:
            await self.find(key)
        self._versions[key] = await asyncio.to_thread(self._store.replace, key, data, self._versions[key])
