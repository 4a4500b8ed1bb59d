"""Downloading a checkpoint from the bucket into a slot, shard by shard. Everything is checked by its checksum.

The bytes go straight into the slot. So this takes no memory beyond the slots, which the node has for the job.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from spotrun.errors import CorruptError, NotFound
from spotrun.state import checkpoints, shards, slots
from spotrun.store import Store, checkpoint_key
from spotrun.train.slot_files import map_file
from spotrun.wire import FileRef


def fetch(store: Store, job: str, step: int, folder: Path, slot: int) -> slots.Record:
    """Download the checkpoint of that step into the slot and commit it.

    Raises `CorruptError`, naming the key, if anything differs from the manifest or the record, and `SpotrunError` if
    the memory has no room for the slot.
    """
    try:
        manifest = checkpoints.read_manifest(store, job, step)
    except ValueError as error:
        raise CorruptError(str(error)) from None
    files = _Files(store, job, step, {file.name: file for file in manifest.files})
    name = shards.state_name(manifest.generation, sum(each.endswith(".safetensors") for each in files.listed))
    key = checkpoint_key(job, step, name)
    record, head, names = _parse(files.read(name), key)
    if (record.job, record.generation, record.step) != (job, manifest.generation, step):
        raise CorruptError(f"{key} is of job {record.job}, generation {record.generation}, step {record.step}")
    entries = shards.parse_header(head)
    runs = shards.partition([entry.stop - entry.start for entry in entries], len(names))
    first = len(head).to_bytes(8, "little") + head
    path = slots.data_path(folder, slot)
    slots.revoke(folder, slot)
    _make_way(path, first)
    view = memoryview(map_file(path, len(first) + (entries[-1].stop if entries else 0)))
    view[: len(first)] = first
    for shard, run in zip(names, runs, strict=True):
        files.read_shard(shard, entries[run.start : run.stop], view[len(first) :])
    try:
        slots.verify(folder, slot, record)
    except CorruptError as error:
        raise CorruptError(f"{key}: its shards do not add up to the snapshot: {error}") from None
    slots.commit(folder, slot, record)
    return record


def _make_way(path: Path, first: bytes) -> None:
    """Remove the slot's file if it begins in another way: it has other tensors.

    Workers that wait may have mapped it. They keep their maps as long as the file is the same one.
    """
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        if file.read(len(first)) != first:
            with slots.locked(file, fcntl.LOCK_EX) as free:
                if free:  # no worker of an older generation writes into it
                    file.truncate(0)  # otherwise those maps would hold its memory
            path.unlink()


class _Files:
    """The files of a checkpoint. listed: those of its manifest, by name."""

    def __init__(self, store: Store, job: str, step: int, listed: Mapping[str, FileRef]) -> None:
        self._store, self._job, self._step, self.listed = store, job, step, listed

    def read(self, name: str) -> bytearray:
        """A file's bytes."""
        key, data = self._find(name), bytearray(self.listed[name].size)
        self._store.read_into(key, 0, memoryview(data))
        self._check(name, data)
        return data

    def read_shard(self, name: str, entries: Sequence[shards.Entry], into: memoryview) -> None:
        """Download a shard's tensors, which must be these entries, to where they belong in `into`."""
        key = self._find(name)
        room = into[entries[0].start : entries[-1].stop] if entries else into[:0]
        first = bytearray(max(0, self.listed[name].size - len(room)))  # the tensors end where the file ends
        self._store.read_into(key, 0, memoryview(first))
        self._store.read_into(key, len(first), room if first else room[:0])
        self._check(name, first, room)
        try:
            found = shards.parse_header(bytes(first[8:]))
        except ValueError as error:
            raise CorruptError(f"{key} is not a safetensors file: {error}") from None
        wanted = [(entry.name, entry.dtype, entry.shape) for entry in entries]
        if [(entry.name, entry.dtype, entry.shape) for entry in found] != wanted:
            raise CorruptError(f"{key} holds other tensors than the checkpoint's state says")

    def _find(self, name: str) -> str:
        """The file's key. Its size is that of the manifest."""
        key = checkpoint_key(self._job, self._step, name)
        if name not in self.listed:
            raise CorruptError(f"{checkpoint_key(self._job, self._step)} does not list {name}")
        try:
            size = self._store.size(key)
        except NotFound:
            raise CorruptError(f"{key} is missing, though the manifest lists it") from None
        if size != self.listed[name].size:
            raise CorruptError(f"{key} is damaged: {size} bytes; the manifest says {self.listed[name].size} bytes")
        return key

    def _check(self, name: str, *parts: bytearray | memoryview) -> None:
        found = xxhash.xxh3_128()
        for part in parts:
            found.update(part)
        if found.hexdigest() != self.listed[name].xxh3:
            raise CorruptError(
                f"{checkpoint_key(self._job, self._step, name)} is damaged: xxh3 {found.hexdigest()}; "
                f"the manifest says {self.listed[name].xxh3}"
            )


def _parse(text: bytearray, key: str) -> tuple[slots.Record, bytes, list[str]]:
    """(record, safetensors header, shards' names) of a state file."""
    try:
        fields: dict[str, Any] = json.loads(text)
        record = slots.Record.of(fields["record"])
        head = str(fields["header"]).encode()
        shards.parse_header(head)
        names = [str(name) for name in fields["shards"]]
        if not names:
            raise ValueError("no shards")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(f"{key} is not a state file: {type(error).__name__}: {error}") from None
    return record, head, names
