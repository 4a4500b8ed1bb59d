"""The launcher: a process between the agent, which has no torch, and the workers, which are forks of a warm forkserver.

torch elastic runs the worker group. The agent's commands take the place of its rendezvous. Agent and launcher exchange
JSON lines over a socket:

    agent → launcher   {"type": "start", "generation", "rank", "nodes", "store", "tasks": [...]}
                       {"type": "take_store", "generation", "store"}
                       end of file: end all workers
    launcher → agent   importing() · ready(store) · store(store) · started(generation, pids) ·
                       exited(generation, local_rank, code) · refused(generation, why)

A start command ends the workers of the generation before. If workers join a generation without a restart, the agent
sends `take_store` instead. Events name the generation of the start command. The launcher is a fork of a process that
has torch and this module (see `template`).
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import select
import signal
import socket
import threading
from dataclasses import dataclass, replace
from multiprocessing import connection, forkserver, get_context
from multiprocessing.context import ForkServerProcess
from typing import Any

from torch.distributed import HashStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError, RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from spotrun.machine import name_lookups
from spotrun.machine.processes import descendants, kill
from spotrun.node.launch import preload
from spotrun.node.launch.orphans import Orphans
from spotrun.node.launch.worker import Task, run

log = logging.getLogger(__name__)

FOREVER = 2**31  # restarts that torch elastic allows: the head decides how many there are
LOST = 255  # multiprocessing's exit code for a worker whose forkserver has ended (`popen_forkserver.Popen.poll`)
ENDING = 1.0  # seconds: the pipes of a killed process may close before the process has ended
POISONED = 3  # exit code of the trial process if the imports have initialised CUDA: then no fork can use CUDA
TRIALS = 4  # trial processes, at most; after the second last one, no module is imported before the fork


@dataclass(frozen=True)
class StartCommand:
    """The agent's command to start the workers of a generation."""

    generation: int
    rank: int  # of this node
    nodes: int  # in the generation
    store: str  # endpoint of the generation's TCPStore
    tasks: tuple[Task, ...]  # one for each worker


class EventWriter:
    """Writes events to the agent, one line each."""

    def __init__(self, fd: int) -> None:
        self._out = os.fdopen(fd, "w", buffering=1, encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, **values: object) -> None:
        with self._lock:
            print(json.dumps(values), file=self._out, flush=True)


class Stores:
    """TCPStores on this node's address: one for the generation that runs, an unused one for the next.

    Two threads use it: the main thread for start commands, and the reading thread for `take_store`.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._current: TCPStore | None = None
        self._make()

    def take(self, endpoint: str) -> bool:
        """Use the unused store, and make another. False: the unused store has another endpoint."""
        with self._lock:
            if endpoint != self.endpoint:
                return False
            self._current = self._next  # this removes the old store with all keys of its generation
            self._make()
            return True

    def _make(self) -> None:
        listener = socket.socket(socket.AF_INET6 if ":" in self._address else socket.AF_INET)
        listener.bind((self._address, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        self._next = TCPStore(
            self._address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.endpoint = f"{self._address}:{port}"


class CommandRendezvous(RendezvousHandler):
    """A rendezvous whose result the head has decided: `next_rendezvous` waits for the agent's start command."""

    def __init__(self, stores: Stores, events: EventWriter) -> None:
        self.wake_fd, self._wake = os.pipe()
        self._stores, self._events = stores, events
        self._commands: queue.Queue[StartCommand | None] = queue.Queue()
        self.command: StartCommand | None = None
        self._closed = False

    def put(self, command: StartCommand | None) -> None:
        """Pass on a command, from the reading thread; None: the last command has come."""
        self._commands.put(command)
        os.write(self._wake, b"!")

    def next_rendezvous(self) -> RendezvousInfo:
        while not self._closed:
            command = self._commands.get()
            os.read(self.wake_fd, 1)
            if command is None:
                self._closed = True
                break
            # Workers that warm up need no store.
            if command.rank == 0 and command.store and not self.take_store(command.generation, command.store):
                continue
            self.command = command
            host, _, port = command.store.rpartition(":")
            # Ranks are known, and workers meet at the first node's store: torch elastic itself stores nothing.
            return RendezvousInfo(HashStore(), command.rank, command.nodes, RendezvousStoreInfo(host, int(port or 0)))
        raise RendezvousGracefulExitError("the agent has closed the launcher")

    def take_store(self, generation: int, store: str) -> bool:
        """Use the unused store for a generation, and tell the agent of the next one. False: refused."""
        if not self._stores.take(store):
            self._events.write(type="refused", generation=generation, why=f"no store is held at {store}")
            return False
        self._events.write(type="store", store=self._stores.endpoint)
        return True

    def num_nodes_waiting(self) -> int:
        return 0 if self._commands.empty() else 1

    def get_backend(self) -> str:
        return "spotrun"

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return str(self.command.generation) if self.command else "0"

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def shutdown(self) -> bool:
        return True


class ForkingElasticAgent(SimpleElasticAgent):
    """torch elastic's agent. Its workers are forks of the warm forkserver. It waits for their ends, and never polls.

    When one worker fails, the others go on: the spotrun agent ends them once their snapshot is safe.
    """

    def __init__(self, spec: WorkerSpec, rendezvous: CommandRendezvous, events: EventWriter, orphans: Orphans) -> None:
        super().__init__(spec, exit_barrier_timeout=0)
        self._commands, self._events, self._orphans = rendezvous, events, orphans
        self._processes: list[ForkServerProcess] = []
        self._codes: dict[int, int] = {}

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        assert self._commands.command is not None
        spec.local_world_size = len(self._commands.command.tasks)
        found: list[Worker] = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
        return found

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        start = self._commands.command
        assert start is not None
        self._codes, self._processes = {}, []
        for worker, task in zip(worker_group.workers, start.tasks, strict=True):
            env = self._environment(worker_group, worker.local_rank, start.generation)
            task = replace(task, env=task.env | env)
            process = get_context("forkserver").Process(target=run, args=(task,), name=f"rank{worker.global_rank}")
            process.start()
            self._processes.append(process)
        pids = [process.pid for process in self._processes]
        self._events.write(type="started", generation=start.generation, pids=pids)
        return dict(enumerate(pids))

    def _environment(self, group: WorkerGroup, local_rank: int, generation: int) -> dict[str, str]:
        """What torchrun sets (https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables").

        One variable is left out: TORCH_NCCL_ASYNC_ERROR_HANDLING=1. With that value, a worker aborts its communicators
        before it ends, and the abort may hang when a peer is gone. torch's default, 3, ends the worker at once
        (ProcessGroupNCCL.hpp).
        """
        spec, worker = group.spec, group.workers[local_rank]
        return {
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(group.group_rank),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "WORLD_SIZE": str(worker.world_size),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(max(0, generation - 1)),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        alive = {p.sentinel: i for i, p in enumerate(self._processes) if i not in self._codes}
        for sentinel in connection.wait([*alive, self._commands.wake_fd]):
            if isinstance(sentinel, int) and sentinel in alive:
                self._reap(alive[sentinel])
        if len(self._codes) < len(self._processes):
            return RunResult(WorkerState.HEALTHY)
        if any(self._codes.values()):
            return RunResult(WorkerState.FAILED)
        return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: None for worker in worker_group.workers})

    def _reap(self, index: int) -> None:
        process = self._processes[index]
        process.join()
        code = process.exitcode if process.exitcode is not None else 1
        if code == LOST and _forkserver_ended():
            code = -signal.SIGKILL  # the kernel has killed the worker with it, see `preload`
        self._codes[index] = code
        if len(self._codes) == len(self._processes):
            self._orphans.end()  # before the agent gives the devices to other workers
        generation = self._commands.command.generation if self._commands.command else 0
        self._events.write(type="exited", generation=generation, local_rank=index, code=code)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 30) -> None:
        for index, process in enumerate(self._processes):
            if index not in self._codes and process.pid is not None:
                below = descendants(process.pid)
                process.kill()
                kill(below)
        for index in range(len(self._processes)):
            if index not in self._codes:
                self._reap(index)

    def _construct_event(self, state: str, source: EventSource, *_: object, **__: object) -> Event:
        """Skip the look-up of this machine's full name: torch elastic would wait for DNS at each event."""
        return Event(f"torchelastic.worker.status.{state}", source)

    def _exit_barrier(self) -> None:
        """Do not wait for other nodes: this process outlives the generation."""


def main(address: str, lines_in: int, lines_out: int) -> None:
    """Run the launcher in a fork of the template, after `preload.fork_server`. Does not return.

    address: of this node. lines_in, lines_out: descriptors for the commands and the events.
    """
    logging.basicConfig(level=logging.WARNING, format="launcher: %(message)s")
    name_lookups.leave_out_dns()  # here, not in the workers, which are forks of the forkserver
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # workers' ranks follow from the node's rank: no store needed
    events = EventWriter(lines_out)
    events.write(type="importing")  # torch is imported already; the forkserver imports the script's modules
    stores = Stores(address)
    _warm_up()
    orphans = Orphans()
    rendezvous = CommandRendezvous(stores, events)
    threading.Thread(target=_read_commands, args=(rendezvous, lines_in), daemon=True).start()
    events.write(type="ready", store=stores.endpoint)
    while not rendezvous.is_closed():
        spec = WorkerSpec(
            role="worker",
            local_world_size=1,  # each start command sets it
            rdzv_handler=rendezvous,
            entrypoint=run,
            max_restarts=FOREVER,
            monitor_interval=1e-4,
        )
        ForkingElasticAgent(spec, rendezvous, events, orphans).run()
    # Python would take a second or two to destroy all modules.
    atexit._run_exitfuncs()
    os._exit(0)


def trial(answer: connection.Connection) -> None:
    """The first fork. When it ends, the forkserver has imported everything. answer: gets `preload.readers`."""
    answer.send(preload.readers)
    os._exit(POISONED if preload.poisoned() else 0)


def _forkserver_ended() -> bool:
    """Whether the forkserver has ended. It stays a zombie until multiprocessing starts the next one."""
    try:
        handle = os.pidfd_open(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], ENDING)[0])
    finally:
        os.close(handle)


def _warm_up() -> None:
    """Have the forkserver import the script's modules, except those that must be imported after the fork."""
    for left in reversed(range(TRIALS)):
        answer, end = get_context("forkserver").Pipe(duplex=False)
        process = get_context("forkserver").Process(target=trial, args=(end,))
        process.start()
        end.close()
        process.join()
        readers = answer.recv() if answer.poll() and process.exitcode in (0, POISONED) else []
        answer.close()
        if process.exitcode != POISONED and not readers:
            break
        modules = os.environ.pop(preload.MODULES, "").split()
        # One that has been imported by another one may read the place too. The next trial shows it.
        blamed = readers if process.exitcode == 0 and left > 1 else modules
        names = {each.partition(":")[0] for each in blamed}
        late = [each for each in modules if each.partition(":")[0] in names]
        os.environ[preload.MODULES] = " ".join(each for each in modules if each not in late)
        why = "initialises CUDA" if process.exitcode == POISONED else "reads a worker's place, such as RANK"
        log.warning(
            "importing %s %s, so each worker imports these modules after its fork", " ".join(sorted(names)), why
        )
        # Its own end would wait for threads that the imports have started.
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
    if process.exitcode != 0:
        raise SystemExit(f"launcher: a trial worker ended with {process.exitcode}")


def _read_commands(rendezvous: CommandRendezvous, fd: int) -> None:
    for line in os.fdopen(fd, encoding="utf-8"):
        values = json.loads(line)
        if values.pop("type") == "take_store":
            rendezvous.take_store(**values)
            continue
        tasks = tuple(Task(**{**task, "args": tuple(task["args"])}) for task in values.pop("tasks"))
        rendezvous.put(StartCommand(**values, tasks=tasks))
    rendezvous.put(None)
