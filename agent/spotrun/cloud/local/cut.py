"""Takes a machine off the network: its TCP sockets, and their other ends, go silent. Needs no root.

There is no reset and no end of file. The kernel drops packets in both directions, as if a cable were pulled. For this,
the daemon borrows the sockets of other processes (`pidfd_getfd`) and attaches a filter that drops everything
(`SO_ATTACH_FILTER` with a one-instruction program). The machine's listening sockets drop SYNs in the same way. Sockets
that its processes open during the cut are found and filtered within about 10 ms.

A machine that is cut off still reaches three things: its metadata server (a real machine's server is on its host), its
bucket if that is a folder, and established connections between its own processes. A partition of a real cloud's network
often leaves the same. It is the hardest case for fencing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from spotrun.cloud.local import procs
from spotrun.cloud.local.layout import METADATA_PORT, Layout
from spotrun.errors import CloudError

_SYS_PIDFD_GETFD = 438  # the same on every architecture
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_TCP_INFO, _ESTABLISHED_TO_CLOSING, _LISTEN = 11, (1, 4, 5, 6, 8, 9, 11), 10
_LOOK_FOR_NEW = 5  # sweeps between two searches for new processes
_LOOK_FOR_PEERS = 10  # sweeps between two searches for other ends, once the first searches found none
_EAGER = 20  # the first searches for another end; each sweep makes one of them

Address = tuple[str, int]
Ends = tuple[Address, Address]  # (local, remote)

_libc = ctypes.CDLL(None, use_errno=True)
_program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET | BPF_K, 0: keep no byte
_filter = struct.pack("@HL", 1, ctypes.addressof(_program))


@dataclass
class _Cut:
    """One machine's cut."""

    pids: set[int] = field(default_factory=set)  # the machine's processes at the last search
    done: set[int] = field(default_factory=set)  # inodes of sockets that need no more work
    ends: dict[int, Ends] = field(default_factory=dict)  # the ends of its connections, by inode
    lost: dict[Ends, int] = field(default_factory=dict)
    """Ends of peers that are not found yet, with the number of tries."""
    sweeps: int = 0  # how often the machine was swept


class Cutter:
    """All cuts of one cluster. Blocking; for one thread at a time."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._cuts: dict[str, _Cut] = {}
        self._filtered: dict[int, set[str]] = {}  # by inode: the machines whose cuts keep this socket silent
        self._strangers: dict[int, Ends | None] = {}  # ends of other machines' sockets, seen while looking for peers

    def cut(self, machine: str) -> None:
        """Silence a machine. Raises `CloudError` if the kernel does not allow it; then nothing is cut."""
        self._cuts[machine] = _Cut()
        try:
            self.sweep(machine)
        except OSError as error:
            self.join(machine)
            raise CloudError(
                f"cannot cut {machine} off: the kernel refuses access to its sockets ({error}); "
                "it needs Linux 5.6 or newer that lets a process trace its descendants (no seccomp filter against "
                "pidfd_getfd, kernel.yama.ptrace_scope at most 1)"
            ) from error

    def sweep(self, machine: str) -> None:
        """Silence new sockets of the machine. Raises OSError if the kernel does not allow it."""
        cut = self._cuts.get(machine)
        if cut is None:
            return
        if cut.sweeps % _LOOK_FOR_NEW == 0:
            cut.pids = procs.of_machine(self._layout.mark(machine))
        cut.sweeps += 1
        fresh = [each for each in _sockets(cut.pids) if each[0] not in cut.done]
        held: list[tuple[int, socket.socket]] = []
        try:
            for inode, pid, fd in fresh:
                if (sock := _borrow(pid, fd)) is not None:
                    held.append((inode, sock))
                    if (ends := _ends(sock)) is not None:
                        cut.ends[inode] = ends
            own = set(cut.ends.values())
            for inode, sock in held:
                self._silence(machine, cut, inode, sock, own)
        finally:
            for _, sock in held:
                sock.close()
        if cut.lost:
            self._find_peers(machine, cut)

    def join(self, machine: str) -> None:
        """Undo the cut."""
        if self._cuts.pop(machine, None) is None:
            return
        free = set()
        for inode, wanting in list(self._filtered.items()):
            wanting.discard(machine)
            if not wanting:
                free.add(inode)
                del self._filtered[inode]
        everyone = procs.of_cluster(self._layout.unique) | {os.getpid()}
        for inode, pid, fd in _sockets(everyone):
            if inode in free and (sock := _borrow(pid, fd)) is not None:
                with sock, suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        if not self._cuts:
            self._strangers.clear()

    def forget(self, machine: str) -> None:
        """Drop the cut of a machine that is gone. The filters on its peers' sockets stay."""
        self._cuts.pop(machine, None)

    def _silence(self, machine: str, cut: _Cut, inode: int, sock: socket.socket, own: set[Ends]) -> None:
        if not _is_tcp(sock):
            cut.done.add(inode)
        elif _state(sock) == _LISTEN:
            self._attach(machine, inode, sock)
            cut.done.add(inode)
        elif inode in cut.ends:
            local, remote = cut.ends[inode]
            cut.done.add(inode)
            if (remote, local) in own or remote[1] == METADATA_PORT:
                return
            self._attach(machine, inode, sock)
            cut.lost[(remote, local)] = 0

    def _attach(self, machine: str, inode: int, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _filter)
        self._filtered.setdefault(inode, set()).add(machine)

    def _find_peers(self, machine: str, cut: _Cut) -> None:
        """Silence the other ends in the cluster's processes. A connection that is not accepted yet is found later."""
        if min(cut.lost.values()) > _EAGER and cut.sweeps % _LOOK_FOR_PEERS:
            return
        others = (procs.of_cluster(self._layout.unique) | {os.getpid()}) - cut.pids
        for inode, pid, fd in _sockets(others):
            known = self._strangers.get(inode)
            if inode in self._strangers and known not in cut.lost:
                continue
            if (sock := _borrow(pid, fd)) is None:
                continue
            with sock:
                ends = _ends(sock)
                if ends is not None or not _is_tcp(sock) or _state(sock) == _LISTEN:
                    self._strangers[inode] = ends
                if ends in cut.lost:
                    self._attach(machine, inode, sock)
                    del cut.lost[ends]
        for ends in cut.lost:
            cut.lost[ends] += 1


def _sockets(pids: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """(inode, pid, fd) of each socket, without repetition."""
    seen: set[int] = set()
    for pid in pids:
        try:
            fds = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for fd in fds:
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:[") and (inode := int(target[8:-1])) not in seen:
                    seen.add(inode)
                    yield inode, pid, int(fd)


def _borrow(pid: int, fd: int) -> socket.socket | None:
    """A second handle on another process's socket; None if the process or the socket is gone. Raises OSError."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        handle = _libc.syscall(_SYS_PIDFD_GETFD, process, fd, 0)
        if handle < 0:
            code = ctypes.get_errno()
            if code in (errno.ESRCH, errno.EBADF):
                return None
            raise OSError(code, os.strerror(code))
    finally:
        os.close(process)
    try:
        return socket.socket(fileno=handle)
    except OSError:  # the number was reused in the meantime
        os.close(handle)
        return None


def _is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM


def _state(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0]


def _ends(sock: socket.socket) -> Ends | None:
    """The ends of a TCP connection; None for any other socket. IPv4 addresses mapped to IPv6 are returned as IPv4."""
    if not _is_tcp(sock) or _state(sock) not in _ESTABLISHED_TO_CLOSING:
        return None
    try:
        return _plain(sock.getsockname()), _plain(sock.getpeername())
    except OSError:
        return None


def _plain(name: tuple[str, int]) -> Address:
    return name[0].removeprefix("::ffff:"), name[1]
