"""What goes wrong in a worker of `tests.train.generations`. Most of these take the place of functions of spotrun."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from spotrun.train import connections, distributed, streams

_SEND_ALL = streams._send_all


def fail_on_device(*_: Any) -> NoReturn:
    raise torch.AcceleratorError("the device is lost")


def fail_after(seconds: float) -> None:
    time.sleep(seconds)
    raise dist.DistBackendError("NCCL says no")


def leave_in_a_collective_that_hangs(meeting_place: Path, rank: int) -> None:
    """Form a process group of two. Rank 0 leaves it while a collective hangs. Rank 1 is killed sooner or later."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    distributed.join_process_group(torch.device("cpu"), "gloo", alone=meeting_place)
    if rank == 1:
        signal.pause()
    dist.all_reduce(torch.zeros(1), async_op=True)
    connections.of_group = frozenset()
    distributed.leave_process_group()


def send_a_part(connection: socket.socket, items: Iterable[streams.Data]) -> None:
    """Send the beginning of a stream and one piece, and die."""
    for data in itertools.islice(items, 2):
        connection.sendall(data)
    os.kill(os.getpid(), signal.SIGKILL)


def send_wrongly(connection: socket.socket, items: Iterable[streams.Data]) -> None:
    """Damage the first piece of the first stream. Later streams are right."""
    streams._send_all = _SEND_ALL
    about, piece, *rest = items
    _SEND_ALL(connection, [about, bytes([piece[0] ^ 1]) + bytes(piece[1:]), *rest])


def connect_meanwhile(group: dict[str, str], rank: int, folder: Path) -> None:
    """Form a group, and leave it. Another connection is made before the others come. Notes whether it stays open."""
    os.environ.update(group, RANK=str(rank), LOCAL_RANK="0")
    found: list[socket.socket] = []
    store = distributed._agent_store

    def connect(*args: Any) -> Any:
        with socket.create_server(("127.0.0.1", 0)) as server:
            found.extend([socket.create_connection(server.getsockname()), server.accept()[0]])
        return store(*args)

    distributed._agent_store = connect  # type: ignore[assignment]
    distributed.join_process_group(torch.device("cpu"), "gloo")
    dist.barrier()
    distributed.leave_process_group()
    for each in found:
        each.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            assert each.recv(1), "the connection is broken"
    (folder / str(rank)).touch()
    os._exit(0)
