"""`spotrun profile` on a node: it asks a real process, puts the trace into the bucket, and leaves nothing behind."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts import trace_table
from spotrun.node import profiles, stacks
from spotrun.node.profiles import Answer
from spotrun.state.control import NONE, Control
from spotrun.state.profile import Request
from spotrun.store import Store
from tests.helpers import wait_for

# A worker, as far as `spotrun profile` sees it: it trains until its standard input ends.
WORKER = """
import sys, threading, time
from pathlib import Path
import torch
from spotrun.state.control import Context, Control
from spotrun.train.profiling import Profiling

path, bucket, *special = sys.argv[1:]
control = Control(Path(path))
profiling = Profiling(control, Context("digits-1", 3, "spot-7", path, "", bucket), torch.device("cpu"))
print("ready", flush=True)
if "stuck" in special:
    sys.stdin.read()
for step in range(1, 10**9):
    torch.randn(4, 4) @ torch.randn(4, 4)
    time.sleep(0.001)
    profiling.end_step(step)
"""
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTRUN_TMPFS", str(tmp_path / "tmpfs"))
    monkeypatch.setenv("SPOTRUN_SCRATCH", str(tmp_path / "scratch"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a worker of rank 2; its control block is at `block(tmp_path)`."""
    started: list[subprocess.Popen[bytes]] = []
    block(tmp_path).parent.mkdir(parents=True)
    control = Control(block(tmp_path), create=True)

    def begin(*special: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", WORKER, str(block(tmp_path)), str(tmp_path / "bucket"), *special]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        control.generation, control.pid, control.rank = 3, process.pid, 2
        return process

    yield begin
    control.close()
    for process in started:
        process.kill()
        process.communicate()


def block(folder: Path) -> Path:
    return folder / "tmpfs/digits-1/control/1.0"


def profile(*words: str, job: str = "digits-1") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "spotrun.cli", "profile", job, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answers(process: subprocess.Popen[str]) -> list[Answer]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return [Answer(**json.loads(line)) for line in out.splitlines()]


def nothing_left(folder: Path) -> bool:
    control = Control(block(folder))
    asked = control.profile
    control.close()
    return (
        not list((folder / "scratch").rglob("*.*")) and not Request.path_for(block(folder)).exists() and asked == NONE
    )


def test_the_trace_is_in_the_bucket(start: Start, tmp_path: Path) -> None:
    process = start()
    for steps in (4, 1):
        [answer] = answers(profile("--steps", str(steps), "--rank", "2"))
        key = f"jobs/digits-1/system/spot-7/profile-0003-2-{answer.first}.json.gz"
        assert answer == Answer(2, 3, steps, answer.first, key)
        trace = json.loads(gzip.decompress(Store(str(tmp_path / "bucket")).get(key)))
        assert {row.name: row.calls for row in trace_table.processor(trace)}["aten::randn"] == 2 * steps
    assert nothing_left(tmp_path)
    assert process.poll() is None


def test_other_ranks_and_jobs_are_not_asked(start: Start, tmp_path: Path) -> None:
    start()
    assert answers(profile("--rank", "1")) == []
    assert answers(profile(job="other-1")) == []
    for words, problem in ((["--steps", "0"], "--steps: 0: allowed: 1 to 1000"), ([], "'../x': is not a job's id")):
        process = profile(*words, job="digits-1" if words else "../x")
        assert process.communicate()[1] == f"spotrun: {problem}\n"
        assert process.returncode == 2
    assert nothing_left(tmp_path)


def asked(folder: Path) -> subprocess.Popen[str]:
    """A request that the worker has not answered."""
    process = profile()
    wait_for(lambda: Request.path_for(block(folder)).exists(), what="the request")
    return process


@pytest.mark.parametrize("end", ["the process has ended", "the generation has ended; ask again when the job trains"])
def test_the_worker_does_not_go_on(end: str, start: Start, tmp_path: Path) -> None:
    """The operator is told at once."""
    worker = start("stuck")
    process = asked(tmp_path)
    if "process" in end:
        worker.kill()
        worker.wait()
    else:
        control = Control(block(tmp_path))
        control.renew(4)
        control.close()
    assert [each.problem for each in answers(process)] == [end]
    assert nothing_left(tmp_path)


def test_one_request_at_a_time(start: Start, tmp_path: Path) -> None:
    """A request that is killed is in nobody's way afterwards."""
    worker = start("stuck")
    first = asked(tmp_path)
    assert [each.problem for each in answers(profile())] == [
        "somebody else is profiling this rank; try again in a few minutes"
    ]
    first.kill()
    first.communicate()
    assert worker.stdin is not None
    worker.stdin.close()  # it trains now
    worker.stdin = None
    [answer] = answers(profile("--steps", "2"))
    assert (answer.steps, answer.problem) == (2, "")
    assert nothing_left(tmp_path)


def test_it_has_a_bound_in_time(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start("stuck")
    monkeypatch.setattr(profiles, "SECONDS", 0.1)
    monkeypatch.setattr(profiles, "LAST", 0.1)
    [(path, worker)] = stacks.workers(block(tmp_path).parent)
    answer = profiles.ask(path, worker, "digits-1", 5)
    assert answer.problem.startswith("no step has ended in 0.2 s, or the script does not use run.steps")
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"steps": "many"}'])
def test_a_malformed_answer(text: str, start: Start, tmp_path: Path) -> None:
    """A job's code can write it."""
    start("stuck")
    process = asked(tmp_path)
    folder = tmp_path / "scratch/profiles/digits-1/2"
    (folder / "part").write_text(text)
    os.replace(folder / "part", folder / "answer.json")
    [answer] = answers(process)
    assert answer.problem
    assert nothing_left(tmp_path)
