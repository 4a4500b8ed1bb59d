"""Templates: launchers that are forked from a process that has torch, and what is left when one of them ends."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from spotrun.machine.processes import descendants
from spotrun.node.launch import templates as module
from spotrun.node.launch.client import Launcher
from spotrun.node.launch.template import send
from spotrun.node.launch.templates import Templates
from tests.fakes.launchers import Bench, alive, children
from tests.fakes.node import Machine, order_of, wheel, world
from tests.helpers import await_for, wait_for

A = "node-a"
PLAIN = {name: value for name, value in os.environ.items() if name != "TONE"}
LOUD = PLAIN | {"TONE": "loud"}


class Node:
    """Benches that share templates, as the jobs of a node do."""

    def __init__(self, root: Path) -> None:
        self.templates = Templates()
        self.benches: list[Bench] = []
        self._root = root

    async def begin(self, env: dict[str, str] = PLAIN, private: bool = False, ready: bool = True) -> Bench:
        bench = Bench(self._root / str(len(self.benches)), self.templates)
        self.benches.append(bench)
        await bench.launcher.start("127.0.9.9", env, [], private)
        if ready:
            await bench.ready()
        return bench


@contextlib.asynccontextmanager
async def node(root: Path) -> AsyncIterator[Node]:
    found = Node(root)
    try:
        yield found
    finally:
        for each in found.benches:
            await each.launcher.end()
        await found.templates.end()
        await await_for(lambda: not launcher_processes(), what="no process left")


def launcher_processes() -> list[int]:
    """The templates of this process, and all that they have forked."""
    return [pid for each in templates() for pid in (each, *descendants(each))]


def templates() -> list[int]:
    return [pid for pid in children(os.getpid()) if b"launch.template" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def code(bench: Bench) -> int:
    """The exit code of a launcher that ends."""
    await await_for(lambda: bench.events and bench.events[-1]["type"] == "ended", 40, "an end")
    return int(bench.events[-1]["code"])


def kept(pid: int) -> dict[str, Any]:
    """What a process has from its parent and from its own start, as far as /proc shows it."""
    names = ("SigBlk", "SigIgn", "Threads", "Umask", "Uid", "Groups", "CapEff", "NoNewPrivs", "Seccomp")
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = ("oom_score_adj", "cgroup", "limits")
    return {
        **{name: status[name] for name in names if name in status},
        **{name: Path(f"/proc/{pid}/{name}").read_text() for name in files},
        **{str(fd): os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1, 2)},
        "handlers": int(status["SigCgt"], 16) & 0x7FFFFFFF,  # libc has one of its own above these
        "cwd": os.readlink(f"/proc/{pid}/cwd"),
        "session": os.getsid(pid),
        "group": os.getpgid(pid),
    }


def open_ends(pid: int) -> set[str]:
    """The pipes, sockets and handles of processes that a process has open, besides its three standard files."""
    found = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd") if int(fd) > 2}
    found -= {os.readlink(f"/proc/{pid}/fd/2")}
    return {each for each in found if each.startswith(("pipe:", "socket:", "anon_inode:[pidfd]"))}


RANDOM = """
import multiprocessing, random, sys, numpy, torch
print(random.random(), numpy.random.random(), multiprocessing.current_process().authkey.hex(), torch.initial_seed())
"""


async def test_a_forked_launcher_is_like_a_program_of_its_own(tmp_path: Path) -> None:
    spawned = subprocess.Popen(
        [sys.executable, "-P", "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    async with node(tmp_path) as n:
        one, two = await n.begin(), await n.begin()
        (template,) = templates()
        first, second = children(template)
        assert len(os.listdir(f"/proc/{template}/task")) == 1, "a fork while other threads run may find locks held"
        assert spawned.stdout.readline()
        wanted = kept(spawned.pid) | {"0": os.devnull, "1": os.readlink("/proc/self/fd/2")}
        # The launcher itself waits in a second thread for the agent's commands, and reaps orphans.
        launchers = wanted | {"handlers": wanted["handlers"] | 1 << signal.SIGCHLD - 1}
        for pid in (first, second):
            assert kept(pid) | {"Threads": wanted["Threads"]} == launchers
        assert kept(template) == wanted
        assert open_ends(first).isdisjoint(open_ends(second))
        assert open_ends(second).isdisjoint(open_ends(template))

        said = []
        for each in (one, two):
            each.start(1, RANDOM)
            assert await each.code(1) == 0
            said.append(each.log(1).split())
        assert said[0][3] == said[1][3], "torch begins with the same seed in all processes"
        secrets = {word for words in said for word in words[:3]}
        assert len(secrets) == 6
        assert multiprocessing.current_process().authkey.hex() not in secrets
    spawned.communicate(b"\n")


async def test_the_agent_gets_the_exit_code_of_each_launcher(tmp_path: Path) -> None:
    async with node(tmp_path) as n:
        (other, killed, ended) = [await n.begin() for _ in range(3)]
        (template,) = templates()
        last, first, second = children(template)
        os.kill(first, signal.SIGKILL)
        assert await code(killed) == -signal.SIGKILL
        os.kill(second, signal.SIGTERM)
        assert await code(ended) == -signal.SIGTERM
        await await_for(lambda: children(template) == [last], what="the end of what the launchers have left")
        failing = Launcher(n.templates, (events := list[dict[str, object]]()).append)
        await failing.start("192.0.2.1", PLAIN, [])  # no address of this computer
        await await_for(lambda: events and events[-1]["type"] == "ended", what="an end")
        assert events[-1]["code"] == 1
        other.start(1, "import sys; sys.exit(7)")
        assert await other.code(1) == 7
        await other.launcher.end()
        assert await code(other) == 0
        assert templates() == [template], "it stays for the next job"


SLEEP = "import time; time.sleep(600)"


async def test_a_launcher_that_does_not_end_by_itself_is_killed(tmp_path: Path) -> None:
    async with node(tmp_path) as n:
        stopped, other = await n.begin(), await n.begin()
        stopped.start(1, SLEEP)
        (worker,) = (await stopped.said(lambda e: e["type"] == "started", "a start"))["pids"]
        (template,) = templates()
        os.kill(children(template)[0], signal.SIGSTOP)
        await stopped.launcher.end(timeout=0.0)
        assert await code(stopped) == -signal.SIGKILL
        await await_for(lambda: not alive(worker), what="the end of the worker")
        other.start(1, "print('unharmed')")
        assert await other.code(1) == 0


async def test_launchers_end_with_their_template_and_the_next_one_gets_another(tmp_path: Path) -> None:
    async with node(tmp_path) as n:
        benches = [await n.begin() for _ in range(2)]
        for each in benches:
            each.start(1, SLEEP)
            await each.said(lambda e: e["type"] == "started", "a start")
        (template,) = templates()
        everyone = descendants(template)
        assert len(everyone) >= 2 * 4, "launcher, resource tracker, forkserver, worker"
        os.kill(template, signal.SIGKILL)
        assert [await code(each) for each in benches] == [-signal.SIGKILL] * 2
        await await_for(lambda: not any(map(alive, everyone)), what="the end of all")
        again = await n.begin()
        assert template not in templates()
        again.start(1, "print('again')")
        assert await again.code(1) == 0


async def test_a_template_that_dies_while_it_imports(tmp_path: Path) -> None:
    async with node(tmp_path) as n:
        waiting = await n.begin(ready=False)
        (template,) = await await_for(templates, what="a template")
        os.kill(template, signal.SIGKILL)
        assert await code(waiting) == -signal.SIGKILL
        await n.begin()
        assert template not in templates()


async def test_a_template_that_hangs_while_it_imports_is_ended_with_its_launcher(tmp_path: Path) -> None:
    async with node(tmp_path) as n:
        waiting = await n.begin(ready=False)
        (template,) = await await_for(templates, what="a template")
        os.kill(template, signal.SIGSTOP)
        waiting.launcher.give_up()
        assert await code(waiting) == -signal.SIGKILL
        await n.begin()
        assert template not in templates()


async def test_a_template_that_hangs_is_left_to_those_who_still_wait_for_it(tmp_path: Path) -> None:
    """Their jobs may have longer limits. Nobody else waits for it."""
    async with node(tmp_path) as n:
        first = await n.begin(ready=False)
        (template,) = await await_for(templates, what="a template")
        os.kill(template, signal.SIGSTOP)
        second = await n.begin(ready=False)
        first.launcher.give_up()
        assert await code(first) == -signal.SIGKILL
        assert second.launcher.alive
        await n.begin()
        assert template in templates()
        second.launcher.give_up()
        await await_for(lambda: template not in templates(), what="the end of the template")


@pytest.mark.parametrize("end", ["by a signal", "with its job"])
async def test_a_launcher_ends_although_its_template_stands_still(tmp_path: Path, end: str) -> None:
    async with node(tmp_path) as n:
        ending, other = await n.begin(), await n.begin()
        (template,) = templates()
        launcher, _ = children(template)
        os.kill(template, signal.SIGSTOP)
        if end == "by a signal":
            os.kill(launcher, signal.SIGKILL)
        else:
            await asyncio.wait_for(ending.launcher.end(), 120)
        assert await code(ending) == -signal.SIGKILL
        other.start(1, "print('unharmed')")
        assert await other.code(1) == 0
        await n.begin()
        assert len(templates()) == 2, "a launcher would wait for a template that stands still"
        await asyncio.wait_for(other.launcher.end(), 120)
        await await_for(lambda: template not in templates(), what="the end of the template")


async def test_an_agent_ends_although_its_template_stands_still(tmp_path: Path) -> None:
    async with world(tmp_path, A) as w:
        machine: Machine = w.machines[0]
        bundle = w.bundle()
        await w.ready(bundle, [A])
        await w.begin(bundle, 1, [A])
        await w.steps([A], 1, 3)
        (template,) = children(machine.process.pid)
        os.kill(template, signal.SIGSTOP)
        try:
            machine.process.terminate()
            assert await asyncio.wait_for(machine.process.wait(), 120) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(template, signal.SIGCONT)


async def test_a_launcher_that_hangs_leaves_the_template_to_others(tmp_path: Path) -> None:
    async with node(tmp_path) as n:
        first = await n.begin()
        (template,) = templates()
        first.launcher.give_up()
        assert await code(first) == -signal.SIGKILL
        await n.begin()
        assert templates() == [template]


async def test_a_template_that_ends_before_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*values: Any) -> None:
        wait_for(lambda: not templates(), what="the end of the template")
        send(*values)

    monkeypatch.setattr(module, "send", late)
    async with node(tmp_path) as n:
        waiting = await n.begin({"PYTHONHOME": str(tmp_path)}, ready=False)
        assert await code(waiting) == 1


async def test_a_launcher_that_ends_before_it_is_forked(tmp_path: Path) -> None:
    async with node(tmp_path) as n:
        early = await n.begin(ready=False)
        (template,) = await await_for(templates, what="a template")
        await early.launcher.end()
        assert [e["type"] for e in early.events] == ["ended"]
        await n.begin()
        assert templates() == [template], "what it has imported is there for the next job"
        assert len(children(template)) == 1

        early = await n.begin(LOUD, private=True, ready=False)
        await early.launcher.end()
        await await_for(lambda: templates() == [template], what="the end of the private template")


async def test_which_template_a_launcher_gets_and_which_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node(tmp_path) as n:
        first = await n.begin(PLAIN)
        (plain,) = templates()
        second = await n.begin(LOUD)
        plain, loud = templates()
        await second.launcher.end()
        assert templates() == [plain, loud], "one is in use, the other was used last"
        await first.launcher.end()
        await await_for(lambda: templates() == [loud], what="the end of the template that was not used last")

        mine = [await n.begin(LOUD, private=True) for _ in range(2)]
        assert len(templates()) == 2, "a job's own variables may equal those of another job, but not those of the node"
        await mine[0].launcher.end()
        assert len(templates()) == 2
        await mine[1].launcher.end()
        await await_for(lambda: templates() == [loud], what="the end of the private template")

        monkeypatch.setattr(module, "_installed", lambda: (1,))
        await n.begin(LOUD)
        await await_for(lambda: len(templates()) == 1, what="the end of what has the packages of before")
        assert templates() != [loud]


COUNTING = """
import os, sys

class Counting:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            with open(os.environ["TORCH_IMPORTS"], "a") as file:
                file.write(f"{os.getpid()}\\n")

sys.meta_path.insert(0, Counting())
"""


async def test_the_jobs_of_a_node_import_torch_once(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(COUNTING)
    imports = tmp_path / "imports"
    paths = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    async with world(tmp_path, A, environment={"PYTHONPATH": paths, "TORCH_IMPORTS": str(imports)}) as w:
        (machine,) = w.machines
        assert not imports.exists()
        for number in range(3):
            bundle = w.bundle("--steps", "5")
            await w.ready(bundle, [A])
            await w.begin(bundle, 1, [A])
            await w.phase([A], 1, "succeeded")
            assert len(imports.read_text().split()) == 1, f"after job {number}"
        requirements = [f"tiny-package @ file://{wheel(tmp_path)}"]
        for number, own in enumerate(({"env": {"TONE": "loud"}}, {"requirements": requirements}), 2):
            await w.ready(w.bundle(**own), [A])
            assert len(imports.read_text().split()) == number, f"a job's own: {own}"
        await w.ready(w.bundle(), [A])
        assert len(imports.read_text().split()) == 3
        await w.head.order(A, order_of(bundle).replace(jobs=()))
        await await_for(lambda: len(machine.processes()) == 2, what="agent and template")
        (template,) = children(machine.process.pid)
        assert "TONE" not in Path(f"/proc/{template}/environ").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("moment", ["importing torch", "ready", "idle"])
async def test_nothing_outlives_an_agent(tmp_path: Path, moment: str, number: int) -> None:
    async with world(tmp_path, A) as w:
        machine: Machine = w.machines[0]
        bundle = w.bundle()
        await w.head.order(A, order_of(bundle))
        if moment == "importing torch":
            await w.head.wait(A, lambda r: r.doing == moment, moment)
            await await_for(lambda: len(machine.processes()) > 1, what="a template")
        else:
            await w.ready(bundle, [A])
        if moment == "idle":
            await w.head.order(A, order_of(bundle).replace(jobs=()))
            await await_for(lambda: len(machine.processes()) == 2, what="agent and template")
        machine.process.send_signal(number)
        await machine.gone()
        assert machine.process.returncode == (0 if number == signal.SIGTERM else -signal.SIGKILL)
