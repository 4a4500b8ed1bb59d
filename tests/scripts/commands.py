"""The operator's commands as processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fakes.cluster import Machines
from tests.helpers import wait_for

ROOT = Path(__file__).parents[2]


def fab(standin: Machines, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fabric", words[0], "--cluster", str(standin.cluster), *words[1:]]
    env = {**os.environ, "SPOTRUN_HOME": str(standin.home), "COLUMNS": "120"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, **options)


@contextlib.contextmanager
def interruptible(
    standin: Machines, task: str, *words: str, program: str = "fabric", **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """A task as it runs at a terminal, wherever the tests run: Ctrl-C reaches it."""
    command = [sys.executable, "-m", program, task, "--cluster", str(standin.cluster), *words]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "SPOTRUN_HOME": str(standin.home), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def interrupted(process: subprocess.Popen[str]) -> str:
    """What the task says when it is interrupted."""
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    wait_for(lambda: process.poll() is not None, what="the interrupted command's end")
    assert process.returncode == 130
    said = process.stderr.read()
    assert "Traceback" not in said
    return said
