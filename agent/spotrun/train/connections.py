"""How to break connections: of the process group, of transfers, and to the store at which this process meets others."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Protocol


class Transfer(Protocol):
    """Sends or receives a state over connections of its own."""

    def close(self) -> None:
        """Break these connections. Any thread may call this."""


of_group: frozenset[str] = frozenset()  # names of sockets, see `sockets`
transfers: set[Transfer] = set()  # those under way
broken = False  # whether `break_all` has been called since this process joined the group; then no transfer begins
meeting_place: tuple[str, int] | None = None  # (host, port) of the store at which this process waits for others


def break_all() -> None:
    """Have all collectives of the process group fail, here and in others. Any thread may call this.

    This also ends transfers and a meeting. If this process meets others, this returns when the meeting has ended.

    Neither the end of a gloo group nor its abort closes connections on which a collective waits. This ends the reading
    from them, and gloo closes them. If the writing ended too, more collectives would hang.

    Even so, a collective can hang, which is rare (bench/RESULTS.md says how rare). Then the agent ends the worker. Two
    cases are known (gloo's tcp/pair.cc, torch 2.13):

    * There are two collectives at the same time. DDP has that with three ranks, or with several buckets. When the first
      one fails, gloo stops reading from a connection that still brings its data (`Pair::prepareRead`). The second one
      waits for the same connection.
    * A worker stands still in a collective while its peers leave. When it goes on, it may wait in
      `UnboundBuffer::waitSend`, although the connection is closed.
    """
    global broken
    broken = True  # first, so that no transfer is missed
    for each in list(transfers):
        each.close()
    _shut_down()
    while meeting_place is not None:  # torch connects again, and waits for an answer without a limit (torch 2.13)
        time.sleep(0.05)
        _shut_down()


def _leave_to_parent() -> None:
    """In a child that the script has forked, such as a loader's worker: close the group's connections.

    Otherwise, those that the parent closes stay open as long as the child lives. Then peers that wait for the parent do
    not notice that it has left, or that it is dead. Each descriptor stays in use, because gloo's objects have its
    number.
    """
    if not of_group:
        return
    with contextlib.suppress(OSError):  # the child has as many descriptors as it may have
        nothing = os.open(os.devnull, os.O_RDWR)
        for name, descriptor in sockets().items():
            if name in of_group:
                os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)


os.register_at_fork(after_in_child=_leave_to_parent)


def connected_to(place: tuple[str, int]) -> set[str]:
    """The sockets of this process that are connected to this host and port."""
    return {name for name, _, peer in _connections() if peer == place}


def _shut_down() -> None:
    for name, connection, peer in _connections():
        with contextlib.suppress(OSError):
            if peer == meeting_place:
                connection.shutdown(socket.SHUT_RDWR)
            elif name in of_group:
                connection.shutdown(socket.SHUT_RD)


def _connections() -> Iterator[tuple[str, socket.socket, tuple[str, int]]]:
    """The TCP connections of this process: the kernel's name, the socket, and the host and port of the other end.

    A socket that listens is left out: gloo ends the process if that one closes.
    """
    for name, descriptor in sockets().items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            # Another thread may have closed the socket, and the descriptor may be another one's by now.
            if os.readlink(f"/proc/self/fd/{connection.fileno()}") == name and connection.family != socket.AF_UNIX:
                host, port, *_ = connection.getpeername()
                yield name, connection, (host.removeprefix("::ffff:"), port)


def sockets() -> dict[str, int]:
    """The sockets of this process: the kernel's name of each, and its descriptor."""
    found = {}
    with contextlib.suppress(OSError):  # there is no /proc
        for each in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
                if (name := os.readlink(f"/proc/self/fd/{each}")).startswith("socket:"):
                    found[name] = int(each)
    return found
