"""The job on this node: its code, packages and launcher, and its newest worker group."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from spotrun.backoff import Backoff
from spotrun.errors import CorruptError, SpotrunError, StoreError
from spotrun.node.bundle import fetch
from spotrun.node.launch.client import Launcher
from spotrun.node.launch.preload import LONGEST, SOCKETS
from spotrun.node.launch.worker import Task
from spotrun.node.packages import imported_modules, install
from spotrun.node.workers import WorkerGroup, create
from spotrun.spec import JobSpec
from spotrun.state.control import Context
from spotrun.store import Store
from spotrun.wire import Bundle, Failure, Generation

log = logging.getLogger(__name__)

RETRY = (1.0, 30.0)  # seconds between tries to prepare: the first pause, the longest
QUIET_TRIES = 3  # tries before a bucket that does not answer is reported as a failure: it may be away for a moment


class Job:
    """What one bundle needs on this node. Folders: `tmpfs`/<job>/slots, control; `scratch`/code, packages, logs.

    environment: variables for workers, unless the agent's own environment or the job file sets them.
    """

    def __init__(
        self, bundle: Bundle, store: Store, address: str, devices: int, tmpfs: Path, scratch: Path,
        changed: Callable[[], None], environment: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.bundle = bundle
        self.failure: Failure | None = None  # why the job cannot be prepared
        self.doing, self.doing_since = "", 0.0  # the present step of the preparation; epoch seconds
        self.newest = 0  # the newest generation that this agent took part in
        self.group: WorkerGroup | None = None
        self.slots = tmpfs / bundle.id / "slots"
        self.control = tmpfs / bundle.id / "control"
        self.logs = scratch / "logs" / bundle.id
        self._store, self._address, self._devices, self._scratch = store, address, devices, scratch
        self._changed, self._environment = changed, environment
        self._root = Path()  # of the unpacked bundle
        self._launcher = Launcher(self._on_event)
        self._preparation: asyncio.Task[None] | None = None
        self._spec: JobSpec | None = None
        self._ready = self._ended = False

    @property
    def store(self) -> str:
        """The endpoint of the launcher's unused TCPStore; empty while the launcher is not ready."""
        return self._launcher.store

    @property
    def procs(self) -> int:
        wanted = self._spec.procs_per_node if self._spec else 1
        return self._devices if wanted == "auto" else wanted

    def prepare(self) -> None:
        """Prepare the job in the background."""
        self._preparation = asyncio.create_task(self._prepare_until_done())

    def start(self, generation: Generation, rank: int, node: str) -> WorkerGroup:
        """Start the workers of a generation. rank: of this node. Raises OSError if there is no room."""
        number = generation.number
        self.slots.mkdir(parents=True, exist_ok=True)
        group = create(generation, rank, self.procs, self.control, self.logs / f"{number:04d}")
        self.group, self.newest = group, number
        tasks = self._tasks(group, node)
        self._launcher.start_workers(number, rank, len(generation.members), generation.store, tasks)
        return group

    async def restart_launcher(self) -> None:
        """Kill the launcher and its workers. `_launcher_ended` starts another launcher."""
        await self._launcher.end(timeout=0.0)

    async def end(self) -> None:
        """End all processes of the job. Files stay."""
        self._ended = True
        if self._preparation is not None:
            self._preparation.cancel()
            await asyncio.gather(self._preparation, return_exceptions=True)
        if self.group is not None:
            await self.group.end()
        await self._launcher.end()

    def remove(self) -> None:
        """Remove the job's files in tmpfs."""
        shutil.rmtree(self.slots.parent, ignore_errors=True)

    def _tasks(self, group: WorkerGroup, node: str) -> list[Task]:
        """One task for each worker of the group."""
        assert self._spec is not None
        interval = self._spec.snapshot_interval
        found = []
        for each in group.workers:
            context = Context(
                job=self.bundle.id,
                generation=group.number,
                node=node,
                control=str(each.path),
                slots=str(self.slots),
                bucket=self._store.url,
                snapshot_interval=0 if interval == "auto" else interval,
                checkpoints=[(ref.generation, ref.step) for ref in group.generation.checkpoints],
            )
            task = Task(
                root=str(self._root),
                script=self._spec.script,
                args=self._spec.args,
                log=str(each.log),
                control=str(each.path),
                generation=group.number,
                env={Context.VARIABLE: context.to_env()},
            )
            found.append(task)
        return found

    async def _prepare_until_done(self, pause: float = 0.0) -> None:
        backoff = Backoff(*RETRY)
        while True:
            await asyncio.sleep(pause)
            try:
                await self._prepare()
                return
            except Exception as error:  # the job's files and the bucket may cause any error
                pause = backoff.next()
                if not isinstance(error, SpotrunError | OSError):
                    log.exception("job %s: unexpected error", self.bundle.id)
                if isinstance(error, StoreError) and backoff.tries < QUIET_TRIES:
                    log.warning("job %s is not ready, trying again: %s", self.bundle.id, error)
                else:
                    self._fail(str(error) or repr(error))
                if isinstance(error, CorruptError):
                    return  # another try would fail the same way

    async def _prepare(self) -> None:
        bundle = self.bundle
        self._spec = spec = _validated(bundle)
        self._now("fetching the code")
        self._root = await asyncio.to_thread(fetch, self._store, bundle.code, self._scratch / "code")
        if not (self._root / spec.script).is_file():
            raise CorruptError(f"the bundle has no {spec.script}; submit the job again")
        env = {**self._environment, **os.environ, **spec.env}
        if spec.requirements:
            self._now("installing requirements")
        packages = await install(spec.requirements, self._scratch / "packages", env)
        paths = [str(packages or ""), spec.env.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if self.procs > 1:
            env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: more threads than cores slow all workers down
        env |= await asyncio.to_thread(_make_socket_folder, self.slots.parent / "launcher")
        modules = await asyncio.to_thread(imported_modules, self._root, spec.script)
        self._now("importing torch")
        await self._launcher.start(self._address, self.procs, env, modules)

    def _now(self, doing: str) -> None:
        self.doing, self.doing_since = doing, time.time() if doing else 0.0
        self._changed()

    def _fail(self, message: str) -> None:
        log.error("job %s cannot be prepared: %s", self.bundle.id, message)
        self.failure = Failure(kind="setup", rank=0, at=time.time(), message=message[:1000])
        self._changed()

    def _on_event(self, event: dict[str, Any]) -> None:
        """Take an event of the launcher."""
        kind, group = event["type"], self.group
        mine = group is not None and event.get("generation") == group.number
        if kind == "importing":
            self._now("importing the script's modules")
        elif kind == "ready":
            self._ready, self.failure = True, None
            self._now("")
        elif kind == "ended":
            self._launcher_ended(int(event["code"]))
        elif group is not None and mine and kind == "started":
            group.started(event["pids"])
        elif group is not None and mine and kind == "exited":
            group.exited(event["local_rank"], event["code"])
        elif group is not None and mine and kind == "refused":
            group.fail(_failure("peer", group, f"generation {group.number} could not start: {event['why']}"))
        self._changed()

    def _launcher_ended(self, status: int) -> None:
        if self.group is not None and self.group.alive:
            self.group.fail(_failure("signal", self.group, f"the launcher of the workers ended (status {status})"))
        if self._ended:
            return
        if not self._ready:
            self._fail(f"the launcher of the workers does not start (status {status}); the agent's log says why")
        log.warning("the launcher ended (status %s); starting another", status)
        self._preparation = asyncio.create_task(self._prepare_until_done(RETRY[0] if self._ready else RETRY[1]))
        self._ready = False


def _make_socket_folder(folder: Path) -> dict[str, str]:
    """Make an empty folder for the launcher's socket; return the variable that names it."""
    shutil.rmtree(folder, ignore_errors=True)  # a killed launcher leaves its socket
    if len(os.fsencode(folder)) > LONGEST:
        return {}  # the socket is then in the folder for temporary files
    folder.mkdir(parents=True)
    return {SOCKETS: str(folder)}


def _validated(bundle: Bundle) -> JobSpec:
    try:
        return JobSpec.kept(bundle.job)
    except ValidationError as error:
        raise CorruptError(f"the order's job is malformed: {' '.join(str(error).split())[:300]}") from None


def _failure(kind: Literal["peer", "signal"], group: WorkerGroup, message: str) -> Failure:
    return Failure(kind=kind, rank=group.workers[0].rank, at=time.time(), message=message)
