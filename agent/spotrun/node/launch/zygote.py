"""The zygote: a process that has imported torch, and forks the templates of several agents on one computer.

On a cloud, each machine has one agent, whose template imports torch. The machines of a local cluster share a computer:
there one import, in one copy in memory, is enough for all. The local cloud starts the zygote and names its socket in
the machines' environment (`processes.ZYGOTE`). torch is imported when the first agent asks.

    agent → zygote     template(variables, folder), with the template's end of a channel, and a stderr
    template → agent   template, with the template's pidfd, on the channel. For what follows there, see `template`

If the zygote cannot do this, or has other code than the agent, it closes the channel. Then, or if it is gone, the agent
starts templates of its own, as on a cloud.

A template ends when its agent closes the channel or ends. It is a grandchild of the zygote. Between them is a process
that only reaps, as a machine's init does: orphans of the machine's jobs become its children, and it ends after the last
of them. In /proc, both have their machine's environment, by which the local cloud finds a machine's processes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing.process
import os
import select
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from spotrun.machine import private_paths, source
from spotrun.machine.processes import adopt_orphans, die_with_parent, show_environment
from spotrun.node.launch import preload
from spotrun.node.launch.template import Template, receive, send

SERVER = "spotrun.node.launch.server"  # not imported at the top: agents, which have no torch, import this module
PATIENCE = 5.0  # seconds for an agent that has connected to send its request


@dataclass(frozen=True)
class Request:
    """The process that an agent wants."""

    variables: Mapping[str, str]
    folder: str  # its working folder
    code: str = ""  # the agent's `source.STAMP`; an agent of an older version does not say it


def main() -> None:
    """Serve until the parent ends. Arguments: the parent's pid, the descriptor of the listening socket."""
    die_with_parent(int(sys.argv[1]))
    with socket.socket(fileno=int(sys.argv[2])) as listener:
        sys.argv = ["-c"]
        Zygote(listener).serve()


def is_older(path: str, installed: Sequence[int]) -> bool:
    """Whether packages were installed since the zygote began. Its imports may be older. Raises OSError.

    installed: times in nanoseconds.
    """
    return os.stat(path).st_mtime_ns <= max(installed, default=0)


def ask(path: str, request: Request, channel: socket.socket) -> None:
    """Ask the zygote at `path` for a template that has `channel`. Returns before it exists. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.setblocking(False)
        asking.connect(path)
        send(asking, request.__dict__, [channel.fileno(), 2])


class Zygote:
    """The templates that come from this process."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def serve(self) -> NoReturn:
        """Fork templates, and reap those that end."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._listener.fileno():
                    self._accept()
                else:
                    self._poll.unregister(descriptor)
                    os.close(descriptor)
                    with contextlib.suppress(ChildProcessError):
                        while os.waitpid(-1, os.WNOHANG)[0]:
                            pass

    def _accept(self) -> None:
        descriptors: list[int] = []
        try:
            asking, _ = self._listener.accept()
            with asking:
                asking.settimeout(PATIENCE)
                if not private_paths.is_own_peer(asking):
                    return
                data, descriptors = receive(asking)
                if data:
                    self._answer(Request(**json.loads(data)), descriptors)
        except Exception as error:  # an import of torch may cause any error
            print(f"zygote: no template is forked: {error!r}", file=sys.stderr, flush=True)
            time.sleep(0.1)  # if the error lasts, the request is still there
        finally:
            for each in descriptors:
                os.close(each)

    def _answer(self, request: Request, descriptors: Sequence[int]) -> None:
        if request.code == source.STAMP:
            self._fork(request, descriptors)
        else:
            print("zygote: an agent has other code of spotrun: it gets no template", file=sys.stderr, flush=True)

    def _fork(self, request: Request, descriptors: Sequence[int]) -> None:
        channel, stderr = descriptors
        if SERVER not in sys.modules:
            preload.import_base()
            importlib.import_module(SERVER)
        for stream in (sys.stdout, sys.stderr):  # otherwise the fork would print what is left there
            stream.flush()
        pid = os.fork()
        if pid == 0:
            _become_template(request, channel, stderr)
        self._poll.register(os.pidfd_open(pid), select.POLLIN)


def _become_template(request: Request, channel: int, stderr: int) -> NoReturn:
    """In a fork: be what a new Python with these variables would be after its import of torch.

    The template is a child of this fork, which only reaps: the template itself, and all that its jobs leave behind.
    """
    try:
        os.setsid()
        adopt_orphans()
        for target in (1, 2):
            os.dup2(stderr, target)
        preload.close_descriptors({0, 1, 2, channel})
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(request.variables)
        # Imports may have stored the zygote's values.
        tempfile.tempdir, multiprocessing.process.ORIGINAL_DIR = None, request.folder  # type: ignore[attr-defined]
        show_environment()
        if os.fork() == 0:
            _serve(channel)
        os.close(channel)
        while True:
            os.wait()
    except ChildProcessError:  # all have ended
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _serve(channel: int) -> NoReturn:
    try:
        with socket.socket(fileno=channel) as end:
            handle = os.pidfd_open(os.getpid())
            send(end, {"type": "template"}, [handle])
            os.close(handle)
            Template(end).serve()
        os._exit(0)
    except (BrokenPipeError, ConnectionResetError):  # the agent has ended
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)
