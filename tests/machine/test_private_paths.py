"""What other users of the computer may not do. The attacks come from user 65534, which takes root to play."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from scripts import home
from spotrun.cloud.local import cloud
from spotrun.cloud.local.layout import Layout
from spotrun.errors import SpotrunError
from spotrun.head.server import control, ctl
from spotrun.machine import private_paths
from spotrun.machine.private_paths import NotOursError
from spotrun.node.launch import preload
from tests.cloud.local_spec import IDLE, spec
from tests.head.world import World
from tests.helpers import wait_for

NOBODY = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")


def as_nobody(attack: Callable[[], object]) -> str:
    """What the attack says, or the exception that ended it. It runs in a fork, which has all modules that it needs."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            text = str(attack())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode()[:60000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return text


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that everybody may enter; pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="spotrun-public-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_folder_is_made_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        found = private_paths.make_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (found, found.parent)] == [0o700, 0o700]


def test_what_others_may_read_becomes_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert stat.S_IMODE(private_paths.make_folder(tmp_path).stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(NotOursError, match=f"others may write to it .mode {mode:04o}.; see what is in it, then `chmod"):
        private_paths.make_folder(folder)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(NotOursError, match="is in the way: it is not a folder"):
            private_paths.make_folder(tmp_path / name)


def test_a_link_of_our_own_will_do(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    assert private_paths.make_folder(tmp_path / "link").is_dir()


@root_only
def test_what_belongs_to_another_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir(mode=0o700)
    os.chown(tmp_path / "f", NOBODY, NOBODY)
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    os.chown(tmp_path / "link", NOBODY, NOBODY, follow_symlinks=False)
    for name in ("f", "link"):
        with pytest.raises(NotOursError, match=r"belongs to \w+, not to root: it is not used") as caught:
            private_paths.make_folder(tmp_path / name)
        assert "\n" not in str(caught.value)


@root_only
def test_an_operators_state_of_another_is_refused(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTRUN_HOME", str(public / "state"))
    assert home.home() == public / "state"
    (public / "state").mkdir()
    os.chown(public / "state", NOBODY, NOBODY)
    with pytest.raises(SpotrunError, match="belongs to"):
        home.home()


def test_an_operators_state_of_before_becomes_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPOTRUN_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".spotrun").mkdir(mode=0o755)
    assert stat.S_IMODE(home.home().stat().st_mode) == 0o700


@root_only
def test_a_local_cluster_is_its_operators_alone(public: Path) -> None:
    """Another user reads nothing of it: no token, no key, no head.json, no bucket. Whatever the umask is."""
    place = public / "home"
    before = os.umask(0o002)
    try:
        cloud.up(spec(), place, IDLE)
        wait_for((Layout.of(place, "tiny").folder("head-0") / "init.log").exists, what="the head's machine")
        layout = Layout.of(place, "tiny")
        wait_for(lambda: (layout.tmpfs / "head-0").is_dir(), what="its memory")
        kept = [path for path in place.rglob("*") if path.is_file()]
        assert {layout.record, layout.key} <= set(kept)

        def read() -> list[str]:
            found = []
            for path in (*kept, layout.tmpfs / "head-0", layout.state, place / "local"):
                try:
                    found.append(f"{path}: {path.read_bytes() if path.is_file() else os.listdir(path)!r}")
                except OSError:
                    continue
            return found

        assert as_nobody(read) == "[]"
        open_ones = [path for path in (place, *place.rglob("*")) if path.lstat().st_mode & 0o077]
        assert [path for path in open_ones if not path.is_symlink() and not path.is_socket()] == []
    finally:
        os.umask(before)
        cloud.down("tiny", place)


@root_only
def test_a_folder_in_memory_that_another_made_is_refused(public: Path) -> None:
    """Its name can be foreseen. Here the other one is root, as nobody else's folder could stay in root's way."""
    state = public / "home"
    state.mkdir()
    os.chown(state, NOBODY, NOBODY)
    memory = Path(f"/dev/shm/spotrun-{NOBODY}-{Layout.of(state, 'tiny').unique}")
    memory.mkdir(mode=0o777)
    try:
        said = as_nobody(lambda: cloud.up(spec(), state, IDLE))
        assert said.startswith("NotOursError: ")
        assert f"{memory} belongs to root, not to " in said
        assert "\n" not in said
    finally:
        memory.rmdir()
        cloud.down("tiny", state) if state.stat().st_uid == os.geteuid() else None


@root_only
async def test_an_agent_does_not_use_memory_that_another_made(tmp_path: Path) -> None:
    from tests.fakes.node import Machine

    found = Machine("node-a", "127.0.9.2", tmp_path, tmp_path / "bucket")
    found.tmpfs.mkdir(parents=True)
    os.chown(found.tmpfs, NOBODY, NOBODY)
    await found.start()
    try:
        assert found.process is not None
        assert await asyncio.wait_for(found.process.wait(), 60) != 0
        assert f"{found.tmpfs} belongs to " in found.log
    finally:
        await found.end()
        await found.metadata.stop()


@root_only
async def test_the_control_socket_is_its_users_alone(public: Path) -> None:
    """Even where its modes are lost."""
    world, path = World(public / "bucket"), public / "head.sock"
    runner = web.AppRunner(control.ControlServer(world.head).app())
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    path.chmod(0o777)

    def ask() -> str:
        with socket.socket(socket.AF_UNIX) as client_:
            client_.settimeout(30)
            client_.connect(str(path))
            client_.sendall(b"GET /status HTTP/1.1\r\nHost: head\r\nConnection: close\r\n\r\n")
            return client_.makefile("rb").readline().decode()

    try:
        assert "403" in await asyncio.to_thread(as_nobody, ask)
        connector = aiohttp.UnixConnector(str(path))
        async with aiohttp.ClientSession(connector=connector) as session, session.get("http://head/status") as answer:
            assert answer.status == 200
    finally:
        await runner.cleanup()


@root_only
async def test_a_control_socket_of_another_is_not_asked(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = public / "head.sock"
    monkeypatch.setenv("SPOTRUN_TMPFS", str(public))
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind(str(path))
        os.chown(path, NOBODY, NOBODY)
        with pytest.raises(NotOursError, match=r"head\.sock belongs to"):
            await ctl._run(ctl_arguments())
    path.unlink()
    path.touch()
    with pytest.raises(NotOursError, match="it is not a socket"):
        await ctl._run(ctl_arguments())


def ctl_arguments() -> object:
    import argparse

    parser = argparse.ArgumentParser()
    ctl.add_parser(parser.add_subparsers())
    return parser.parse_args(["ctl", "status"])


# A launcher as far as its server of forks: it says where that listens, and forks when a line comes in.
LAUNCHER = """
import os
from spotrun.node.launch import preload
preload.BASE = ()
preload.fork_server()
from multiprocessing import forkserver, get_context
os.write(1, (forkserver._forkserver._forkserver_address + "\\n").encode())
os.read(0, 1)
process = get_context("forkserver").Process(target=os._exit, args=(7,))
process.start()
process.join()
os.write(1, f"{process.exitcode}\\n".encode())
"""


def ask_for_a_fork(address: str) -> str:
    """As multiprocessing does: hand over ends of pipes; the server answers with the fork's pid."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(address)
        pipes = [os.pipe() for _ in range(3)]
        reduction.sendfds(asking, [pipes[0][0], pipes[1][1], pipes[2][0], pipes[2][1]])
        os.close(pipes[0][0])
        os.close(pipes[1][1])
        return "forked" if os.read(pipes[1][0], 8) else "passed over"


@root_only
def test_no_other_user_has_the_server_fork(public: Path) -> None:
    """The modes keep others out. Where they are lost, the server itself does, and serves its own user on."""
    environment = dict(os.environ) | {preload.SOCKETS: str(public)}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        address = launcher.stdout.readline().strip()
        assert address.startswith(str(public))
        assert as_nobody(lambda: ask_for_a_fork(address)).startswith("PermissionError")
        for path in (Path(address), Path(address).parent):
            path.chmod(0o777)
        answer = as_nobody(lambda: ask_for_a_fork(address)).partition(":")[0]
        assert answer in ("passed over", "ConnectionResetError", "BrokenPipeError")
        launcher.stdin.write("x")
        launcher.stdin.flush()
        assert launcher.stdout.readline().strip() == "7"
    finally:
        launcher.kill()
        launcher.communicate()
