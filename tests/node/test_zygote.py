"""The zygote: templates of several agents on one computer, forked from one process that has torch."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from spotrun.cloud.local import daemon, procs
from spotrun.cloud.local.layout import Layout, remove_tree
from spotrun.machine import private_paths, source
from spotrun.machine.processes import MARK, ZYGOTE, children, descendants, kill
from spotrun.node.launch import templates as module
from spotrun.node.launch.templates import NOT_FORKED, Templates
from tests.fakes.launchers import Bench, alive
from tests.helpers import await_for

ORPHAN = """
import os, subprocess, time
if os.fork() == 0:
    subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True)
    os._exit(0)
os.wait()
print("made", flush=True)
time.sleep(1000)
"""

MANY = """
import os, time
for _ in range(60):
    os.system("true &")
print("all", flush=True)
time.sleep(1000)
"""


class Computer:
    """A computer with a zygote and machines, whose agents are this process."""

    def __init__(self, root: Path) -> None:
        self.layout = Layout(root / "home" / "local" / "c")
        self.layout.make()
        self.pid = 0  # the zygote's
        self._root = root
        self._templates: list[Templates] = []
        self._benches: list[Bench] = []

    def begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Start the zygote as the local cloud does."""
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv(ZYGOTE, "")  # removed at the end, with what the next lines set
        private_paths.make_folder(self.layout.tmpfs)
        before = set(children(os.getpid()))
        daemon.start_zygote(self.layout)
        (self.pid,) = set(children(os.getpid())) - before

    def mark(self, name: str) -> str:
        return self.layout.mark(name)

    def idle(self, name: str) -> Bench:
        """A machine whose launcher has not been started."""
        templates = Templates()
        self._templates.append(templates)
        found = Bench(self._root / f"{name}-{len(self._benches)}", templates)
        self._benches.append(found)
        return found

    async def bench(self, name: str, monkeypatch: pytest.MonkeyPatch, **more: str) -> Bench:
        """A machine with a launcher."""
        monkeypatch.setenv(MARK, self.mark(name))
        found = self.idle(name)
        await found.launcher.start("127.0.9.9", os.environ | more, [])
        await found.ready()
        return found

    def inits(self) -> list[int]:
        """The children of the zygote: one for each machine."""
        return [pid for pid in children(self.pid) if alive(pid)]

    def forked(self) -> list[int]:
        """The templates that come from the zygote."""
        return [children(pid)[0] for pid in self.inits()]

    def of(self, name: str) -> set[int]:
        """The living processes of a machine."""
        return procs.of_machine(self.mark(name))

    async def end(self) -> None:
        for bench in self._benches:
            await bench.launcher.end()
        for templates in self._templates:
            await templates.end()
        if not self.pid:
            return
        await await_for(lambda: not self.inits(), what="no template left")
        kill([self.pid])
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


@contextlib.asynccontextmanager
async def computer(root: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Computer]:
    found = Computer(root)
    try:
        found.begin(monkeypatch)
        yield found
    finally:
        try:
            await found.end()
            await await_for(lambda: not procs.of_cluster(found.layout.unique), what="no process left")
        finally:
            procs.kill(lambda: procs.of_cluster(found.layout.unique))
            remove_tree(found.layout.tmpfs)


async def test_two_machines_have_torch_from_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own variables, folder and temporary files, and all of its processes have its mark."""
    text = 'import os, tempfile; print(os.environ["MORE"], os.environ["NAME"], os.getcwd(), tempfile.gettempdir())'
    async with computer(tmp_path, monkeypatch) as c:
        benches = []
        for name in ("a-0", "b-0"):
            (temporary := c.layout.tmpfs / name / "tmp").mkdir(parents=True)  # in a short path, for sockets
            (folder := tmp_path / name).mkdir()
            monkeypatch.chdir(folder)
            monkeypatch.setenv("TMPDIR", str(temporary))
            monkeypatch.setenv("NAME", name)
            benches.append(await c.bench(name, monkeypatch))
        first, second = c.forked()
        assert {procs.mark_of(first), procs.mark_of(second)} == {c.mark("a-0"), c.mark("b-0")}
        assert {os.readlink(f"/proc/{pid}/cwd") for pid in (first, second)} == {
            str(tmp_path / n) for n in ("a-0", "b-0")
        }
        for name, bench in zip(("a-0", "b-0"), benches, strict=True):
            bench.start(1, text)
            assert await bench.code(1) == 0
            assert bench.log(1) == f"yes {name} {bench.root} {c.layout.tmpfs / name / 'tmp'}\n"
        for pid in (first, second):
            below = descendants(pid)
            assert len(below) >= 3, "launcher, forkserver, resource tracker"
            assert {procs.mark_of(each) for each in below} == {procs.mark_of(pid)}
            assert c.of(procs.mark_of(pid).partition("/")[2]) == {procs.status(pid)[1], pid, *below}


async def test_a_template_ends_with_its_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with computer(tmp_path, monkeypatch) as c:
        bench = await c.bench("a-0", monkeypatch)
        bench.start(1, "import time; time.sleep(1000)")
        await await_for(lambda: any(e["type"] == "started" for e in bench.events), what="a worker")
        (template,) = c.forked()
        assert len(c.of("a-0")) >= 6
        # The kernel does this when the agent is killed.
        bench.launcher._templates._all[0]._channel.shutdown(socket.SHUT_RDWR)
        await await_for(lambda: not alive(template) and not c.of("a-0"), what="nothing left of the machine")
        assert alive(c.pid)


async def test_machines_go_on_without_the_zygote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its templates stay. Other machines start templates of their own."""
    async with computer(tmp_path, monkeypatch) as c:
        first = await c.bench("a-0", monkeypatch)
        (template,) = c.forked()
        kill([c.pid])
        os.waitpid(c.pid, 0)
        first.start(1, "print('here')")
        assert await first.code(1) == 0
        second = await c.bench("b-0", monkeypatch)
        second.start(1, "print('here')")
        assert await second.code(1) == 0
        assert alive(template)
        assert [procs.mark_of(pid) for pid in children(os.getpid()) if pid in c.of("b-0")] == [c.mark("b-0")]


async def test_a_zygote_that_dies_while_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher ends, and says why. The next one is the machine's own."""
    async with computer(tmp_path, monkeypatch) as c:
        os.kill(c.pid, signal.SIGSTOP)
        bench = c.idle("x")
        await bench.launcher.start("127.0.9.9", os.environ, [])
        kill([c.pid])
        await await_for(lambda: bench.events, 40, "an end")
        assert bench.events[-1] == {"type": "ended", "code": NOT_FORKED}
        assert not bench.launcher.alive
        bench.events.clear()
        await bench.launcher.start("127.0.9.9", os.environ, [])
        await bench.ready()


@pytest.mark.parametrize("case", ["path", "threads", "packages"])
async def test_what_the_zygote_has_read_must_be_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Python reads its path at its start, OpenMP its threads at torch's import, and packages may be newer."""
    async with computer(tmp_path, monkeypatch) as c:
        if case == "packages":
            monkeypatch.setattr(module, "_installed", lambda: (time.time_ns(),))
        changed = {"path": {"PYTHONPATH": str(tmp_path)}, "threads": {"OMP_NUM_THREADS": "2"}, "packages": {}}[case]
        bench = await c.bench("a-0", monkeypatch, **changed)
        assert not c.forked()
        bench.start(1, "import os, sys; print(os.environ['OMP_NUM_THREADS'], sys.path)")
        assert await bench.code(1) == 0
        assert bench.log(1).startswith(changed.get("OMP_NUM_THREADS", "1") + " ")
        assert (str(tmp_path) + "'" in bench.log(1)) == (case == "path")


@pytest.mark.parametrize("stamp", ["another", ""])
async def test_an_agent_with_other_code_starts_its_own_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stamp: str
) -> None:
    """spotrun was updated after the local cloud had begun, or set back: an agent of an older version has no stamp."""
    async with computer(tmp_path, monkeypatch) as c:
        monkeypatch.setattr(source, "STAMP", stamp)
        bench = c.idle("a-0")
        await bench.launcher.start("127.0.9.9", os.environ, [])
        await await_for(lambda: bench.events, 40, "an end")
        assert bench.events == [{"type": "ended", "code": NOT_FORKED}]
        assert not c.forked()
        bench.events.clear()
        await bench.launcher.start("127.0.9.9", os.environ, [])
        await bench.ready()


async def test_variables_of_the_network_need_no_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with computer(tmp_path, monkeypatch) as c:
        bench = await c.bench("a-0", monkeypatch, GLOO_SOCKET_IFNAME="lo", PYTHONPATH=os.environ.get("PYTHONPATH", ""))
        assert len(c.forked()) == 1
        bench.start(1, "import os; print(os.environ['GLOO_SOCKET_IFNAME'])")
        assert await bench.code(1) == 0
        assert bench.log(1) == "lo\n"


async def test_an_orphan_without_variables_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that a script has left behind belongs to the machine, also after the agent has ended."""
    async with computer(tmp_path, monkeypatch) as c:
        bench = await c.bench("a-0", monkeypatch)
        bench.start(1, ORPHAN)
        await bench.printed(1, "made")
        (init,), (template,) = c.inits(), c.forked()
        (orphan,) = [pid for pid in c.of("a-0") if not procs.mark_of(pid)]
        assert [procs.status(orphan)[1]] == children(template), "it belongs to the launcher"
        bench.launcher._templates._all[0]._channel.shutdown(socket.SHUT_RDWR)
        await await_for(lambda: c.of("a-0") == {init, orphan}, what="only the orphan, and what reaps it")
        assert not alive(template)
        kill([orphan])
        await await_for(lambda: not Path(f"/proc/{init}").exists(), what="nothing of the machine")


async def test_many_orphans_leave_no_zombie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a process may have files open, while the job goes on."""
    async with computer(tmp_path, monkeypatch) as c:
        bench = await c.bench("a-0", monkeypatch)
        (init,), (template,) = c.inits(), c.forked()
        resource.prlimit(template, resource.RLIMIT_NOFILE, (40, 40))
        (launcher,) = children(template)
        bench.start(1, MANY)
        await bench.printed(1, "all")
        await await_for(lambda: all(map(alive, children(launcher))), what="all orphans reaped")
        assert children(init) == [template]
        await bench.launcher.end()
        assert alive(template)


async def test_a_zygote_whose_templates_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent asks it once."""
    async with computer(tmp_path, monkeypatch) as c:
        monkeypatch.setattr(os, "getcwd", lambda: f"{tmp_path}/is-not-there")
        bench = c.idle("x")
        for _ in range(2):
            bench.events.clear()
            await bench.launcher.start("127.0.9.9", os.environ, [])
            await await_for(lambda: bench.events and bench.events[-1]["type"] in ("ended", "ready"), 40, "an answer")
        assert (bench.events[-1]["type"], c.inits()) == ("ready", [])
