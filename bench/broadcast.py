"""The reference for a transfer: how long a bare gloo broadcast of the same state takes, between two processes."""

from __future__ import annotations

import os
import statistics
import time
from datetime import timedelta
from typing import Any

from bench.processes import answer
from bench.systems import SIZES, BenchError, Workload

TIMES = 5
PATIENCE = 120.0  # seconds


def measure(workload: Workload, times: int = TIMES) -> float:
    """Median seconds of a broadcast of the model and of what AdamW keeps for it. The receiver's memory is in place."""
    found: list[float] | None = answer(_work, 2, (SIZES[workload.size], times), PATIENCE)
    if found is None:
        raise BenchError("the reference, a bare broadcast, failed: its output is above")
    return statistics.median(found)


def _work(rank: int, port: int, hidden: int, times: int, results: Any) -> None:
    os.environ["BENCH_HIDDEN"] = str(hidden)
    import torch
    import torch.distributed as dist

    from bench import work

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=PATIENCE))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE))
    tensors = [torch.ones_like(each.detach()) for each in work.build_model().parameters() for _ in range(3)]
    seconds = []
    for _ in range(times):
        dist.barrier()
        began = time.monotonic()
        for tensor in tensors:
            dist.broadcast(tensor, 0)
        dist.barrier()  # on loopback, this adds less than a millisecond
        seconds.append(time.monotonic() - began)
    if rank == 0:
        results.put(seconds)
    dist.destroy_process_group()
