"""Run Terraform and Packer. If one of them is killed, it forgets what it has just made, and that then costs money.

So two things must not kill it: the signals of a terminal, which go to all programs there, and a pipe whose reader has
ended, as `tee` does at Ctrl-C. Go's programs end at once when they write into such a pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, a cancelled CI job, a terminal that is gone
_PAUSE = 0.05  # seconds between two looks at a program


def run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], stopping: str, quiet: bool = False
) -> tuple[int, str]:
    """Run a program. Returns its exit status and its output. The output also goes to stderr, unless `quiet`.

    Ctrl-C, SIGTERM and SIGHUP stop the program as its own Ctrl-C does. This waits for its end, and then raises
    `KeyboardInterrupt`. A Ctrl-C after the first signal kills it. stopping: what the person is told meanwhile. quiet:
    what the program writes to stdout comes first in the output.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, _noted() as signals:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors if quiet else output,
            start_new_session=True,
        )
        shown = told = 0
        while process.returncode is None:
            if signals and not told:
                told = 1
                _signal_group(process, signal.SIGINT)
                _show(f"{stopping}\n".encode())
            if signal.SIGINT in signals[1:]:
                _signal_group(process, signal.SIGKILL)
            time.sleep(_PAUSE)
            process.poll()
            if not quiet:
                shown += _show(_read(output, shown))
        if signals:
            raise KeyboardInterrupt
        return process.returncode, (_read(output) + _read(errors)).decode(errors="replace")


@contextlib.contextmanager
def _noted() -> Iterator[list[int]]:
    """Note the signals that stop, instead of ending this process. One that is ignored, as by nohup, stays ignored."""
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals  # only the main thread gets them
        return
    before = {each: signal.getsignal(each) for each in _STOPPING if signal.getsignal(each) != signal.SIG_IGN}
    for each in before:
        signal.signal(each, lambda number, _: signals.append(number))
    try:
        yield signals
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _read(file: IO[bytes], start: int = 0) -> bytes:
    """What the program has written since `start`. The position of the file, which the program shares, stays."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size - start, start)


def _show(data: bytes) -> int:
    """Write to stderr. Returns the number of bytes, also if nobody reads them any more."""
    rest = data
    with contextlib.suppress(OSError):
        sys.stderr.flush()
        while rest:
            rest = rest[os.write(sys.stderr.fileno(), rest) :]
    return len(data)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
