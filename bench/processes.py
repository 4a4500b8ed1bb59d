"""Nodes as process trees: launch them, signal all their processes, kill them. They end when this process ends."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

# torchrun on this machine alone. Without a log folder, it would leave a folder with temporary files behind.
STANDALONE = ("-m", "torch.distributed.run", "--standalone", f"--log-dir={os.devnull}")
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def launch(arguments: list[str], env: dict[str, str], log: Path, program: str = sys.executable) -> int:
    """Start a node's root process in a session of its own, and return its pid. It is killed when this process ends."""

    def die_with_parent() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))

    with log.open("ab") as output:
        process = subprocess.Popen(
            [program, *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    return process.pid


def answer(work: Callable[..., None], ranks: int, args: tuple[Any, ...], patience: float) -> Any:
    """Call `work(rank, port, *args, queue)` in new processes. Returns what rank 0 puts into the queue.

    port: a free one, for the store. None: a process has failed, or has not ended within `patience` seconds.
    """
    spawn = multiprocessing.get_context("spawn")
    queue, port = spawn.SimpleQueue(), free_port()
    processes = [spawn.Process(target=work, args=(rank, port, *args, queue), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(patience)
    return None if any(process.exitcode != 0 for process in processes) else queue.get()


def signal_tree(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and all its descendants, whatever session they are in."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def sweep() -> None:
    """Kill and reap every descendant of this process. Call `adopt_orphans` before: otherwise it loses its orphans."""
    me = psutil.Process()
    while children := me.children(recursive=True):
        for process in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(children, timeout=10)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def tail(folder: Path, lines: int = 15) -> str:
    """The last lines of every log below a run's folder, to show when something went wrong."""
    found = [path for path in sorted(folder.rglob("*.log")) if path.stat().st_size]
    ends = ("\n".join(path.read_text(errors="replace").splitlines()[-lines:]) for path in found)
    return "\n".join(f"--- {path.relative_to(folder)}\n{end}" for path, end in zip(found, ends, strict=True))
