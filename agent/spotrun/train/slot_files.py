"""Slot files in memory: a mapped file with room for a state's tensors, and reading a committed slot."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from spotrun.errors import CorruptError, SpotrunError
from spotrun.state import shards, slots
from spotrun.train.encoding import DTYPES, TORCH

SMALL = 4096  # bytes of a tensor that is not worth sharing
_POPULATE = 1 << 20  # bytes in one call that fills a map with pages: no other thread can map memory meanwhile
_LOWEST = 19  # priority of a thread: all others come first
ASIDE = 10.0  # seconds for which a slot's pages may wait for free time: without them, there is no snapshot
TRIES = 3  # after so many tries, the pages of a slot are no longer filled beside training
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; not in the mmap module
_libc = ctypes.CDLL(None)

Entries = tuple[shards.Entry, ...]


def layout(tensors: dict[str, torch.Tensor]) -> Entries:
    """Where each tensor lies in a slot file."""
    return shards.layout([(name, DTYPES[t.dtype], tuple(t.shape)) for name, t in tensors.items()])


@dataclass
class SlotFile:
    """A slot's file, mapped to be written."""

    entries: Entries
    mapped: mmap.mmap  # the whole file
    flat: torch.Tensor  # the whole map, as bytes
    views: dict[str, torch.Tensor]  # the tensors in the map that this process writes, by name
    inode: int  # of the file
    file: BinaryIO | None = None  # it is open until `fill` is done; None: another process fills it
    filled_bytes: int = 0  # from the beginning: what `fill` has filled with pages
    tries: int = 0  # to do that beside training

    @classmethod
    def create(cls, path: Path, entries: Entries) -> SlotFile:
        """The file for these tensors, without pages: only `fill` makes room for them. Raises `SpotrunError`."""
        begin = len(shards.header(entries))
        file, mapped = _map_to_write(path, begin + (entries[-1].stop if entries else 0))
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        return cls(entries, mapped, flat, _views(flat, entries, begin), os.fstat(file.fileno()).st_ino, file)

    @classmethod
    def attach(cls, path: Path, entries: Entries, names: Collection[str]) -> SlotFile | None:
        """The file that another process has made, to write some of its tensors. None: it has another size, or is gone.

        The entries may be those of another file: compare them.
        """
        begin = len(shards.header(entries))
        try:
            with path.open("r+b") as file:
                found = os.fstat(file.fileno())
                if found.st_size == 0 or found.st_size != begin + (entries[-1].stop if entries else 0):
                    return None
                mapped = mmap.mmap(file.fileno(), found.st_size)
        except (FileNotFoundError, ValueError):
            return None
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        own = tuple(entry for entry in entries if entry.name in names)
        return cls(entries, mapped, flat, _views(flat, own, begin), found.st_ino)

    @property
    def filled(self) -> bool:
        """Whether `fill` has filled all of the map with pages."""
        return self.filled_bytes == len(self.mapped)

    def fill(self, hurry: threading.Event | None = None) -> None:
        """Fill the map with pages, and write the header. Raises `SpotrunError` if memory does not suffice.

        After that error, its pages are free again, and the next call begins from the start. hurry: for the first
        `ASIDE` seconds, use only time that nothing else on this machine needs. Stop when this is set: the next call
        goes on.
        """
        if hurry is None:
            return self._fill(lambda: False)
        self.tries += 1
        # A thread of its own: without privileges, a thread cannot raise its priority again.
        aside = threading.Thread(target=self._fill_aside, args=(hurry,), name="slot-pages", daemon=True)
        aside.start()
        aside.join()
        self._fill(hurry.is_set)

    def _fill_aside(self, hurry: threading.Event) -> None:
        until = time.monotonic() + ASIDE
        with contextlib.suppress(OSError):  # a container may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)  # on Linux: of this thread
        with contextlib.suppress(SpotrunError):  # `fill` tries again, and raises it
            self._fill(lambda: hurry.is_set() or time.monotonic() > until)

    def _fill(self, stops: Callable[[], bool]) -> None:
        while not self.filled and not stops():
            stop = min(self.filled_bytes + _POPULATE, len(self.mapped))
            self._allocate(stop)
            _populate(self.mapped, self.filled_bytes, stop)
            self.filled_bytes = stop
        if self.filled and self.file is not None:
            header = shards.header(self.entries)
            self.mapped[: len(header)] = header
            self.file.close()
            self.file = None

    def _allocate(self, stop: int) -> None:
        """Have the kernel allocate and clear the next pages: that takes most of the time of `fill`."""
        assert self.file is not None
        try:
            _allocate(self.file, self.filled_bytes, stop)
        except OSError as error:
            self.filled_bytes = 0
            os.ftruncate(self.file.fileno(), 0)
            raise _no_room(Path(self.file.name), len(self.mapped), error) from None

    def fill_views(self) -> torch.Tensor:
        """Fill the map with pages where `views` are. Returns that part of the map, in whole pages."""
        begin = self.flat.data_ptr()
        views = [view for view in self.views.values() if view.nbytes]  # an empty one has no address
        starts = [view.data_ptr() - begin for view in views]
        stops = [view.data_ptr() - begin + view.nbytes for view in views]
        start, stop = min(starts, default=0) // mmap.PAGESIZE * mmap.PAGESIZE, max(stops, default=0)
        _populate(self.mapped, start, stop)
        return self.flat[start:stop]


class Reader:
    """Reads a committed slot. The slot may be overwritten soon: copy what is kept.

    mapped: the slot's file, if this process has mapped it. To map a large file again takes long. With this map, a write
    into a view changes the snapshot.
    """

    def __init__(self, folder: Path, slot: int, mapped: SlotFile | None = None) -> None:
        self._path = slots.data_path(folder, slot)
        self.entries, self._begin = shards.read_header(self._path)
        self._flat = _map_to_read(self._path) if mapped is None else mapped.flat
        self._views = _views(self._flat, self.entries, self._begin)

    @property
    def header(self) -> bytes:
        """The bytes before the first tensor."""
        return self._flat[: self._begin].numpy().tobytes()

    def bytes_of(self, start: int, stop: int, entries: Entries) -> torch.Tensor:
        """A range of the bytes after the header, in the map."""
        return self._flat[self._begin + start : self._begin + stop]

    def tensor(self, name: str) -> torch.Tensor:
        """A copy of the tensor."""
        return self._find(name).clone()

    def view(self, name: str) -> torch.Tensor:
        """The tensor in the map, to be copied at once. A small tensor is a copy: optimizers keep their counters."""
        found = self._find(name)
        return found.clone() if found.nbytes <= SMALL else found

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in the map."""
        return tensor.device.type == "cpu" and 0 <= tensor.data_ptr() - self._flat.data_ptr() < self._flat.numel()

    def _find(self, name: str) -> torch.Tensor:
        if name not in self._views:
            raise CorruptError(f"snapshot {self._path} has no tensor {name}, but its record names one")
        return self._views[name]


def _map_to_read(path: Path) -> torch.Tensor:
    with path.open("rb") as file:
        # Private and writable only because torch warns of read-only memory.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def map_file(path: Path, size: int) -> mmap.mmap:
    """The file, of that size and with all its pages, mapped to be written.

    A worker of an older generation may still write into the file that is there. Then it is replaced.
    """
    file, mapped = _map_to_write(path, size)
    with file:
        try:
            _allocate(file, 0, size)
        except OSError as error:
            raise _no_room(path, size, error) from None
    _populate(mapped, 0, size)
    return mapped


def _map_to_write(path: Path, size: int) -> tuple[BinaryIO, mmap.mmap]:
    """As `map_file`, but without pages. Returns the open file, too."""
    file = _open(path)
    try:
        if not _is_free(file.fileno()):
            file.close()
            path.unlink(missing_ok=True)
            file = _open(path)
        os.ftruncate(file.fileno(), size)
        return file, mmap.mmap(file.fileno(), size)
    except OSError as error:
        file.close()
        raise _no_room(path, size, error) from None


def _open(path: Path) -> BinaryIO:
    return open(path, "r+b", 0, opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o600))


def _allocate(file: BinaryIO, start: int, stop: int) -> None:
    """Without this, a full tmpfs would kill the process (SIGBUS) in the middle of a copy."""
    if stop > start:
        os.posix_fallocate(file.fileno(), start, stop - start)


def _no_room(path: Path, size: int, error: OSError) -> SpotrunError:
    return SpotrunError(
        f"no room for a snapshot of {size / 1e6:.0f} MB in {path.parent}: {error.strerror}. "
        "Two of them must fit: use machines with more memory, or make that file system larger"
    )


def _is_free(handle: int) -> bool:
    """Whether no worker copies a section into the file (see `slots.filling`)."""
    with slots.locked(handle, fcntl.LOCK_EX) as free:
        return free


def _populate(mapped: mmap.mmap, start: int, stop: int) -> None:
    """Fill this part of the map with pages, if the kernel can. Otherwise the first writes do it.

    Not by `mmap.madvise`: it holds the interpreter's lock, so training would stand still for seconds.
    """
    address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr() if stop > start else 0
    for at in range(start, stop, _POPULATE):
        size = ctypes.c_size_t(min(_POPULATE, stop - at))
        if _libc.madvise(ctypes.c_void_p(address + at), size, _POPULATE_WRITE) != 0:
            return


def _views(flat: torch.Tensor, entries: Entries, begin: int) -> dict[str, torch.Tensor]:
    return {
        entry.name: flat[begin + entry.start : begin + entry.stop].view(TORCH[entry.dtype]).view(entry.shape)
        for entry in entries
    }
