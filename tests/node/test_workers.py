"""The launcher and its workers without an agent; and what an agent decides from code, archives and exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import os
import signal
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from spotrun.errors import CorruptError
from spotrun.machine.gpus import gpu_count
from spotrun.machine.process import descendants
from spotrun.node import code, job, leftovers, workers
from spotrun.node.launch import preload
from spotrun.node.launch.client import Launcher
from spotrun.node.launch.worker import Task
from spotrun.node.workers import create, phase
from spotrun.state import exit_note
from spotrun.state.control import EXIT_DRAINED, EXIT_PEER, Control
from spotrun.wire import Failure, Generation
from tests.helpers import await_for


class Bench:
    """A launcher on a bench: what it says is kept in `events`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[dict[str, Any]] = []
        self.launcher = Launcher(self.events.append)
        (root / "modules").mkdir()

    async def begin(self, *modules: str, procs: int = 1) -> None:
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join([str(self.root / "modules"), env.get("PYTHONPATH", "")])
        await self.launcher.begin("127.0.9.9", procs, env, modules)
        await self.said(lambda e: e["be"] == "ready", "the launcher ready")

    async def said(self, look: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            assert not any(e["be"] == "ended" for e in self.events), f"the launcher ended: {self.events}"
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
        self.launcher.start(number, 0, 1, self.launcher.store, tasks)

    async def code(self, number: int, index: int = 0) -> int:
        event = await self.said(
            lambda e: (e["be"], e.get("generation"), e.get("local_rank")) == ("exited", number, index), "an exit"
        )
        return int(event["code"])

    def log(self, number: int, index: int = 0) -> str:
        return (self.root / f"{number}.{index}.log").read_text()

    def failure(self, number: int) -> Failure:
        return Failure(**json.loads(exit_note.path_for(self.root / f"{number}.0").read_text()))


@contextlib.asynccontextmanager
async def bench(root: Path) -> AsyncIterator[Bench]:
    found = Bench(root)
    try:
        yield found
    finally:
        await found.launcher.end()
        assert not found.launcher.alive


# As NCCLUtils.hpp and ProcessGroupNCCL.cpp write it.
NCCL = """NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled system error, NCCL version 2.27.7
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
socketPollConnect: connect to 10.0.0.7<41231> returned Connection refused"""
NCCL_SHORT = (
    "NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled system error, NCCL version 2.27.7; "
    "socketPollConnect: connect to 10.0.0.7<41231> returned Connection refused"
)
WATCHDOG = f"""step 7
[rank1]:[E1122 10:00:00.000 ProcessGroupNCCL.cpp:2068] [PG ID 0 Rank 1] Process group watchdog thread terminated with \
exception: {NCCL}
Exception raised from checkForNCCLErrorsInternal at ProcessGroupNCCL.cpp:2363 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f in libc10.so)
terminate called after throwing an instance of 'c10::DistBackendError'
"""

PLAIN = """
import atexit, os, signal, sys, threading, time, __main__
assert __name__ == "__main__" and __main__.__file__ == __file__ == sys.argv[0]
assert sys.path[0] == os.path.dirname(__file__) and os.getcwd() == os.path.dirname(__file__)
print(sys.argv[1:], os.environ["MORE"], os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"])
print("on stderr", file=sys.stderr)
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
    time.sleep(0.2)
    print("a thread ended")
threading.Thread(target=late).start()
state = "kept"
"""


async def test_a_worker_is_like_python_running_the_script(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.begin()
        b.start(1, PLAIN, "one", "two words")
        assert await b.code(1) == 0
        lines = b.log(1).splitlines()
        assert sorted(lines[:3]) == ["['one', 'two words'] yes 0 1 1", "from a child", "on stderr"]
        assert lines[3:] == ["a thread ended", "at exit kept"]
        control = Control(tmp_path / "1.0")
        assert (control.generation, control.rank) == (1, 0)
        assert control.forked > 0
        control.close()

        scripts = {
            2: ("import sys; sys.exit()", 0),
            3: ("import sys; sys.exit(7)", 7),
            4: ("import sys; sys.exit('out of luck')", 1),
            5: ("def f():\n    1/0\nf()", 1),
            6: ("if x = 1:", 1),
            7: ("import torch.distributed as d\nraise d.DistNetworkError('Connection reset by peer')", EXIT_PEER),
            8: ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
            9: (f"import os; os._exit({EXIT_DRAINED})", EXIT_DRAINED),
            10: ("import no_such_module_here", 1),
            14: (f"import torch.distributed as d\nraise d.DistBackendError({NCCL!r})", EXIT_PEER),
        }
        for number, (text, wanted) in scripts.items():
            b.start(number, text)
            assert await b.code(number) == wanted, text
        assert b.failure(3).message == "the script exited with code 7"
        assert "out of luck" in b.log(4)
        assert b.failure(5).message == "ZeroDivisionError: division by zero"
        assert b.failure(5).traceback.splitlines()[1].strip() == f'File "{tmp_path}/s5.py", line 3, in <module>'
        assert b.failure(5).traceback == b.log(5)
        assert "SyntaxError" in b.failure(6).message
        assert b.failure(7).kind == "peer"
        assert b.failure(14).message == f"torch.distributed.DistBackendError: {NCCL_SHORT}"
        assert b.failure(10).message == "ModuleNotFoundError: No module named 'no_such_module_here'"

        # A generation that still runs is ended by the next; a store that is not held is refused.
        b.start(11, "import time; time.sleep(600)")
        await b.said(lambda e: e["be"] == "started" and e["generation"] == 11, "a start")
        b.start(12, "print('next')")
        assert await b.code(11) == -signal.SIGKILL
        assert await b.code(12) == 0
        b.launcher.store = "127.0.9.9:1"
        b.start(13, "")
        await b.said(lambda e: e["be"] == "refused" and e["generation"] == 13, "a refusal")


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
        await await_for(lambda: not any(_alive(pid) for pid in pids), 2, "an end")


async def test_the_launchers_socket_is_where_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv(preload.SOCKETS, folder)
        async with bench(tmp_path) as b:
            await b.begin()
            assert len(list(Path(folder).glob("pymp-*/listener-*"))) == 1
            b.start(1, f"import os, tempfile\nprint(tempfile.gettempdir(), '{preload.SOCKETS}' in os.environ)")
            assert await b.code(1) == 0
            assert b.log(1) == f"{tempfile.gettempdir()} False\n"
    place = tmp_path / "launcher"
    (place / "pymp-old").mkdir(parents=True)
    monkeypatch.setattr(job, "LONGEST", len(str(place)))
    assert job._make_room(place) == {preload.SOCKETS: str(place)}
    assert list(place.iterdir()) == []
    monkeypatch.setattr(job, "LONGEST", len(str(place)) - 1)
    assert job._make_room(place) == {}


async def test_the_launcher_goes_with_its_end_of_input(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.begin(procs=2)
        b.start(1, "import os, time\nif not os.fork(): time.sleep(600)\ntime.sleep(600)", procs=2)
        started = await b.said(lambda e: e["be"] == "started", "a start")
        await await_for(lambda: all(descendants(pid) for pid in started["pids"]), what="children of the workers")
        below = [child for pid in started["pids"] for child in descendants(pid)]
        await b.launcher.end()
        for pid in [*started["pids"], *below]:
            await await_for(lambda pid=pid: not Path(f"/proc/{pid}/fd").exists() or not _alive(pid), what="an end")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


USER = Failure(kind="user", rank=0, at=1.0, message="")
PEER = Failure(kind="peer", rank=0, at=1.0, message="")


@pytest.mark.parametrize(
    ("codes", "failure", "lost", "restored", "wanted"),
    [
        ([None, None], None, False, False, "starting"),
        ([None, None], None, False, True, "running"),
        ([None, 0], None, False, True, "running"),
        ([None, EXIT_DRAINED], None, False, True, "running"),
        ([None, 1], USER, False, True, "failed"),
        ([None, EXIT_PEER], PEER, False, False, "failed"),
        ([0, 0], None, False, True, "succeeded"),
        ([EXIT_DRAINED, EXIT_DRAINED], None, False, True, "drained"),
        ([EXIT_DRAINED, EXIT_PEER], PEER, False, True, "drained"),
        ([EXIT_DRAINED, None], PEER, False, True, "running"),
        ([EXIT_DRAINED, 1], USER, False, True, "failed"),
        ([EXIT_DRAINED, 0], None, False, True, "drained"),
        ([EXIT_PEER, EXIT_PEER], PEER, False, True, "failed"),
        ([EXIT_DRAINED, -1], PEER, True, True, "failed"),
        ([-9, -9], None, False, True, "failed"),
    ],
)
def test_phase(codes: list[int | None], failure: Failure | None, lost: bool, restored: bool, wanted: str) -> None:
    assert phase(codes, failure, lost, restored) == wanted


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("", "ended by SIGABRT"),
        ("a script's own assertion\n", "ended by SIGABRT"),
        (WATCHDOG, f"ended by SIGABRT: {NCCL_SHORT}"),
        ("much text\n" * 20_000 + WATCHDOG, f"ended by SIGABRT: {NCCL_SHORT}"),
    ],
)
def test_a_worker_that_nccl_aborts_has_lost_a_peer(log: str, message: str, tmp_path: Path) -> None:
    """During a drain too: the snapshot of a worker that has drained is what counts."""
    generation = Generation(number=1, members=(), store="h:1")
    found = create(generation, 0, 2, tmp_path / "control", tmp_path / "logs")
    found.locals[0].log.write_text(log)
    found.exited(0, -signal.SIGABRT)
    assert found.failure is not None
    assert (found.failure.kind, found.failure.message) == ("peer", message)
    assert found.phase == "failed"
    found.locals[1].control.exit = EXIT_DRAINED
    found.exited(1, EXIT_DRAINED)
    assert found.phase == "drained"
    found.close()


@pytest.mark.parametrize(
    ("expected", "committed", "draining", "seconds"),
    [
        pytest.param(0.0, 8, False, workers.SETTLE, id="none is under way"),
        pytest.param(0.5, 6, False, workers.SETTLE, id="a small one"),
        pytest.param(7.0, 6, False, 14.0, id="a large one: twice what it takes"),
        pytest.param(70.0, 6, False, 20.0, id="not longer than the two steps that it is worth"),
        pytest.param(70.0, workers.NONE, False, 80.0, id="the first one is worth all steps of this process"),
        pytest.param(0.5, 6, True, workers.LEAVE, id="a worker that leaves a drain"),
        pytest.param(70.0, 6, True, 140.0, id="a drain with a large one"),
    ],
)
def test_a_snapshot_gets_the_time_that_its_size_takes(
    expected: float, committed: int, draining: bool, seconds: float, tmp_path: Path
) -> None:
    """A process that took up the work at step 0, ten seconds a step, and has begun the snapshot of step 8."""
    control = Control(tmp_path / "control", create=True)
    control.base, control.step, control.begun, control.stepping = 0, 8, 8, 80.0
    control.expected, control.committed = expected, committed
    assert workers.patience(control, draining) == seconds
    control.close()


async def test_a_worker_is_not_ended_in_the_middle_of_a_large_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SETTLE", 0.0)
    found = create(Generation(number=1, members=(), store="h:1"), 0, 1, tmp_path / "control", tmp_path / "logs")
    worker = await asyncio.create_subprocess_exec("sleep", "600")
    found.started([worker.pid])
    control = found.locals[0].control
    control.base, control.step, control.begun, control.stepping, control.expected = 0, 8, 8, 8000.0, 4000.0
    ending = asyncio.create_task(found.free())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(worker.wait(), 0.5)
    control.committed = 8
    assert await worker.wait() == -signal.SIGKILL
    found.exited(0, -signal.SIGKILL)
    await ending
    found.close()


HOLDER = """
import mmap, sys
opened, mapped = (open(path, "r+b") for path in sys.argv[1:])
kept = mmap.mmap(mapped.fileno(), 4)
mapped.close()
print(flush=True)
sys.stdin.read()
"""


async def test_what_dead_workers_leave_in_shared_memory_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what a living one has open or mapped, nor files of others."""
    shared = tmp_path / "shm"
    shared.mkdir()
    for name in ("nccl-opened", "nccl-mapped", "nccl-left", "nccl-late", "other"):
        (shared / name).write_bytes(b"1234")
    paths = [str(shared / name) for name in ("nccl-opened", "nccl-mapped")]
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, *paths, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"\n"
    monkeypatch.setattr(leftovers, "SHARED", shared)
    found = create(Generation(number=1, members=(), store="h:1"), 0, 1, tmp_path / "control", tmp_path / "logs")
    found.exited(0, -signal.SIGKILL)
    await found.free()
    assert sorted(path.name for path in shared.iterdir()) == ["nccl-mapped", "nccl-opened", "other"]
    (shared / "nccl-late").write_bytes(b"1234")
    await found.free()  # once is enough: what comes later is of another generation
    assert (shared / "nccl-late").exists()
    await holder.communicate(b"")
    assert sorted(leftovers.remove()) == [str(shared / name) for name in ("nccl-late", "nccl-mapped", "nccl-opened")]
    found.close()


def archive(path: Path, *members: tarfile.TarInfo) -> Path:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size) if member.isfile() else None)
    path.write_bytes(zstandard.compress(buffer.getvalue()))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 1) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size if kind == tarfile.REGTYPE else 0
    return info


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([member("../evil")], "leads out"),
        ([member("a/../../evil")], "leads out"),
        ([member("/tmp/evil")], "leads out"),
        ([member("link", tarfile.SYMTYPE, "../..")], "outside"),
        ([member("link", tarfile.SYMTYPE, "/etc")], "refused"),
        ([member("link", tarfile.LNKTYPE, "../evil")], "refused"),
        ([member("d", tarfile.SYMTYPE, "."), member("d/l", tarfile.SYMTYPE, ".."), member("d/l/evil")], "refused"),
        ([member("disk", tarfile.BLKTYPE)], "device"),
        ([member("tty", tarfile.CHRTYPE)], "device"),
        ([member("pipe", tarfile.FIFOTYPE)], "device"),
        ([member("link", tarfile.LNKTYPE, "nothing")], "cannot be unpacked"),
    ],
)
def test_hostile_archives(members: list[tarfile.TarInfo], words: str, tmp_path: Path) -> None:
    target = tmp_path / "inner" / "target"
    target.mkdir(parents=True)
    with pytest.raises(CorruptError, match="code/x") as caught:
        code.unpack(archive(tmp_path / "a", *members), target, "code/x")
    assert words in str(caught.value)
    assert not list(tmp_path.rglob("evil"))


def test_oversized_and_broken_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    target.mkdir()
    whole = archive(tmp_path / "a", member("big", size=5000), member("more", size=5000))
    cut = tmp_path / "cut"
    cut.write_bytes(whole.read_bytes()[:-20])
    with pytest.raises(CorruptError, match="cannot be unpacked"):
        code.unpack(cut, target, "code/x")
    monkeypatch.setattr(code, "MAX_UNPACKED", 9000)
    with pytest.raises(CorruptError, match="refused: more than"):
        code.unpack(whole, target, "code/x")


SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "x", "GNU.sparse.realsize": "1"}


@pytest.mark.parametrize(
    ("headers", "data"), [({"comment": "x" * (2 << 20)}, b"x"), (SPARSE, b"2000000\n" + b"1\n" * 2_000_000)]
)
def test_headers_are_not_read_without_end(headers: dict[str, str], data: bytes, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = member("name", size=len(data))
        info.pax_headers = headers
        tar.addfile(info, io.BytesIO(data))
    (tmp_path / "a").write_bytes(zstandard.compress(buffer.getvalue()))
    with pytest.raises(CorruptError, match="refused: a header of more than 1 MiB"):
        code.unpack(tmp_path / "a", tmp_path, "code/x")


def test_a_full_disk_is_not_the_archives_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "makefile", full)
    with pytest.raises(code.SetupError, match="No space left"):
        code.unpack(archive(tmp_path / "a", member("file")), tmp_path, "code/x")


def test_imports_of_a_script(tmp_path: Path) -> None:
    files = {
        "src/train.py": "from __future__ import annotations\nimport os, a.b as c\nfrom d import e\nimport helper\n"
        "from tools.inner import x\ntry:\n    import f\nexcept ImportError:\n    import g\nif True:\n    import h\n"
        "def later():\n    import not_this\nclass C:\n    import nor_this\nfrom . import nothing\nimport helper\n",
        "src/helper.py": "import i, helper\n",
        "tools/__init__.py": "import j\n",
        "tools/inner.py": "import k\n",
        "tools/other.py": "import not_that\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sorted(code.imports(tmp_path, "src/train.py")) == ["a.b", "d", "f", "g", "h", "i", "j", "k", "os"]
    (tmp_path / "src/train.py").write_text("not python at all")
    assert code.imports(tmp_path, "src/train.py") == []


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpu_count(tmp_path) == 3
    assert gpu_count(tmp_path / "none") == 0


async def test_a_launcher_that_cannot_start_says_so(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    launcher = Launcher(events.append)
    await launcher.begin("127.0.9.9", 1, {"PYTHONPATH": str(tmp_path), "PYTHONHOME": str(tmp_path)}, [])
    await await_for(lambda: events, what="an event")
    assert events[-1]["be"] == "ended"
    assert events[-1]["code"] != 0
    await asyncio.wait_for(launcher.end(), 10)
