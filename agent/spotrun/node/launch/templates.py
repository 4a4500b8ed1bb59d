"""The agent's side of the templates (see `template`): start them, have them fork launchers, end them.

A template has one environment: variables and installed packages. Jobs of the same environment share a template, which
stays when they have left. So the next job finds torch imported. A job that sets variables or brings packages gets a
private template, which ends with its last launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spotrun.machine import source
from spotrun.machine.processes import ZYGOTE, descendants, kill
from spotrun.node.launch import zygote
from spotrun.node.launch.template import Request, receive, send

log = logging.getLogger(__name__)

NOT_FORKED = -1000  # a launcher's exit code if the zygote has not forked its template; no signal has this number
PATIENCE = 2.0  # seconds from a launcher's end until its template has told the exit code

# -P: no module of the working directory comes before the installed ones. Not -m: the template would be the main module,
# and each worker would import that module once more.
COMMAND = (sys.executable, "-P", "-c", "from spotrun.node.launch.template import main; main()")


NETWORK = ("GLOO_", "NCCL_", "TORCH_NCCL_", "FI_")  # variables that are read when a process group is made, not before


@dataclass(frozen=True)
class Environment:
    """What a template has and its launchers inherit."""

    variables: frozenset[tuple[str, str]]
    installed: tuple[int, ...]  # when packages were last installed or removed, in nanoseconds
    private: bool  # whether it is a job's own

    @property
    def is_machines(self) -> bool:
        """Whether it equals the agent's, except for variables that are read later. If so, a zygote can fork it."""
        variables = dict(self.variables)
        added = [name for name, value in variables.items() if value and name not in os.environ]
        same = all(variables.get(name) == value for name, value in os.environ.items())
        return not self.private and same and all(name.startswith(NETWORK) for name in added)


class Templates:
    """The templates of an agent. At most one of them is idle: the shared one that was used last."""

    def __init__(self) -> None:
        self._all: list[Template] = []  # in the order of their last use
        self._zygote = os.environ.get(ZYGOTE, "")  # path of its socket; empty: there is none
        self._number = 0  # of the last launcher

    def launch(
        self, variables: Mapping[str, str], private: bool, request: Request, lines: Sequence[int]
    ) -> LauncherProcess:
        """Have a launcher forked, by a new template if there is none. Raises OSError.

        private: whether the environment is a job's own. lines: the launcher's ends of its two pipes.
        """
        environment = Environment(frozenset(variables.items()), _installed(), private)
        usable = (each for each in self._all if each.environment == environment and each.alive and not each.hangs)
        found = next(usable, None)
        if found is None:
            found = Template(environment, self._sweep, self._zygote if environment.is_machines else "")
        else:
            self._all.remove(found)
        self._all.append(found)
        self._number += 1
        try:
            return found.fork(self._number, request, lines)
        finally:
            self._sweep()

    def give_up(self, launcher: LauncherProcess) -> None:
        """Kill the processes below a launcher that does not get ready. The caller kills the launcher itself.

        A template that has forked no launcher hangs. The next launcher gets a new template. The hanging one is killed
        when no other job waits for it.
        """
        kill(descendants(launcher.pid) if launcher.forked else [])
        for each in self._all:
            if launcher in each.launchers.values() and not any(other.forked for other in each.launchers.values()):
                each.hangs = True
                if len(each.launchers) == 1:
                    each.kill()

    async def end(self) -> None:
        """End all templates, and so all launchers."""
        for each in self._all:
            each.kill()
        await asyncio.gather(*(each.gone.wait() for each in self._all))

    def _sweep(self) -> None:
        """Forget the templates that have ended, and end those that are idle and not the newest shared one."""
        if any(each.refused for each in self._all):
            self._zygote = ""
        self._all = [each for each in self._all if not each.gone.is_set()]
        newest = next((each for each in reversed(self._all) if not each.environment.private), None)
        for each in self._all:
            if (each.hangs or each is not newest) and not each.launchers:
                each.kill()


class LauncherProcess:
    """A launcher, as the agent sees it. not_told: called if it has ended and the template does not tell how."""

    def __init__(self, changed: Callable[[], None], not_told: Callable[[], None]) -> None:
        self._changed, self._not_told = changed, not_told
        self._handle = -1  # the pidfd; -1: the template has not forked the launcher yet, or the launcher has ended
        self._loop = asyncio.get_running_loop()
        self._code: asyncio.Future[int] = self._loop.create_future()

    @property
    def alive(self) -> bool:
        return not self._code.done()

    @property
    def forked(self) -> bool:
        return self._handle >= 0

    @property
    def pid(self) -> int:
        """Its process id; -1 if it has just ended. Only if `forked`."""
        found = re.search(r"^Pid:\s*(-?\d+)$", Path(f"/proc/self/fdinfo/{self._handle}").read_text(), re.MULTILINE)
        return int(found[1]) if found else -1

    async def wait(self) -> int:
        """The exit code, once the launcher has ended; -N: signal N has ended it; or `NOT_FORKED`."""
        return await asyncio.shield(self._code)

    def kill(self) -> None:
        """End the launcher. If the template forks it later, it is killed then."""
        if self.forked:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        else:
            self.ended(-signal.SIGKILL)

    def started(self, handle: int) -> None:
        """Record that the template has forked the launcher. handle: a pidfd of it."""
        self._handle = handle
        self._loop.add_reader(handle, self._await_code)

    def _await_code(self) -> None:
        """The launcher has ended. Its template tells the exit code, unless the template stands still."""
        self._loop.remove_reader(self._handle)
        self._loop.call_later(PATIENCE, self._give_up_code)

    def _give_up_code(self) -> None:
        if self.alive:
            self._not_told()
            self.ended(-signal.SIGKILL)

    def orphaned(self, code: int) -> None:
        """Record that the template has ended. The kernel kills its launchers.

        code: the exit code of this launcher if it was not forked.
        """
        if self.forked:
            self._loop.add_reader(self._handle, self.ended, -signal.SIGKILL)
        else:
            self.ended(code)

    def ended(self, code: int) -> None:
        """Record that the launcher has ended, or will not be forked. Later calls change nothing."""
        if self.alive:
            if self.forked:
                self._loop.remove_reader(self._handle)
                os.close(self._handle)
                self._handle = -1
            self._code.set_result(code)
            self._changed()


class Template:
    """A template process. changed: called when a launcher or the template has ended.

    The constructor starts the process, or asks the zygote at the path `zygote` for it. Raises OSError.
    """

    def __init__(self, environment: Environment, changed: Callable[[], None], zygote: str = "") -> None:
        self.environment = environment
        self.launchers: dict[int, LauncherProcess] = {}
        self.gone = asyncio.Event()  # set when the process has ended
        self.refused = False  # whether the zygote has not forked it
        self.hangs = False  # whether it did not do its work for too long: no further launcher should wait for it
        self._changed, self._killed = changed, False
        self._process: subprocess.Popen[bytes] | None = None  # None: the zygote's child
        self._handle = -1  # the pidfd; -1: the zygote has not forked it yet
        with contextlib.ExitStack() as unless_started:
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            unless_started.enter_context(self._channel)
            with theirs:
                if not (zygote and _ask(zygote, environment, theirs)):
                    self._process = _start(environment, theirs)
                    unless_started.callback(self._process.kill)
                    self._handle = os.pidfd_open(self._process.pid)
            unless_started.pop_all()
        self._channel.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel, self._receive)
        if self._process is not None:
            loop.add_reader(self._handle, self._end)

    @property
    def alive(self) -> bool:
        running = self._process is None or self._process.poll() is None
        return running and not self._killed and not self.gone.is_set()

    def fork(self, number: int, request: Request, lines: Sequence[int]) -> LauncherProcess:
        """Ask for a launcher. It is forked once torch is imported. Raises OSError."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has just ended: `_end` will say how
            send(self._channel, {"launcher": number, **asdict(request)}, lines)
        self.launchers[number] = launcher = LauncherProcess(lambda: self._forget(number), self._hang)
        return launcher

    def kill(self) -> None:
        self._killed = True
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        elif not self.gone.is_set():
            self._end()  # if it is forked later, it finds the channel closed, and ends

    def _hang(self) -> None:
        log.warning("the template does not tell that a launcher has ended: the next launcher gets another template")
        self.hangs = True

    def _forget(self, launcher: int) -> None:
        del self.launchers[launcher]
        self._changed()

    def _receive(self) -> None:
        """Read what the template says."""
        while True:
            try:
                data, descriptors = receive(self._channel)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                asyncio.get_running_loop().remove_reader(self._channel)
                if self._handle < 0:
                    self.refused = True
                    self._end()
                return
            said = json.loads(data)
            if said["type"] == "template":
                (self._handle,) = descriptors
                asyncio.get_running_loop().add_reader(self._handle, self._end)
            else:
                self._note(said, self.launchers.get(said["launcher"]), descriptors)

    def _note(self, said: dict[str, Any], launcher: LauncherProcess | None, descriptors: Sequence[int]) -> None:
        if said["type"] == "forked":
            (handle,) = descriptors
            if launcher is None:  # killed in the meantime
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                os.close(handle)
            else:
                launcher.started(handle)
        elif launcher is not None:
            launcher.ended(said["code"])

    def _end(self) -> None:
        """The process has ended, or was never forked."""
        loop = asyncio.get_running_loop()
        if self._handle >= 0:
            self._receive()
            loop.remove_reader(self._handle)
            os.close(self._handle)
            self._handle = -1
        loop.remove_reader(self._channel)
        self._channel.close()
        code = NOT_FORKED if self.refused else self._process.wait() if self._process is not None else 0
        if self.launchers:
            why = "was not forked" if self.refused else f"ended (status {code or 'unknown'})"
            log.warning("the template of %s launchers %s", len(self.launchers), why)
        self.gone.set()
        for each in list(self.launchers.values()):
            each.orphaned(code or -signal.SIGKILL)
        self._changed()


def _start(environment: Environment, channel: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, str(os.getpid()), str(channel.fileno())],
        stdin=subprocess.DEVNULL, stdout=2, env=dict(environment.variables), pass_fds=[channel.fileno()],
    )  # fmt: skip


def _ask(path: str, environment: Environment, channel: socket.socket) -> bool:
    """Ask the zygote for a template. False: there is none that can fork it."""
    try:
        if zygote.is_older(path, environment.installed):
            return False
        zygote.ask(path, zygote.Request(dict(environment.variables), os.getcwd(), source.STAMP), channel)
    except OSError as error:
        log.warning("no zygote at %s (%s): this agent starts a template of its own", path, error)
        return False
    return True


def _installed() -> tuple[int, ...]:
    """When a package was last installed into the interpreter's own folders: a template keeps what it has imported."""
    found = []
    for name in ("purelib", "platlib"):
        with contextlib.suppress(OSError):  # a system's Python may lack one of the folders
            found.append(os.stat(sysconfig.get_path(name)).st_mtime_ns)
    return tuple(found)
