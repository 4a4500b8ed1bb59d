"""Where the workers of a test form their process group: a store that the test keeps, as torchrun does in production.

A port that a test only looks up and leaves can be taken by another process before the first worker binds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def meeting(world_size: int) -> Iterator[dict[str, str]]:
    """The variables for workers of one process group. The store ends with this context."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world_size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    del store
