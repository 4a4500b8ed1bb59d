"""Networks of their own for machines: a switch, machines at it, and doors from this computer's loopback addresses.

All of it lives as long as the file descriptors of the process that has made it, however that ends; nothing of it shows
in this computer's own network but the doors, which are that process's sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
CLONE_NEWNET = 0x40000000  # linux/sched.h
_libc = ctypes.CDLL(None, use_errno=True)


class Namespace:
    """One network: nothing but a loopback device at first. path: for other processes, while this one lives."""

    def __init__(self) -> None:
        self._fd = _elsewhere(_unshare)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.ip("link", "set", "lo", "up")

    def close(self) -> None:
        """It goes with the last process in it."""
        os.close(self._fd)

    def ip(self, *words: str) -> None:
        """Run `ip` in it. AssertionError with what it said if that fails."""
        command = ["nsenter", f"--net={self.path}", "ip", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"

    def listen(self, address: str, port: int) -> socket.socket:
        """A socket that listens in it."""
        return self._make(lambda: socket.create_server((address, port), backlog=256))

    def connect(self, address: str, port: int) -> socket.socket:
        """A socket that is connected from in it. Raises OSError."""
        return self._make(lambda: socket.create_connection((address, port), timeout=5))

    def _make(self, socket_of: Callable[[], socket.socket]) -> socket.socket:
        def inside() -> socket.socket:
            if _libc.setns(self._fd, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            return socket_of()

        found = _elsewhere(inside)
        found.setblocking(False)
        return found


class Switch(Namespace):
    """What machines are plugged into; this end of it is the first address of 10.77.0.0/24."""

    def __init__(self) -> None:
        super().__init__()
        self.ip("link", "add", "switch", "type", "bridge")
        self.ip("address", "add", "10.77.0.1/24", "dev", "switch")
        self.ip("link", "set", "switch", "up")

    def plug(self, address: str) -> Namespace:
        """A machine's network: eth0 with this address; it can reach nothing but the others, and itself."""
        found = Namespace()
        port = f"port{address.rpartition('.')[2]}"
        with contextlib.suppress(AssertionError):  # of a machine that had the address before, and is not quite gone
            self.ip("link", "delete", port)
        self.ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", found.path)
        self.ip("link", "set", port, "master", "switch", "up")
        found.ip("address", "add", f"{address}/24", "dev", "eth0")
        found.ip("link", "set", "eth0", "up")
        return found


async def relay(door: socket.socket, connect: Callable[[], socket.socket]) -> None:
    """Pass on each connection that comes in at a door, until cancelled; then all of them end."""

    async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            found = await asyncio.to_thread(connect)
            there_reader, there_writer = await asyncio.open_connection(sock=found)
            with contextlib.closing(there_writer):
                await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))

    running: set[asyncio.Task[None]] = set()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(passed(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    server = await asyncio.start_server(accepted, sock=door)
    try:
        await server.serve_forever()
    finally:
        server.close()
        for task in list(running):
            task.cancel()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while block := await reader.read(1 << 16):
        writer.write(block)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


def _unshare() -> int:
    if _libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _elsewhere(work: Callable[[], T]) -> T:
    """The result of a function on a thread of its own, because a network is changed for a thread, and stays so."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
