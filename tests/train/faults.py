"""What goes wrong in a worker of `tests.train.generations`: these take the place of functions of spotrun."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from spotrun.state.slots import Record
from spotrun.train import transfer
from spotrun.train.slot_files import Reader


def fail_on_device(*_: Any) -> NoReturn:
    raise torch.AcceleratorError("the device is lost")


def fail_after(seconds: float) -> None:
    time.sleep(seconds)
    raise dist.DistBackendError("NCCL says no")


def send_a_part(record: Record, reader: Reader, hop: transfer.Hop) -> NoReturn:
    transfer.send(record, reader, hop)[0].wait()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
