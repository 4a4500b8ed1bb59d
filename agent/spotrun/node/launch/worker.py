"""A worker runs the script as `python script.py args…` would, and reports why if it ends early.

It is a fork of the forkserver, so torch is imported already. Its standard output and error go to the rank's log. A full
disk loses text of that log, and changes nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import types
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from spotrun.errors import MisuseError, SpotrunError
from spotrun.machine import private_paths
from spotrun.machine.processes import die_with_parent, kill_descendants, offer_to_oom_killer
from spotrun.node.launch import own_stacks, preload
from spotrun.state import exit_note
from spotrun.state.control import EXIT_PEER, Control

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_PACKAGE = Path(__file__).parents[2]
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Task:
    """One worker's part of a generation."""

    root: str  # the unpacked bundle: the working directory
    script: str  # relative to `root`
    args: tuple[str, ...]  # of the script
    log: str  # path of the rank's log
    control: str  # path of the worker's control block
    generation: int
    env: dict[str, str]  # variables on top of the forkserver's own


def torchrun_place(rank: int, procs: int, nodes: int, store: str, generation: int) -> dict[str, str]:
    """A worker's place in a generation, in the variables that torchrun has for it.

    See https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables". procs: workers of each node.
    """
    host, _, port = store.rpartition(":")
    return {
        "RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": str(rank // procs),
        "WORLD_SIZE": str(procs * nodes),
        "ROLE_WORLD_SIZE": str(procs * nodes),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": str(max(0, generation - 1)),
        "TORCHELASTIC_RUN_ID": str(generation),
    }


def run(task: Task) -> None:
    """Run the script in this process, a child of the forkserver. Returns only if it succeeds."""
    forked = time.time()
    die_with_parent(preload.SERVER)
    offer_to_oom_killer()
    os.environ.update(task.env)
    preload.number_modules()
    if mask := os.environ.get(private_paths.UMASK):
        os.umask(int(mask, 8))
    _redirect(task.log)
    control = _control(task)
    rank = int(task.env["RANK"])
    control.generation, control.pid, control.rank, control.forked = task.generation, os.getpid(), rank, forked
    _get_own_tracker()
    from spotrun.train import failures  # not at the top: the agent imports this module, and must not import torch

    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    own_stacks.serve()
    _ignore_sigterm()
    failures.before_leaving(kill_descendants)  # when `spotrun.train` ends this process
    os.chdir(task.root)
    path = Path(task.root, task.script)
    sys.argv = [str(path), *task.args]
    sys.path.insert(0, str(path.parent))
    # The script must not inherit this process's start method: a DataLoader then starts its workers as under `python`.
    multiprocessing.set_start_method(None, force=True)
    try:
        _run_as_main(path)
        failures.check()
        # A process of multiprocessing would skip these two.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        if failures.void:
            _fail(task, "peer", f"the script exited with code {code} in a step that does not count", "", EXIT_PEER)
        if isinstance(error.code, str):
            _print(f"{error.code}\n")
        _fail(task, "user", f"the script exited with code {code}", "", (code & 0xFF) or 1)
    except BaseException as error:
        text = "".join(traceback.format_exception(error.with_traceback(_script_part(error.__traceback__))))
        _print(text)
        said = "".join(traceback.format_exception_only(error)).strip()
        message = exit_note.summary(said) if "Last error:" in said else said.splitlines()[-1]
        if failures.is_peer_failure(error):
            _fail(task, "peer", message, text, EXIT_PEER)
        if isinstance(error, MisuseError):
            _fail(task, "user", _place(error, task.root) + " ".join(str(error).splitlines()), "", 1, repeats=True)
        _fail(task, "user", message, text, 1)


def _control(task: Task) -> Control:
    """The worker's control block. If the agent is of another version, this process ends."""
    try:
        return Control(Path(task.control)).checked()
    except SpotrunError as error:
        _print(f"{error}\n")
        _fail(task, "user", str(error), "", 1, repeats=True)


def _get_own_tracker() -> None:
    """Forget the launcher's resource tracker: if the script needs a tracker, multiprocessing starts one.

    A tracker removes a dead worker's shared memory when no process uses the tracker any more.
    """
    tracker = resource_tracker._resource_tracker
    os.close(tracker._fd)  # type: ignore[attr-defined]
    tracker.__init__()  # type: ignore[misc]


def _ignore_sigterm() -> None:
    """Ignore SIGTERM in this process, not in its children.

    A machine's shutdown sends SIGTERM, but the agent ends workers with SIGKILL once their snapshot is safe. Children
    keep the default: a DataLoader ends its workers with SIGTERM, and waits for them. A child that executes another
    program gets the default too, because this is a handler and not SIG_IGN.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _redirect(log: str) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    sys.stdout, sys.stderr = _stream(1), _stream(2)


def _stream(descriptor: int) -> TextIO:
    """A stream as `open(descriptor, "w", buffering=1)` makes it, but a full disk raises no error."""
    file = io.BufferedWriter(_Log(descriptor, "w", closefd=False))
    stream = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)
    stream.mode = "w"  # type: ignore[misc]
    return stream


class _Log(io.FileIO):
    """A rank's log. What the disk has no room for is lost: a log must not end the training.

    Only what Python writes in this process gets here. A child that writes to the same descriptor gets the error.
    """

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return memoryview(data).nbytes


def _print(text: str) -> None:
    """Print to standard error. If the script has closed or replaced this stream, that may fail, and changes nothing."""
    with contextlib.suppress(Exception):
        sys.stderr.write(text)


def _run_as_main(path: Path) -> None:
    """Execute the file as `__main__`. Unlike runpy, keep the module afterwards: exit handlers may use it.

    Raises what the script raises, also `SystemExit`, unless the script says that it has succeeded.
    """
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        if error.code is not None and error.code != 0:
            raise


def _script_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without this module's own frames."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _place(error: BaseException, root: str) -> str:
    """Where the script has made this error, `train.py:12: `: the newest line in its own files.

    A file outside of `root` has its whole path. Lines of spotrun do not count, nor do those of a library between both.
    """
    found = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    found = [(path, line) for path, line in found if not Path(path).is_relative_to(_PACKAGE)]
    own = [(os.path.relpath(path, root), line) for path, line in found if Path(path).is_relative_to(root)]
    return "".join(f"{path}:{line}: " for path, line in (own or found)[-1:])


def _fail(task: Task, kind: str, message: str, trace: str, code: int, repeats: bool = False) -> NoReturn:
    """Write the reason down and leave at once: other threads may be stuck in a collective."""
    from spotrun.train import failures  # as above

    exit_note.write(task.control, kind, int(task.env["RANK"]), message, trace, repeats)
    failures.flush()
    kill_descendants()
    os._exit(code)
