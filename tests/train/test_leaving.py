"""The end of a process group that this process has left: another thread sees to it."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spotrun.train import distributed, group_health
from spotrun.train.group_health import GroupHealth
from tests.helpers import wait_for
from tests.train.faults import connect_meanwhile
from tests.train.forks import forked
from tests.train.meeting import meeting

CPU = torch.device("cpu")


class Group:
    """A process group with a backend like NCCL's: its end takes time."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.ended = False

    def shutdown(self) -> None:
        assert self.may_end.wait(60)
        self.ended = True


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Group]:
    """Forms a group that counts as one of NCCL."""
    monkeypatch.setattr(distributed, "_end", None)
    monkeypatch.setattr(distributed, "_abort", None)
    monkeypatch.setattr(distributed, "_has_nccl", lambda group: True)
    return join


def join() -> Group:
    """A new group. Its end is that of the `Group`."""
    distributed.join_alone()
    found = Group()
    names: Any = dist.distributed_c10d._world.pg_names
    names.clear()
    names[found] = "0"
    return found


def test_the_next_group_is_formed_while_the_last_one_ends(nccl: Callable[[], Group]) -> None:
    """At most one ends at a time: it holds memory of the device."""
    first = nccl()
    assert distributed.leave_in_time(CPU, aborts=False, patience=60)
    assert not dist.is_initialized()
    second = nccl()
    dist.all_reduce(torch.ones(1))
    assert not first.ended
    assert not distributed.leave_in_time(CPU, aborts=False, patience=0.1)
    first.may_end.set()
    wait_for(lambda: not dist.is_initialized(), 60)
    assert first.ended
    second.may_end.set()
    wait_for(lambda: second.ended, 60)


def test_a_group_ends_when_its_abort_has_ended(nccl: Callable[[], Group], monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker goes on as soon as the device has nothing to do."""
    aborted, calls = threading.Event(), []

    def abort(group: Any, device: torch.device) -> None:
        calls.append(group)
        assert aborted.wait(60)

    monkeypatch.setattr(distributed, "abort_collectives", abort)
    group, whole = nccl(), dist.group.WORLD
    group.may_end.set()
    assert distributed.abort_in_time(CPU, patience=60)
    assert distributed.abort_in_time(CPU, patience=60)
    assert distributed.leave_in_time(CPU, aborts=True, patience=60)
    assert calls == [whole], "it is not begun again while it lasts"
    assert not group.ended
    aborted.set()
    assert distributed._end is not None
    distributed._end.join(60)
    assert group.ended


@pytest.mark.parametrize("free", [1 << 30, 10 << 30], ids=["little memory", "much memory"])
def test_a_device_with_little_memory_gets_no_second_group(
    nccl: Callable[[], Group], monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """Otherwise NCCL would find no room, and all workers would restart."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 << 30))
    monkeypatch.setattr(distributed, "LEAVE_WAIT", 0.5)
    waited = list[float]()
    monkeypatch.setattr(distributed, "_end", SimpleNamespace(join=waited.append))
    distributed.make_room(CPU)
    assert not waited
    distributed.make_room(torch.device("cuda", 0))
    assert waited == ([0.5] if free < distributed.ROOM else [])


def test_an_abort_counts_at_once_and_once(nccl: Callable[[], Group], monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots of the next generation do not count it, however late its thread runs."""
    may_begin, backend = threading.Event(), Backend()

    def abort(group: Any, device: torch.device) -> None:
        assert may_begin.wait(60)
        backend.abort()

    monkeypatch.setattr(distributed, "abort_collectives", abort)
    nccl().may_end.set()
    old = GroupHealth()
    assert distributed.abort_in_time(CPU, patience=60)
    assert old.trouble() == "a process group was aborted"
    assert distributed.leave_in_time(CPU, aborts=True, patience=60)
    new = GroupHealth()
    may_begin.set()
    assert distributed._end is not None
    distributed._end.join(60)
    assert backend.aborted
    assert not new.trouble()
    backend.abort()  # a script's own
    assert new.trouble()


def test_all_ranks_know_of_an_abort_before_it_begins(
    nccl: Callable[[], Group], monkeypatch: pytest.MonkeyPatch, store: dist.TCPStore
) -> None:
    """Its kernels send others what they have, marked as valid."""
    seen = list[str]()
    monkeypatch.setattr(distributed, "abort_collectives", lambda *_: seen.append(group_health.abort_elsewhere()))
    nccl().may_end.set()
    group_health.begin(store)
    assert group_health.abort_elsewhere() == ""
    assert distributed.leave_in_time(CPU, aborts=True, patience=60)
    assert distributed._end is not None
    distributed._end.join(60)
    group_health.begin(store)  # another rank of the same generation
    assert [*seen, group_health.abort_elsewhere()] == ["another worker has aborted a process group"] * 2


def test_nothing_waits_long_for_a_store_that_does_not_answer(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine of the store may be the one that is gone. Then no rank commits a snapshot."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    server = forked.Process(target=serve_a_store, args=(sender,), daemon=True)
    server.start()
    group_health.begin(dist.TCPStore("127.0.0.1", receiver.recv(), is_master=False))
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    wait_for(lambda: all_threads_stand(Path(f"/proc/{server.pid}/task")), 60)  # one of them is the store's
    monkeypatch.setattr(group_health, "_ANSWER", 0.1)
    group_health.note_abort()  # returns
    assert "does not say" in group_health.abort_elsewhere()
    server.kill()
    assert "does not say" in group_health.abort_elsewhere()


def all_threads_stand(folder: Path) -> bool:
    """Whether a signal has stopped each thread of a process: that takes a moment on a busy machine."""
    return all((each / "stat").read_text().rpartition(")")[2].split()[0] == "T" for each in folder.iterdir())


def serve_a_store(port: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    signal.pause()


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    """Of a generation. Afterwards, no generation has begun."""
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group_health.begin(None)


class Backend:
    """Its aborts count, as those of torch's do."""

    aborted = False

    def _abort(self) -> None:
        self.aborted = True

    abort = group_health._counted(_abort)


@pytest.mark.parametrize("fails", ["abort", "end"])
def test_an_end_that_fails_is_a_warning(
    nccl: Callable[[], Group], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    def fail(*_: Any) -> None:
        raise dist.DistBackendError("NCCL says no\nmore")

    monkeypatch.setattr(distributed, "abort_collectives", fail if fails == "abort" else lambda *_: None)
    group = nccl()
    group.may_end.set()
    if fails == "end":
        group.shutdown = fail  # type: ignore[method-assign]
    assert distributed.leave_in_time(CPU, aborts=True, patience=60)
    assert distributed._end is not None
    distributed._end.join(60)
    assert group.ended == (fails == "abort")
    assert "NCCL says no" in caplog.text
    assert "more" not in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("aborts", [False, True])
def test_cuda_groups_follow_each_other(aborts: bool) -> None:
    """The next one works while the last one ends, and afterwards."""
    device, tensor = torch.device("cuda", 0), torch.ones(4, device="cuda")
    for _ in range(3):
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(tensor)
        torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
        dist.all_reduce(tensor)
        if aborts:
            assert distributed.abort_in_time(device, patience=60)
        assert distributed.leave_in_time(device, aborts, patience=60)
        assert not dist.is_initialized()
    assert distributed._end is not None
    distributed._end.join(60)
    assert not distributed._end.is_alive()
    assert tensor.tolist() == [1.0] * 4


def test_another_threads_connection_stays(tmp_path: Path) -> None:
    """A dataset may connect to its bucket while this worker waits for the others, and then leaves their group."""
    with meeting(2) as group:
        both = [forked.Process(target=connect_meanwhile, args=(group, rank, tmp_path), daemon=True) for rank in (0, 1)]
        for each in both:
            each.start()
        for each in both:
            each.join(60)
            each.kill()
    assert [each.exitcode for each in both] == [0, 0]
    assert all((tmp_path / str(rank)).exists() for rank in (0, 1))


def _wrap_hooks(pipe: Connection) -> None:
    before, depths = sys.excepthook, list[int]()
    for _ in range(3):
        distributed.join_alone()
        depth, hook = 0, sys.excepthook
        while hook is not before:
            inner = inspect.getclosurevars(hook).nonlocals["old_hook"]
            depth, hook = depth + 1, inner
        depths.append(depth)
        distributed.leave_process_group()
    pipe.send(depths)


def test_the_next_group_leaves_no_more_behind_than_the_last_one() -> None:
    """torch wraps `sys.excepthook` each time. After a thousand times, an error could not be shown any more."""
    here, there = forked.Pipe()
    process = forked.Process(target=_wrap_hooks, args=(there,), daemon=True)
    process.start()
    assert here.poll(60)
    assert here.recv() == [1, 1, 1]
    process.join(60)
