"""Snapshots on tmpfs: two slots, each a safetensors file and a commit record, written in turn.

A writer removes a slot's record, writes the data, and then writes a new record (by rename) with size and checksum. So a
slot with a record is whole, even if a writer dies. The uploader holds a shared lock while it copies a slot, and the
writer skips a locked slot. No torch here: the agent reads slots too.

    <folder>/0.safetensors  <folder>/0.json  <folder>/1.safetensors  <folder>/1.json  <folder>/0.lock …

Local rank 0 of a node is the writer. The node's other workers may copy tensors into the data file, too. Each of them
shares a lock on that file while it copies. The writer has this lock alone when it hashes the file.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

import xxhash

from spotrun.errors import CorruptError

SLOTS = (0, 1)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """A committed snapshot."""

    job: str
    generation: int
    step: int
    size: int  # bytes of the data file
    xxh3: str  # hex digest (128 bits) of the data file
    state: Any  # everything but the tensors, as JSON values (see train/encoding.py)

    @classmethod
    def of(cls, values: Any) -> Record:
        """What this version or another one wrote. Ignores unknown keys. Raises TypeError if `values` is no record."""
        return cls(**{each.name: values[each.name] for each in fields(cls) if each.name in values})

    @property
    def order(self) -> tuple[int, int]:
        """Newer snapshots compare greater. A later generation is newer, even with a smaller step."""
        return (self.generation, self.step)


def data_path(folder: Path, slot: int) -> Path:
    return folder / f"{slot}.safetensors"


def record_path(folder: Path, slot: int) -> Path:
    return folder / f"{slot}.json"


def commit(folder: Path, slot: int, record: Record, patience: float = 0.0) -> None:
    """Write the slot's record. Its data must be complete. Raises OSError.

    patience: seconds for which it tries again: another job may fill the memory that all of them share, for a moment.
    """
    target, until = record_path(folder, slot), time.monotonic() + patience
    partial = target.with_suffix(".part")
    text = json.dumps(vars(record))  # not `asdict`: to copy long lists in the state takes longer than to write them
    while True:
        try:
            partial.write_text(json.dumps({"record": text, "xxh3": xxhash.xxh3_128_hexdigest(text.encode())}))
            os.replace(partial, target)
            return
        except OSError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.05)


def revoke(folder: Path, slot: int) -> None:
    """Remove the slot's record. Call it before the data is overwritten."""
    record_path(folder, slot).unlink(missing_ok=True)


def read(folder: Path, slot: int, strict: bool = False) -> Record | None:
    """The slot's record; None if it is missing or damaged. Damage is logged.

    strict: raise OSError if the record may be whole, but this process cannot open it: it has too many files open.
    """
    path = record_path(folder, slot)
    try:
        outer = json.loads(path.read_text())
        # A learning rate with a flipped bit is as bad as a weight with one.
        if xxhash.xxh3_128_hexdigest(outer["record"].encode()) != outer["xxh3"]:
            raise ValueError("its checksum is wrong")
        record = Record.of(json.loads(outer["record"]))
        if not all(isinstance(value, int) and value >= 0 for value in (record.generation, record.step, record.size)):
            raise ValueError("its numbers are invalid")
        return record
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if strict and isinstance(error, OSError):
            raise
        log.warning("snapshot record %s cannot be read, skipped: %s", path, error)
        return None


def newest(folder: Path, job: str, strict: bool = False) -> list[tuple[int, Record]]:
    """(slot, record) of every committed snapshot of the job, newest first. Data is not verified. strict: see `read`."""
    known = ((slot, read(folder, slot, strict)) for slot in SLOTS)
    found = [(slot, record) for slot, record in known if record is not None and record.job == job]
    return sorted(found, key=lambda item: item[1].order, reverse=True)


def digest(path: Path) -> tuple[int, str]:
    """(size, xxh3 of 128 bits as hex) of a file. Hashing releases the GIL."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return 0, xxhash.xxh3_128_hexdigest(b"")
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as view:
            return size, xxhash.xxh3_128_hexdigest(view)


def verify(folder: Path, slot: int, record: Record) -> None:
    """Raise `CorruptError`, naming the file, if the slot's data differs from the record.

    Raises another OSError if this process cannot read the data: that does not say that they are damaged.
    """
    path = data_path(folder, slot)
    try:
        size, found = digest(path)
    except FileNotFoundError as error:
        raise CorruptError(f"snapshot {path}: {error.strerror}") from None
    if (size, found) != (record.size, record.xxh3):
        raise CorruptError(
            f"snapshot {path} (step {record.step}) is damaged: {size} bytes, xxh3 {found}; "
            f"its record says {record.size} bytes, xxh3 {record.xxh3}"
        )


@contextmanager
def reading(folder: Path, slot: int) -> Iterator[None]:
    """Lock the slot while copying from it. If this process dies, the kernel unlocks it."""
    with (folder / f"{slot}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        now = time.time_ns()
        os.utime(lock.fileno(), ns=(now, now))  # see `last_read`
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough if a forked child shares the file


def last_read(folder: Path, slot: int) -> int:
    """Time of the last `reading` of the slot, in epoch nanoseconds, only for comparison. 0: never."""
    try:
        return os.stat(folder / f"{slot}.lock").st_mtime_ns
    except FileNotFoundError:
        return 0


@contextmanager
def writing(folder: Path, slot: int) -> Iterator[bool]:
    """Lock the slot to write it, without waiting. Yields whether this succeeded."""
    with (folder / f"{slot}.lock").open("a") as lock, locked(lock, fcntl.LOCK_EX) as free:
        yield free


@contextmanager
def filling(folder: Path, slot: int, alone: bool) -> Iterator[bool]:
    """Lock the slot's data file, together with other workers or alone, without waiting. Yields whether this succeeded.

    Only for processes of the writer's node and job, while the writer has the slot's own lock.
    """
    try:
        file = data_path(folder, slot).open("rb")
    except FileNotFoundError:
        yield False
        return
    with file, locked(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH) as free:
        yield free


@contextmanager
def locked(file: IO[Any] | int, how: int) -> Iterator[bool]:
    """Lock an open file, without waiting. Yields whether this succeeded."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
        return
    try:
        yield True
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # a forked child (a loader's worker, say) may share the file
