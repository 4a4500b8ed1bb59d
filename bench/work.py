"""What every system under measurement trains, and how a worker says where it is.

Both training scripts import this as their sibling `work`, so model, data, optimizer, pace and marks are the same.
A mark is one JSON line appended to the file named by BENCH_EVENTS; `bench.phases` reads them.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import nn

BATCH = 64
SAMPLES = 1 << 16
FEATURES, CLASSES = 64, 10
HIDDEN = int(os.environ.get("BENCH_HIDDEN", "1024"))  # 1024: 1.1 M parameters
SETUP_SECONDS = float(os.environ.get("BENCH_SETUP", "0"))  # of waiting, as for data and files, before training
# As on the local cloud: workers share this computer's GPU if the variable is set.
DEVICE = "cuda" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu"
STEP_SECONDS = 0.05  # the least a step takes; the rest of it is slept, as a CPU sleeps while its accelerator works


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )


def set_up() -> None:
    """What a script does once before it trains: here it waits."""
    time.sleep(SETUP_SECONDS)


def build_data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    return torch.utils.data.TensorDataset(x, x[:, :CLASSES].argmax(dim=1))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Pace:
    """Sleep for what is left of STEP_SECONDS since the last call."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def wait(self) -> None:
        time.sleep(max(0.0, self._last + STEP_SECONDS - time.monotonic()))
        self._last = time.monotonic()


def mark(name: str, step: int = -1) -> None:
    """Append one event: name and the steps completed so far. "entered" also says when the process was created."""
    now = time.time()
    if name == "entered":
        _append("created", _created(now), step)
    _append(name, now, step)


def mark_joining() -> None:
    """Append what a new process would: this process is about to form another group."""
    now = time.time()
    _append("created", now, -1)
    _append("entered", now, -1)


def _append(name: str, at: float, step: int) -> None:
    line = {"name": name, "time": at, "pid": os.getpid(), "node": _node(), "step": step}
    handle = os.open(Path(os.environ["BENCH_EVENTS"]), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, (json.dumps(line) + "\n").encode())  # one small append: lines of several ranks never mix
    finally:
        os.close(handle)


def _node() -> str:
    context = os.environ.get("SPOTRUN_CONTEXT")
    return str(json.loads(context)["node"]) if context else os.environ.get("BENCH_NODE", "")


def _created(now: float) -> float:
    """When this process was forked, from field 22 of /proc/self/stat (clock ticks since boot, see proc(5))."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return now - max(0.0, age)
