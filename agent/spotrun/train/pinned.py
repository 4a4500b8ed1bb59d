"""Page-locked host memory: a device copies into it by itself, while the host goes on.

A slot's own mapping is locked, chunk by chunk. So a snapshot needs no second buffer, and no memory is rounded up to a
power of two, as torch's own allocator of pinned memory does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise

log = logging.getLogger(__name__)

CHUNK = 256 << 20  # bytes locked at once: the driver holds up other calls meanwhile


class PinnedMemory:
    """Locks regions of memory. register, unregister: cudaHostRegister(address, size), cudaHostUnregister(address).

    Both return CUDA's error code, 0 for success.
    """

    def __init__(
        self, register: Callable[[int, int], int], unregister: Callable[[int], int], chunk: int = CHUNK
    ) -> None:
        self._register, self._unregister, self._chunk = register, unregister, chunk
        self._regions: dict[int, int] = {}  # size, by address

    def add(self, address: int, size: int) -> None:
        """Lock a mapping, which begins at a page. What cannot be locked is left as it is: copies to it hold up."""
        self._regions[address] = size
        for at in range(0, size, self._chunk):
            if code := self._register(address + at, min(self._chunk, size - at)):
                log.warning(
                    "cannot lock %d MB of memory for snapshots (cudaHostRegister: error %d); each of them holds up "
                    "training for the time of its copy, and is taken less often",
                    size >> 20,
                    code,
                )
                self._unlock(address, at)
                del self._regions[address]
                return

    def remove(self, address: int) -> None:
        """Unlock a mapping, before it goes."""
        if (size := self._regions.pop(address, None)) is not None:
            self._unlock(address, size)

    def pieces(self, address: int, size: int) -> list[range]:
        """Cut `size` bytes from `address` on into runs that each lie in one chunk: CUDA copies into one at a time."""
        base = next((base for base, length in self._regions.items() if base <= address < base + length), None)
        if base is None or size == 0:
            return [range(size)]
        first = (base - address) % self._chunk or self._chunk  # bytes up to the next chunk
        cuts = [0, *range(first, size, self._chunk), size]
        return [range(start, stop) for start, stop in pairwise(cuts)]

    def _unlock(self, address: int, size: int) -> None:
        for at in range(0, size, self._chunk):
            self._unregister(address + at)
