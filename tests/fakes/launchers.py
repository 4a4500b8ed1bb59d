"""Launchers without an agent."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from spotrun.node.launch.client import Launcher
from spotrun.node.launch.templates import Templates
from spotrun.node.launch.worker import Task
from spotrun.state import exit_note
from spotrun.state.control import Control
from spotrun.wire import Failure
from tests.helpers import await_for


class Bench:
    """A launcher on a bench: what it says is kept in `events`."""

    def __init__(self, root: Path, templates: Templates) -> None:
        self.root = root
        self.events: list[dict[str, Any]] = []
        self.launcher = Launcher(templates, self.events.append)
        (root / "modules").mkdir(parents=True)

    async def begin(self, *modules: str, procs: int = 1) -> None:
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join([str(self.root / "modules"), env.get("PYTHONPATH", "")])
        await self.launcher.start("127.0.9.9", env, modules)
        await self.ready()

    async def ready(self) -> None:
        await self.said(lambda e: e["type"] == "ready", "the launcher ready")

    async def said(self, look: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            assert not any(e["type"] == "ended" for e in self.events), f"the launcher ended: {self.events}"
            return next((e for e in self.events if look(e)), None)

        event = await await_for(found, 40, what)
        assert event is not None
        return event

    def start(self, number: int, text: str, *args: str, procs: int = 1) -> None:
        """Run `text` as a script in generation `number`."""
        (self.root / f"s{number}.py").write_text(text)
        tasks = []
        for index in range(procs):
            control = self.root / f"{number}.{index}"
            Control(control, create=True).close()
            log = self.root / f"{number}.{index}.log"
            tasks.append(Task(str(self.root), f"s{number}.py", args, str(log), str(control), number, {"MORE": "yes"}))
        self.launcher.start_workers(number, 0, 1, self.launcher.store, tasks)

    async def code(self, number: int, index: int = 0) -> int:
        event = await self.said(
            lambda e: (e["type"], e.get("generation"), e.get("local_rank")) == ("exited", number, index), "an exit"
        )
        return int(event["code"])

    def log(self, number: int, index: int = 0) -> str:
        return (self.root / f"{number}.{index}.log").read_text()

    async def printed(self, number: int, text: str, index: int = 0) -> str:
        """A worker's log, once it has `text`."""
        path = self.root / f"{number}.{index}.log"
        await await_for(lambda: path.exists() and text in path.read_text(), what=f"{text!r} in the log")
        return self.log(number, index)

    def failure(self, number: int) -> Failure:
        return Failure(**json.loads(exit_note.path_for(self.root / f"{number}.0").read_text()))


@contextlib.asynccontextmanager
async def bench(root: Path) -> AsyncIterator[Bench]:
    """A bench, and a template of its own."""
    templates = Templates()
    found = Bench(root, templates)
    try:
        yield found
    finally:
        await found.launcher.end()
        assert not found.launcher.alive
        await templates.end()


def alive(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """The living children that the main thread of a process has forked, the oldest first."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if alive(int(word))]


def parent(pid: int) -> int:
    """The process that has forked this one (proc(5))."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
