"""All-reduce over all GPUs of two machines: is the sum right, how fast is it, and what does NCCL go over?"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from words import tell, transport

import spotrun

BYTES = 1 << 30
TIMES = 20


def main() -> None:
    # NCCL writes what it goes over to a file of each process, from which rank 0 reads its own.
    log = f"/tmp/nccl-{os.getpid()}.log"
    os.environ["NCCL_DEBUG_FILE"] = log
    run = spotrun.init()
    if run.device.type != "cuda":
        raise SystemExit("torch finds no CUDA device: the driver is not loaded, or torch is built for CPUs")
    world = run.world_size
    small = torch.full((1024,), float(run.rank + 1), device=run.device)
    dist.all_reduce(small)
    right = bool((small == world * (world + 1) / 2).all())
    values = torch.ones(BYTES // 4, device=run.device)
    dist.all_reduce(values)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(TIMES):
        dist.all_reduce(values)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / TIMES
    # What each link carries: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    bus = BYTES / seconds * 2 * (world - 1) / world / 1e9
    if run.is_main:
        tell("all-reduce", right=right, bus=round(bus, 2), bytes=BYTES, world=world, transport=transport(log))


main()
