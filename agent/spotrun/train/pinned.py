"""Page-locked host memory: a device copies into it while the host goes on.

A slot's mapping is locked chunk by chunk. A snapshot then needs no second buffer. torch's own pinned allocator
would also round each size up to a power of two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise

log = logging.getLogger(__name__)

CHUNK = 256 << 20  # bytes locked in one call, which blocks other calls of the driver


class PinnedMemory:
    """Locks regions of memory.

    register: cudaHostRegister(address, size). unregister: cudaHostUnregister(address). Both return CUDA's error code; 0
    is success.
    """

    def __init__(
        self, register: Callable[[int, int], int], unregister: Callable[[int], int], chunk: int = CHUNK
    ) -> None:
        self._register, self._unregister, self._chunk = register, unregister, chunk
        self._regions: dict[int, int] = {}  # size, by address

    def add(self, address: int, size: int) -> None:
        """Lock a mapping that begins at a page. If this fails, the mapping stays unlocked, and copies to it block."""
        self._regions[address] = size
        for at in range(0, size, self._chunk):
            if code := self._register(address + at, min(self._chunk, size - at)):
                log.warning(
                    "cannot lock %d MB of memory for snapshots (cudaHostRegister: error %d). Training waits during "
                    "each copy, so snapshots are taken less often",
                    size >> 20,
                    code,
                )
                self._unlock(address, at)
                del self._regions[address]
                return

    def remove(self, address: int) -> None:
        """Unlock a mapping. Call it before the mapping is closed."""
        if (size := self._regions.pop(address, None)) is not None:
            self._unlock(address, size)

    def pieces(self, address: int, size: int) -> list[range]:
        """Cut `size` bytes at `address` into ranges within one chunk each: one CUDA copy cannot span two chunks."""
        base = next((base for base, length in self._regions.items() if base <= address < base + length), None)
        if base is None or size == 0:
            return [range(size)]
        first = (base - address) % self._chunk or self._chunk  # bytes up to the next chunk
        cuts = [0, *range(first, size, self._chunk), size]
        return [range(start, stop) for start, stop in pairwise(cuts)]

    def _unlock(self, address: int, size: int) -> None:
        for at in range(0, size, self._chunk):
            self._unregister(address + at)
