"""The safetensors format, and cutting a snapshot into the shards of a checkpoint. No torch: the agent cuts them.

Format (https://huggingface.co/docs/safetensors, "Format"): 8 bytes little-endian header length, a JSON header that
gives each tensor's dtype, shape and byte range, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import xxhash

from spotrun.errors import CorruptError, MisuseError
from spotrun.state import slots

# Bytes of one element, by safetensors' name of the dtype.
ITEM = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
# The object of a tensor: names are such as model.0.weight or optimizer[0] (`train.encoding`).
_OBJECT = re.compile(r"[^.\[' ]*")
ALIGN = 64  # of the first tensor's bytes in the file
MAX_HEADER = 100 << 20  # the limit of the safetensors library
SAMPLE = 4096  # bytes of a tensor that are looked at to tell which tensors differ


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. Its bytes are [start, stop), counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def layout(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[Entry, ...]:
    """Place (name, dtype, shape) tensors one after another: widest elements first, so that all are aligned."""
    entries: list[Entry] = []
    at = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -ITEM[tensor[1]]):
        stop = at + ITEM[dtype] * prod(shape)
        entries.append(Entry(name, dtype, shape, at, stop))
        at = stop
    return tuple(entries)


def header(entries: Sequence[Entry]) -> bytes:
    """The file's bytes before the first tensor. Offsets count from the first entry's start.

    Raises `MisuseError` if there are more tensors than a reader accepts.
    """
    base = entries[0].start if entries else 0
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for entry in entries:
        offsets = [entry.start - base, entry.stop - base]
        fields[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN)
    if len(text) > MAX_HEADER:
        raise MisuseError(
            f"{len(entries)} tensors are too many for a snapshot: the list of them has {len(text) >> 20} MiB, and "
            f"safetensors allows {MAX_HEADER >> 20} MiB. Keep many small tensors in few large ones"
        )
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> tuple[tuple[Entry, ...], int]:
    """(tensors in file order, where their bytes begin). Raises `CorruptError` unless the file is whole."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > min(size, MAX_HEADER):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            entries = parse_header(file.read(length))
        end = 8 + length + (entries[-1].stop if entries else 0)
        if size != end:
            raise ValueError(f"{size} bytes instead of {end}")
    except ValueError as error:
        raise CorruptError(f"{path} is not a whole safetensors file: {error}") from None
    return entries, 8 + length


def parse_header(text: bytes | str) -> tuple[Entry, ...]:
    """Tensors in file order, from a file's JSON header. Raises `ValueError` if there is a gap between them."""
    try:
        entries = [
            Entry(name, str(value["dtype"]), tuple(map(int, value["shape"])), *map(int, value["data_offsets"]))
            for name, value in json.loads(text).items()
            if name != "__metadata__"
        ]
        # At the same offset, empty tensors come first.
        entries.sort(key=lambda entry: (entry.start, entry.stop))
        at = 0
        for entry in entries:
            if entry.start != at or entry.stop - at != ITEM[entry.dtype] * prod(entry.shape):
                raise ValueError(f"tensor {entry.name} is out of place")
            at = entry.stop
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"its header is invalid ({type(error).__name__}: {error})") from None
    return tuple(entries)


def partition(sizes: Sequence[int], parts: int) -> list[range]:
    """Cut tensors of these sizes (bytes) into `parts` runs of at most sum/parts + the largest size.

    A tensor goes to the part in which its middle byte lies.
    """
    total = sum(sizes)
    runs = [0] * parts
    at = 0
    for size in sizes:
        runs[min(parts - 1, (2 * at + size) * parts // (2 * total)) if total else 0] += 1
        at += size
    starts = [sum(runs[:index]) for index in range(parts)]
    return [range(start, start + count) for start, count in zip(starts, runs, strict=True)]


def shard_name(generation: int, index: int, parts: int) -> str:
    """`index` counts from 0. Names count from 1, as usual for sharded safetensors."""
    return f"g{generation}-shard-{index + 1:05d}-of-{parts:05d}.safetensors"


def state_name(generation: int, parts: int) -> str:
    """Every name contains the number of parts, so files of a checkpoint in more or fewer parts are not overwritten."""
    return f"g{generation}-state-of-{parts:05d}.json"


def index_name(generation: int, parts: int) -> str:
    return f"g{generation}-model-of-{parts:05d}.safetensors.index.json"


def write_part(folder: Path, slot: int, index: int, parts: int, out_dir: Path) -> list[tuple[str, Path, int, str]]:
    """Write this node's part of a checkpoint: (object name, file, size, xxh3) of each file written to `out_dir`.

    The caller holds `slots.reading(folder, slot)`. Part 0 also writes the record and the index of all shards. Raises
    `CorruptError` if the slot has no whole snapshot.
    """
    record = slots.read(folder, slot)
    source = slots.data_path(folder, slot)
    if record is None:
        raise CorruptError(f"snapshot {source} has no record; it was being written")
    slots.verify(folder, slot, record)
    entries, begin = read_header(source)
    runs = partition([entry.stop - entry.start for entry in entries], parts)
    names = [shard_name(record.generation, number, parts) for number in range(parts)]
    out_dir.mkdir(parents=True, exist_ok=True)
    shard = out_dir / names[index]
    _write_shard(source, begin, [entries[number] for number in runs[index]], shard)
    written = [shard]
    if index == 0:
        weights = {entries[number].name: name for name, run in zip(names, runs, strict=True) for number in run}
        total = entries[-1].stop if entries else 0
        table = {"metadata": {"total_size": total}, "weight_map": weights}
        header_text = header(entries)[8:].decode()
        state = {"record": vars(record), "header": header_text, "shards": names}
        contents = {index_name(record.generation, parts): table, state_name(record.generation, parts): state}
        for name, content in contents.items():
            (out_dir / name).write_text(json.dumps(content))
            written.append(out_dir / name)
    return [(path.name, path, *slots.digest(path)) for path in written]


def sketch(folder: Path, slot: int) -> dict[str, str]:
    """By the name that `run.track` has for an object: a hash of its tensors' names, types, shapes and first bytes.

    If two snapshots of a step differ, their sketches usually tell in which object. The caller holds
    `slots.reading(folder, slot)`. Raises `CorruptError`.
    """
    path = slots.data_path(folder, slot)
    entries, begin = read_header(path)
    found: dict[str, xxhash.xxh3_64] = {}
    with path.open("rb") as file:
        for entry in entries:
            name = _OBJECT.match(entry.name)[0]  # type: ignore[index]  # it matches the empty text, too
            said = f"{entry.name} {entry.dtype} {entry.shape}".encode()
            first = os.pread(file.fileno(), min(SAMPLE, entry.stop - entry.start), begin + entry.start)
            found.setdefault(name, xxhash.xxh3_64()).update(said + first)
    return {name: each.hexdigest() for name, each in found.items()}


def _write_shard(source: Path, begin: int, entries: Sequence[Entry], target: Path) -> None:
    with source.open("rb") as file, target.open("wb") as out:
        out.write(header(entries))
        if not entries or entries[-1].stop == entries[0].start:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            out.write(view[begin + entries[0].start : begin + entries[-1].stop])
