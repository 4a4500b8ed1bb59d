"""What the launcher's forkserver does before it forks: end with its parent, import what every worker needs.

The forkserver is a fork of the launcher, made while the launcher runs nothing else. The launcher is a fork of a process
that has imported torch (see `template`). So the jobs of a node import torch once. If the forkserver is stopped,
multiprocessing starts a new one, which preloads only this module. An exception here would end the forkserver, so this
module lets none through.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import importlib
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from multiprocessing import forkserver, reduction, resource_tracker, util
from pathlib import Path
from typing import Any, NoReturn

from spotrun.machine import private_paths
from spotrun.machine.gpus import gpu_count
from spotrun.machine.processes import die_with_parent

MODULES = "SPOTRUN_PRELOAD"  # the variable: modules, or `module:name`, separated by spaces
PARENT = "SPOTRUN_LAUNCHER"  # the variable: the launcher's pid
WATCH = "SPOTRUN_WATCH"  # the variable: seconds, a space, the file that gets the stacks if MODULES take longer
SOCKETS = "SPOTRUN_SOCKETS"  # the variable: folder of the socket on which the launcher asks for forks
LONGEST = 107 - len("/pymp-12345678/listener-12345678")  # bytes of that folder's path (sun_path in unix(7))
BASE = ("torch", "torch._dynamo", "numpy", "spotrun.node.launch.worker", "spotrun.train.run")

# Each worker has its own values of these, and the fork server has none. A module that reads one when it is imported
# would have the wrong value in all workers.
PLACE = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
# Modules that may read one all the same: each keeps it as `rank_zero_only.rank`, where `number_modules` replaces it.
NUMBERED = {
    "lightning.fabric.utilities.rank_zero": "RANK",
    "lightning_fabric.utilities.rank_zero": "RANK",
    "torchmetrics.utilities.prints": "LOCAL_RANK",
}

UNIFIED_MEMORY = "/dev/nvidia-uvm"
SERVER = os.getpid()  # a worker compares this with its parent's pid
used_cuda = False
readers: list[str] = []  # the imports that have read a variable of `PLACE`
_spawn = util.spawnv_passfds


def fork_server() -> None:
    """Fork the forkserver. Call this from the launcher's main thread, before there are others."""
    os.environ[PARENT] = str(os.getpid())
    # Python 3.11.0 would use an abstract socket, which has no owner and no mode.
    util.abstract_sockets_supported = False  # type: ignore[misc]
    forkserver.set_forkserver_preload([__name__])
    # Not TMPDIR, which workers inherit. A launcher that is killed leaves its socket.
    tempfile.tempdir = os.environ.pop(SOCKETS, None)
    resource_tracker.ensure_running()  # a program of its own, which the forkserver would start otherwise
    util.spawnv_passfds = _fork  # type: ignore[assignment]
    forkserver.ensure_running()
    util.spawnv_passfds = _spawn
    tempfile.tempdir = None


def import_base() -> None:
    """Import torch and everything else that every worker needs."""
    # With this, torch.cuda.is_available() asks NVML, not the driver: no fork can use CUDA once a driver is initialised
    # (https://docs.pytorch.org/docs/stable/cuda_environment_variables.html).
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    ask_for_large_pages()
    # These objects stay. Searching them for garbage would take a seventh of the time here, and in each worker.
    # There it would also copy their memory.
    gc.disable()
    _import(BASE)
    gc.freeze()
    gc.enable()


def ask_for_large_pages(kernel: Path = Path("/sys/kernel/mm/transparent_hugepage")) -> None:
    """Have torch ask for pages of 2 MB for large tensors. Call this before torch is imported.

    With pages of 4 KB, a step that makes 300 MB of gradients and temporary tensors spends 0.4 of its time on page
    faults. Where models are on GPUs, there is little to gain, and the search for 2 MB of free memory could delay a
    batch. kernel: its folder of such pages. If the kernel has none, torch would print a warning.
    """
    if kernel.exists() and not gpu_count():
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def close_descriptors(kept: Collection[int | None]) -> None:
    """In a fork: close the descriptors of the parent. Otherwise their other ends would wait for this process."""
    for each in map(int, os.listdir("/proc/self/fd")):
        if each not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
                os.close(each)


def _fork(path: str, args: Sequence[str], descriptors: Sequence[int]) -> int:
    """In place of `util.spawnv_passfds`: run the code of `python … -c code` in a fork. Returns its pid."""
    launcher = os.getpid()
    return os.fork() or _serve(launcher, args[-1], descriptors)


def _serve(launcher: int, code: str, descriptors: Sequence[int]) -> NoReturn:
    global SERVER
    try:
        SERVER = os.getpid()
        die_with_parent(launcher)
        sys.argv, tempfile.tempdir, util.spawnv_passfds = ["-c"], None, _spawn
        close_descriptors({0, 1, 2, resource_tracker.getfd(), *descriptors})
        forkserver._forkserver.__init__()  # type: ignore[misc]  # its lock is held by the launcher
        _guard()
        _import_all()
        exec(code, {})
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _import_all() -> None:
    global used_cuda
    import_base()
    with _watched():
        for name in os.environ.get(MODULES, "").split():
            with _reads() as found:
                _import([name])
            if found:
                readers.append(name)
    torch = sys.modules.get("torch")
    used_cuda = (torch is not None and torch.cuda.is_initialized()) or driver_in_use()


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """If this takes too long, write the stacks of all threads into a file. The process goes on."""
    seconds, _, path = os.environ.pop(WATCH, "").partition(" ")
    file = None
    with contextlib.suppress(OSError, ValueError):
        if path:
            file = open(path, "w")  # noqa: SIM115
            faulthandler.dump_traceback_later(float(seconds), file=file)  # its thread needs no GIL
    yield
    if file is not None:
        faulthandler.cancel_dump_traceback_later()  # no fork has that thread
        file.close()


@contextlib.contextmanager
def _reads() -> Iterator[list[str]]:
    """The variables of `PLACE` that are read in this context. A copy of all variables is no such read."""
    read: Any = os._Environ.__getitem__
    found: list[str] = []

    def noted(variables: Any, name: Any) -> Any:
        if name in PLACE and sys._getframe(2).f_globals.get("__name__") not in NUMBERED:  # (1) is `Mapping.get`
            found.append(name)
        return read(variables, name)

    os._Environ.__getitem__ = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        os._Environ.__getitem__ = read  # type: ignore[method-assign]


def number_modules() -> None:
    """In a worker: give the modules of `NUMBERED` that are imported this worker's number."""
    for name, variable in NUMBERED.items():
        if name in sys.modules:
            sys.modules[name].rank_zero_only.rank = int(os.environ[variable])


def _import(names: Sequence[str]) -> None:
    for name in names:
        try:
            module, _, part = name.partition(":")
            importlib.import_module(module)
            if part:
                __import__(module, fromlist=[part])  # as `from module import part`: a submodule, or one loaded late
        except BaseException as error:  # an import may even exit; the worker imports it again and reports the error
            print(f"preload: {name} was not imported: {error!r}", file=sys.stderr, flush=True)


def driver_in_use(descriptors: Path = Path("/proc/self/fd")) -> bool:
    """Whether a library in this process has initialised CUDA's driver: `cuInit` opens unified memory's device."""
    # NVML opens other devices, and forks survive NVML.
    for each in descriptors.iterdir():
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            if os.readlink(each) == UNIFIED_MEMORY:
                return True
    return False


def poisoned() -> bool:
    """In a fork: whether CUDA cannot be used, because the forkserver has initialised CUDA or counted the devices."""
    torch = sys.modules.get("torch")
    return used_cuda or (torch is not None and torch.cuda._is_in_bad_fork())


def _guard() -> None:
    """Make the forkserver ignore requests from processes of other users: a fork runs any code that a request names."""
    # The modes of the socket and its folder are the first guard. Python 3.14 also has a key.
    receive = reduction.recvfds

    def recvfds(sock: Any, size: int) -> Any:
        if not private_paths.is_own_peer(sock):
            raise ConnectionAbortedError(errno.ECONNABORTED, "another user's process")  # the server's loop goes on
        return receive(sock, size)

    reduction.recvfds = recvfds


if os.environ.get(PARENT) == str(os.getppid()):
    die_with_parent(os.getppid())
    _guard()
    _import_all()
