"""The launcher and its workers, without an agent."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import signal
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest

from spotrun.machine import gpus
from spotrun.machine.processes import descendants
from spotrun.node import job
from spotrun.node.launch import preload
from spotrun.node.launch.client import Launcher
from spotrun.node.launch.templates import Templates
from spotrun.state import control
from spotrun.state.control import EXIT_DRAINED, EXIT_PEER, Control
from tests.fakes.launchers import alive, bench, parent
from tests.fakes.nccl import NCCL, NCCL_SHORT
from tests.fakes.node import small_memory
from tests.helpers import await_for

PLAIN = """
import atexit, os, signal, sys, threading, __main__
assert __name__ == "__main__" and __main__.__file__ == __file__ == sys.argv[0]
assert sys.path[0] == os.path.dirname(__file__) and os.getcwd() == os.path.dirname(__file__)
print(sys.argv[1:], os.environ["MORE"], os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"])
print("on stderr", file=sys.stderr)
for number, stream in enumerate((sys.stdout, sys.stderr), 1):
    assert (stream.fileno(), stream.buffer.fileno(), stream.isatty(), stream.mode) == (number, number, False, "w")
    assert (stream.encoding, stream.errors, stream.line_buffering) == ("utf-8", "backslashreplace", True)
sys.stdout.buffer.write(b"bytes\\n")
sys.stdout.buffer.flush()
os.system("echo from a child")
os.kill(os.getpid(), signal.SIGTERM)  # passed over
ready, tell = os.pipe()
child = os.fork()
if child == 0:
    os.write(tell, b"!")
    signal.pause()
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
atexit.register(lambda: print("at exit", state))
def late():
    threading.main_thread().join()
    print("a thread ended")
threading.Thread(target=late).start()
state = "kept"
"""
EXITS = """
import atexit, sys, threading, time
atexit.register(lambda: print("at exit"))
def late():
    threading.main_thread().join()
    print("a thread ended")
threading.Thread(target=late).start()
sys.exit(0)
"""


async def test_a_worker_of_another_version_than_its_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """spotrun was replaced while the agent ran. Without the check, both would misread each other's numbers."""
    async with bench(tmp_path) as b:
        await b.begin()
        with monkeypatch.context() as patch:
            patch.setattr(control, "_LAYOUT", bytes(8))  # as an older agent makes the block
            b.start(1, "print('the script')")
        assert await b.code(1) == 1
        failure = b.failure(1)
        assert failure.repeats
        assert failure.message.startswith("spotrun has been replaced by another version on this machine")
        assert b.log(1) == f"{failure.message}\n"


async def test_a_worker_is_like_python_running_the_script(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.begin()
        b.start(1, PLAIN, "one", "two words")
        assert await b.code(1) == 0
        lines = b.log(1).splitlines()
        assert sorted(lines[:4]) == ["['one', 'two words'] yes 0 1 1", "bytes", "from a child", "on stderr"]
        assert lines[4:] == ["a thread ended", "at exit kept"]
        control = Control(tmp_path / "1.0")
        assert (control.generation, control.rank) == (1, 0)
        assert control.forked > 0
        control.close()

        scripts = {
            2: (EXITS, 0),
            3: ("import sys; sys.exit(7)", 7),
            4: ("import sys; sys.exit('out of luck')", 1),
            5: ("def f():\n    1/0\nf()", 1),
            6: ("if x = 1:", 1),
            7: ("import torch.distributed as d\nraise d.DistNetworkError('Connection reset by peer')", EXIT_PEER),
            8: ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
            9: (f"import os; os._exit({EXIT_DRAINED})", EXIT_DRAINED),
            10: ("import sys\nsys.stdout.close()\nsys.stderr.close()\nimport no_such_module_here", 1),
            15: ("from spotrun.train import failures\nfailures.void = True\nraise SystemExit(3)", EXIT_PEER),
            16: ("from spotrun.train import failures\nfailures.void = True", EXIT_PEER),
            14: (f"import torch.distributed as d\nraise d.DistBackendError({NCCL!r})", EXIT_PEER),
        }
        for number, (text, wanted) in scripts.items():
            b.start(number, text)
            assert await b.code(number) == wanted, text
        assert (b.log(2), b.failure(3).message) == ("a thread ended\nat exit\n", "the script exited with code 7")
        assert "out of luck" in b.log(4)
        assert b.failure(5).message == "ZeroDivisionError: division by zero"
        assert b.failure(5).traceback.splitlines()[1].strip() == f'File "{tmp_path}/s5.py", line 3, in <module>'
        assert b.failure(5).traceback == b.log(5)
        assert "SyntaxError" in b.failure(6).message
        assert b.failure(7).kind == "peer"
        assert b.failure(14).message == f"torch.distributed.DistBackendError: {NCCL_SHORT}"
        assert b.failure(15).message == "the script exited with code 3 in a step that does not count"
        assert b.failure(10).message == "ModuleNotFoundError: No module named 'no_such_module_here'"


MISUSE = """import contextlib, helper, spotrun
run = spotrun.init()
def main():
    with contextlib.ExitStack() as stack:
        stack.callback(run.track)
helper.call(main)
"""


async def test_a_wrong_use_of_spotrun_says_where_without_a_traceback(tmp_path: Path) -> None:
    """The newest line of the script's own files: a library may have called spotrun for it."""
    (tmp_path / "helper.py").write_text("import spotrun\n\n\ndef call(it):\n    it()\n")
    async with bench(tmp_path) as b:
        await b.begin()
        scripts = {
            1: MISUSE,
            2: "import helper, spotrun\nhelper.call(lambda: spotrun.init().fit(None))",
            3: "import helper, spotrun\nrun = spotrun.init()\nhelper.call(run.track)",
            4: "from spotrun.train import failures\nfailures.void = True\nimport spotrun\nspotrun.init('x')",
        }
        for number, text in scripts.items():
            b.start(number, text)
            assert await b.code(number) == (EXIT_PEER if number == 4 else 1), b.log(number)
        what = "run.track() tracks nothing; write run.track(model=model, optimizer=optimizer, …)"
        found = b.failure(1)
        assert (found.kind, found.message, found.traceback, found.repeats) == ("user", f"s1.py:4: {what}", "", True)
        assert b.log(1).splitlines()[-1].endswith(what)
        assert b.failure(2).message.startswith("s2.py:2: run.fit takes a Trainer of Lightning, not builtins.NoneType: ")
        assert b.failure(3).message == f"helper.py:5: {what}"
        assert not b.failure(4).repeats, "in a step that does not count, any error may follow from that"


async def test_a_generation_ends_the_one_before_and_is_refused_without_its_store(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.begin()
        b.start(1, "import time; time.sleep(600)")
        await b.said(lambda e: e["type"] == "started" and e["generation"] == 1, "a start")
        b.start(2, "print('next')")
        assert await b.code(1) == -signal.SIGKILL
        assert await b.code(2) == 0
        b.launcher.store = "127.0.9.9:1"
        b.start(3, "")
        await b.said(lambda e: e["type"] == "refused" and e["generation"] == 3, "a refusal")


# It fills the disk, then also the last block of its log. The control block and the log lie on that disk.
FILLS = """
import os, sys
print("the log has a block")
try:
    with open("filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
except OSError as error:
    print(error.strerror, flush=True)
print("lost" * 5000, file=sys.stderr)
sys.stdout.buffer.write(b"lost" * 5000)
sys.stdout.buffer.flush()
"""
PEER_DIES = "import torch.distributed as d\nraise d.DistNetworkError('Connection reset by peer')"


async def test_a_full_disk_changes_nothing_but_the_log(tmp_path: Path) -> None:
    """And full memory, where the note of a failure lies, changes nothing but the note."""
    root = tmp_path / "full"
    root.mkdir()
    with small_memory(root):
        async with bench(root) as b:
            await b.begin()
            scripts = {
                1: ("os.unlink('filler')\nprint('there is room again')", 0),
                2: (PEER_DIES, EXIT_PEER),
                3: ("raise ValueError('bad luck')", 1),
                4: ("sys.exit('out of luck')", 1),
            }
            for number, (text, wanted) in scripts.items():
                b.start(number, FILLS + text)
                assert await b.code(number) == wanted, text
                (root / "filler").unlink(missing_ok=True)
                assert b.log(number).startswith("the log has a block\nNo space left on device\nlost")
            assert b.log(1).endswith("lostthere is room again\n")


FORKS = """
import os
from multiprocessing import get_context
if __name__ == "__main__":
    for method in ("forkserver", "spawn", "fork"):
        process = get_context(method).Process(target=os._exit, args=(7,))
        process.start()
        process.join()
        print(method, process.exitcode)
"""


async def test_a_store_is_for_one_generation(tmp_path: Path) -> None:
    """Also until the launcher has named another one. A warm-up takes none."""
    async with bench(tmp_path) as b:
        await b.begin()
        first = b.launcher.store
        assert b.launcher.store_is_free
        b.launcher.start_workers(-1, 0, 1, "", [])
        assert b.launcher.store_is_free
        b.launcher.take_store(1, first)
        assert (b.launcher.store, b.launcher.store_is_free) == (first, False)
        await b.said(lambda e: e["type"] == "store", "another store")
        assert (b.launcher.store == first, b.launcher.store_is_free) == (False, True)


async def test_a_worker_starts_processes_in_every_way(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.begin()
        b.start(1, FORKS)
        assert await b.code(1) == 0
        assert b.log(1) == "forkserver 7\nspawn 7\nfork 7\n"


LISTED = """
import os, sys
import {name}
print("ahead" if {name}.pid == os.getppid() else "late")
"""
MODULE = """
import os, sys
print("a stray line", flush=True)
os.write(1, b"{and more\\n")
pid = os.getpid()
"""


async def test_imports_ahead_of_time(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        (tmp_path / "modules" / "loud.py").write_text(MODULE)
        (tmp_path / "modules" / "broken.py").write_text("1/0")
        (tmp_path / "modules" / "leaver.py").write_text("import sys; sys.exit(5)")
        await b.begin("broken", "leaver", "no_such_module_here", "loud", procs=2)
        b.start(1, LISTED.format(name="loud") + "assert 'torch._dynamo' in sys.modules", procs=2)
        assert [await b.code(1, index) for index in (0, 1)] == [0, 0]
        assert b.log(1) == b.log(1, 1) == "ahead\n"


PLACED = """
import os
rank = os.environ.get("RANK", "-1")
workers = int(os.getenv("WORLD_SIZE", "1"))
"""


async def test_imports_that_read_a_workers_place_are_not_made_ahead(tmp_path: Path) -> None:
    """Before the fork there is none: a library would take each worker for the only one, or for none."""
    async with bench(tmp_path) as b:
        (tmp_path / "modules" / "placed.py").write_text(PLACED)
        (tmp_path / "modules" / "first.py").write_text("import placed")
        (tmp_path / "modules" / "loud.py").write_text(MODULE)
        await b.begin("first", "placed:rank", "placed:workers", "placed:os", "loud", procs=2)
        b.start(1, "import placed\nprint(placed.rank, placed.workers)" + LISTED.format(name="loud"), procs=2)
        assert [await b.code(1, index) for index in (0, 1)] == [0, 0]
        assert (b.log(1), b.log(1, 1)) == ("0 2\nahead\n", "1 2\nahead\n")


async def test_lightning_is_imported_ahead_and_knows_a_workers_rank(tmp_path: Path) -> None:
    """It reads RANK when it is imported, and torchmetrics LOCAL_RANK: only rank 0 logs and saves."""
    script = """
import sys
print("torchmetrics" in sys.modules, "pytorch_lightning" in sys.modules)
from pytorch_lightning.utilities import rank_zero_only
from torchmetrics.utilities import prints
print(rank_zero_only.rank, prints.rank_zero_only.rank, rank_zero_only(lambda: "logs")())
"""
    async with bench(tmp_path) as b:
        await b.begin("torchmetrics", "pytorch_lightning", procs=2)
        b.start(1, script, procs=2)
        assert [await b.code(1, index) for index in (0, 1)] == [0, 0]
        assert (b.log(1), b.log(1, 1)) == ("True True\n0 0 logs\n", "True True\n1 1 None\n")


async def test_a_thread_of_an_import_does_not_keep_the_launcher_from_getting_ready(tmp_path: Path) -> None:
    """Two libraries read RANK, and one imports the other: so two fork servers are ended while the thread runs."""
    async with bench(tmp_path) as b:
        thread = "import threading\nthreading.Thread(target=threading.Event().wait).start()\n"
        (tmp_path / "modules" / "threaded.py").write_text(MODULE + thread)
        (tmp_path / "modules" / "placed.py").write_text(PLACED)
        (tmp_path / "modules" / "first.py").write_text("import placed")
        await b.begin("threaded", "first", "placed")
        b.start(1, "import placed\nprint(placed.rank)" + LISTED.format(name="threaded"))
        assert await b.code(1) == 0
        assert b.log(1) == "0\nahead\n"


EAGER = {  # what using CUDA leaves behind, as there is no GPU here
    "torch initialises CUDA": "import torch\ntorch.cuda._initialized = True\n",
    "torch counts devices": "import os, torch\nserver = os.getpid()\n"
    "torch.cuda._is_in_bad_fork = lambda: os.getpid() != server\n",
    "another library uses the driver": "from pathlib import Path\nfrom spotrun.node.launch import preload\n"
    "preload.driver_in_use.__defaults__ = (Path({folder!r}),)\n",
}


@pytest.mark.parametrize("use", EAGER)
async def test_imports_that_use_the_gpu_are_not_made_ahead(use: str, tmp_path: Path) -> None:
    """A fork cannot use CUDA that its parent has initialised."""
    (tmp_path / "7").symlink_to("/dev/nvidia-uvm")
    async with bench(tmp_path) as b:
        (tmp_path / "modules" / "eager.py").write_text(MODULE + EAGER[use].format(folder=str(tmp_path)))
        await b.begin("eager")
        b.start(1, LISTED.format(name="eager") + "assert 'torch' in sys.modules")
        assert await b.code(1) == 0
        assert b.log(1).endswith("late\n")


async def test_asking_whether_there_is_a_gpu_leaves_the_driver_alone(tmp_path: Path) -> None:
    """transformers asks when it is imported."""
    async with bench(tmp_path) as b:
        text = (
            "import os, torch\nassert os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] == '1'\ntorch.cuda.is_available()\n"
        )
        (tmp_path / "modules" / "asking.py").write_text(MODULE + text)
        await b.begin("asking")
        b.start(1, LISTED.format(name="asking"))
        assert await b.code(1) == 0
        assert b.log(1) == "ahead\n"


HUGE = """
import torch
tensor = torch.ones(16 << 20)
at = tensor.data_ptr() + tensor.nbytes // 2
maps = [line.split() for line in open("/proc/self/smaps")]
inside = False
for words in maps:
    if "-" in words[0] and len(words) > 4:
        start, stop = (int(each, 16) for each in words[0].split("-"))
        inside = start <= at < stop
    elif inside and words[0] == "VmFlags:":
        print("asks" if "hg" in words else "does not ask")
"""


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no such pages")
@pytest.mark.parametrize(("value", "said"), [(None, "asks\n"), ("0", "does not ask\n")])
async def test_large_tensors_ask_for_large_pages(
    value: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the job sets the variable, or the machine has GPUs for jobs."""
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    monkeypatch.setenv(gpus.DEVICES, "")
    if value is not None:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", value)
    async with bench(tmp_path) as b:
        await b.begin()
        b.start(1, HUGE)
        assert await b.code(1) == 0
        assert b.log(1) == said


@pytest.mark.parametrize(
    ("there", "kernel", "value"),
    [(0, "", "1"), (8, "", None), (0, "missing", None)],
    ids=["no GPU", "GPUs", "a kernel without them"],
)
def test_who_asks_for_large_pages(
    there: int, kernel: str, value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "")  # so that it is put back
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    monkeypatch.setattr(preload, "gpu_count", lambda: there)
    preload.ask_for_large_pages(tmp_path / kernel)
    assert os.environ.get("THP_MEM_ALLOC_ENABLE") == value


def test_only_the_device_of_unified_memory_shows_that_the_driver_is_in_use(tmp_path: Path) -> None:
    for name, target in {"0": "/dev/null", "5": "/dev/nvidiactl", "6": "/dev/nvidia0"}.items():
        (tmp_path / name).symlink_to(target)
    assert not preload.driver_in_use(tmp_path)
    assert not preload.driver_in_use()
    (tmp_path / "7").symlink_to("/dev/nvidia-uvm")
    assert preload.driver_in_use(tmp_path)


CHILDREN = """
import subprocess, sys
from torch.utils.data import DataLoader
from spotrun.train.failures import leave
batches = iter(DataLoader(range(100), num_workers=2))
next(batches)
print(subprocess.Popen(["sleep", "600"]).pid, *(worker.pid for worker in batches._workers), flush=True)
"""


@pytest.mark.parametrize(("end", "wanted"), [(f"leave({EXIT_DRAINED})", EXIT_DRAINED), ("1/0", 1), ("sys.exit(7)", 7)])
async def test_children_do_not_outlive_a_worker_that_leaves(end: str, wanted: int, tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.begin()
        b.start(1, CHILDREN + end)
        assert await b.code(1) == wanted
        pids = [int(word) for word in b.log(1).splitlines()[0].split()]
        assert len(pids) == 3
        await await_for(lambda: not any(alive(pid) for pid in pids), 2, "an end")


@pytest.mark.parametrize("killed", ["worker", "forkserver", "launcher"])
async def test_children_do_not_outlive_a_worker_that_is_killed(killed: str, tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.begin()
        b.start(1, CHILDREN + "import signal; signal.pause()")
        (worker,) = (await b.said(lambda e: e["type"] == "started", "a start"))["pids"]
        pids = [int(word) for word in (await b.printed(1, "\n")).split()]
        assert len(pids) == 3
        assert all(map(alive, pids))
        processes = {"worker": worker, "forkserver": parent(worker), "launcher": parent(parent(worker))}
        os.kill(processes[killed], signal.SIGKILL)
        await await_for(lambda: not any(map(alive, [worker, *pids])), 10, "their end")
        if killed != "launcher":
            assert await b.code(1) != 0
            b.start(2, "import sys; sys.exit(7)")
            assert await b.code(2) == 7


ORPHANS = """
import signal, subprocess
for _ in range(2):
    subprocess.run(["sh", "-c", "sleep 600 & echo $!"])
print("started", flush=True)
signal.pause()
"""


async def test_orphans_of_a_worker_live_as_long_as_the_worker_and_are_reaped(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.begin(procs=2)
        b.start(1, ORPHANS, procs=2)
        await b.printed(1, "started", 1)
        first, second = [int(word) for word in (await b.printed(1, "started")).split()[:2]]
        workers = (await b.said(lambda e: e["type"] == "started", "a start"))["pids"]
        os.kill(first, signal.SIGKILL)
        await await_for(lambda: not Path(f"/proc/{first}").exists(), 10, "no zombie")
        os.kill(workers[0], signal.SIGKILL)
        assert await b.code(1) == -signal.SIGKILL
        assert alive(second), "the other worker of the generation still runs"
        b.start(2, "")
        assert await b.code(1, 1) == -signal.SIGKILL
        assert not alive(second)
        assert await b.code(2) == 0


SHARED = """
import os, signal
from multiprocessing.shared_memory import SharedMemory
SharedMemory({name!r}, create=True, size=4096)
os.fork() or signal.pause()
{end}
"""


async def test_shared_memory_of_a_worker_that_does_not_leave_properly_is_removed(tmp_path: Path) -> None:
    name = f"spotrun-test-{uuid.uuid4().hex}"
    ends = {1: "os.kill(os.getpid(), signal.SIGKILL)", 2: "os._exit(7)", 3: "pass"}
    async with bench(tmp_path) as b:
        await b.begin()
        for (number, end), wanted in zip(ends.items(), (-signal.SIGKILL, 7, 0), strict=True):
            b.start(number, SHARED.format(name=name, end=end))
            assert await b.code(number) == wanted, b.log(number)
            assert not Path("/dev/shm", name).exists()


TORCHS = """
import os, signal
import torch
import torch.multiprocessing as mp
mp.set_sharing_strategy("file_system")
shared = torch.ones(1000).share_memory_()
print(torch.UntypedStorage._share_filename_cpu_(shared.untyped_storage())[1].decode(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_torchs_shared_memory_of_a_worker_that_was_killed_is_removed(tmp_path: Path) -> None:
    """Of the sharing strategy that torch names when there are too many open files. Else each restart leaves batches."""
    async with bench(tmp_path) as b:
        await b.begin()
        for number in (1, 2):
            b.start(number, TORCHS)
            assert await b.code(number) == -signal.SIGKILL, b.log(number)
            shared = Path(f"/dev/shm{b.log(number).strip()}")
            assert shared.name.startswith("torch_"), b.log(number)
            await await_for(lambda: not os.path.lexists(shared), what="its removal")  # noqa: B023


async def test_only_a_worker_that_needs_a_resource_tracker_starts_one(tmp_path: Path) -> None:
    look = "from multiprocessing import resource_tracker\nprint(resource_tracker._resource_tracker._pid)"
    async with bench(tmp_path) as b:
        await b.begin()
        b.start(1, look)
        assert await b.code(1) == 0
        assert b.log(1) == "None\n"


async def test_what_an_import_has_started_serves_all_generations(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        text = "import subprocess\nserver = subprocess.Popen(['sleep', '600'])"
        (tmp_path / "modules" / "serving.py").write_text(text)
        await b.begin("serving")
        for number in (1, 2):
            b.start(number, "import serving\nprint(serving.server.pid)")
            assert await b.code(number) == 0
            assert alive(int(b.log(number)))
        assert b.log(1) == b.log(2)


async def test_the_launchers_socket_is_where_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv(preload.SOCKETS, folder)
        async with bench(tmp_path) as b:
            await b.begin()
            assert len(list(Path(folder).glob("pymp-*/listener-*"))) == 1
            found = (
                f"[name for name, value in os.environ.items() if name == '{preload.SOCKETS}' or '{folder}' in value]"
            )
            b.start(1, f"import os, tempfile\nprint(tempfile.gettempdir(), {found})")
            assert await b.code(1) == 0
            assert b.log(1) == f"{tempfile.gettempdir()} []\n", "torch would compile into memory that is for snapshots"
    place = tmp_path / "launcher"
    (place / "pymp-old").mkdir(parents=True)
    monkeypatch.setattr(job, "LONGEST", len(str(place)))
    assert job._make_socket_folder(place) == {preload.SOCKETS: str(place)}
    assert list(place.iterdir()) == []
    monkeypatch.setattr(job, "LONGEST", len(str(place)) - 1)
    assert job._make_socket_folder(place) == {}


async def test_the_launcher_goes_with_its_end_of_input(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.begin(procs=2)
        b.start(1, "import os, time\nif not os.fork(): time.sleep(600)\ntime.sleep(600)", procs=2)
        started = await b.said(lambda e: e["type"] == "started", "a start")
        await await_for(lambda: all(descendants(pid) for pid in started["pids"]), what="children of the workers")
        below = [child for pid in started["pids"] for child in descendants(pid)]
        await b.launcher.end()
        for pid in [*started["pids"], *below]:
            await await_for(functools.partial(_has_ended, pid), what="an end")


async def test_workers_whose_forkserver_dies_count_as_killed(tmp_path: Path) -> None:
    """The exit code of a worker is then unknown. The next generation has a new forkserver."""
    async with bench(tmp_path) as b:
        await b.begin(procs=2)
        b.start(1, "import time; time.sleep(600)", procs=2)
        started = await b.said(lambda e: e["type"] == "started", "a start")
        os.kill(parent(started["pids"][0]), signal.SIGKILL)
        assert [await b.code(1, index) for index in (0, 1)] == [-signal.SIGKILL] * 2
        b.start(2, "import os; os._exit(255)")
        assert await b.code(2) == 255


def _has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}/fd").exists() or not alive(pid)


async def test_a_launcher_that_cannot_start_says_so(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    launcher = Launcher(Templates(), events.append)
    await launcher.start("127.0.9.9", {"PYTHONPATH": str(tmp_path), "PYTHONHOME": str(tmp_path)}, [])
    await await_for(lambda: events, what="an event")
    assert events[-1]["type"] == "ended"
    assert events[-1]["code"] != 0
    await asyncio.wait_for(launcher.end(), 60)


async def test_a_launcher_that_cannot_start_holds_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent tries again and again. Otherwise each try would take two of the last descriptors."""
    make, made = os.pipe, list[tuple[int, int]]()

    def pipe() -> tuple[int, int]:
        if made:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(make())
        return made[-1]

    monkeypatch.setattr(os, "pipe", pipe)
    launcher = Launcher(Templates(), lambda _: None)
    with pytest.raises(OSError, match="Too many open files"):
        await launcher.start("127.0.9.9", dict(os.environ), ())
    for each in made[0]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(each)
