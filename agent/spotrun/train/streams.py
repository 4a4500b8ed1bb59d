"""TCP connections over which a worker sends a state to another one.

A transfer has several, because one rarely fills a network. AWS limits a connection to 5 or 10 Gbit/s
(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-network-bandwidth.html).

They do not use gloo (torch 2.13). It sends one message at a time, so a state of 300 MB took 0.29 s instead of 0.09 s.
And it does not always tell that a connection is broken (gloo/transport/tcp/pair.cc, `signalException`). Here,
`Streams.close` ends every thread that waits for a connection.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from spotrun.train import connections

T = TypeVar("T")
Data = bytes | memoryview
COUNT = 8  # streams of a sender. A receiver takes as many as the sender says
MOST = 255  # streams that there can be
SILENCE = 60.0  # seconds without an answer or a piece of the state, after which a peer counts as gone
INTRODUCTION = 5.0  # seconds in which the other end of a new connection must show the secret
LONGEST = 1 << 30  # bytes that `unframe` accepts
_HELLO = struct.Struct("!QB")  # the secret, and the number of the stream
_LENGTH = struct.Struct("!Q")
_SIOCGIFADDR = 0x8915  # netdevice(7)
_DISCARD = 9  # a port, for a question to the kernel: nothing is sent there


@dataclass(frozen=True)
class Address:
    """Where a worker gives its state to a process that shows the secret, a number below 2^63."""

    host: str
    port: int
    secret: int

    @property
    def numbers(self) -> list[int]:
        """Four whole numbers of 64 bits that `read` understands."""
        host = ipaddress.ip_address(self.host)
        packed = host if isinstance(host, ipaddress.IPv6Address) else ipaddress.IPv6Address(f"::ffff:{host}")
        return [*struct.unpack("!qq", packed.packed), self.port, self.secret]

    @classmethod
    def read(cls, numbers: Sequence[int]) -> Address:
        """The address with these numbers."""
        host = ipaddress.IPv6Address(struct.pack("!qq", *numbers[:2]))
        return cls(str(host.ipv4_mapped or host), *numbers[2:4])


NOWHERE = Address("::", 0, 0)


class Streams:
    """The connections and threads of one side of a transfer. After `connections.break_all`, no connection begins."""

    def __init__(self) -> None:
        self._lock, self._sockets = threading.Lock(), list[socket.socket]()
        connections.transfers.add(self)
        self._closed = connections.broken

    def close(self) -> None:
        """End all threads. Any thread may call this, at any time."""
        with self._lock:
            self._closed = True
            for each in self._sockets:
                with suppress(OSError):  # it is closed already
                    each.shutdown(socket.SHUT_RDWR)
        connections.transfers.discard(self)

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Make a call in a thread. An error of a socket is a `DistError` of the future."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                found = call()
            except OSError as error:
                future.set_exception(_gone(error))
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(found)

        try:
            threading.Thread(target=run, name="spotrun-transfer", daemon=True).start()
        except RuntimeError as error:  # there are too many threads
            raise _gone(error) from None
        return future

    def connect(self, address: Address, number: int) -> socket.socket:
        """A connection to a `Listener`, for this one of its streams."""
        found = socket.socket(_family(address.host))
        found.settimeout(0)
        code = found.connect_ex((address.host, address.port))
        self._hold(found)  # not before: only a connection that has begun can be ended
        try:
            if code == errno.EINPROGRESS:
                poll = select.poll()
                poll.register(found, select.POLLOUT)
                ready = poll.poll(1e3 * SILENCE)
                code = found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if ready else errno.ETIMEDOUT
            if code:
                raise OSError(code, os.strerror(code))
            found.settimeout(SILENCE)
            found.sendall(_HELLO.pack(address.secret, number))
        except OSError:
            found.close()
            raise
        return found

    def _hold(self, connection: socket.socket) -> None:
        """From now on, `close` shuts this socket down."""
        with self._lock:
            if self._closed:
                connection.close()
                connections.transfers.discard(self)
                raise dist.DistError("the transfer of the state has been given up")
            self._sockets.append(connection)


class Listener(Streams):
    """Gives a state to the worker that has the `address`. If `send` is not called, call `close`.

    Raises `DistError` if this machine has no address for that.
    """

    def __init__(self) -> None:
        try:
            host = _own_host()
            self._socket = socket.create_server((host, 0), family=_family(host))
        except OSError as error:
            raise dist.DistError(f"this worker cannot listen for another one: {error}") from None
        self.address = Address(host, self._socket.getsockname()[1], secrets.randbits(63))
        self._served: list[Future[None]] = []  # by number
        self._claimed: set[int] = set()  # the streams that the receiver has asked for
        super().__init__()
        self._hold(self._socket)

    @property
    def sends(self) -> bool:
        """Whether `send` has been called."""
        return bool(self._served)

    def send(self, stream: Callable[[int], Iterable[Data]], count: int) -> None:
        """Begin to send. stream: returns the data of the stream with this number, below `count`."""
        self._served = [Future() for _ in range(count)]
        self.start(partial(self._accept, stream))

    def wait(self) -> None:
        """Wait until the kernel has all data. Raises `DistError` if the receiver is gone before that."""
        try:
            done, _ = wait(self._served, return_when=FIRST_EXCEPTION)
            for each in done:
                each.result()
        finally:
            self.close()

    def close(self) -> None:
        super().close()
        if not self._served:  # otherwise the thread that accepts does that
            self._socket.close()

    def _accept(self, stream: Callable[[int], Iterable[Data]]) -> None:
        """Have a thread for each connection, until the receiver has asked for all streams."""
        until = time.monotonic() + SILENCE
        try:
            with self._socket:
                while len(self._claimed) < len(self._served):
                    self._socket.settimeout(max(0.001, until - time.monotonic()))
                    connection, _ = self._socket.accept()
                    self._hold(connection)
                    self.start(partial(self._serve, connection, stream))
        except Exception as error:
            for number, each in enumerate(self._served):
                if self._claim(number):
                    each.set_exception(_gone(error))

    def _serve(self, connection: socket.socket, stream: Callable[[int], Iterable[Data]]) -> None:
        """Send what the other end asks for, if it is the receiver."""
        with connection:
            number = self._introduced(connection)
            if number is None or number >= len(self._served) or not self._claim(number):
                return
            if len(self._claimed) == len(self._served):
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
            try:
                _send_all(connection, stream(number))
            except BaseException as error:
                self._served[number].set_exception(_gone(error) if isinstance(error, OSError) else error)
            else:
                self._served[number].set_result(None)

    def _claim(self, number: int) -> bool:
        """Whether nobody has asked for this stream before."""
        with self._lock:
            found = number not in self._claimed
            self._claimed.add(number)
            return found

    def _introduced(self, connection: socket.socket) -> int | None:
        """The number of the stream that the other end wants; None: it is a stranger."""
        hello = bytearray(_HELLO.size)
        connection.settimeout(INTRODUCTION)
        try:
            fill(connection, memoryview(hello))
        except OSError:
            return None
        secret, number = _HELLO.unpack(hello)
        return number if secrets.compare_digest(str(secret), str(self.address.secret)) else None


def fill(connection: socket.socket, room: memoryview) -> None:
    """Receive as many bytes as there is room for. Raises `OSError` if the other end is gone."""
    while room.nbytes:
        count = connection.recv_into(room)
        if not count:
            raise ConnectionResetError("the connection has ended too early")
        room = room[count:]


def framed(data: bytes) -> bytes:
    """Data that `unframe` can receive."""
    return _LENGTH.pack(len(data)) + data


def unframe(connection: socket.socket) -> bytes:
    """Receive what `framed` has made."""
    size = bytearray(_LENGTH.size)
    fill(connection, memoryview(size))
    (length,) = _LENGTH.unpack(size)
    if length > LONGEST:
        raise ConnectionResetError(f"the sender announces {length} bytes at once; {LONGEST} are allowed")
    data = bytearray(length)
    fill(connection, memoryview(data))
    return bytes(data)


def _send_all(connection: socket.socket, items: Iterable[Data]) -> None:
    connection.settimeout(SILENCE)
    for data in items:
        connection.sendall(data)


def _gone(error: Exception) -> dist.DistError:
    return dist.DistError(f"the transfer of the state has failed: {error}")


def _own_host() -> str:
    """This machine's address on gloo's network, which a job file may choose; else that towards the group's store."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    family, _, _, _, place = socket.getaddrinfo(os.environ["MASTER_ADDR"], _DISCARD, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect(place)
        return str(asking.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
