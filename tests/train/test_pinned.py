"""The memory that a GPU copies snapshots into: locked once, beside training, in chunks. The driver is played."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spotrun.state import slots
from spotrun.train import pinned, snapshot
from spotrun.train.pinned import PinnedMemory
from spotrun.train.snapshot import Writer
from spotrun.train.staging import Copy, Staging
from tests.helpers import wait_for
from tests.train.blocks import block
from tests.train.late import Late


class Driver:
    """Locks memory as CUDA does: a page only once."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room  # bytes
        self.locked: dict[int, int] = {}  # size, by address

    def register(self, address: int, size: int) -> int:
        if any(address < at + length and at < address + size for at, length in self.locked.items()):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        if sum(self.locked.values()) + size > self.room:
            return 2  # cudaErrorMemoryAllocation
        self.locked[address] = size
        return 0

    def unregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 3000), st.integers(0, 3000), st.integers(50, 700))
def test_no_copy_leaves_its_chunk(size: int, at: int, length: int, chunk: int) -> None:
    at %= size
    length %= size - at + 1
    driver = Driver()
    pins = PinnedMemory(driver.register, driver.unregister, chunk)
    pins.add(4096, size)
    assert sum(driver.locked.values()) == size
    pieces = pins.pieces(4096 + at, length)
    assert [byte for piece in pieces for byte in piece] == list(range(length))
    for piece in pieces:
        if piece:
            assert (at + piece.start) // chunk == (at + piece.stop - 1) // chunk
    pins.remove(4096)
    assert driver.locked == {}


def test_memory_that_cannot_be_locked_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(room=250)
    pins = PinnedMemory(driver.register, driver.unregister, 100)
    pins.add(4096, 300)
    assert "cudaHostRegister: error 2" in caplog.text
    assert driver.locked == {}  # half of it locked would help nobody
    assert pins.pieces(4096 + 50, 100) == [range(100)]
    pins.remove(4096)


def test_the_driver_is_free_for_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training launches kernels meanwhile."""
    now, pauses = [0.0], list[float]()

    def register(address: int, size: int) -> int:
        now[0] += size / 2000
        return 0

    monkeypatch.setattr(pinned, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=pauses.append))
    PinnedMemory(register, lambda address: 0, 100).add(4096, 450)
    assert pauses == pytest.approx([0.05] * 4)
    PinnedMemory(register, lambda address: 0, 1000).add(4096, 2000)
    assert pauses[4:] == [0.1], "at most: the process may have been stopped"


def test_locked_memory_stays() -> None:
    """Otherwise the driver would take new memory at this address for the old memory."""
    driver = Driver()
    pins = PinnedMemory(driver.register, driver.unregister)
    memory = torch.ones(10)
    held = weakref.ref(memory)
    pins.add(memory.data_ptr(), memory.nbytes, memory)
    address = memory.data_ptr()
    del memory
    assert held() is not None
    pins.remove(address)
    assert held() is None


def test_memory_is_unlocked_when_its_pinned_memory_is_gone() -> None:
    """Later memory at these addresses is not taken for the old one: `cudaMemcpy` refuses what is locked in part."""
    driver = Driver()
    pins = PinnedMemory(driver.register, driver.unregister, 100)
    memory = torch.ones(100)
    held = weakref.ref(memory)
    pins.add(memory.data_ptr(), memory.nbytes, memory)
    pins.add(1 << 50, 1000)
    del memory
    assert held() is not None
    del pins
    assert driver.locked == {}
    assert held() is None


class Locking(Late):
    """A stage that says what it was told to lock, and in which thread."""

    def __init__(self) -> None:
        super().__init__()
        self.locked: dict[int, int] = {}
        self.threads: list[threading.Thread] = []

    def pin(self, memory: torch.Tensor) -> None:
        self.locked[memory.data_ptr()] = memory.numel()
        self.threads.append(threading.current_thread())

    def unpin(self, memory: torch.Tensor) -> None:
        del self.locked[memory.data_ptr()]

    def start(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], beside: Sequence[bool]) -> Copy:
        for _, target in pairs:
            assert any(at <= target.data_ptr() < at + size for at, size in self.locked.items())
        return super().start(pairs, beside)


def test_a_slot_is_locked_before_it_is_needed_and_until_it_goes(tmp_path: Path) -> None:
    stage = Locking()
    writer = Writer(tmp_path, "job", 1, block(), stage=stage)
    state = {"x": torch.ones(100)}
    writer.prepare({"state.x": state["x"]})
    assert len(stage.locked) == 1
    for step in (1, 2):
        assert writer.take(step, lambda encoder: encoder.encode(state, "state"), set(), wait=True)
        writer.settle()
    sizes = [slots.data_path(tmp_path, slot).stat().st_size for slot in slots.SLOTS]
    assert sorted(stage.locked.values()) == sorted(sizes)  # nothing beside the slots, nothing rounded up
    state["x"] = torch.ones(200)
    for step in (3, 4):
        assert writer.take(step, lambda encoder: encoder.encode(state, "state"), set(), wait=True)
        writer.settle()
    assert len(stage.locked) == 2
    assert len(stage.threads) == 4


def test_a_large_slot_is_laid_out_beside_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "EAGER", 1000)
    stage = Locking()
    writer = Writer(tmp_path, "job", 1, block(), stage=stage)
    writer.prepare({"state.x": torch.ones(100)})
    state = {"x": torch.ones(100), "momentum": torch.ones(300)}  # after the first step
    assert not writer.take(1, lambda encoder: encoder.encode(state, "state"), set(), wait=False)
    wait_for(lambda: not writer._busy)
    assert writer.take(2, lambda encoder: encoder.encode(state, "state"), set(), wait=False)
    wait_for(lambda: not writer._busy)
    assert [record.step for _, record in slots.newest(tmp_path, "job")] == [2]
    here = threading.current_thread()
    assert [thread is here for thread in stage.threads] == [True, False, False]  # `prepare` is before training
    state["more"] = torch.ones(300)
    assert writer.take(3, lambda encoder: encoder.encode(state, "state"), set(), wait=True)  # one that cannot wait
    writer.settle()
    assert slots.newest(tmp_path, "job")[0][1].step == 3


def test_room_for_the_optimizer_is_made_after_the_first_step(tmp_path: Path) -> None:
    stage = Locking()
    writer = Writer(tmp_path, "job", 1, block(), stage=stage)
    writer.prepare({"state.x": torch.ones(100)})
    state = {"x": torch.ones(100), "momentum": torch.ones(300)}
    writer.make_room(lambda encoder: encoder.encode(state, "state"))
    wait_for(lambda: not writer._busy)
    assert writer.take(5, lambda encoder: encoder.encode(state, "state"), set(), wait=True)
    wait_for(lambda: not writer._busy)
    here = threading.current_thread()
    assert [thread is here for thread in stage.threads] == [True, False, False]


@pytest.mark.gpu
def test_cuda_copies_straight_into_a_slot(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot's own memory is locked; a tensor that lies across chunks arrives whole; locking twice breaks nothing."""
    stage = Staging(torch.device("cuda", 0))
    monkeypatch.setattr(stage._pins, "_chunk", 1 << 20)
    writer = Writer(memory, "job", 1, block(), stage=stage)
    state = {"x": torch.arange(1_000_000, device="cuda"), "half": torch.randn(999, 1001, device="cuda").half().t()}
    writer.take(1, lambda encoder: encoder.encode(state, "state"), set(), wait=True)
    writer.settle()
    slot = writer._slots[slots.newest(memory, "job")[0][0]]
    assert slot.flat[: 1 << 20].is_pinned()
    for name, tensor in state.items():
        assert torch.equal(slot.views[f"state.{name}"], tensor.cpu())
    assert stage._pins._register(slot.flat.data_ptr(), 4096) != 0
    assert float(torch.ones(2, device="cuda").sum()) == 2.0
