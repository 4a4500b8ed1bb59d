"""Where this process is: its rank, its device, its process group."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spotrun.errors import SpotrunError
from spotrun.machine.gpus import gpu_count

# Of collectives. Long, for rank 0 may be downloading a checkpoint; that a peer is gone is found out by other means.
TIMEOUT = timedelta(minutes=30)
PARTING = 5.0  # seconds that one who leaves waits for the others: a late one may not come
log = logging.getLogger(__name__)


def rank_and_world() -> tuple[int, int]:
    """(rank, world size) of this process; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def choose_device(local_rank: int, insist: bool = False) -> torch.device:
    """This worker's GPU where the machine has GPUs, else the CPU.

    insist: raise `SpotrunError` where torch cannot use the GPUs of this machine; without it, that is a warning. With
    CUDA_VISIBLE_DEVICES set to nothing, the CPU is meant.
    """
    if not torch.cuda.is_available():
        if (there := gpu_count()) and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1"):
            message = (
                f"this machine has {there} GPUs, but torch {torch.__version__} cannot use them: {_why_no_cuda()}. "
                "To train on the CPU all the same, set CUDA_VISIBLE_DEVICES to nothing"
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
    """Form the process group that torchrun's variables describe; without them, or if there is one, do nothing."""
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ and not dist.is_initialized():
        backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        dist.init_process_group(backend, timeout=TIMEOUT)


def cpu_group(device: torch.device) -> dist.ProcessGroup | None:
    """A group that takes CPU tensors; None where the default one does."""
    if not dist.is_initialized() or device.type == "cpu" or "gloo" in str(dist.get_backend_config()):
        return None
    return dist.new_group(backend="gloo", timeout=TIMEOUT)  # type: ignore[no-any-return]


def leave_together(device: torch.device, group: dist.ProcessGroup | None, patience: float = PARTING) -> None:
    """Before this process leaves: wait until every rank has what this one sends, for at most `patience` seconds.

    That a collective's kernel has finished here does not mean that its data has arrived. It has once every rank says
    that its own device has finished. group: as `cpu_group` returned it.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    whole: Any = group or dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if whole is None or whole.size() == 1:
        return
    try:
        # By messages of its own kind: one that waits in another collective is not disturbed.
        whole.monitored_barrier(timedelta(seconds=patience), False)
    except Exception as error:
        log.warning("leaving before every other worker is done: %s", str(error).partition("\n")[0])
