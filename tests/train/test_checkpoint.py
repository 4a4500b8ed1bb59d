"""Checkpoints: what is complete, what is damaged, what is kept."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import assume, example, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from spotrun.errors import CorruptError, SpotrunError, StoreError
from spotrun.node import memory
from spotrun.state import checkpoints, shards, slots
from spotrun.state.control import Context
from spotrun.store import Store, checkpoint_key
from spotrun.train import download, transfer
from spotrun.train import restore as restoring
from spotrun.train.encoding import decode
from spotrun.train.restore import Found, restore
from spotrun.train.slot_files import Reader
from spotrun.train.snapshot import Writer
from spotrun.wire import FileRef, Manifest, StateRef
from tests.fakes.node import small_memory
from tests.train.blocks import block, encoding
from tests.train.forks import forked

State = Callable[[int], dict[str, Any]]


def state_at(step: int) -> dict[str, Any]:
    return {
        "weight": torch.arange(1000.0) + step,
        "small": [torch.full((n,), step) for n in range(5)],
        "half": torch.ones(3, 3).bfloat16(),
        "note": ("a", None, float("inf")),
    }


def snapshot(folder: Path, step: int, generation: int = 1, state: State = state_at) -> None:
    writer = Writer(folder, "job", generation, block())
    writer.take(step, lambda encoder: encoder.encode(state(step), "state"), set(), wait=True)
    writer.settle()


def save(
    store: Store,
    tmp_path: Path,
    step: int,
    generation: int = 1,
    parts: int = 3,
    manifest: bool = True,
    state: State = state_at,
) -> None:
    """What the nodes and the head do together to make a checkpoint."""
    folder = tmp_path / f"node-{generation}-{step}"
    snapshot(folder, step, generation, state)
    slot = slots.newest(folder, "job")[0][0]
    files = []
    for index in range(parts):
        with slots.reading(folder, slot):
            written = shards.write_part(folder, slot, index, parts, tmp_path / f"out-{index}")
        for name, path, size, xxh3 in written:
            store.put(checkpoint_key("job", step, name), path)
            files.append(FileRef(name=name, size=size, xxh3=xxh3))
    if manifest:
        document = Manifest(job="job", generation=generation, step=step, created=time.time(), files=tuple(files))
        checkpoints.publish(store, document)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "bucket"))


def object_path(tmp_path: Path, step: int, name: str) -> Path:
    return tmp_path / "bucket" / checkpoint_key("job", step, name)


def context(tmp_path: Path, *found: tuple[int, int]) -> Context:
    return Context("job", 3, "n", "", str(tmp_path / "slots"), str(tmp_path / "bucket"), 0, list(found))


def check(folder: Path, slot: int, step: int) -> None:
    record = slots.read(folder, slot)
    assert record is not None
    slots.verify(folder, slot, record)
    check_found(Found(record, Reader(folder, slot), kept=True, sending=[]), step)


def check_found(state: Found, step: int) -> None:
    assert state.record.step == step
    found = decode(state.record.state, state.tensors.tensor)
    wanted = state_at(step)
    assert torch.equal(found["weight"], wanted["weight"])
    assert [t.tolist() for t in found["small"]] == [t.tolist() for t in wanted["small"]]
    assert found["half"].dtype == torch.bfloat16
    assert found["note"] == wanted["note"]


@given(st.lists(st.integers(0, 1000)), st.integers(1, 9))
def test_partition_is_complete_and_balanced(sizes: list[int], parts: int) -> None:
    runs = shards.partition(sizes, parts)
    assert len(runs) == parts
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    for run in runs:
        assert sum(sizes[index] for index in run) <= sum(sizes) / parts + max(sizes, default=0)


@pytest.mark.parametrize("parts", [1, 2, 3, 20])
def test_round_trip(store: Store, tmp_path: Path, parts: int) -> None:
    save(store, tmp_path, 10, parts=parts)
    folder = tmp_path / "slots"
    folder.mkdir()
    record = download.fetch(store, "job", 10, folder, 1)
    assert record.order == (1, 10)
    check(folder, 1, 10)
    assert sorted(path.name for path in folder.iterdir()) == ["1.json", "1.safetensors"]


def test_keys_of_a_later_version_are_ignored(store: Store, tmp_path: Path) -> None:
    """In a snapshot's record, and in the same record in a checkpoint."""
    save(store, tmp_path, 10)
    manifest = checkpoints.read_manifest(store, "job", 10)
    files = {each.name: each for each in manifest.files}
    (name,) = (each for each in files if "state" in each)
    state = json.loads(store.get(key := checkpoint_key("job", 10, name)))
    state["record"]["later"] = state["later"] = 1
    text = json.dumps(state).encode()
    store.put(key, text)
    files[name] = FileRef(name=name, size=len(text), xxh3=xxhash.xxh3_128_hexdigest(text))
    store.put(checkpoint_key("job", 10), manifest.replace(files=tuple(files.values())).model_dump_json().encode())
    found = restore(context(tmp_path, (1, 10)), 0, None)
    assert found is not None
    check_found(found, 10)

    folder = tmp_path / "node-1-10"
    ((slot, record),) = slots.newest(folder, "job")
    inner = json.dumps(vars(record) | {"later": 1})
    outer = {"record": inner, "xxh3": xxhash.xxh3_128_hexdigest(inner.encode()), "later": 1}
    slots.record_path(folder, slot).write_text(json.dumps(outer))
    check(folder, slot, 10)


def test_shards_are_what_other_tools_read(store: Store, tmp_path: Path) -> None:
    save(store, tmp_path, 10)
    index = json.loads(object_path(tmp_path, 10, shards.index_name(1, 3)).read_text())
    assert sorted(set(index["weight_map"].values())) == [shards.shard_name(1, number, 3) for number in range(3)]
    tensors: dict[str, Any] = {}
    for name in set(index["weight_map"].values()):
        tensors |= load_file(object_path(tmp_path, 10, name))
    assert tensors.keys() == index["weight_map"].keys()
    assert torch.equal(tensors["state.weight"], state_at(10)["weight"])  # type: ignore[arg-type]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_a_slot_without_a_whole_snapshot_is_not_uploaded(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match="has no record"):
        shards.write_part(tmp_path, 0, 0, 1, tmp_path)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (shards.shard_name(2, 1, 3), "cut"),
        (shards.shard_name(2, 0, 3), "flip"),
        (shards.shard_name(2, 2, 3), "gone"),
        (shards.state_name(2, 3), "flip"),
        (shards.state_name(2, 3), "gone"),
        ("manifest.json", "cut"),
        ("manifest.json", "junk"),
    ],
)
def test_damaged_ones_are_passed_over(
    store: Store, tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, tmp_path, 10)
    save(store, tmp_path, 20, generation=2)
    path = object_path(tmp_path, 20, name)
    if damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif damage == "flip":
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    elif damage == "gone":
        path.unlink()
    else:
        path.write_text('{"job": "other", "files": [{"name": "../../x"}]}')
    folder = tmp_path / "slots"
    folder.mkdir()
    with pytest.raises(CorruptError, match=checkpoint_key("job", 20, name)):
        download.fetch(store, "job", 20, folder, 0)
    assert slots.newest(folder, "job") == []
    found = restore(context(tmp_path, (2, 20), (1, 10)), 0, None)
    assert found is not None
    assert checkpoint_key("job", 20, name) in caplog.text
    check_found(found, 10)
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []


def test_one_that_was_damaged_on_its_way_is_read_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the job would go on from an older state, or fail if there is none."""
    save(store, tmp_path, 10)
    part, keys = Store.part, list[str]()

    def disturbed(self: Store, key: str, start: int, end: int) -> bytes:
        keys.append(key)
        data = part(self, key, start, end)
        return bytes(len(data)) if keys == [key] else data

    monkeypatch.setattr(Store, "part", disturbed)
    found = restore(context(tmp_path, (1, 10)), 0, None)
    assert found is not None
    check_found(found, 10)


class Dying(Store):
    """A bucket whose client is killed right before, or right after, its nth write."""

    def __init__(self, url: str, nth: int, after: bool) -> None:
        super().__init__(url)
        self.left, self.after = nth, after

    def put(self, key: str, data: bytes | Path, stopped: Callable[[], bool] | None = None) -> None:
        self._die(not self.after)
        super().put(key, data, stopped)
        self._die(self.after)

    def create(self, key: str, data: bytes) -> bool:
        self._die(not self.after)
        created = super().create(key, data)
        self._die(self.after)
        return created

    def _die(self, now: bool) -> None:
        self.left -= now
        if now and self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(folder: Path, nth: int, after: bool) -> None:
    """Runs in a process of its own."""
    save(Dying(str(folder / "bucket"), nth, after), folder / "writer", 20, generation=2)


WRITES = 6  # three shards, the state, the index, the manifest


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_writer_killed_at_every_stage(store: Store, tmp_path: Path, after: bool) -> None:
    """What it leaves is never read; the checkpoint before it is. Only the last write makes it count."""
    save(store, tmp_path, 10)
    for nth in range(1, WRITES + 1):
        killed = forked.Process(target=save_and_die, args=(tmp_path, nth, after))
        killed.start()
        killed.join()
        assert killed.exitcode == -signal.SIGKILL, "it has fewer writes than this test believes"
        whole = nth == WRITES and after
        wanted = [StateRef(generation=2, step=20)] if whole else []
        assert checkpoints.list_complete(store, "job") == [*wanted, StateRef(generation=1, step=10)]
        folder = tmp_path / f"slots-{nth}"
        folder.mkdir()
        found = restore(dataclasses.replace(context(tmp_path, (2, 20), (1, 10)), slots=str(folder)), 0, None)
        assert found is not None
        check_found(found, 20 if whole else 10)


def test_a_manifest_cannot_name_files_elsewhere(store: Store) -> None:
    files = (FileRef(name="../../../code/x", size=1, xxh3="0"),)
    manifest = Manifest(job="job", generation=1, step=10, created=0, files=files)
    store.put(checkpoint_key("job", 10), manifest.model_dump_json().encode())
    with pytest.raises(ValueError, match="outside its folder"):
        checkpoints.read_manifest(store, "job", 10)


@pytest.mark.parametrize("local", [(1, 5), (1, 10), (2, 3)])
def test_the_newer_of_memory_and_bucket_counts(store: Store, tmp_path: Path, local: tuple[int, int]) -> None:
    save(store, tmp_path, 10)
    folder = tmp_path / "slots"
    writer = Writer(folder, "job", local[0], block())
    writer.take(local[1], lambda encoder: encoder.encode(state_at(local[1]), "state"), set(), wait=True)
    writer.settle()
    found = restore(context(tmp_path, (1, 10)), 0, None)
    assert found is not None
    assert found.record.order == max(local, (1, 10))
    check_found(found, found.record.step)


def test_nothing_anywhere_is_a_fresh_start(tmp_path: Path) -> None:
    assert restore(context(tmp_path), 0, None) is None


def test_a_bucket_that_does_not_answer_is_asked_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that gave up would count as a failure of the job."""
    save(store, tmp_path, step=10)
    bucket, pauses = tmp_path / "bucket", []
    bucket.rename(tmp_path / "away")
    bucket.touch()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            bucket.unlink()
            (tmp_path / "away").rename(bucket)

    monkeypatch.setattr(restoring, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    found = restore(context(tmp_path, (1, 10)), 0, None)
    assert found is not None
    check_found(found, 10)
    assert pauses == [1.0, 2.0, 4.0]


def test_a_bucket_is_not_asked_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bucket").touch()
    monkeypatch.setattr(restoring, "BUCKET_PATIENCE", 0.0)
    monkeypatch.setattr(restoring, "time", SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic))
    with pytest.raises(StoreError, match="cannot use this bucket"):
        restore(context(tmp_path, (1, 10)), 0, None)


@pytest.mark.parametrize(("generation", "goes_on"), [(1, False), (2, True)], ids=["older", "the same"])
def test_a_state_of_an_older_generation_is_no_way_out_of_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generation: int, goes_on: bool
) -> None:
    """A spare node has the state of the generation in which it was last: hours of training may lie between."""
    snapshot(tmp_path / "slots", 15, generation)
    (tmp_path / "bucket").touch()
    for name in ("BUCKET_PATIENCE", "BUCKET_PATIENCE_WITH_STATE"):
        monkeypatch.setattr(restoring, name, 0.0)
    with contextlib.nullcontext() if goes_on else pytest.raises(StoreError, match="cannot use this bucket"):
        found = restore(context(tmp_path, (2, 20), (1, 10)), 0, None)
        assert found is not None
        check_found(found, 15)


def test_none_of_the_checkpoints_can_be_read(store: Store, tmp_path: Path) -> None:
    """Beginning again would be a silent loss of everything."""
    save(store, tmp_path, 10)
    object_path(tmp_path, 10, shards.shard_name(1, 0, 3)).unlink()
    with pytest.raises(SpotrunError, match="none of the 1 checkpoints of job job can be read"):
        restore(context(tmp_path, (1, 10)), 0, None)


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """This process can open no file."""
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_snapshot_that_cannot_be_opened_now_is_not_damaged(tmp_path: Path) -> None:
    """Otherwise a worker with too many open files would go on from an older state, and remove the newest one."""
    folder = tmp_path / "slots"
    snapshot(folder, 5)
    with no_more_files(), pytest.raises(OSError, match="Too many open files"):
        restore(context(tmp_path), 0, None)
    record = slots.read(folder, 0)
    assert record is not None
    with no_more_files(), pytest.raises(OSError, match="Too many open files"):
        slots.verify(folder, 0, record)
    found = restore(context(tmp_path), 0, None)
    assert found is not None
    assert found.record.step == 5


def test_another_jobs_snapshot_is_not_ours(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "slots", "other", 9, block())
    writer.take(1, lambda encoder: encoder.encode(state_at(1), "state"), set(), wait=True)
    writer.settle()
    assert restore(context(tmp_path), 0, None) is None


def test_complete_and_prune(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (10, 20, 30):
        save(store, tmp_path, step)
    save(store, tmp_path, 25, generation=2)  # after a return to step 20: newer than step 30 of generation 1
    save(store, tmp_path, 15, manifest=False)
    save(store, tmp_path, 35, generation=2, manifest=False)
    store.put(checkpoint_key("job", 40), b"junk")
    store.put(checkpoint_key("job", 25, "g1-state.json"), b"left by a generation that died here")
    store.put(checkpoint_key("job", 30, "g3-state-of-00001.json"), b"may still be on its way")
    store.put("jobs/job/checkpoints/readme.txt", b"someone's note")
    order = [StateRef(generation=g, step=s) for g, s in ((2, 25), (1, 30), (1, 20), (1, 10))]
    assert checkpoints.list_complete(store, "job") == order
    assert checkpoint_key("job", 40) in caplog.text
    checkpoints.prune(store, "job", 2)
    assert checkpoints.list_complete(store, "job") == order[:2]
    steps = {int(key.split("/")[3]) for key in store.list("jobs/job/checkpoints") if key.count("/") == 4}
    assert steps == {25, 30, 35}  # 35 may still be on its way
    assert not store.exists(checkpoint_key("job", 25, "g1-state.json"))
    assert store.exists(checkpoint_key("job", 30, "g3-state-of-00001.json"))
    folder = tmp_path / "slots"
    folder.mkdir()
    download.fetch(store, "job", 25, folder, 0)
    check(folder, 0, 25)


@pytest.mark.parametrize("step", [10**10 - 1, 10**10, 1 << 53])
def test_a_step_with_more_digits_than_most(store: Store, tmp_path: Path, step: int) -> None:
    save(store, tmp_path, step - 1)
    save(store, tmp_path, step)
    assert [ref.step for ref in checkpoints.list_complete(store, "job")] == [step, step - 1]
    checkpoints.prune(store, "job", 1)
    assert [ref.step for ref in checkpoints.list_complete(store, "job")] == [step]
    folder = tmp_path / "slots"
    folder.mkdir()
    assert download.fetch(store, "job", step, folder, 0).step == step


def test_a_later_generation_that_ends_at_the_same_step_counts(store: Store, tmp_path: Path) -> None:
    """The first one had made the last step, but its script had not ended: its state was not the finished one."""
    save(store, tmp_path, 10)
    save(store, tmp_path, 10, generation=2, state=lambda step: state_at(step) | {"note": "finished"})
    late = Manifest(job="job", generation=1, step=10, created=0.0, files=())
    checkpoints.publish(store, late)
    checkpoints.prune(store, "job", 3)
    assert checkpoints.list_complete(store, "job") == [StateRef(generation=2, step=10)]
    folder = tmp_path / "slots"
    folder.mkdir()
    record = download.fetch(store, "job", 10, folder, 0)
    assert (record.generation, record.state["note"]) == (2, "finished")
    assert [key for key in store.list("jobs") if "/g1-" in key] == []


def test_a_broken_manifest_is_replaced_unless_a_later_version_has_written_it(store: Store) -> None:
    new = Manifest(job="job", generation=1, step=10, created=0.0, files=())
    for text, stays in ((b"junk", False), (b'{"format": 99}', True)):
        store.put(checkpoint_key("job", 10), text)
        checkpoints.publish(store, new)
        assert (store.get(checkpoint_key("job", 10)) == text) == stays


@pytest.mark.parametrize("parts", [1, 2])
def test_a_checkpoint_is_restored_in_the_memory_of_two_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """That is what the agent has checked. It ends workers that leave no memory free and have other files there."""
    large: State = lambda step: {"note": step, "weight": torch.full((13 << 18,), float(step))}  # noqa: E731
    store, job, strays = Store(str(tmp_path / "bucket")), tmp_path / "memory", list[Path]()
    save(store, tmp_path, 10, parts=parts, state=large)
    job.mkdir()
    part = Store.part

    def look(self: Store, key: str, start: int, end: int) -> bytes:
        strays.extend(memory.strays(job))
        return part(self, key, start, end)

    monkeypatch.setattr(Store, "part", look)
    with small_memory(job):  # 32 MiB; the state has 13
        snapshot(job / "slots", 4, state=large)
        snapshot(job / "slots", 5, state=large)
        found = restore(dataclasses.replace(context(tmp_path, (1, 10)), slots=str(job / "slots")), 0, None)
        assert found is not None
        assert (found.record.step, decode(found.record.state, found.tensors.tensor)["note"]) == (10, 10)
        del found
    assert strays == []


def grown(count: int, step: int) -> dict[str, Any]:
    """A state with so many tensors, such as that of a list that grows."""
    return {"list": [torch.full((5000,), step + n / 10) for n in range(count)]}


def come_back(tmp_path: Path, before: int, since: int) -> None:
    """A worker that has mapped its slots restores the state of others, and then has as many tensors as before."""
    own = context(tmp_path, (2, 10))
    writer = Writer(Path(own.slots), "job", 1, block())

    def take(step: int) -> None:
        assert writer.take(step, encoding(grown(before, step)), set(), wait=True)
        writer.settle()

    def check_list(found: Found, count: int, step: int) -> None:
        tensors = decode(found.record.state, found.tensors.tensor)["list"]
        assert [tensor.unique().tolist() for tensor in tensors] == [
            t.unique().tolist() for t in grown(count, step)["list"]
        ]

    take(4)
    take(5)
    found = restore(own, 0, None, mapped=writer.mapped)
    assert found is not None
    check_list(found, since, 10)
    writer.renew(3)
    for step in (11, 12):
        take(step)
        found = restore(own, 0, None, mapped=writer.mapped)
        assert found is not None
        check_list(found, before, step)


@pytest.mark.parametrize(("before", "since"), [(1, 3), (3, 1)], ids=["more tensors", "fewer tensors"])
def test_a_checkpoint_with_other_tensors_than_this_worker_has_mapped(
    store: Store, tmp_path: Path, before: int, since: int
) -> None:
    """It was a spare node's worker while others trained on, and their nodes are gone."""
    save(store, tmp_path, 10, generation=2, state=lambda step: grown(since, step))
    worker = forked.Process(target=come_back, args=(tmp_path, before, since))  # SIGBUS may end it
    worker.start()
    worker.join()
    assert worker.exitcode == 0


def test_what_this_worker_has_mapped_takes_no_memory_from_a_checkpoint(store: Store, tmp_path: Path) -> None:
    save(store, tmp_path, 10, state=lambda step: {"weight": torch.full((14 << 18,), float(step))})
    folder = tmp_path / "memory"
    folder.mkdir()
    with small_memory(folder):  # 32 MiB
        own = dataclasses.replace(context(tmp_path, (1, 10)), slots=str(folder))
        writer = Writer(folder, "job", 0, block())
        for step in (4, 5):  # 13 MiB each
            assert writer.take(step, encoding({"weight": torch.full((13 << 18,), float(step))}), set(), wait=True)
            writer.settle()
        found = restore(own, 0, None, mapped=writer.mapped)
        assert found is not None
        assert found.record.step == 10
        del found, writer


def test_prune_of_nothing(store: Store) -> None:
    checkpoints.prune(store, "job", 3)
    assert checkpoints.list_complete(store, "job") == []


def names_no_tensor(header: bytes) -> bool:
    """Whether this is the header of a file without tensors, such as `{}`. Such a file is whole."""
    try:
        found = json.loads(header)
    except ValueError:
        return False
    return isinstance(found, dict) and found.keys() <= {"__metadata__"}


@given(st.binary(max_size=200))
@example(b"")
@example(b"[]")
@example(b'{"a": {}}')
def test_junk_is_no_safetensors_file(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.safetensors"
    for content in (data, len(data).to_bytes(8, "little") + data):
        assume(not names_no_tensor(content[8:]))
        path.write_bytes(content)
        with pytest.raises(CorruptError, match="junk"):
            shards.read_header(path)


@pytest.mark.parametrize("how", [torch.Tensor.conj, lambda tensor: torch._neg_view(tensor)])
def test_a_tensor_with_other_values_than_its_memory_is_not_written_to(how: Any) -> None:
    """Bytes of a state that is received would be read as their conjugates."""
    live = how(torch.ones(3, dtype=torch.complex64))
    entry = shards.Entry("kernel", "C64", (3,), 0, 24)
    assert transfer._destination(entry, live) is not live
    plain = torch.ones(3, dtype=torch.complex64)
    assert transfer._destination(entry, plain) is plain
