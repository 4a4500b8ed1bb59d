"""The folders that a job leaves in the bucket, and finds again on another node."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from spotrun.errors import CorruptError, StoreError
from spotrun.folders import FoldersRef, Input, Keeping
from spotrun.node.kept_folders import Keeper, fetch
from spotrun.store import Store, kept_key


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "out" / "deep").mkdir(parents=True)
    (folder / "out" / "a.bin").write_bytes(os.urandom(3 << 20))
    (folder / "out" / "deep" / "b c.txt").write_text("b")
    (folder / "out" / "empty").touch()
    (folder / "out" / "newest").symlink_to("deep")
    (folder / "other").mkdir()
    (folder / "secret").write_text("s")
    return folder


async def keep(store: Store, work: Path, *folders: str, generation: int = 1) -> Keeping:
    """What the node reports when it is done, or when its first try has failed."""
    changed = asyncio.Event()
    keeper = Keeper(store, changed.set)
    keeper.want("j-1", work, folders, generation)
    await changed.wait()
    assert keeper.keeping is not None
    found = keeper.keeping
    keeper.stop()
    return found


def wanted(ref: FoldersRef | None, folder: str = "out") -> Input:
    assert ref is not None
    return Input(name="here", job="j-1", folder=folder, ref=ref)


async def test_a_folder_comes_back_as_it_was(tmp_path: Path, work: Path) -> None:
    store, target = Store(str(tmp_path / "bucket")), tmp_path / "target"
    target.mkdir()
    kept = await keep(store, work, "out", "other")
    assert (kept.problem, kept.trouble) == ("", "")
    assert await keep(store, work, "out", "other") == kept, "another try finds what the first one has uploaded"
    await asyncio.to_thread(fetch, store, wanted(kept.ref), target)
    for name in ("a.bin", "deep/b c.txt", "empty", "newest/b c.txt"):
        assert (target / "here" / name).read_bytes() == (work / "out" / name).read_bytes()
    assert os.readlink(target / "here" / "newest") == "deep"
    assert not store.exists(kept_key("j-1", 1, "secret"))


class SideBySide(Store):
    """Each request waits until some others are under way."""

    together = threading.Barrier(4, timeout=30)

    def fetch(self, key: str, path: Path, size: int | None = None) -> None:
        self.together.wait()
        super().fetch(key, path, size)

    def keep(self, key: str, path: Path, stopped: Callable[[], bool] | None = None) -> None:
        self.together.wait()
        super().keep(key, path, stopped)


async def test_small_files_are_sent_and_fetched_side_by_side(tmp_path: Path) -> None:
    """With 20,000 files, the waits for the bucket would take many minutes one after the other."""
    (tmp_path / "work" / "out").mkdir(parents=True)
    (tmp_path / "target").mkdir()
    for number in range(16):
        (tmp_path / "work" / "out" / str(number)).write_text(str(number))
    store = SideBySide(str(tmp_path / "bucket"))
    kept = await keep(store, tmp_path / "work", "out")
    await asyncio.to_thread(fetch, store, wanted(kept.ref), tmp_path / "target")
    found = {path.name: path.read_text() for path in (tmp_path / "target" / "here").iterdir()}
    assert found == {str(number): str(number) for number in range(16)}


async def test_a_log_that_an_older_agent_has_kept(tmp_path: Path) -> None:
    """Its key ends with its name."""
    store, data = Store(str(tmp_path / "bucket")), b"done"
    file = {"name": "out/train.log", "size": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data), "link": ""}
    listed = json.dumps({"format": 1, "folders": ["out"], "files": [file]}).encode()
    store.put(kept_key("j-1", 1), listed)
    store.put(kept_key("j-1", 1, "out/train.log"), data)
    ref = FoldersRef(generation=1, sha256=hashlib.sha256(listed).hexdigest())
    (tmp_path / "target").mkdir()
    await asyncio.to_thread(fetch, store, wanted(ref), tmp_path / "target")
    assert (tmp_path / "target/here/train.log").read_bytes() == data


def fifo(work: Path) -> None:
    os.mkfifo(work / "out" / "pipe")


def link_out(work: Path) -> None:
    (work / "out" / "deep" / "link").symlink_to("../../secret")


def link_to_root(work: Path) -> None:
    (work / "out" / "link").symlink_to("/etc/passwd")


def bad_name(work: Path) -> None:
    (work / "out" / "a\nb").touch()


def replaced(work: Path) -> None:
    (work / "out").rename(work / "moved")
    (work / "out").symlink_to("moved")


def missing(work: Path) -> None:
    (work / "out").rename(work / "moved")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (fifo, "keep: out/pipe: is neither a file nor a folder nor a link"),
        (link_out, "keep: out/deep/link: is a link out of out; copy what it leads to"),
        (link_to_root, "keep: out/link: is a link out of out; copy what it leads to"),
        (bad_name, "keep: 'out/a\\nb': is not a name that a bucket can have; rename it"),
        (replaced, "keep: out: is not a folder, or is a link"),
        (missing, "keep: out: does not exist when the script has ended"),
    ],
    ids=["a pipe", "a link out of it", "an absolute link", "a line break", "a link in its place", "no folder"],
)
async def test_a_folder_that_cannot_be_kept(
    tmp_path: Path, work: Path, spoil: Callable[[Path], None], problem: str
) -> None:
    spoil(work)
    found = await keep(Store(str(tmp_path / "bucket")), work, "out")
    assert (found.problem, found.ref) == (problem, None)


async def test_a_bucket_that_refuses_is_tried_again(tmp_path: Path, work: Path) -> None:
    (tmp_path / "bucket" / "jobs").mkdir(parents=True)
    (tmp_path / "bucket" / "jobs" / "j-1").write_text("a file in the place of a folder")
    found = await keep(Store(str(tmp_path / "bucket")), work, "out")
    assert found.trouble
    assert found.ref is None


async def test_what_was_changed_in_the_bucket_is_not_taken(tmp_path: Path, work: Path) -> None:
    store = Store(str(tmp_path / "bucket"))
    ref = (await keep(store, work, "out")).ref

    def refusal(name: str, wants: Input) -> str:
        target = tmp_path / name
        target.mkdir()
        with pytest.raises((CorruptError, StoreError)) as caught:
            fetch(store, wants, target)
        return str(caught.value)

    assert refusal("1", wanted(ref, "in")) == "inputs.here: j-1 has left no folder in"
    store.put(kept_key("j-1", 1, "out/deep/b c.txt"), b"B")
    assert "is damaged" in refusal("2", wanted(ref))
    store.put(kept_key("j-1", 1, "out/deep/b c.txt"), b"b")
    store.put(kept_key("j-1", 1, "out/a.bin"), b"shorter")
    assert "a.bin is damaged" in refusal("6", wanted(ref))
    store.put(kept_key("j-1", 1, "out/a.bin"), work / "out" / "a.bin")
    store.delete([kept_key("j-1", 1, "out/deep/b c.txt")])
    assert "has been deleted" in refusal("3", wanted(ref))
    store.put(kept_key("j-1", 1), b"{}")
    assert "its checksum differs" in refusal("4", wanted(ref))
    store.delete([kept_key("j-1", 1)])
    assert "has been deleted; run j-1 again" in refusal("5", wanted(ref))


class Disturbed(Store):
    """A bucket from which each object first arrives with a wrong byte."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.fetched: list[str] = []

    def fetch(self, key: str, path: Path, size: int | None = None) -> None:
        super().fetch(key, path, size)
        if key not in self.fetched and size:
            path.write_bytes(bytes(size))
        self.fetched.append(key)


async def test_what_was_damaged_on_its_way_is_read_again(tmp_path: Path, work: Path) -> None:
    store, target = Disturbed(str(tmp_path / "bucket")), tmp_path / "target"
    target.mkdir()
    kept = await keep(store, work, "out")
    await asyncio.to_thread(fetch, store, wanted(kept.ref), target)
    for name in ("a.bin", "deep/b c.txt", "empty"):
        assert (target / "here" / name).read_bytes() == (work / "out" / name).read_bytes()
    assert len(store.fetched) == 5, "the two that are not empty twice"
