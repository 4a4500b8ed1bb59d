"""The training loops of `bench.gpu`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

WIDTH = 4096  # of each layer: 16.8 million parameters
LAYERS = {"50M": 3, "100M": 6, "1B": 60}
BATCH = {"50M": 2048, "100M": 4096, "1B": 4096}  # rows; the smallest makes steps of 4 ms on an H100
SMALL = (256, 4, 65536)  # width, layers and rows of the model that two workers train over gloo
TURN, FIRST = 40, 5  # steps of a loop in its turn; the first ones, which do not count


def prepare(folder: str, port: int, interval: int, rank: int = 0, world: int = 1, exact: bool = False) -> Any:
    """Make this process a worker under spotrun, with NCCL if it is the only one. Returns its control block."""
    from spotrun.state.control import Context, Control

    place = Path(tempfile.mkdtemp(dir=folder))
    control = Control(place / "control", create=True)
    places = str(place / "control"), str(place / "slots"), folder
    context = Context("job", 1, f"n{rank}", *places, interval, regroups=exact, exact=exact)
    os.environ |= {Context.VARIABLE: context.to_env(), "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch
    import torch.distributed as dist

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if world == 1 else "gloo")
    return control


def sizes_of(name: str) -> tuple[int, int, int]:
    """Width, layers and rows."""
    return WIDTH, LAYERS[name], BATCH[name]


def _network(width: int, layers: int, rows: int) -> tuple[Any, Any]:
    """A model, and what it is trained with."""
    import torch
    from torch import nn

    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).cuda(), torch.randn(rows, width).cuda()


def seconds_of(loop: Iterator[None]) -> float:
    """Seconds of a step in a loop's turn."""
    import torch

    for _ in range(FIRST):
        next(loop)
    torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(TURN - FIRST):
        next(loop)
    torch.cuda.synchronize()
    return (time.monotonic() - began) / (TURN - FIRST)


def bare(size: str, waits: bool) -> Generator[None]:
    """A step each time, without DDP, which one worker does not need. waits: for the device, after the backward pass."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    model, x = _network(*sizes_of(size))
    optimizer = torch.optim.AdamW(model.parameters())
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    while True:
        for (number,) in DataLoader(TensorDataset(torch.arange(1 << 20)), 64):
            number.to("cuda")
            model(x).square().mean().backward()
            if waits:
                event.record()
                while not event.query():
                    time.sleep(0)
            optimizer.step()
            optimizer.zero_grad()
            yield


def under_spotrun(width: int, layers: int, rows: int, run: Any = None) -> Iterator[None]:
    """The same as `bare`, under spotrun. run: the worker's, if there is one."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import spotrun

    run = run or spotrun.init()
    network, x = _network(width, layers, rows)
    model = run.ddp(network)
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.arange(1 << 20))
    sampler = spotrun.ElasticSampler(data, seed=0)
    run.track(model=model, optimizer=optimizer, sampler=sampler)
    for _ in run.epochs(1000):
        for (_number,) in run.steps(DataLoader(data, 64, sampler=sampler)):
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            yield


def paced(loop: Iterator[None]) -> Iterator[float]:
    """When each step ended. The host is one step ahead of the device."""
    import torch

    before: Any = None
    for _ in loop:
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        if before is not None:
            before.synchronize()
            yield time.monotonic()
        before = event


def mean_step(ends: list[float]) -> float:
    """Of the second half of the steps."""
    half = ends[len(ends) // 2 :]
    return (half[-1] - half[0]) / (len(half) - 1)
