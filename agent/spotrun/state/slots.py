"""Snapshots on tmpfs: two slots, each a safetensors file and a commit record, written in turn.

A slot's record is removed before the slot is written and put back (by rename) after, with size and checksum, so a
slot with a record is whole whenever its writer died. The uploader takes a shared lock while it copies out of a slot;
the writer passes over a slot so locked. No torch here: the agent reads slots too.

    <folder>/0.safetensors  <folder>/0.json  <folder>/1.safetensors  <folder>/1.json  <folder>/0.lock …
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from spotrun.errors import CorruptError

SLOTS = (0, 1)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """A committed snapshot. `state` is what is not a tensor, as JSON values (see train/snapshot.py).

    size: bytes of the data file. xxh3: hex digest (128 bits) of the whole data file.
    """

    job: str
    generation: int
    step: int
    size: int
    xxh3: str
    state: Any

    @property
    def order(self) -> tuple[int, int]:
        """Later is newer: a later generation counts whatever its step."""
        return (self.generation, self.step)


def data_path(folder: Path, slot: int) -> Path:
    return folder / f"{slot}.safetensors"


def record_path(folder: Path, slot: int) -> Path:
    return folder / f"{slot}.json"


def commit(folder: Path, slot: int, record: Record) -> None:
    """Make the slot count. Its data must be in place."""
    target = record_path(folder, slot)
    partial = target.with_suffix(".part")
    text = json.dumps(asdict(record))
    partial.write_text(json.dumps({"record": text, "xxh3": xxhash.xxh3_128_hexdigest(text.encode())}))
    os.replace(partial, target)


def revoke(folder: Path, slot: int) -> None:
    """Take back the slot's record, before its data is overwritten."""
    record_path(folder, slot).unlink(missing_ok=True)


def read(folder: Path, slot: int) -> Record | None:
    """The slot's record; None if there is none or it is not a record (then said in the log)."""
    path = record_path(folder, slot)
    try:
        outer = json.loads(path.read_text())
        # A learning rate with a flipped bit is as bad as a weight with one.
        if xxhash.xxh3_128_hexdigest(outer["record"].encode()) != outer["xxh3"]:
            raise ValueError("it is not what was written")
        record = Record(**json.loads(outer["record"]))
        if not all(isinstance(value, int) and value >= 0 for value in (record.generation, record.step, record.size)):
            raise ValueError("its numbers are none")
        return record
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        log.warning("snapshot record %s is not readable, passed over: %s", path, error)
        return None


def newest(folder: Path, job: str) -> list[tuple[int, Record]]:
    """(slot, record) of every committed snapshot of the job, newest first. Data is not verified."""
    found = [(slot, record) for slot in SLOTS if (record := read(folder, slot)) is not None and record.job == job]
    return sorted(found, key=lambda item: item[1].order, reverse=True)


def digest(path: Path) -> tuple[int, str]:
    """(size, xxh3 of 128 bits as hex) of a file. The hash lets the GIL go."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return 0, xxhash.xxh3_128_hexdigest(b"")
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as view:
            return size, xxhash.xxh3_128_hexdigest(view)


def verify(folder: Path, slot: int, record: Record) -> None:
    """Raises `CorruptError`, naming the file, unless the slot's data is what the record says."""
    path = data_path(folder, slot)
    try:
        size, found = digest(path)
    except OSError as error:
        raise CorruptError(f"snapshot {path}: {error.strerror}") from None
    if (size, found) != (record.size, record.xxh3):
        raise CorruptError(
            f"snapshot {path} (step {record.step}) is damaged: {size} bytes, xxh3 {found}; "
            f"its record says {record.size} bytes, xxh3 {record.xxh3}"
        )


@contextmanager
def reading(folder: Path, slot: int) -> Iterator[None]:
    """Hold the slot still while copying out of it. The kernel lets go if this process dies."""
    with (folder / f"{slot}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        now = time.time_ns()
        os.utime(lock.fileno(), ns=(now, now))  # see `last_read`
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough if a forked child shares the file


def last_read(folder: Path, slot: int) -> int:
    """When someone last began `reading` the slot: epoch nanoseconds, only good for comparing. 0: never."""
    try:
        return os.stat(folder / f"{slot}.lock").st_mtime_ns
    except FileNotFoundError:
        return 0


@contextmanager
def writing(folder: Path, slot: int) -> Iterator[bool]:
    """Whether the slot may be written now; never waits."""
    with (folder / f"{slot}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child (a loader's worker, say) may share the file
