"""`spotrun stacks`: the Python stacks of a job's workers on this node, now. Training goes on.

py-spy reads a worker's stacks if it is installed and may attach. Otherwise the worker itself sends them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from spotrun.errors import SpotrunError
from spotrun.machine import private_paths
from spotrun.node.launch.own_stacks import address
from spotrun.state.control import Control

PATIENCE = 3.0  # seconds for a worker to send its stacks
SPY = 5.0  # seconds for py-spy
LARGEST = 200_000  # bytes of a worker's answer
ENDED = "the process has ended"
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_BLOCK = re.compile(r"[0-9]+\.[0-9]+")  # the name of a control block: generation and local rank


@dataclass(frozen=True)
class Answer:
    """What is known about one worker."""

    rank: int
    generation: int
    pid: int
    stacks: str = ""  # as `py-spy dump --json` prints them
    problem: str = ""  # why there are none


def add_parser(commands: Any) -> None:
    """Add `stacks`."""
    parser = commands.add_parser("stacks", help="print the Python stacks of a job's workers (on a node)")
    parser.add_argument("job")
    parser.set_defaults(run=lambda args: show(args.job))


def show(job: str) -> int:
    """Print a line of JSON for each worker: the fields of `Answer`. Raises `SpotrunError`."""
    check(job)
    found = list(workers(tmpfs() / job / "control"))
    with ThreadPoolExecutor(max(1, len(found))) as pool:
        for answer in pool.map(lambda each: ask(*each), found):
            print(json.dumps(asdict(replace(answer, stacks=short(answer.stacks, scratch(), job)))), flush=True)
    return 0


def check(job: str) -> None:
    """Raise `SpotrunError` if this is not a job's id: as a part of a path, it could lead to another folder."""
    if not _JOB.fullmatch(job):
        raise SpotrunError(f"{job!r}: is not a job's id")


def tmpfs() -> Path:
    """The node's folder in memory (`node.job.Node`)."""
    return Path(os.environ.get("SPOTRUN_TMPFS", "/dev/shm/spotrun"))


def scratch() -> Path:
    """The node's folder on the disk."""
    return Path(os.environ.get("SPOTRUN_SCRATCH", "/var/lib/spotrun"))


def short(text: str, scratch: Path, job: str) -> str:
    """The text without the folder of the job's code, and without that of the node: a file has one name on all nodes."""
    return re.sub(f'{re.escape(str(scratch))}/(work/{re.escape(job)}/[^/"]+/)?', "", text)


def workers(folder: Path) -> Iterator[tuple[Path, Answer]]:
    """The workers that have a rank, with the paths of their control blocks. Raises `SpotrunError`."""
    try:
        paths = sorted(path for path in folder.iterdir() if _BLOCK.fullmatch(path.name))
    except FileNotFoundError:
        return
    except OSError as error:
        raise SpotrunError(f"{folder}: {error.strerror}; run this as the user of the agent") from None
    for path in paths:
        try:
            control = Control(path)
        except (OSError, ValueError):
            continue  # its group has ended, or it is not a control block
        with contextlib.closing(control):
            answer = Answer(control.rank, control.generation, control.pid)
        if answer.generation > 0 and answer.pid > 0:  # others warm up, or are about to be forked
            yield path, answer


def ask(path: Path, worker: Answer) -> Answer:
    """The worker's stacks, or why there are none. path: of its control block. Takes `SPY` + `PATIENCE` at most."""
    try:
        if not maps(worker.pid, path):
            return replace(worker, problem=ENDED)
        if text := _spy(worker.pid):
            return replace(worker, stacks=text)
        return replace(worker, stacks=_told(worker.pid))
    except (FileNotFoundError, ProcessLookupError):
        return replace(worker, problem=ENDED)
    except ConnectionRefusedError:
        return replace(worker, problem="it does not listen: it is starting, or runs an older version of spotrun")
    except TimeoutError:
        state = f"its state is {_state(worker.pid)}; if it runs, C code may hold Python's GIL"
        return replace(worker, problem=f"no answer in {PATIENCE:g} s; {state}")
    except OSError as error:
        return replace(worker, problem=str(error))


def maps(pid: int, path: Path) -> bool:
    """Whether the process has the file mapped: then it is the worker of this control block."""
    lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    return any(line.split(maxsplit=5)[5:] == [str(path)] for line in lines)


def _spy(pid: int) -> str:
    """What py-spy says; empty if it is not installed, or may not attach to the process."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    program = shutil.which("py-spy", path=programs)
    if program is None:
        return ""
    command = [program, "dump", "--pid", str(pid), "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SPY, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 and len(done.stdout) <= LARGEST else ""


def _told(pid: int) -> str:
    """What the worker itself says. Raises OSError."""
    deadline, found = time.monotonic() + PATIENCE, b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(address(pid))
        peer, _, _ = private_paths.PEER.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, private_paths.PEER.size)
        )
        if peer != pid or not private_paths.is_own_peer(connection):
            raise OSError(f"another process ({peer}) has taken its socket")
        while block := connection.recv(65536):
            found += block
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            if len(found) > LARGEST:
                raise OSError(f"its answer has more than {LARGEST} bytes")
            connection.settimeout(left)
    return found.decode(errors="replace")


def _state(pid: int) -> str:
    """As in /proc/PID/status, such as `T (stopped)`."""
    found = re.search(r"^State:\s*(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return found[1] if found else "not known"
