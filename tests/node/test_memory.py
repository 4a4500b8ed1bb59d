"""The memory and the devices that jobs on one node need, hold and take from each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spotrun.node import claims, memory
from spotrun.node.claims import Claims
from spotrun.node.memory import Need
from spotrun.state import slots
from tests.fakes.node import small_memory

MB = 1 << 20


def slot(folder: Path, number: int, size: int) -> None:
    """A slot's data file, with all its pages."""
    path = slots.data_path(folder / "slots", number)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))


@pytest.mark.parametrize(
    ("state", "held", "missing"),
    [
        pytest.param(0, (), 0, id="nothing is known of its size"),
        pytest.param(8 * MB, (), 16 * MB, id="the head knows its size"),
        pytest.param(0, (8 * MB,), 8 * MB, id="one slot has its size"),
        pytest.param(0, (8 * MB, 8 * MB), 0, id="both slots have their memory"),
        pytest.param(12 * MB, (8 * MB, 8 * MB), 8 * MB, id="it has grown"),
        pytest.param(4 * MB, (8 * MB,), 8 * MB, id="the head knows an older size"),
    ],
)
def test_a_job_needs_two_snapshots(tmp_path: Path, state: int, held: tuple[int, ...], missing: int) -> None:
    for number, size in enumerate(held):
        slot(tmp_path, number, size)
    assert Need(tmp_path, state).missing == missing


@pytest.mark.parametrize(
    ("free", "own", "others", "lack"),
    [
        pytest.param(100, 50, (), 0, id="it fits alone"),
        pytest.param(99, 50, (), 1, id="it does not fit alone"),
        pytest.param(100, 20, (15, 15), 0, id="it fits beside two others"),
        pytest.param(100, 20, (15, 16), 2, id="it does not fit beside two others"),
        pytest.param(10, 0, (20,), 0, id="a job of unknown size is let in"),
    ],
)
def test_what_is_missing_for_all_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, own: int, others: tuple[int, ...], lack: int
) -> None:
    monkeypatch.setattr(claims, "free", lambda folder: free)
    found = Claims(tmp_path)
    for number, state in enumerate(others):
        found.make(f"job-{number}", (number,), Need(tmp_path / str(number), state), lambda: True)
    found.make("ended", (8,), Need(tmp_path / "ended", 1000), lambda: False)
    assert found.lack(Need(tmp_path / "own", own)) == lack


def test_a_claim_holds_as_long_as_its_workers_live(tmp_path: Path) -> None:
    living, found = {"one", "two"}, Claims(tmp_path)
    found.make("one", (0, 1), Need(tmp_path), lambda: "one" in living)
    found.make("two", (3,), Need(tmp_path), lambda: "two" in living)
    assert found.holder((2,)) is None
    assert found.holder((2, 1, 0)) == (1, "one")
    assert found.holder((3, 0)) == (3, "two")
    assert found.devices("one") == (0, 1)
    living.remove("one")
    assert found.holder((0, 1)) is None
    assert (found.devices("one"), found.devices("two")) == ((), (3,))
    found.make("three", (0,), Need(tmp_path), lambda: True)
    assert sorted(found._claims) == ["three", "two"], "a node may serve thousands of jobs"


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory of 32 MiB."""
    folder = tmp_path / "memory"
    folder.mkdir()
    with small_memory(folder):
        yield folder


def test_a_tmpfs_has_the_room_of_its_mount(tmpfs: Path) -> None:
    assert 31 * MB < memory.free(tmpfs) <= 32 * MB
    (tmpfs / "some").write_bytes(bytes(8 * MB))
    assert memory.free(tmpfs) <= 24 * MB


def test_files_of_a_job_that_leave_no_room_for_others(tmpfs: Path) -> None:
    greedy, modest = tmpfs / "greedy", tmpfs / "modest"
    slot(modest, 0, 10 * MB)
    (modest / "control").mkdir()
    (modest / "control" / "1.0").write_bytes(bytes(4096))
    slot(greedy, 1, 1 * MB)
    (greedy / "own" / "deep").mkdir(parents=True)
    (greedy / "own" / "deep" / "file").write_bytes(bytes(15 * MB))
    assert memory.excess(greedy) == 0, "there is room"
    (greedy / "slots" / "more").write_bytes(bytes(4 * MB))
    assert memory.excess(greedy) == 19 * MB
    assert memory.excess(modest) == 0
    for path in list(memory.strays(greedy)):
        path.unlink()
    assert memory.excess(greedy) == 0
    assert slots.data_path(greedy / "slots", 1).exists()
