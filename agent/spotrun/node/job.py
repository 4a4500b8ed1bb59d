"""The job on this node: its code, packages and launcher, made ready and kept so."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from spotrun.backoff import Backoff
from spotrun.errors import CorruptError, SpotrunError, StoreError
from spotrun.node.bundle import fetch
from spotrun.node.launch.client import Launcher
from spotrun.node.launch.preload import LONGEST, SOCKETS
from spotrun.node.launch.worker import Task
from spotrun.node.packages import imported_modules, install
from spotrun.node.workers import Group, create
from spotrun.spec import JobSpec
from spotrun.state.control import Context
from spotrun.store import Store
from spotrun.wire import Bundle, Failure, Generation

log = logging.getLogger(__name__)

RETRY = (1.0, 30.0)  # seconds between tries to get ready: the first pause, the longest
QUIET_TRIES = 3  # the bucket may be away for a moment: not reported as a failure before that many tries


class Job:
    """What one bundle needs on this node. Folders: `tmpfs`/<job>/slots, control; `scratch`/code, packages, logs.

    environment: what workers get unless the agent's own environment or the job file says otherwise.
    """

    def __init__(
        self, bundle: Bundle, store: Store, address: str, devices: int, tmpfs: Path, scratch: Path,
        changed: Callable[[], None], environment: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.bundle = bundle
        self.failure: Failure | None = None  # why it cannot be made ready
        self.newest = 0  # generation that this agent took part in last
        self.group: Group | None = None
        self.slots = tmpfs / bundle.id / "slots"
        self.control = tmpfs / bundle.id / "control"
        self.logs = scratch / "logs" / bundle.id
        self._store, self._address, self._devices, self._scratch = store, address, devices, scratch
        self._changed, self._environment = changed, environment
        self._root = Path()
        self._launcher = Launcher(self._hear)
        self._setup: asyncio.Task[None] | None = None
        self._spec: JobSpec | None = None
        self._ready = self._ended = False

    @property
    def store(self) -> str:
        """The fresh store that the launcher holds; empty while it is not ready."""
        return self._launcher.store

    @property
    def procs(self) -> int:
        wanted = self._spec.procs_per_node if self._spec else 1
        return self._devices if wanted == "auto" else wanted

    def begin(self) -> None:
        """Get ready, in the background."""
        self._setup = asyncio.create_task(self._get_ready())

    def tasks(self, group: Group, node: str) -> list[Task]:
        """What each worker of the group has to do."""
        assert self._spec is not None
        interval = self._spec.snapshot_interval
        found = []
        for each in group.locals:
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
            found.append(
                Task(
                    root=str(self._root),
                    script=self._spec.script,
                    args=self._spec.args,
                    log=str(each.log),
                    control=str(each.path),
                    generation=group.number,
                    env={Context.VARIABLE: context.to_env()},
                )
            )
        return found

    def start(self, generation: Generation, rank: int, node: str) -> Group:
        """Start the workers of a generation in which this node is number `rank`. Raises OSError if there is no room."""
        number = generation.number
        self.slots.mkdir(parents=True, exist_ok=True)
        group = create(generation, rank, self.procs, self.control, self.logs / f"{number:04d}")
        self.group, self.newest = group, number
        self._launcher.start(number, rank, len(generation.members), generation.store, self.tasks(group, node))
        return group

    async def restart_launcher(self) -> None:
        """End the launcher and its workers, whatever state they are in; another one is begun by itself."""
        await self._launcher.end(timeout=0.0)

    async def end(self) -> None:
        """End everything of it. Files stay."""
        self._ended = True
        if self._setup is not None:
            self._setup.cancel()
            await asyncio.gather(self._setup, return_exceptions=True)
        if self.group is not None:
            await self.group.free()
        await self._launcher.end()

    def remove(self) -> None:
        """Remove what it holds in tmpfs."""
        shutil.rmtree(self.slots.parent, ignore_errors=True)

    async def _get_ready(self) -> None:
        backoff, tries = Backoff(*RETRY), 0
        while True:
            try:
                await self._try()
                return
            except Exception as error:  # what it has to do with comes from outside
                tries += 1
                if not isinstance(error, SpotrunError | OSError):
                    log.exception("job %s: unexpected", self.bundle.id)
                if isinstance(error, StoreError) and tries < QUIET_TRIES:
                    log.warning("job %s is not ready, trying again: %s", self.bundle.id, error)
                else:
                    self._fail(str(error) or repr(error))
                if isinstance(error, CorruptError):
                    return  # it will not get better
            await asyncio.sleep(backoff.next())

    async def _try(self) -> None:
        bundle = self.bundle
        self._spec = spec = _validated(bundle)
        self._root = await asyncio.to_thread(fetch, self._store, bundle.code, self._scratch / "code")
        if not (self._root / spec.script).is_file():
            raise CorruptError(f"the bundle has no {spec.script}; submit the job again")
        env = {**self._environment, **os.environ, **spec.env}
        packages = await install(spec.requirements, self._scratch / "packages", env)
        paths = [str(packages or ""), spec.env.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if self.procs > 1:
            env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, so that they do not get in each other's way
        env |= await asyncio.to_thread(_make_room, self.slots.parent / "launcher")
        modules = await asyncio.to_thread(imported_modules, self._root, spec.script)
        await self._launcher.begin(self._address, self.procs, env, modules)

    def _fail(self, message: str) -> None:
        log.error("job %s cannot be made ready: %s", self.bundle.id, message)
        self.failure = Failure(kind="setup", rank=0, at=time.time(), message=message[:1000])
        self._changed()

    def _hear(self, event: dict[str, Any]) -> None:
        """What the launcher says."""
        kind, group = event["type"], self.group
        mine = group is not None and event.get("generation") == group.number
        if kind == "ready":
            self._ready, self.failure = True, None
        elif kind == "ended":
            self._launcher_ended(int(event["code"]))
        elif group is not None and mine and kind == "started":
            group.started(event["pids"])
        elif group is not None and mine and kind == "exited":
            group.exited(event["local_rank"], event["code"])
        elif group is not None and mine and kind == "refused":
            group.give_up(_failure("peer", group, f"generation {group.number} could not start: {event['why']}"))
        self._changed()

    def _launcher_ended(self, status: int) -> None:
        if self.group is not None and self.group.alive:
            self.group.give_up(_failure("signal", self.group, f"the launcher of the workers ended (status {status})"))
        if self._ended:
            return
        if not self._ready:
            self._fail(f"the launcher of the workers does not start (status {status}); the agent's log says why")
        log.warning("the launcher ended (status %s); starting another", status)
        self._setup = asyncio.create_task(self._again(RETRY[0] if self._ready else RETRY[1]))
        self._ready = False

    async def _again(self, pause: float) -> None:
        await asyncio.sleep(pause)
        await self._get_ready()


def _make_room(folder: Path) -> dict[str, str]:
    """The variable that has the launcher put its socket into `folder`, emptied: what a killed one leaves goes too.

    Without it, if the socket's path would be too long, the socket is where temporary files are.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if len(os.fsencode(folder)) > LONGEST:
        return {}
    folder.mkdir(parents=True)
    return {SOCKETS: str(folder)}


def _validated(bundle: Bundle) -> JobSpec:
    try:
        return JobSpec.kept(bundle.job)
    except ValidationError as error:
        raise CorruptError(f"the order's job is malformed: {' '.join(str(error).split())[:300]}") from None


def _failure(kind: str, group: Group, message: str) -> Failure:
    return Failure.model_validate({"kind": kind, "rank": group.locals[0].rank, "at": time.time(), "message": message})
