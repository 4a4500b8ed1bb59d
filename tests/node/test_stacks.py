"""`spotrun stacks` on a node: it asks real processes, and does harm to none."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.rank_stacks import read_node, read_stacks
from spotrun.node import stacks
from spotrun.node.launch.own_stacks import address
from spotrun.state.control import Control

# A worker, as far as `spotrun stacks` sees it. It hangs in a function of its own, and another thread waits.
WORKER = """
import os, socket, sys, threading, time
from pathlib import Path
from spotrun.node.launch import own_stacks
from spotrun.state.control import Control

control = Control(Path(sys.argv[1]))
if "listens" in sys.argv:
    own_stacks.serve()
threading.Thread(target=threading.Event().wait, daemon=True).start()

def drip():
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(own_stacks.address(os.getpid()))
        listener.listen()
        print("ready", flush=True)
        peer, _ = listener.accept()
        while True:
            peer.send(b" ")
            time.sleep(0.0005)

if "drips" in sys.argv:
    drip()

def stuck():
    print("ready", flush=True)
    while True:
        if "busy" not in sys.argv:
            time.sleep(0.01)

stuck()
"""
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a worker of rank 0, with what is special about it; its control block is at `block(tmp_path)`."""
    started: list[subprocess.Popen[bytes]] = []
    folder = block(tmp_path).parent
    folder.mkdir(parents=True)
    control = Control(block(tmp_path), create=True)

    def begin(*special: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", WORKER, str(block(tmp_path)), *special]
        process = subprocess.Popen(words, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        control.generation, control.pid, control.rank = 1, process.pid, 0
        return process

    yield begin
    control.close()
    for process in started:
        process.kill()
        process.communicate()


def block(folder: Path) -> Path:
    return folder / "tmpfs/digits-1/control/1.0"


def ask(folder: Path) -> stacks.Answer:
    [(path, worker)] = stacks.workers(block(folder).parent)
    return stacks.ask(path, worker)


def test_the_worker_says_where_it_is_and_goes_on(start: Start, tmp_path: Path) -> None:
    process = start("listens")
    for _ in range(5):
        answer = ask(tmp_path)
        assert (answer.rank, answer.generation, answer.pid, answer.problem) == (0, 1, process.pid, "")
        main, others = read_stacks(answer.stacks)
        assert [frame.function for frame in main] == ["stuck", "<module>"]
        assert any(frame.function == "Event.wait" for stack in others for frame in stack)
    assert process.poll() is None


def test_a_worker_that_computes_all_the_time(start: Start, tmp_path: Path) -> None:
    start("listens", "busy")
    main, _ = read_stacks(ask(tmp_path).stacks)
    assert "stuck" in [frame.function for frame in main]


def test_a_worker_that_does_not_listen(start: Start, tmp_path: Path) -> None:
    process = start()
    assert ask(tmp_path).problem == "it does not listen: it is starting, or runs an older version of spotrun"
    assert process.poll() is None


def test_a_worker_that_answers_without_an_end(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "PATIENCE", 0.02)
    monkeypatch.setattr(stacks, "LARGEST", 200)
    start("drips")
    assert "no answer in 0.02 s" in ask(tmp_path).problem


def test_another_process_has_its_socket(start: Start, tmp_path: Path) -> None:
    process = start()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address(process.pid))
        listener.listen()
        assert ask(tmp_path).problem == f"another process ({os.getpid()}) has taken its socket"


def test_a_worker_that_is_stopped(start: Start, tmp_path: Path) -> None:
    process = start("listens")
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert f"no answer in {stacks.PATIENCE:g} s; its state is T (stopped)" in ask(tmp_path).problem
    process.send_signal(signal.SIGCONT)
    assert ask(tmp_path).stacks


def test_a_worker_that_has_ended(start: Start, tmp_path: Path) -> None:
    process = start("listens")
    process.kill()
    process.wait()
    assert ask(tmp_path).problem == "the process has ended"


def test_another_process_has_the_number_now(start: Start, tmp_path: Path) -> None:
    start("listens")
    with subprocess.Popen(["sleep", "1000"]) as other:
        control = Control(block(tmp_path))
        control.pid = other.pid
        control.close()
        assert ask(tmp_path).problem == "the process has ended"
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize(
    ("program", "spies"),
    {
        "it answers": ('echo "[\\"$1 $2 $4\\"]"', True),
        "it may not attach": ("echo 'Permission Denied' >&2; exit 1", False),
    }.values(),
    ids=["it answers", "it may not attach"],
)
def test_with_py_spy(program: str, spies: bool, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bin/py-spy"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    start("listens")
    answer = ask(tmp_path)
    assert (answer.stacks.strip() == '["dump --pid --json"]') is spies
    assert ("stuck" in answer.stacks) is not spies


def test_the_command(start: Start, tmp_path: Path) -> None:
    """Paths are the same on all nodes; blocks of workers that warm up, and other files, are left out."""
    start("listens")
    Control(block(tmp_path).with_name("0.0"), create=True).close()
    block(tmp_path).with_name("2.0").write_text("not a block")
    block(tmp_path).with_name("1.0.next").write_text("{}")
    scratch = Path(stacks.__file__).parent
    environment = {**os.environ, "SPOTRUN_TMPFS": str(tmp_path / "tmpfs"), "SPOTRUN_SCRATCH": str(scratch)}

    def spotrun(job: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "spotrun.cli", "stacks", job]
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)

    done = spotrun("digits-1")
    assert done.returncode == 0, done.stderr
    [rank] = read_node("spot-0", done.stdout)
    assert [(rank.rank, rank.node, rank.problem)] == [(0, "spot-0", "")]
    assert json.loads(done.stdout)["generation"] == 1
    assert (spotrun("other-1").returncode, spotrun("other-1").stdout) == (0, "")
    bad = spotrun("../x")
    assert (bad.returncode, bad.stderr) == (2, "spotrun: '../x': is not a job's id\n")


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/n/s/work/a.b-1/0123abc/train.py", "train.py"),
        ("/n/s/work/a.b-1/0123abc/lib/data.py", "lib/data.py"),
        ("/n/s/packages/x/torch/a.py", "packages/x/torch/a.py"),
        ("/n/s/work/axb-1/0123abc/train.py", "work/axb-1/0123abc/train.py"),
        ("/usr/lib/python3.11/threading.py", "/usr/lib/python3.11/threading.py"),
    ],
)
def test_a_file_has_one_name_on_all_nodes(file: str, expected: str) -> None:
    assert stacks.short(json.dumps([file, file]), Path("/n/s"), "a.b-1") == json.dumps([expected, expected])
