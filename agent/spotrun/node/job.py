"""What a job has on this node: its code, packages and launcher, and its newest worker group."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from spotrun.backoff import Backoff
from spotrun.errors import CorruptError, SpotrunError
from spotrun.machine.metadata import Identity
from spotrun.node import by_hand, kept_folders, preparing, trackers, worker_failure
from spotrun.node.bundle import copy, fetch
from spotrun.node.claims import Claims
from spotrun.node.launch.client import Launcher
from spotrun.node.launch.preload import LONGEST, SOCKETS
from spotrun.node.launch.templates import NOT_FORKED, Templates
from spotrun.node.launch.worker import Task, torchrun_place
from spotrun.node.packages import imported_modules, install
from spotrun.node.workers import WorkerGroup, create, move
from spotrun.spec import JobSpec
from spotrun.state.control import Context, Invitation, worker_fifo
from spotrun.state.wakeup import Wakeups, wake
from spotrun.store import Store
from spotrun.wire import Bundle, Failure, Generation, Place

log = logging.getLogger(__name__)

RETRY = (1.0, 30.0)  # seconds between tries to prepare: the first pause, the longest
RESTARTS = "SPOTRUN_RESTARTS"  # the variable: how many generations of the job were begun before this one
WARM_UP = Generation.model_construct(number=0, members=(), store="", checkpoints=(), regroup=False)


@dataclass
class Node:
    """This node, as its jobs see it. The health gate's result sets `devices`, `environment` and `fit`."""

    identity: Identity
    boot: str  # as in Report
    store: Store
    tmpfs: Path  # folder in memory: <job>/slots, <job>/control
    scratch: Path  # folder on disk: code/<sha256>, work/<job>, logs/<job>, packages
    claims: Claims
    devices: int = 1  # how many the node has
    # Variables for workers, unless the agent's own environment or the job file sets them.
    environment: Mapping[str, str] = field(default_factory=dict)
    fit: bool = False  # whether jobs may begin
    templates: Templates = field(default_factory=Templates)  # of the launchers of all jobs


class Job:
    """What one bundle needs on this node. devices: those that its workers may use; (): all."""

    def __init__(self, bundle: Bundle, node: Node, devices: tuple[int, ...], changed: Callable[[], None]) -> None:
        self.bundle, self.devices = bundle, devices
        self.failure: Failure | None = None  # why the job cannot be prepared
        self.doing, self.doing_since = "", 0.0  # the present step of the preparation; epoch seconds
        self.group: WorkerGroup | None = None
        self.slots = node.tmpfs / bundle.id / "slots"
        self.control = node.tmpfs / bundle.id / "control"
        self.root = Path()  # the job's own copy of the bundle: its working folder
        self.logs = node.scratch / "logs" / bundle.id
        self.metrics = node.scratch / "metrics" / bundle.id
        self.place: Place | None = None  # as in JobReport
        self._node, self._changed = node, changed
        self._launcher = Launcher(node.templates, self._on_event)
        self._preparation: asyncio.Task[None] | None = None
        self._wakeups: Wakeups | None = None
        self._spec: JobSpec | None = None
        self._env: dict[str, str] = {}  # of the launcher
        self._ready = self._ended = False
        self._moved = asyncio.Event()  # set when the launcher begins another step, is ready, or has ended
        self._hung = False  # whether the launcher was killed before it was ready
        self._warm_ups = 0  # how many times workers were started to warm up

    @property
    def store(self) -> str:
        """The endpoint of the launcher's unused TCPStore; empty while the launcher is not ready."""
        return self._launcher.store

    @property
    def store_is_free(self) -> bool:
        """Whether a generation may still get `store`. If not, the launcher will soon name another one."""
        return self._launcher.store_is_free

    @property
    def python_path(self) -> str:
        """The workers' PYTHONPATH."""
        return self._env.get("PYTHONPATH", "")

    @property
    def keep(self) -> tuple[str, ...]:
        """The folders that the job keeps; empty while its working folder is not ready."""
        return self._spec.keep if self._spec is not None and self.root != Path() else ()

    @property
    def procs(self) -> int:
        wanted = self._spec.procs_per_node if self._spec else 1
        return (len(self.devices) or self._node.devices) if wanted == "auto" else wanted

    def prepare(self) -> None:
        """Prepare the job in the background."""
        with contextlib.suppress(OSError):  # the runner also looks at the workers from time to time
            self._wakeups = Wakeups(self.control / "wakeup", self._changed)
        self._preparation = asyncio.create_task(self._prepare_until_done())

    def start(self, generation: Generation, rank: int) -> WorkerGroup:
        """Start the workers of a generation. rank: of this node. Raises OSError if there is no room."""
        number = generation.number
        self._note_place(number)
        self.slots.mkdir(parents=True, exist_ok=True)
        group = create(generation, rank, self.procs, self.control, self._logs_of(number))
        self.group = group
        tasks = self._tasks(group)
        self._launcher.start_workers(number, rank, len(generation.members), generation.store, tasks)
        return group

    def warm_up(self) -> WorkerGroup:
        """Start workers that belong to no generation, and wait for one when the script's set-up is done."""
        self.slots.mkdir(parents=True, exist_ok=True)
        self._warm_ups += 1
        # No generation has a number below 1, so no event of the launcher is taken for another group's.
        group = create(WARM_UP, 0, self.procs, self.control, self._logs_of(0))
        group.origin = -self._warm_ups
        self.group = group
        self._launcher.start_workers(group.origin, 0, 1, "", self._tasks(group))
        return group

    def regroup(self, generation: Generation, rank: int) -> WorkerGroup:
        """Have the waiting workers join a generation without a restart. rank: of this node.

        Raises OSError if there is no room: then these workers can only be ended.
        """
        assert self.group is not None
        number, nodes = generation.number, len(generation.members)
        self._note_place(number)
        group = move(self.group, generation, rank, self._logs_of(number))
        for each, task in zip(group.workers, self._tasks(group), strict=True):
            place = torchrun_place(each.rank, len(group.workers), nodes, generation.store, number)
            Invitation(task.env | place, task.log).write(each.path)
        if rank == 0:
            self._launcher.take_store(number, generation.store)
        for each in group.workers:
            each.control.joins = number
            wake(str(worker_fifo(each.path)))
        self.group = group
        return group

    def why_hung(self, group: WorkerGroup) -> str:
        """What the workers, which hang, have not done in time."""
        assert self._spec is not None
        return worker_failure.why_hung((each.control for each in group.workers), self._spec)

    def _note_place(self, generation: int) -> None:
        """Write down, for a person on this node, how the workers of a generation run."""
        if self._spec is None or self._spec.keep_on_failure is None:
            return
        path = self.root.parent / "env.sh"
        by_hand.write(path, self._env | self._worker_env(generation))
        self.place = Place(folder=str(self.root), env=str(path), logs=str(self._logs_of(generation)))

    def _logs_of(self, generation: int) -> Path:
        return self.logs / f"{generation:04d}"

    def _worker_env(self, generation: int) -> dict[str, str]:
        return {RESTARTS: str(max(0, generation - 1)), **_visible(self.devices)}

    async def restart_launcher(self) -> None:
        """Kill the launcher and its workers. `_launcher_ended` starts another launcher."""
        await self._launcher.end(timeout=0.0)

    async def end(self) -> None:
        """End all processes of the job. Files stay."""
        self._ended = True
        if self._wakeups is not None:
            self._wakeups.close()
        if self._preparation is not None:
            self._preparation.cancel()
            await asyncio.gather(self._preparation, return_exceptions=True)
        if self.group is not None:
            await self.group.end()
        await self._launcher.end()

    def _tasks(self, group: WorkerGroup) -> list[Task]:
        """One task for each worker of the group."""
        assert self._spec is not None
        env = self._worker_env(group.number)
        interval = self._spec.snapshot_interval
        found = []
        for each in group.workers:
            context = Context(
                job=self.bundle.id,
                generation=group.number,
                node=self._node.identity.name,
                control=str(each.path),
                slots=str(self.slots),
                bucket=self._node.store.url,
                snapshot_interval=0 if interval == "auto" else interval,
                checkpoints=[(ref.generation, ref.step) for ref in group.generation.checkpoints],
                controls=[str(worker.path) for worker in group.workers],
                regroups=True,
                metrics=str(self.metrics),
                wakeup=str(self._wakeups.path) if self._wakeups is not None else "",
                warm_up=group.number == 0,
                exact=self._spec.exact,
                elastic=self._spec.nodes.min != self._spec.nodes.max,
            )
            task = Task(
                root=str(self.root),
                script=self._spec.script,
                args=self._spec.args,
                log=str(each.log),
                control=str(each.path),
                generation=group.number,
                env={Context.VARIABLE: context.to_env(), **env},
            )
            found.append(task)
        return found

    async def _prepare_until_done(self, pause: float = 0.0) -> None:
        backoff = Backoff(*RETRY)
        while True:
            await asyncio.sleep(pause)
            began = time.monotonic()
            try:
                await self._prepare()
                break
            except Exception as error:  # the job's files and the bucket may cause any error
                pause = backoff.next()
                if not isinstance(error, SpotrunError | OSError):
                    log.exception("job %s: unexpected error", self.bundle.id)
                took = time.monotonic() - began
                if preparing.may_pass(error, took) and backoff.tries < preparing.QUIET_TRIES:
                    log.warning("job %s is not ready, trying again: %s", self.bundle.id, error)
                else:
                    self._fail(str(error) or repr(error), preparing.repeats(error))
                if isinstance(error, CorruptError):
                    return  # another try would fail the same way
        await self._watch_imports()

    async def _prepare(self) -> None:
        bundle, node = self.bundle, self._node
        self._spec = spec = _validated(bundle)
        self._now("fetching the code")
        code = await asyncio.to_thread(fetch, node.store, bundle.code, node.scratch / "code")
        self.root = await asyncio.to_thread(copy, code, node.scratch / "work" / bundle.id, self._fetch_inputs)
        if not (self.root / spec.script).is_file():
            raise CorruptError(f"the bundle has no {spec.script}; submit the job again")
        env = {**node.environment, **os.environ, **trackers.variables(bundle.id, spec.env), **spec.env}
        if spec.requirements:
            self._now("installing requirements")
        packages = await install(spec.requirements, node.scratch / "packages", env, preparing.pip_limit(spec))
        own = [str(self.root / each) for each in spec.env.get("PYTHONPATH", "").split(os.pathsep) if each]
        paths = [str(packages or ""), *own, os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if threads := _threads(self.procs, len(self.devices) or node.devices, node.devices):
            env.setdefault("OMP_NUM_THREADS", str(threads))
        env |= await asyncio.to_thread(_make_socket_folder, self.slots.parent / "launcher")
        self._env = env
        modules = await asyncio.to_thread(imported_modules, self.root, spec.script, own)
        self._now("importing torch")
        private = bool(spec.env or packages)
        self._stacks.unlink(missing_ok=True)
        watch = f"{preparing.import_limit(spec):g} {self._stacks}"
        await self._launcher.start(node.identity.address, env, modules, private, watch)

    @property
    def _stacks(self) -> Path:
        """The file in which the fork server writes where it is, if the imports take too long."""
        return self.root.parent / "imports"

    async def _watch_imports(self) -> None:
        """Wait until the launcher is ready or has ended. If one of its steps takes too long, kill it and say so."""
        assert self._spec is not None
        limit = preparing.import_limit(self._spec)
        while self._launcher.alive and not self._ready:
            self._moved.clear()
            try:
                async with asyncio.timeout(limit + preparing.LATE):
                    await self._moved.wait()
            except TimeoutError:
                if self._ready or not self._launcher.alive:
                    return  # just in time
                calls = preparing.innermost_calls(self._stacks)
                self._hung = True
                longer = "If it needs longer, set start_timeout in the job file"
                self._fail(f"{self.doing} has not ended after {limit:g} s: killed{calls}. {longer}")
                self._launcher.give_up()
                return

    def _fetch_inputs(self, root: Path) -> None:
        """Fetch the folders of other jobs. Called in another thread."""
        for each in self.bundle.inputs:
            self.doing, self.doing_since = f"fetching input {each.name}", time.time()
            kept_folders.fetch(self._node.store, each, root)

    def _now(self, doing: str) -> None:
        self.doing, self.doing_since = doing, time.time() if doing else 0.0
        self._changed()

    def _fail(self, message: str, repeats: bool = False) -> None:
        log.error("job %s cannot be prepared: %s", self.bundle.id, message)
        self.failure = Failure(kind="setup", rank=0, at=time.time(), message=message[:1000], repeats=repeats)
        self._changed()

    def _on_event(self, event: dict[str, Any]) -> None:
        """Take an event of the launcher."""
        self._moved.set()
        kind, group = event["type"], self.group
        mine = group is not None and event.get("generation") == (group.origin or group.number)
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
        elif group is not None and kind == "refused" and event["generation"] in (group.number, group.origin):
            group.fail(_failure("peer", group, f"generation {group.number} could not start: {event['why']}"))
        self._changed()

    def _launcher_ended(self, status: int) -> None:
        if self.group is not None and self.group.alive:
            self.group.fail(_failure("signal", self.group, f"the launcher of the workers ended (status {status})"))
        if self._ended:
            return
        pause = RETRY[0]
        if status == NOT_FORKED:
            pause = 0.0  # the agent starts a template of its own: nothing is wrong with the job
        elif not self._ready:
            if not self._hung:
                self._fail(f"the launcher of the workers does not start (status {status}); the agent's log says why")
            pause = RETRY[1]
        self._hung = False
        log.warning("the launcher ended (status %s); starting another", status)
        self._preparation = asyncio.create_task(self._prepare_until_done(pause))
        self._ready = False


def _visible(devices: tuple[int, ...]) -> dict[str, str]:
    """The variables that show these GPUs to CUDA and no others; (): all.

    A worker gets them as a fork of a process that has not initialised CUDA. CUDA reads them when it is initialised
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables).
    """
    if not devices:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _threads(procs: int, devices: int, all: int) -> int:
    """Threads of each worker; 0: torch decides. More threads than cores slow all workers of the machine down."""
    if procs > 1:
        return 1  # as torchrun does
    return max(1, (os.cpu_count() or 1) * devices // all) if devices < all else 0


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
