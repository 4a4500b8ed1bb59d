"""The template: a process that has imported torch, and forks launchers. It starts no threads and runs no job's code.

A new Python needs seconds to import torch. A fork of this process has torch already. Agent and template exchange
packets of JSON over a Unix socket (unix(7), SOCK_SEQPACKET):

    agent → template   fork(launcher, and the fields of `Request`), with the launcher's ends of two pipes (see `server`)
    template → agent   forked(launcher), with a pidfd of the launcher · ended(launcher, code)

A launcher is a child of this process. It is killed when this process ends, and this process reads its exit code. The
agent kills launchers through their pidfds. This process adopts and kills what a launcher leaves behind.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from spotrun.machine.processes import adopt_orphans, children, die_with_parent, kill
from spotrun.node.launch import preload

PACKET = 1 << 18  # bytes of the largest packet; by default, the kernel refuses one of 208 KiB already

PAUSE = 50  # milliseconds between two looks at orphans


@dataclass(frozen=True)
class Request:
    """What a launcher gets."""

    address: str  # of this node
    modules: Sequence[str]  # that are imported before the first worker is forked
    sockets: str  # folder of the launcher's socket; empty: the folder for temporary files
    watch: str = ""  # as `preload.WATCH`


def main() -> None:
    """Serve until the agent closes the socket. Arguments: the agent's pid, the socket's descriptor."""
    die_with_parent(int(sys.argv[1]))
    with socket.socket(fileno=int(sys.argv[2])) as channel:
        channel.set_inheritable(False)
        sys.argv = ["-c"]
        preload.import_base()
        import spotrun.node.launch.server  # noqa: F401  # not at the top: the agent imports this module

        for stream in (sys.stdout, sys.stderr):  # otherwise each launcher would print what an import has left there
            stream.flush()
        Template(channel).serve()


class Template:
    """The launchers of this process."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._launchers: dict[int, tuple[int, int]] = {}  # by pidfd: the launcher's number, its pid
        self._kept = children(os.getpid())  # what an import may have started
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)

    def serve(self) -> None:
        """Fork launchers and report their ends, until the agent closes the socket."""
        adopt_orphans()
        while True:
            for descriptor, _ in self._poll.poll(self._end_orphans()):
                if descriptor in self._launchers:
                    self._reap(descriptor)
                elif not self._take_request():
                    return

    def _end_orphans(self) -> int | None:
        """Kill and reap what launchers have left. Returns the time until the next look; None: nothing is left."""
        launchers = {pid for _, pid in self._launchers.values()}
        orphans = set(children(os.getpid())).difference(launchers, self._kept)
        kill(orphans)
        for pid in orphans:
            os.waitpid(pid, os.WNOHANG)  # then this process gets the orphan's own children
        return PAUSE if orphans else None

    def _take_request(self) -> bool:
        data, lines = receive(self._channel)
        if not data:
            return False
        values = json.loads(data)
        number = values.pop("launcher")
        if _is_abandoned(lines[0]):
            self._say("ended", number, code=0)
        else:
            self._fork(number, Request(**values), lines)
        for each in lines:
            os.close(each)
        return True

    def _fork(self, number: int, request: Request, lines: Sequence[int]) -> None:
        template = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            print(f"template: no launcher can be forked: {error}", file=sys.stderr, flush=True)
            self._say("ended", number, code=1)
            return
        if pid == 0:
            self._channel.close()
            _become_launcher(template, request, lines)
        handle = os.pidfd_open(pid)
        self._launchers[handle] = number, pid
        self._poll.register(handle, select.POLLIN)
        self._say("forked", number, handle)

    def _reap(self, handle: int) -> None:
        self._poll.unregister(handle)
        number, pid = self._launchers.pop(handle)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(handle)
        self._say("ended", number, code=code)

    def _say(self, type: str, launcher: int, *descriptors: int, **more: int) -> None:
        send(self._channel, {"type": type, "launcher": launcher, **more}, descriptors)


def send(channel: socket.socket, values: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a packet. Raises OSError."""
    data = json.dumps(values).encode()
    if len(data) > PACKET:
        raise OSError(errno.EMSGSIZE, f"{len(data)} bytes are too many for one packet")
    socket.send_fds(channel, [data], descriptors)


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """The next packet and its descriptors, which no other program inherits. No bytes: the other end is closed."""
    found = array("i")
    # Not `socket.recv_fds`, which drops the flag.
    data, ancillary, _, _ = channel.recvmsg(PACKET, socket.CMSG_LEN(2 * found.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content)
    return data, found.tolist()


def _is_abandoned(commands: int) -> bool:
    """Whether the agent has closed its end."""
    poll = select.poll()
    poll.register(commands, 0)
    return bool(poll.poll(0))


def _become_launcher(template: int, request: Request, lines: Sequence[int]) -> NoReturn:
    """In a fork: run the launcher, as if a new Python had started it."""
    try:
        die_with_parent(template)
        preload.close_descriptors({0, 1, 2, *lines})
        os.environ[preload.MODULES] = " ".join(request.modules)
        if request.sockets:
            os.environ[preload.SOCKETS] = request.sockets
        if request.watch:
            os.environ[preload.WATCH] = request.watch
        importlib.invalidate_caches()  # folders may have come since the template looked for modules
        _draw_new_secrets()
        preload.fork_server()
        from spotrun.node.launch.server import main

        main(request.address, *lines)
    except SystemExit as error:
        print(error, file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
            sys.stderr.flush()
        os._exit(1)


def _draw_new_secrets() -> None:
    """Make random numbers and keys differ from those of other forks. Python's `random` does this by itself."""
    multiprocessing.current_process().authkey = os.urandom(32)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
