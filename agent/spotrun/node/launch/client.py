"""The agent's side of the launcher (see `server`): start it, send it commands, read its events."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from io import FileIO
from typing import Any

from spotrun.node.launch.preload import SOCKETS
from spotrun.node.launch.template import Request
from spotrun.node.launch.templates import LauncherProcess, Templates
from spotrun.node.launch.worker import Task

log = logging.getLogger(__name__)

END_TIMEOUT = 3.0  # seconds from the end of the launcher's input until the launcher is killed


class Launcher:
    """A launcher process, forked by one of `templates`. `on_event` is called with each of its events."""

    def __init__(self, templates: Templates, on_event: Callable[[dict[str, Any]], None]) -> None:
        self.store = ""  # endpoint of the unused TCPStore; empty before the launcher is ready and after it has ended
        self._taken = ""  # endpoint of the store that a generation got last; `store` changes when the launcher answers
        self._templates, self._on_event = templates, on_event
        self._process: LauncherProcess | None = None
        self._commands: asyncio.WriteTransport | None = None
        self._events: asyncio.ReadTransport | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.alive

    @property
    def store_is_free(self) -> bool:
        """Whether a generation may still get `store`."""
        return self.store != self._taken

    async def start(
        self, address: str, env: Mapping[str, str], modules: Sequence[str], private: bool = False, watch: str = ""
    ) -> None:
        """Start the process. It imports `modules` before it forks the first worker. Raises OSError.

        private: whether a job has set variables of `env`, or brings packages. Then no other job uses its template.
        watch: as `preload.WATCH`.
        """
        variables = {name: value for name, value in env.items() if name != SOCKETS}
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=1 << 20)
        input, commands = _pipe()
        try:
            events, output = _pipe()
        except OSError:  # this process has as many descriptors as it may have, and will try again
            input.close()
            commands.close()
            raise
        with input, output:
            self._commands, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, commands)
            self._events, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), events)
            request = Request(address, tuple(modules), sockets=env.get(SOCKETS, ""), watch=watch)
            try:
                self._process = self._templates.launch(variables, private, request, (input.fileno(), output.fileno()))
            except OSError:
                self._commands.close()
                self._events.close()
                raise
        self._reader = asyncio.create_task(self._read(reader, self._process))

    def start_workers(self, generation: int, rank: int, nodes: int, store: str, tasks: Sequence[Task]) -> None:
        """Make the launcher start the workers of a generation of `nodes` nodes. rank: of this node."""
        if rank == 0 and store:  # workers that warm up need none
            self._taken = store
        command = {"type": "start", "generation": generation, "rank": rank, "nodes": nodes, "store": store}
        self._write(command | {"tasks": [asdict(task) for task in tasks]})

    def take_store(self, generation: int, store: str) -> None:
        """Make the launcher hold another unused TCPStore: a generation without a start command uses `store`."""
        self._taken = store
        self._write({"type": "take_store", "generation": generation, "store": store})

    def _write(self, command: dict[str, Any]) -> None:
        if self._commands is not None:
            self._commands.write(json.dumps(command).encode() + b"\n")

    async def end(self, timeout: float = END_TIMEOUT) -> None:
        """End the launcher and all its workers."""
        process, self.store = self._process, ""
        if process is None or self._reader is None or self._commands is None or self._events is None:
            return
        self._commands.close()
        if process.forked:
            try:
                async with asyncio.timeout(timeout):
                    await process.wait()
            except TimeoutError:
                log.warning("the launcher did not end by itself: killed")
        elif process.alive:
            self._events.close()  # the request for the launcher has the other end
        process.kill()  # the kernel then kills the forkserver and the workers
        await self._reader

    def give_up(self) -> None:
        """Kill a launcher that does not get ready, with all that its imports have started. Its last event says so."""
        process = self._process
        if process is None or self._commands is None or self._events is None:
            return
        self._templates.give_up(process)
        self._commands.close()
        if process.alive and not process.forked:
            self._events.close()  # the request for the launcher has the other end
        process.kill()  # the kernel then kills the forkserver

    async def _read(self, reader: asyncio.StreamReader, process: LauncherProcess) -> None:
        while line := await reader.readline():
            try:
                event = json.loads(line)
            except ValueError:
                log.warning("a line from the launcher is not JSON: %.200r: ignored", line)
                continue
            if event["type"] in ("ready", "store"):
                self.store, self._taken = event["store"], ""
            self._on_event(event)
        code = await process.wait()
        self.store = ""
        self._on_event({"type": "ended", "code": code})


def _pipe() -> tuple[FileIO, FileIO]:
    reading, writing = os.pipe()
    return FileIO(reading, "rb"), FileIO(writing, "wb")
