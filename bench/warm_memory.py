"""Keep some free memory of this machine warm: touch it and free it, again and again, until this process is killed.

python -m bench.warm_memory GB

A virtual machine may give free memory back to its host. Then the first use of a GB takes seconds of the kernel's time,
instead of 0.05 s, and a benchmark measures which system was given which memory. Measured on such a machine: memory that
was freed 0.5 s ago is still warm, after 1 s it is not.
"""

from __future__ import annotations

import mmap
import sys
import time

PAUSE = 0.4  # seconds between two rounds
LARGE = 2 << 20  # bytes of a large page; with these, a GB takes 0.05 s


def touch(size: int) -> None:
    """Use so many bytes of new memory, and free them."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for place in range(0, size, LARGE):
            memory[place] = 1


def main() -> None:
    size = int(float(sys.argv[1]) * (1 << 30))
    while True:
        touch(size)
        time.sleep(PAUSE)


if __name__ == "__main__":
    main()
