"""A node's part of a checkpoint, while the bucket or the disk refuses it."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from spotrun.errors import StoreError
from spotrun.node import part_uploader as module
from spotrun.node.part_uploader import PartUploader, WantedPart
from spotrun.state import slots
from spotrun.store import Store, client
from spotrun.wire import StateRef, Trouble
from tests.fakes.node import small_memory
from tests.helpers import await_for

REF = StateRef(generation=2, step=7)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", (0.01, 0.05))


def snapshot(folder: Path, step: int = 7, size: int = 1000) -> None:
    """A committed one, in the first slot. size: of its largest tensor, in numbers of 4 bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    slots.revoke(folder, 0)
    data = slots.data_path(folder, 0)
    save_file({"a": np.full(size, step, np.float32), "b": np.zeros(24, np.float32)}, data)
    size, xxh3 = slots.digest(data)
    slots.commit(folder, 0, slots.Record("j", 2, step, size, xxh3, {}))


class Uploading:
    """An uploader, and the folders around it. The bucket refuses while `refuse` says so."""

    def __init__(self, tmp_path: Path) -> None:
        self.slots, self.scratch, self.bucket = tmp_path / "slots", tmp_path / "scratch", tmp_path / "bucket"
        self.store = Store(str(self.bucket))
        self.changes = asyncio.Event()
        self.uploader = PartUploader(self.store, self.scratch, self.changes.set)
        self.wanted = WantedPart("j", self.slots, REF, 0, 1)
        snapshot(self.slots)

    def refuse(self) -> None:
        (self.bucket / "jobs/j").mkdir(parents=True)
        (self.bucket / "jobs/j/checkpoints").write_text("a file where a folder has to be")

    def accept(self) -> None:
        (self.bucket / "jobs/j/checkpoints").unlink()

    async def until(self, look: Callable[[], object], what: str) -> None:
        """Hold the wanted part, as the agent does at each turn."""

        def turn() -> object:
            self.uploader.want(self.wanted)
            return look()

        await await_for(turn, 20, what)

    def tries(self) -> int:
        return self.uploader.trouble.tries if self.uploader.trouble else 0

    def copies(self) -> list[Path]:
        return sorted(self.scratch.glob("part-*"))


async def test_a_part_gets_into_the_bucket(tmp_path: Path) -> None:
    s = Uploading(tmp_path)
    await s.until(lambda: s.uploader.part, "the part")
    part = s.uploader.part
    assert part is not None
    assert (part.step, part.generation, part.index, part.parts, part.sketch) == (7, 2, 0, 1, {})
    assert {file.name for file in part.files} == {
        path.name for path in (s.bucket / "jobs/j/checkpoints/0000000007").iterdir()
    }
    assert (s.uploader.trouble, s.uploader.late, s.copies()) == (None, None, [])


async def test_parts_of_different_states_tell_in_which_object(tmp_path: Path) -> None:
    """A tensor's name begins with that of its object. A checkpoint of one part has nothing to compare."""
    shared, found = np.zeros(5000, np.float32), []
    for number in range(2):
        s = Uploading(tmp_path / str(number))
        late = np.where(np.arange(5000) == 4999, np.float32(number), shared)  # far from its beginning
        tensors = {"model.0.weight": shared, "ema[0].w": shared + np.float32(number), "model2": late, "x": shared}
        save_file(tensors, slots.data_path(s.slots, 0))
        size, xxh3 = slots.digest(slots.data_path(s.slots, 0))
        slots.commit(s.slots, 0, slots.Record("j", 2, 7, size, xxh3, {}))
        s.wanted = WantedPart("j", s.slots, REF, number, 2)
        await s.until(lambda s=s: s.uploader.part, "the part")  # type: ignore[misc]
        assert s.uploader.part is not None
        found.append(s.uploader.part)
    first, second = (part.sketch for part in found)
    assert first.keys() == second.keys() == {"model", "ema", "model2", "x"}
    assert {name for name in first if first[name] != second[name]} == {"ema"}
    assert found[0].whole != found[1].whole


async def test_a_bucket_that_refuses_is_tried_again_from_the_same_copy(tmp_path: Path) -> None:
    s = Uploading(tmp_path)
    s.refuse()
    await s.until(lambda: s.tries() >= 2, "two failures")
    trouble, copies = s.uploader.trouble, s.copies()
    assert trouble is not None
    assert trouble.step == 7
    assert "cannot write jobs/j/checkpoints/0000000007/" in trouble.message
    assert len(copies) == 1
    snapshot(s.slots, step=9)  # the state moves on; what is tried again is the copy
    await s.until(lambda: s.tries() >= 4, "more failures")
    assert s.copies() == copies
    assert s.uploader.trouble is not None
    assert (s.uploader.trouble.since, s.uploader.late) == (trouble.since, None)
    s.accept()
    await s.until(lambda: s.uploader.part, "the part")
    assert s.uploader.trouble is None
    await await_for(lambda: not s.copies(), 20, "the copy is removed")


async def test_what_a_part_took_is_of_all_its_tries(tmp_path: Path) -> None:
    """The head trusts it when it chooses the last moment of a notice. The last try alone may be one small file."""
    s = Uploading(tmp_path)
    s.refuse()
    (tmp_path / "copy").mkdir()
    copy = module._Copy(s.wanted, tmp_path / "copy")
    with pytest.raises(StoreError):
        module._copy_and_upload(s.store, copy, lambda: False)
    copied = copy.took
    assert copied > 0
    s.accept()
    part = module._copy_and_upload(s.store, copy, lambda: False)
    assert part is not None
    assert part.took > copied
    again = module._copy_and_upload(s.store, copy, lambda: False)
    assert again == part


async def test_a_full_disk_is_told_without_copying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = Uploading(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    await s.until(lambda: s.tries() >= 2, "two failures")
    assert s.uploader.trouble is not None
    assert s.uploader.trouble.message.startswith("no room for a part of 0 MiB")
    assert [list(copy.iterdir()) for copy in s.copies()] == [[]]
    monkeypatch.undo()
    await s.until(lambda: s.uploader.part, "the part")


async def test_half_a_copy_takes_no_room_from_the_next_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program fills the disk during the first copy. Then as much is free again as before."""
    disk = tmp_path / "scratch"
    disk.mkdir()
    with small_memory(disk):
        s, tries = Uploading(tmp_path), list[Path]()
        snapshot(s.slots, size=5 << 20)  # 20 MiB of the disk's 32
        check_room = module._check_room

        def check_then_fill(folder: Path, size: int) -> None:
            (disk / "other").unlink(missing_ok=True)
            check_room(folder, size)
            if not tries:
                (disk / "other").write_bytes(bytes(16 << 20))
            tries.append(folder)

        monkeypatch.setattr(module, "_check_room", check_then_fill)
        await s.until(lambda: s.uploader.part, "the part")
        assert len(tries) == 2
        await await_for(lambda: not s.copies(), 20, "the copy is removed")


async def test_a_disk_without_room_for_a_folder_is_trouble(tmp_path: Path) -> None:
    """Also this must not end the agent, and the training with it."""
    s = Uploading(tmp_path)
    s.scratch.write_text("a file where a folder has to be")
    await s.until(lambda: s.tries() >= 2, "two failures")
    assert s.uploader.trouble is not None
    assert str(s.scratch) in s.uploader.trouble.message
    s.scratch.unlink()
    await s.until(lambda: s.uploader.part, "the part")
    await await_for(lambda: not s.copies(), 20, "the copy is removed")


async def test_a_notice_ends_the_pause_between_two_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", (3600.0, 3600.0))
    s = Uploading(tmp_path)
    s.refuse()
    await s.until(s.tries, "a failure")
    s.accept()
    s.uploader.hurry()
    await s.until(lambda: s.uploader.part, "the part")


async def test_pauses_under_notice_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", (3600.0, 3600.0))
    s = Uploading(tmp_path)
    s.uploader.hurry()
    s.refuse()
    await s.until(lambda: s.tries() >= 3, "three failures")
    s.accept()
    await s.until(lambda: s.uploader.part, "the part")


async def test_a_snapshot_that_is_not_there_is_late_and_no_trouble(tmp_path: Path) -> None:
    s = Uploading(tmp_path)
    snapshot(s.slots, step=9)
    await s.until(lambda: s.uploader.late == 7, "late")
    assert (s.uploader.part, s.uploader.trouble) == (None, None)


async def test_what_is_not_wanted_any_more_ends_and_leaves_nothing(tmp_path: Path) -> None:
    s = Uploading(tmp_path)
    s.refuse()
    await s.until(lambda: s.tries() >= 1, "a failure")
    s.uploader.want(None)
    await await_for(lambda: not s.copies(), 20, "the copy is removed")
    assert s.uploader.trouble is not None, "nothing has been saved since"
    s.uploader.forget()
    assert (s.uploader.trouble, s.uploader.part, s.uploader.late) == (None, None, None)


async def test_another_step_takes_over_from_one_that_fails(tmp_path: Path) -> None:
    s = Uploading(tmp_path)
    s.refuse()
    await s.until(lambda: s.tries() >= 1, "a failure")
    since = s.uploader.trouble.since if s.uploader.trouble else 0.0
    snapshot(s.slots, step=9)
    s.wanted = WantedPart("j", s.slots, StateRef(generation=2, step=9), 0, 1)
    await s.until(lambda: s.uploader.trouble and s.uploader.trouble.step == 9, "a failure of the next step")
    assert s.uploader.trouble is not None
    assert s.uploader.trouble.since == since, "it has been failing since then"
    s.accept()
    await s.until(lambda: s.uploader.part, "the part")
    assert s.uploader.part is not None
    assert s.uploader.part.step == 9


async def test_trouble_of_long_ago_does_not_count_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = Uploading(tmp_path)
    s.refuse()
    await s.until(lambda: s.tries() >= 1, "a failure")
    s.uploader.want(None)
    assert isinstance(s.uploader.trouble, Trouble)
    monkeypatch.setattr(module, "FORGOTTEN", -1.0)
    s.uploader.want(None)
    assert s.uploader.trouble is None


async def test_a_stopped_attempt_does_not_finish_its_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload stops in the middle of a file, and the bucket has nothing of that file."""
    monkeypatch.setattr(client, "_PART", 1000)
    u = Uploading(tmp_path)
    reading, proceed = threading.Event(), threading.Event()
    read_parts = client._read_parts

    def slowly(path: Path, size: int, stopped: Callable[[], bool]) -> Iterator[bytes]:
        for part in read_parts(path, size, stopped):
            yield part
            reading.set()
            proceed.wait(20)

    monkeypatch.setattr(client, "_read_parts", slowly)
    u.uploader.want(u.wanted)
    await asyncio.to_thread(reading.wait, 20)
    u.uploader.want(None)
    proceed.set()
    await await_for(lambda: not u.copies(), 20, "the copy is removed")
    assert [path for path in u.bucket.rglob("*") if path.is_file()] == []
    assert u.uploader.trouble is None
