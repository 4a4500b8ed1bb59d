"""This process among the others: its rank, its device, its process groups."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spotrun.errors import SpotrunError
from spotrun.machine import name_lookups
from spotrun.machine.gpus import gpu_count, uses_gpus
from spotrun.train import connections, group_health
from spotrun.train.parallel import Parallel

# Of collectives. Long: rank 0 may be downloading a checkpoint, and dead peers are noticed in other ways.
TIMEOUT = timedelta(minutes=30)
CONNECT = timedelta(seconds=30)  # to an agent's store. It is there before a worker is told of it, or it is gone
TRY = timedelta(seconds=1)  # limit of one try to connect: between two tries, a worker looks whether to give up
# Seconds between two looks whether all are here: at least, for each worker of the group, and at most. All workers look
# at one store, which answers in about 30 µs.
LOOK, LOOK_EACH, LOOK_MOST = 0.002, 0.0001, 0.1
MEETING = "spotrun/meet"  # first part of the keys of a meeting in an agent's store
# For NCCL groups, unless the variables are set already. No thread of torch then ends this process after a failure
# (ProcessGroupNCCL.cpp, `Watchdog` and `HeartbeatMonitor`). `Membership` looks for failures.
NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
# Bytes of a device's memory in which another NCCL group has room: with up to 32 channels, and 4 MiB for each of their
# connections (NCCL_BUFFSIZE), it has rarely more than 1 GiB.
ROOM = 2 << 30
LEAVE_WAIT = 5.0  # seconds that a leaving worker waits for the others, which may never come
log = logging.getLogger(__name__)

_abort: threading.Thread | None = None  # aborts collectives of the process group
_hooks: tuple[Any, Any] = (None, None)  # torch's wrapper of `sys.excepthook`, and what it wraps
_end: threading.Thread | None = None  # ends the NCCL group that this process has left last


class NotBegun(dist.DistError):
    """A process group was not formed, and nothing has been exchanged."""


@dataclass(frozen=True)
class Meeting:
    """How workers meet before they form a group.

    name: differs for each group. given_up: returns whether the group will not be formed. A thread that learns that the
    group is given up must call `connections.break_all`: the store may not answer.
    """

    name: str
    given_up: Callable[[], bool]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work that it has been given. Raises an error of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rank_and_world() -> tuple[int, int]:
    """(rank, world size) of this process; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def choose_device(local_rank: int, insist: bool = False) -> torch.device:
    """This worker's GPU where the machine has GPUs for jobs, else the CPU.

    insist: raise `SpotrunError` if torch cannot use the GPUs of this machine; otherwise that is a warning. An empty
    CUDA_VISIBLE_DEVICES asks for the CPU.
    """
    if not uses_gpus() or not torch.cuda.is_available():
        if (there := gpu_count()) and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1"):
            message = (
                f"this machine has {there} GPUs, but torch {torch.__version__} cannot use them: {_why_no_cuda()}. "
                "To train on the CPU, set CUDA_VISIBLE_DEVICES to an empty value"
            )
            if insist:
                raise SpotrunError(message)
            log.warning("%s", message)
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise SpotrunError(f"worker {local_rank} of this machine has no GPU: there are {count}. Lower procs_per_node")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "it is built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:
        return str(error).partition("\n")[0] or repr(error)
    return "it finds no device"


def join_process_group(
    device: torch.device, backend: str | None, alone: Path | None = None, meeting: Meeting | None = None
) -> bool:
    """Form the process group that torchrun's variables describe. False: they are missing, or a group exists.

    alone: the group has only this node's workers, which meet at this file. meeting: at an agent's store, first wait
    until all workers are there. Raises `NotBegun` if they do not all come. Either all workers of a group give a
    meeting, or none does.
    """
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ or dist.is_initialized():
        return False
    # The functions of this module keep the group that exists at its import, as a default (torch 2.13). DDP imports the
    # module, so import it while there is no group.
    importlib.import_module("torch.distributed.nn.functional")
    backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    before: Collection[str] = connections.sockets()
    group_health.begin(None)
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and alone is None:
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = _agent_store() if meeting is None else _meet(world, meeting)
            # The script's other threads may have connected to something while this one waited.
            place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            before = connections.sockets().keys() - connections.connected_to(place)
            _init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
            group_health.begin(store)
        elif alone is None:
            _init_process_group(backend, timeout=TIMEOUT)
        else:
            rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
            _init_process_group(
                backend, store=dist.FileStore(str(alone), world), rank=rank, world_size=world, timeout=TIMEOUT
            )
    finally:
        connections.of_group = frozenset(connections.sockets().keys() - before)
        connections.broken = False
    return True


def _agent_store(patience: timedelta = CONNECT) -> dist.Store:
    """The store at which torchrun's variables have workers meet, with the keys that torch's own `env://` uses there.

    `env://` tries to connect for as long as a collective may take. A worker that comes too late would hang.
    """
    host, port, world = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    with name_lookups.impatient():
        store = dist.TCPStore(host, port, world, is_master=False, timeout=patience)
    store.set_timeout(TIMEOUT)
    return store


def _meet(world: int, meeting: Meeting) -> dist.Store:
    """The agent's store, once all workers are here. Raises `NotBegun` if they do not all come.

    The wait is here because the forming of a group, which comes next, cannot be interrupted.
    """
    until = time.monotonic() + TIMEOUT.total_seconds()
    connections.meeting_place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        if meeting.given_up():  # before anybody could end the wait
            raise NotBegun("the generation does not begin")
        store = _reach(meeting)
        if store.add(f"{MEETING}/{meeting.name}/here", 1) == world:
            store.set(f"{MEETING}/{meeting.name}/all", "")
        while not meeting.given_up() and time.monotonic() < until:
            # Not `store.wait`: it prints two warnings each time when its limit is over (torch 2.13).
            if store.check([f"{MEETING}/{meeting.name}/all"]):
                return store
            time.sleep(min(LOOK_MOST, max(LOOK, LOOK_EACH * world)))
    except dist.DistError:
        if not meeting.given_up():
            raise
    finally:
        connections.meeting_place = None
    raise NotBegun("the generation does not begin: not all of its workers have come")


def _reach(meeting: Meeting) -> dist.Store:
    """The agent's store. Each try to connect is short: torch goes on until the try's limit, whatever happens."""
    until = time.monotonic() + CONNECT.total_seconds()
    while True:
        try:
            return _agent_store(TRY)
        except dist.DistError:
            if meeting.given_up() or time.monotonic() > until:
                raise


def join_alone() -> None:
    """Form a process group of this process alone."""
    _init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _init_process_group(*args: Any, **options: Any) -> None:
    """`dist.init_process_group`. Each time, torch (2.13) wraps `sys.excepthook`: its wrapper of the last time goes."""
    global _hooks
    if sys.excepthook is _hooks[0]:
        sys.excepthook = _hooks[1]
    before = sys.excepthook
    dist.init_process_group(*args, **options)
    _hooks = sys.excepthook, before


def leave_at_exit(models: Sequence[Parallel]) -> None:
    """Have this process leave its process group when the script ends well.

    The threads of a group that still exists may abort the process while the interpreter ends
    (https://github.com/pytorch/pytorch/issues/190489). If the script fails, others may wait in a collective, and then
    leaving could block (https://github.com/pytorch/torchtitan/pull/1342). models: what `run.ddp` made.
    """
    atexit.register(_leave_unless_failed, models)


def _leave_unless_failed(models: Sequence[Parallel]) -> None:
    if not dist.is_initialized() or getattr(sys, "last_value", None) is not None:
        return
    # First, because a DDP instance keeps the group's threads alive after `destroy_process_group`.
    for model in models:
        model.unwrap()
    dist.destroy_process_group()


def leave_process_group() -> None:
    """Leave the process group at once. The collectives in which others wait for this process fail."""
    global _abort, _end
    connections.break_all()
    connections.of_group = frozenset()
    if dist.is_initialized():
        world = dist.distributed_c10d._world
        old = sorted(world.pg_names, key=lambda each: world.pg_names[each], reverse=True)  # as torch sorts them
        has_nccl, before, _abort = any(map(_has_nccl, old)), _abort, None
        world.pg_names.clear()  # so that torch does not end the groups now
        dist.destroy_process_group()
        ending = _start("spotrun-left", lambda: _end_groups(old, before), "a process group that was left stays")
        _end = ending if has_nccl else _end
    elif dist.is_available():
        # A group that was never complete has been counted, and the count is part of the keys at which workers meet.
        dist.distributed_c10d._world.group_count = 0


def _end_groups(groups: list[Any], abort: threading.Thread | None) -> None:
    """End process groups that this process has left. Only the end of the next NCCL group waits for it.

    The end of a gloo group's thread takes up to 10 ms (torch 2.13). If a collective hangs, it takes as long as a
    collective may. The end of an NCCL group takes 0.5 s, or 1 s with an abort, because its threads sleep that
    long (measured with NCCL 2.28 on an H100). It may also wait for other workers (`ProcessGroupNCCL::shutdown`). This
    process may end earlier.
    """
    if abort is not None:
        abort.join()
    for group in groups:
        group.shutdown()
    groups.clear()


def leave_in_time(device: torch.device, aborts: bool, patience: float) -> bool:
    """Leave the process group, as `leave_process_group`, when the device has done all work that it has been given.

    aborts: whether to abort the collectives first, because a peer may be gone. False: that has failed, or has taken
    longer than `patience`.
    """

    def leave() -> None:
        if aborts:
            _begin_abort(device)
        if dist.is_initialized() and _has_nccl(dist.group.WORLD) and _end is not None:
            _end.join()  # it holds memory of the device, so there is at most one
        synchronize(device)
        leave_process_group()

    return _in_time(leave, patience, "the process group does not end")


def make_room(device: torch.device) -> None:
    """If the device has little memory left, wait until the NCCL group that was left has given its memory back."""
    if device.type == "cuda" and _end is not None and torch.cuda.mem_get_info(device)[0] < ROOM:
        _end.join(LEAVE_WAIT)


def abort_in_time(device: torch.device, patience: float) -> bool:
    """Abort the collectives, and wait until the device has done all its work. Any thread may call this.

    False: that has failed, or has taken longer than `patience`. NCCL itself needs longer: that is not waited for.
    """

    def abort() -> None:
        _begin_abort(device)
        synchronize(device)

    return _in_time(abort, patience, "the collectives under way do not end")


def _begin_abort(device: torch.device) -> None:
    """Have a thread abort the collectives, unless one does that now. `leave_process_group` takes the thread over."""
    global _abort
    whole: Any = dist.group.WORLD if dist.is_initialized() else None
    if whole is None or (_abort is not None and _abort.is_alive()):
        return
    group_health.count_abort()  # now: when the thread runs, the process may be in the next group

    def abort() -> None:
        with group_health.counted():
            abort_collectives(whole, device)

    _abort = _start("spotrun-abort", abort, "the collectives cannot be aborted")


def abort_collectives(group: Any, device: torch.device) -> None:
    """Abort the group's collectives on this device, so that they return even if a peer is gone.

    On a GPU, an aborted kernel returns as if it had succeeded, and what it leaves in memory means nothing. NCCL tells
    its kernels at once, but the call takes a second (measured with NCCL 2.28), or as long as a collective
    (ProcessGroupNCCL.cpp, `abort`). A second call does no harm. For gloo's collectives, see `connections`.
    """
    backend = group._get_backend(device)
    if not isinstance(backend, dist.ProcessGroupGloo):
        backend.abort()


def _has_nccl(group: Any) -> bool:
    """Whether the group has a backend that is not gloo, which here means NCCL."""
    return any(not isinstance(group._get_backend(each), dist.ProcessGroupGloo) for each in group._device_types)


def _in_time(call: Callable[[], None], patience: float, complaint: str) -> bool:
    """Make a call that cannot be interrupted. False: it has failed or takes too long, and a warning says so.

    Another thread makes it, so that this one waits for at most `patience` seconds.
    """
    done: list[bool] = []

    def run() -> None:
        call()
        done.append(True)

    thread = _start("spotrun-leave", run, complaint)
    thread.join(patience)
    if thread.is_alive():
        log.warning("%s: not done after %.0f s", complaint, patience)
    return bool(done)


def _start(name: str, call: Callable[[], None], complaint: str) -> threading.Thread:
    """Make a call in a thread. An error is a warning in the log, which begins with the complaint."""

    def run() -> None:
        try:
            call()
        except Exception as error:
            log.warning("%s: %s", complaint, str(error).partition("\n")[0])

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def cpu_group(device: torch.device) -> dist.ProcessGroup | None:
    """A group that takes CPU tensors; None if the default group does."""
    if not dist.is_initialized() or device.type == "cpu" or "gloo" in str(dist.get_backend_config()):
        return None
    return dist.new_group(backend="gloo", timeout=TIMEOUT)  # type: ignore[no-any-return]


def leave_together(device: torch.device, group: dist.ProcessGroup | None, patience: float = LEAVE_WAIT) -> bool:
    """Wait until every rank has received what this one sends, for at most `patience` seconds. Call it before leaving.

    A collective's kernel can finish here before its data has arrived elsewhere. The data has arrived when every rank
    says that its own device has finished. group: the result of `cpu_group`. False: not all ranks have said so.
    """
    whole: Any = group or dist.group.WORLD if dist.is_available() and dist.is_initialized() else None

    def wait() -> None:
        synchronize(device)
        if whole is not None and whole.size() > 1:
            # This barrier has messages of its own kind, so it does not disturb a rank that waits in another collective.
            # It keeps to its limit on rank 0 only (gloo, torch 2.13).
            whole.monitored_barrier(timedelta(seconds=patience), False)

    return _in_time(wait, patience, "leaving before every other worker is done")
