"""The workers of one generation on a node: how they end, and what they leave."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from spotrun.node import cleanup, snapshot_limits, worker_failure
from spotrun.node.phase import phase_of
from spotrun.node.workers import LocalWorker, create
from spotrun.state import exit_note
from spotrun.state.control import (
    ABLE,
    EXIT_DRAINED,
    EXIT_PEER,
    NONE,
    Control,
    Invitation,
    warm_up_store,
    worker_fifo,
)
from spotrun.wire import Failure, Generation
from tests.fakes.nccl import NCCL_SHORT, WATCHDOG

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
    assert phase_of(codes, failure, lost, restored) == wanted


def test_a_drain_is_not_over_before_the_snapshot_of_a_worker_that_leaves_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins the snapshot of its last step and leaves, just before the agent looks whether it has left."""
    found = create(Generation(number=1, members=(), store="h:1"), 0, 1, tmp_path / "control", tmp_path / "logs")
    look: Any = LocalWorker.left

    def left(worker: LocalWorker) -> int | None:
        worker.control.begun, worker.control.left = 60, EXIT_DRAINED
        code: int | None = look.fget(worker)
        return code

    found.workers[0].control.step = found.workers[0].control.committed = 48
    monkeypatch.setattr(LocalWorker, "left", property(left))
    assert found.phase == "running"
    found.workers[0].control.committed = 60
    assert found.phase == "drained"
    found.close()


def test_a_worker_may_leave_while_the_agent_reads_why_another_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = create(Generation(number=1, members=(), store="h:1"), 0, 2, tmp_path / "control", tmp_path / "logs")
    first, second = found.workers
    read = worker_failure.read

    def slow(*arguments: Any) -> Failure:
        first.control.left = EXIT_PEER
        return read(*arguments)

    monkeypatch.setattr(worker_failure, "read", slow)
    second.control.left = EXIT_PEER
    assert found.failure is not None
    assert found.failure.rank == 1
    assert found.phase == "failed"
    found.close()


@pytest.mark.parametrize(
    ("code", "said"),
    [(2, "the script exited with code 2"), (-11, "ended by SIGSEGV")],
    ids=["as argparse does", "with the stacks of a crash"],
)
def test_without_a_traceback_the_end_of_the_log_says_why_a_script_failed(code: int, said: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {number}" for number in range(100)) + "\rerror: \x1b[1mno --lr\x1b[0m\n")
    found = worker_failure.read(tmp_path / "control", log, 0, code)
    assert found.message == said
    assert found.traceback.splitlines() == [*(f"line {number}" for number in range(81, 100)), "error: no --lr"]


def test_a_failure_that_repeats_needs_no_lines_of_the_log(tmp_path: Path) -> None:
    control, log = tmp_path / "control", tmp_path / "log"
    log.write_text("Traceback\n")
    exit_note.write(control, "user", 0, "train.py:3: run.track() tracks nothing", repeats=True)
    found = worker_failure.read(control, log, 0, 1)
    assert (found.message, found.traceback, found.repeats) == ("train.py:3: run.track() tracks nothing", "", True)


@pytest.mark.parametrize(
    ("steps", "late", "stops", "obeyed"),
    [((50, 51), None, 53, 53), ((53, 52), 53, 56, 56), ((56, 56), 53, 56, 56)],
    ids=["in time", "one worker has passed it", "all workers have stopped after the last one"],
)
def test_a_lower_stop_step_that_comes_too_late_changes_nothing(
    steps: tuple[int, int], late: int | None, stops: int, obeyed: int, tmp_path: Path
) -> None:
    """Otherwise one node would go on after the last ordered step, and another one would stop there."""
    found = create(Generation(number=1, members=(), store="h:1"), 0, 2, tmp_path / "control", tmp_path / "logs")
    found.set_steps(56, None)
    for worker, step in zip(found.workers, steps, strict=True):
        worker.control.step = step
    found.set_steps(53, None)
    assert (found.late, found.stops) == (late, stops)
    assert [worker.control.stop_at for worker in found.workers] == [obeyed, obeyed]
    found.set_steps(None, None)
    assert (found.late, found.stops) == (None, None)
    assert [worker.control.stop_at for worker in found.workers] == [NONE, NONE]
    found.close()


def test_new_workers_find_nothing_of_workers_whose_agent_was_killed(tmp_path: Path) -> None:
    """Workers that warm up have the same paths each time."""
    warm_up, folder = Generation.model_construct(number=0, members=(), store=""), tmp_path / "control"
    old = create(warm_up, 0, 2, folder, tmp_path / "logs")
    for each in old.workers:
        for place in (exit_note.path_for, Invitation.path_for, warm_up_store):
            place(each.path).write_text("of the worker before")
        os.mkfifo(worker_fifo(each.path))
    new = create(warm_up, 0, 2, folder, tmp_path / "logs")
    assert sorted(path.name for path in folder.iterdir()) == ["0.0", "0.1"]
    old.workers[0].control.step = 7  # its process has not ended yet
    assert new.workers[0].control.step == NONE
    new.close()
    assert list(folder.iterdir()) == []
    old.close()


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
    found.workers[0].log.write_text(log)
    found.exited(0, -signal.SIGABRT)
    assert found.failure is not None
    assert (found.failure.kind, found.failure.message) == ("peer", message)
    assert found.phase == "failed"
    found.workers[1].control.exit = EXIT_DRAINED
    found.exited(1, EXIT_DRAINED)
    assert found.phase == "drained"
    found.close()


@pytest.mark.parametrize(
    ("expected", "committed", "draining", "seconds"),
    [
        pytest.param(0.0, 8, False, snapshot_limits.SETTLE, id="none is under way"),
        pytest.param(0.5, 6, False, snapshot_limits.SETTLE, id="a small one"),
        pytest.param(7.0, 6, False, 14.0, id="a large one: twice what it takes"),
        pytest.param(70.0, 6, False, 20.0, id="not longer than the two steps that it is worth"),
        pytest.param(70.0, NONE, False, 80.0, id="the first one is worth all steps of this process"),
        pytest.param(0.5, 6, True, snapshot_limits.LEAVE, id="a worker that leaves a drain"),
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
    assert snapshot_limits.seconds_for_snapshot(control, draining) == seconds
    control.close()


def test_a_worker_that_joins_another_generation_keeps_the_time_for_its_snapshot(tmp_path: Path) -> None:
    control = Control(tmp_path / "control", create=True)
    control.base, control.step, control.begun, control.committed, control.expected = 0, 8, 8, 6, 70.0
    control.renew(2)
    assert (control.begun, control.committed, control.step) == (8, 6, NONE)
    assert snapshot_limits.seconds_for_snapshot(control, draining=False) == 140.0
    control.committed = 8
    control.renew(3)
    assert (control.begun, control.committed, control.expected) == (NONE, NONE, 0.0)
    control.close()


def test_a_drain_is_over_when_its_snapshot_is_committed(tmp_path: Path) -> None:
    """The worker has left before, and may join the next generation meanwhile."""
    found = create(Generation(number=1, members=(), store="h:1"), 0, 1, tmp_path / "control", tmp_path / "logs")
    found.started([os.getpid()])
    control = found.workers[0].control
    control.able, control.base, control.step, control.committed, control.begun = ABLE, 0, 8, 6, 8
    control.left = EXIT_DRAINED
    assert (found.phase, found.regroup, found.stopped_in(1), found.writes_snapshot) == (
        "running",
        "waiting",
        True,
        True,
    )
    control.committed = 8
    assert (found.phase, found.writes_snapshot) == ("drained", False)
    found.close()


@pytest.mark.parametrize("left", [NONE, EXIT_DRAINED])
async def test_a_worker_is_not_ended_in_the_middle_of_a_large_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    monkeypatch.setattr(snapshot_limits, "SETTLE", 0.0)
    found = create(Generation(number=1, members=(), store="h:1"), 0, 1, tmp_path / "control", tmp_path / "logs")
    worker = await asyncio.create_subprocess_exec("sleep", "600")
    found.started([worker.pid])
    control = found.workers[0].control
    control.base, control.step, control.begun, control.stepping, control.expected = 0, 8, 8, 8000.0, 4000.0
    control.left = left
    ending = asyncio.create_task(found.end())
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
    monkeypatch.setattr(cleanup, "SHARED_MEMORY", shared)
    found = create(Generation(number=1, members=(), store="h:1"), 0, 1, tmp_path / "control", tmp_path / "logs")
    found.exited(0, -signal.SIGKILL)
    await found.end()
    assert sorted(path.name for path in shared.iterdir()) == ["nccl-mapped", "nccl-opened", "other"]
    (shared / "nccl-late").write_bytes(b"1234")
    await found.end()  # once is enough: what comes later is of another generation
    assert (shared / "nccl-late").exists()
    await holder.communicate(b"")
    assert sorted(cleanup.remove_nccl_segments()) == [
        str(shared / name) for name in ("nccl-late", "nccl-mapped", "nccl-opened")
    ]
    found.close()
