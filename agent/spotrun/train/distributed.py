"""This process among the others: its rank, its device, its process groups."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spotrun.errors import SpotrunError
from spotrun.machine.gpus import gpu_count

# Of collectives. Long: rank 0 may be downloading a checkpoint, and dead peers are noticed in other ways.
TIMEOUT = timedelta(minutes=30)
LEAVE_WAIT = 5.0  # seconds that a leaving worker waits for the others, which may never come
log = logging.getLogger(__name__)


def rank_and_world() -> tuple[int, int]:
    """(rank, world size) of this process; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def choose_device(local_rank: int, insist: bool = False) -> torch.device:
    """This worker's GPU where the machine has GPUs, else the CPU.

    insist: raise `SpotrunError` if torch cannot use the GPUs of this machine; otherwise that is a warning. An empty
    CUDA_VISIBLE_DEVICES asks for the CPU.
    """
    if not torch.cuda.is_available():
        if (there := gpu_count()) and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1"):
            message = (
                f"this machine has {there} GPUs, but torch {torch.__version__} cannot use them: {_why_no_cuda()}. "
                "To train on the CPU, set CUDA_VISIBLE_DEVICES to an empty value"
            )
            if insist:
                raise SpotrunError(message)
            log.warning("%s", message)
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise SpotrunError(f"worker {local_rank} of this machine has no GPU: there are {count}. Lower procs_per_node")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "it is built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:
        return str(error).partition("\n")[0] or repr(error)
    return "it finds no device"


def join_process_group(device: torch.device, backend: str | None) -> None:
    """Form the process group that torchrun's variables describe, unless they are missing or a group exists."""
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ and not dist.is_initialized():
        backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        dist.init_process_group(backend, timeout=TIMEOUT)


def cpu_group(device: torch.device) -> dist.ProcessGroup | None:
    """A group that takes CPU tensors; None if the default group does."""
    if not dist.is_initialized() or device.type == "cpu" or "gloo" in str(dist.get_backend_config()):
        return None
    return dist.new_group(backend="gloo", timeout=TIMEOUT)  # type: ignore[no-any-return]


def leave_together(device: torch.device, group: dist.ProcessGroup | None, patience: float = LEAVE_WAIT) -> None:
    """Wait until every rank has received what this one sends, for at most `patience` seconds. Call it before exiting.

    A collective's kernel can finish here before its data has arrived elsewhere. The data has arrived when every rank
    says that its own device has finished. group: the result of `cpu_group`.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    whole: Any = group or dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if whole is None or whole.size() == 1:
        return
    try:
        # It has messages of its own kind, so it does not disturb a rank that waits in another collective.
        whole.monitored_barrier(timedelta(seconds=patience), False)
    except Exception as error:
        log.warning("leaving before every other worker is done: %s", str(error).partition("\n")[0])
