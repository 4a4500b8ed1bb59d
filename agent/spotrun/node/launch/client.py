"""The agent's side of the launcher (see `server`): start it, send it commands, read its events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from spotrun.node.launch.preload import MODULES
from spotrun.node.launch.worker import Task

log = logging.getLogger(__name__)

# -P: no module of the working directory comes before the installed ones.
_PROGRAM = (
    "from spotrun.node.launch import preload; lines = preload.serve(); "
    "from spotrun.node.launch.server import main; main(*lines)"
)
COMMAND = (sys.executable, "-P", "-c", _PROGRAM)
END_TIMEOUT = 3.0  # seconds from the end of the launcher's input until the launcher is killed


class Launcher:
    """A launcher process of this agent. `on_event` is called with each of its events."""

    def __init__(self, on_event: Callable[[dict[str, Any]], None]) -> None:
        self.store = ""  # endpoint of the unused TCPStore; empty before the launcher is ready and after it has ended
        self._on_event = on_event
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, address: str, env: dict[str, str], modules: Sequence[str]) -> None:
        """Start the process. It imports `modules` before it forks the first worker."""
        self._process = await asyncio.create_subprocess_exec(
            *COMMAND, str(os.getpid()), address,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=env | {MODULES: " ".join(modules)},
            limit=1 << 20,
        )  # fmt: skip
        self._reader = asyncio.create_task(self._read(self._process))

    def start_workers(self, generation: int, rank: int, nodes: int, store: str, tasks: Sequence[Task]) -> None:
        """Make the launcher start the workers of a generation of `nodes` nodes. rank: of this node."""
        command = {"type": "start", "generation": generation, "rank": rank, "nodes": nodes, "store": store}
        line = json.dumps(command | {"tasks": [asdict(task) for task in tasks]})
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(line.encode() + b"\n")

    async def end(self, timeout: float = END_TIMEOUT) -> None:
        """End the launcher and all its workers."""
        process, self.store = self._process, ""
        if process is None or self._reader is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(timeout):
                await process.wait()
        except TimeoutError:
            log.warning("the launcher did not end by itself: killed")
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # the kernel then kills the forkserver and the workers
        await self._reader

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            try:
                event = json.loads(line)
            except ValueError:
                log.warning("a line from the launcher is not JSON: %.200r: ignored", line)
                continue
            if event["type"] in ("ready", "store"):
                self.store = event["store"]
            self._on_event(event)
        code = await process.wait()
        self.store = ""
        self._on_event({"type": "ended", "code": code})
