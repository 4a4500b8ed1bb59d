"""Page-locked host memory: a device copies into it while the host goes on.

A slot's mapping is locked chunk by chunk. A snapshot then needs no second buffer. torch's own pinned allocator
would also round each size up to a power of two.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

log = logging.getLogger(__name__)

# Bytes locked in one call. Other calls of the driver wait for it, so a pause of the same length follows. Then a kernel
# comes at most 2 ms later; with 256 MiB at a time and without pauses, up to 0.31 s for 6 GiB (an H100, driver 580).
CHUNK = 32 << 20
LONGEST = 0.1  # seconds of a pause: the process may have been stopped meanwhile


class PinnedMemory:
    """Locks regions of memory, at most until this object is gone.

    register: cudaHostRegister(address, size). unregister: cudaHostUnregister(address). Both return CUDA's error code; 0
    is success.
    """

    def __init__(
        self, register: Callable[[int, int], int], unregister: Callable[[int], int], chunk: int = CHUNK
    ) -> None:
        self._register, self._unregister, self._chunk = register, unregister, chunk
        self._regions: dict[int, tuple[range, Any]] = {}  # by address: its chunks, and what keeps the mapping
        # Not at the end of the process, which unlocks everything: the driver may be gone by then.
        weakref.finalize(self, _unlock_all, self._regions, unregister).atexit = False

    def add(self, address: int, size: int, owner: Any = None) -> None:
        """Lock a mapping that begins at a page. If this fails, the mapping stays unlocked, and copies to it block.

        owner: an object that keeps the mapping. If the mapping ended before `remove`, the driver would take later
        memory at its address for the old one.
        """
        self._regions[address] = range(address, address + size, self._chunk), owner
        for at in self._chunks_with_pauses(size):
            if code := self._register(address + at, min(self._chunk, size - at)):
                log.warning(
                    "cannot lock %d MB of memory for snapshots (cudaHostRegister: error %d). Training waits during "
                    "each copy, so snapshots are taken less often",
                    size >> 20,
                    code,
                )
                _unlock(range(address, address + at, self._chunk), self._unregister)
                del self._regions[address]
                return

    def remove(self, address: int) -> None:
        """Unlock a mapping. Call it before the mapping is closed."""
        if address in self._regions:
            _unlock(self._regions[address][0], self._unregister)
            del self._regions[address]

    def pieces(self, address: int, size: int) -> list[range]:
        """Cut `size` bytes at `address` into ranges within one chunk each: one CUDA copy cannot span two chunks."""
        found = (base for base, (chunks, _) in self._regions.items() if base <= address < chunks.stop)
        base = next(found, None)
        if base is None or size == 0:
            return [range(size)]
        first = (base - address) % self._chunk or self._chunk  # bytes up to the next chunk
        cuts = [0, *range(first, size, self._chunk), size]
        return [range(start, stop) for start, stop in pairwise(cuts)]

    def _chunks_with_pauses(self, size: int) -> Iterator[int]:
        """Where each chunk begins. After each, this waits for as long as the caller took for it."""
        began = time.monotonic()
        for at in range(0, size, self._chunk):
            if at:
                time.sleep(min(LONGEST, time.monotonic() - began))
                began = time.monotonic()
            yield at


def _unlock(chunks: range, unregister: Callable[[int], int]) -> None:
    for address in chunks:
        unregister(address)


def _unlock_all(regions: dict[int, tuple[range, Any]], unregister: Callable[[int], int]) -> None:
    for chunks, _ in regions.values():
        _unlock(chunks, unregister)
    regions.clear()  # only now may a mapping end
