"""One machine's GPUs: matrix products, memory, the copy of a snapshot to the host, and how the worker was started."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from ballast import Ballast
from fitness import print_facts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from words import tell

import spotrun
from spotrun.node.launch import preload

ROWS = 8192  # of the square matrices
MEASURED = 3.0  # the least seconds that a measurement takes
BUFFER = 1 << 30  # bytes that are copied within the memory
STATE = 4 << 30  # bytes of the snapshot at most; less where the GPU or the host has less room
STEPS = 60  # of the training in which snapshots are taken


def main() -> None:
    began = time.perf_counter()
    forked = os.getpid() != preload.SERVER  # the server had this module before it forked
    run = spotrun.init()
    if run.device.type != "cuda":
        raise SystemExit("torch finds no CUDA device: the driver is not loaded, or torch is built for CPUs")
    torch.ones(1, device=run.device).item()
    tell("fork", forked=forked, first=time.perf_counter() - began)
    if run.local_rank == 0:
        print_facts()
    _matrix(run.device)
    _copy(run)


def _matrix(device: torch.device) -> None:
    """Measure bf16 products (2 n³ operations each; fp16 where the GPU has no bf16) and copies within the memory.

    A copy reads each byte and writes it, so each byte counts twice.
    """
    kind = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    a, b = (torch.randn(ROWS, ROWS, device=device, dtype=kind) for _ in range(2))
    product = _seconds(lambda: torch.mm(a, b))
    source = torch.zeros(BUFFER, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    moved = _seconds(lambda: target.copy_(source))
    name = torch.cuda.get_device_name(device)
    tflops, memory = 2 * ROWS**3 / product / 1e12, 2 * BUFFER / moved / 1e9
    tell("matrix", name=name, dtype=str(kind), tflops=round(tflops, 1), memory=round(memory, 1))


def _copy(run: Any) -> None:
    """Measure copies to the host: into pinned memory, into other memory, and those of snapshots (every tenth step)."""
    device = run.device
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = min(STATE, torch.cuda.mem_get_info(device)[0] // 4, host // 12 // max(1, torch.cuda.device_count()))
    rates = _rates(device)
    stall = _stall(run, size >> 20)
    tell("copy", name=torch.cuda.get_device_name(device), bytes=size, stall=round(stall, 3), **rates)


def _rates(device: torch.device) -> dict[str, float]:
    """GB/s to the host, by kind of memory there."""
    part = torch.ones(1 << 26, device=device)
    pinned = torch.empty_like(part, device="cpu", pin_memory=True)
    pageable = torch.empty_like(part, device="cpu")
    fast = _seconds(lambda: pinned.copy_(part, non_blocking=True))
    slow = _seconds(lambda: pageable.copy_(part))
    return {name: round(part.nbytes / each / 1e9, 2) for name, each in (("pinned", fast), ("pageable", slow))}


def _stall(run: Any, mib: int) -> float:
    """Seconds by which the longest step with a snapshot is longer than a usual step."""
    model = run.ddp(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(STEPS, 64)), batch_size=1)
    run.track(model=model, optimizer=optimizer, ballast=Ballast(mib, run.device))
    ends: list[float] = []
    for _ in run.epochs(1):
        for (x,) in run.steps(loader):
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            ends.append(time.perf_counter())
    steps = [after - before for before, after in pairwise(ends)][STEPS // 4 :]  # the first ones make files and buffers
    return max(steps) - median(steps)


def _seconds(work: Callable[[], object]) -> float:
    """Seconds that one call takes while the device does nothing else."""
    work()
    torch.cuda.synchronize()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < MEASURED:
        for _ in range(10):
            work()
        torch.cuda.synchronize()
        count += 10
    return (time.perf_counter() - began) / count


main()
