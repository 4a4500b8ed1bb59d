"""Downloading a checkpoint from the bucket into a slot, shard by shard. Everything is checked by its checksum."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from spotrun.errors import CorruptError, NotFound
from spotrun.state import checkpoints, shards, slots
from spotrun.store import Store, checkpoint_key
from spotrun.wire import FileRef


def fetch(store: Store, job: str, step: int, folder: Path, slot: int) -> slots.Record:
    """Download the checkpoint of that step into the slot and commit it.

    Raises `CorruptError`, naming the key, if anything differs from the manifest or the record.
    """
    try:
        manifest = checkpoints.read_manifest(store, job, step)
    except ValueError as error:
        raise CorruptError(str(error)) from None
    files = {file.name: file for file in manifest.files}
    parts = sum(name.endswith(".safetensors") for name in files)
    name = shards.state_name(manifest.generation, parts)
    key = checkpoint_key(job, step, name)
    with tempfile.TemporaryDirectory(dir=folder, prefix="checkpoint-") as scratch:
        path = _download(store, job, step, files, name, Path(scratch))
        record, head, names = _parse(path.read_text(), key)
        if (record.job, record.generation, record.step) != (job, manifest.generation, step):
            raise CorruptError(f"{key} is of job {record.job}, generation {record.generation}, step {record.step}")
        entries = shards.parse_header(head)
        runs = shards.partition([entry.stop - entry.start for entry in entries], len(names))
        slots.revoke(folder, slot)
        target = slots.data_path(folder, slot)
        target.write_bytes(len(head).to_bytes(8, "little") + head)
        for shard, run in zip(names, runs, strict=True):
            piece = _download(store, job, step, files, shard, Path(scratch))
            try:
                shards.append(piece, [entries[number] for number in run], target)
            except CorruptError as error:
                raise CorruptError(f"{checkpoint_key(job, step, shard)}: {error}") from None
            piece.unlink()
    try:
        slots.verify(folder, slot, record)
    except CorruptError as error:
        raise CorruptError(f"{key}: its shards do not add up to the snapshot: {error}") from None
    slots.commit(folder, slot, record)
    return record


def _download(store: Store, job: str, step: int, files: dict[str, FileRef], name: str, scratch: Path) -> Path:
    key = checkpoint_key(job, step, name)
    if name not in files:
        raise CorruptError(f"{checkpoint_key(job, step)} does not list {name}")
    path = scratch / name
    try:
        store.fetch(key, path)
    except NotFound:
        raise CorruptError(f"{key} is missing, though the manifest lists it") from None
    found = slots.digest(path)
    if found != (files[name].size, files[name].xxh3):
        raise CorruptError(
            f"{key} is damaged: {found[0]} bytes, xxh3 {found[1]}; "
            f"the manifest says {files[name].size} bytes, xxh3 {files[name].xxh3}"
        )
    return path


def _parse(text: str, key: str) -> tuple[slots.Record, bytes, list[str]]:
    """(record, safetensors header, shards' names) of a state file."""
    try:
        fields: dict[str, Any] = json.loads(text)
        record = slots.Record(**fields["record"])
        head = str(fields["header"]).encode()
        shards.parse_header(head)
        names = [str(name) for name in fields["shards"]]
        if not names:
            raise ValueError("no shards")
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{key} is not a state file: {type(error).__name__}: {error}") from None
    return record, head, names
