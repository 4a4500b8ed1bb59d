"""Sending a state from worker to worker, straight into the tensors of those who lack it.

The donor reads the state from a slot, or from its own tensors. The bytes travel as they lie in a slot, over several
streams, each with its checksum at the end. A receiver passes on what has arrived, and writes no file: its next snapshot
fills its slot.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from socket import socket
from threading import Lock
from typing import Protocol

import torch
import torch.distributed as dist
import xxhash

from spotrun.errors import CorruptError, SpotrunError
from spotrun.state import shards, slots
from spotrun.train.encoding import TORCH, Encoder
from spotrun.train.slot_files import Entries, layout
from spotrun.train.streams import COUNT, MOST, Address, Data, Listener, Streams, fill, framed, unframe
from spotrun.train.training_state import TrainingState

PIECE = 4 << 20  # bytes that a stream sends at a time
ALONE = 1 << 20  # bytes of a tensor that has pieces of its own; smaller ones share them


@dataclass(frozen=True)
class Piece:
    """A range of a slot file's bytes, counted from the end of the header: whole small tensors, or a part of one."""

    start: int
    stop: int
    entries: Entries


class Source(Protocol):
    """What a donor sends."""

    entries: Entries

    @property
    def header(self) -> bytes:
        """The bytes before the first tensor."""

    def bytes_of(self, start: int, stop: int, entries: Entries) -> torch.Tensor:
        """A range of the bytes after the header, which has only bytes of these entries."""


class OwnState:
    """The state in this process's own tensors. Nothing may change them while it is sent. record: has no checksum."""

    def __init__(self, record: slots.Record, entries: Entries, tensors: Mapping[str, torch.Tensor]) -> None:
        self.record, self.entries, self._tensors = record, entries, tensors
        self._whole: dict[str, torch.Tensor] = {}  # copies of tensors that are not contiguous
        self._lock = Lock()

    @classmethod
    def of(cls, job: str, order: tuple[int, int], state: TrainingState) -> OwnState:
        """The state of this (generation, step)."""
        encoder = Encoder()
        record = slots.Record(job, *order, 0, "", state.encode(encoder))
        return cls(record, layout(encoder.tensors), encoder.tensors)

    @property
    def header(self) -> bytes:
        return shards.header(self.entries)

    def bytes_of(self, start: int, stop: int, entries: Entries) -> torch.Tensor:
        parts = [
            _bytes(self._contiguous(each.name))[max(0, start - each.start) : stop - each.start]
            for each in entries
            if each.stop > each.start
        ]
        if len(parts) == 1 and parts[0].is_cpu:
            return parts[0]
        buffer = _host_memory(stop - start, any(each.is_cuda for each in parts))
        at = 0
        for part in parts:
            buffer[at : at + part.numel()].copy_(part)
            at += part.numel()
        return buffer

    def _contiguous(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name].detach()
        if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            return tensor
        with self._lock:  # several threads may ask for it
            if name not in self._whole:
                self._whole[name] = tensor.resolve_conj().resolve_neg().contiguous()
            return self._whole[name]


class Buffers:
    """The host's memory in which the pieces of a state arrive, and the copy from there into its tensors.

    locked: whether this memory is page-locked for tensors on a device. The device then copies while more bytes arrive.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], locked: bool) -> None:
        self._tensors, self._locked = tensors, locked

    def buffer(self, piece: Piece) -> torch.Tensor:
        """The memory of the host into which the piece goes."""
        first = piece.entries[0]
        tensor = self._tensors[first.name]
        if _is_alone(first) and not tensor.is_cuda:
            return _bytes(tensor)[piece.start - first.start : piece.stop - first.start]
        return _host_memory(piece.stop - piece.start, self._locked and tensor.is_cuda)

    def unpack(self, piece: Piece, buffer: torch.Tensor) -> None:
        """Copy the piece, which has arrived, to where it belongs."""
        for entry in piece.entries:
            tensor = self._tensors[entry.name]
            start, stop = max(entry.start, piece.start), min(entry.stop, piece.stop)
            if stop > start and (tensor.is_cuda or not _is_alone(entry)):
                part = _bytes(tensor)[start - entry.start : stop - entry.start]
                # torch keeps locked memory until the device has read it.
                beside = tensor.is_cuda and buffer.is_pinned()
                part.copy_(buffer[start - piece.start : stop - piece.start], non_blocking=beside)


class Received:
    """A state that another worker has sent. Its tensors belong to this process, and nobody else writes them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, to be kept."""
        if name not in self._tensors:
            raise CorruptError(f"the state that was received has no tensor {name}, but its record names one")
        return self._tensors[name]

    view = tensor

    def holds(self, _: torch.Tensor) -> bool:
        """Whether somebody else may overwrite the tensor."""
        return False


def pieces_of(entries: Entries) -> list[Piece]:
    """The pieces of tensors that lie in this order, without gaps."""
    found: list[Piece] = []
    together: list[shards.Entry] = []

    def flush() -> None:
        if together and together[-1].stop > together[0].start:
            found.append(Piece(together[0].start, together[-1].stop, tuple(together)))
        together.clear()

    for entry in entries:
        if _is_alone(entry):
            flush()
            found += [Piece(at, min(at + PIECE, entry.stop), (entry,)) for at in range(entry.start, entry.stop, PIECE)]
            continue
        if together and entry.stop - together[0].start > ALONE:
            flush()
        together.append(entry)
    flush()
    return found


def deal(pieces: Sequence[Piece], count: int) -> list[list[Piece]]:
    """The pieces of each stream. All streams have about the same number of bytes."""
    dealt: list[list[Piece]] = [[] for _ in range(count)]
    loads = [0] * count
    for each in pieces:
        least = loads.index(min(loads))
        dealt[least].append(each)
        loads[least] += each.stop - each.start
    return dealt


def send(record: slots.Record, source: Source, listener: Listener) -> None:
    """Begin to send a state. The source must not change until `listener.wait` returns."""
    dealt = deal(pieces_of(source.entries), COUNT)
    note, header = json.dumps({"record": vars(record), "streams": COUNT}).encode(), source.header

    def stream(number: int) -> Iterator[Data]:
        about = _about(note, header, number)
        yield about
        hashed = xxhash.xxh3_128(about)
        for each in dealt[number]:
            data = source.bytes_of(each.start, each.stop, each.entries).numpy().data
            yield data
            hashed.update(data)  # while the kernel sends
        yield hashed.digest()

    listener.send(stream, COUNT)


def reserve() -> None:
    """Lock memory for whole pieces, which `receive` needs for large tensors of a GPU. torch keeps the memory."""
    # Two for each stream: one is filled while the device reads the other.
    buffers = [_host_memory(PIECE, locked=True) for _ in range(2 * COUNT)]
    buffers.clear()


def receive(
    into: Mapping[str, torch.Tensor], sender: Address, listener: Listener | None = None
) -> tuple[slots.Record, Received, bool]:
    """Receive a state: (record, tensors, whether the bytes have the sender's checksums).

    into: tensors by name. Those of the right shape and type receive the values; the others are made. listener: passes
    the state on, as in `send`; this returns when all of it is sent. Raises `DistError` if another worker is gone.
    """
    streams, running, queues = Streams(), list[Future[bool]](), list[SimpleQueue[Data | None]]()
    try:
        told = streams.start(partial(_begin, streams, sender)).result()
        tensors = {entry.name: _destination(entry, into.get(entry.name)) for entry in told.entries}
        _await_devices(tensors.values())
        dealt = deal(pieces_of(told.entries), told.count)
        if listener is not None:
            queues += [SimpleQueue() for _ in range(told.count)]
            listener.send(lambda number: iter(queues[number].get, None), told.count)

        buffers = Buffers(tensors, locked=listener is None)  # memory that is passed on may be in use for long

        def take(number: int) -> bool:
            pass_on, about = queues[number].put if queues else _ignore, _about(told.note, told.header, number)
            pass_on(about)
            try:
                with told.first if number == 0 else streams.connect(sender, number) as connection:
                    return _take(connection, dealt[number], buffers, pass_on, xxhash.xxh3_128(about))
            finally:
                pass_on(None)

        for number in range(told.count):
            running.append(streams.start(partial(take, number)))
        done, _ = wait(running, return_when=FIRST_EXCEPTION)
        wholes = [each.result() for each in done]
        _await_devices(tensors.values())
        if listener is not None:
            listener.wait()  # an object of the script may change what it loads
    except BaseException:
        if listener is not None:
            listener.close()
        for queue in queues:
            queue.put(None)  # of threads that have not begun
        raise
    finally:
        streams.close()
        wait(running)  # from now on, no thread writes into a tensor; after an error, a device may for a moment
    return told.record, Received(tensors), all(wholes)


@dataclass(frozen=True)
class _Told:
    """What a sender says before the first tensor."""

    first: socket  # the first stream
    note: bytes
    header: bytes
    record: slots.Record
    count: int  # of streams
    entries: Entries


def _begin(streams: Streams, sender: Address) -> _Told:
    first = streams.connect(sender, 0)
    note, header = unframe(first), unframe(first)
    try:
        told = json.loads(note)
        count, entries = int(told["streams"]), shards.parse_header(header[8:])
        if not 0 < count <= MOST:
            raise ValueError(f"{count} streams; there can be 1 to {MOST}")
        return _Told(first, note, header, slots.Record.of(told["record"]), count, entries)
    except (ValueError, TypeError, KeyError, SpotrunError) as error:
        raise dist.DistError(f"the state that another worker sends cannot be read: {error!r}") from None


def _about(note: bytes, header: bytes, number: int) -> bytes:
    """What the stream of this number begins with."""
    return framed(note) + framed(header) if number == 0 else b""


def _take(
    connection: socket,
    pieces: Sequence[Piece],
    buffers: Buffers,
    pass_on: Callable[[Data], None],
    hashed: xxhash.xxh3_128,
) -> bool:
    """Receive the pieces of a stream. Returns whether they have the sender's checksum. hashed: what came before."""
    for each in pieces:
        buffer = buffers.buffer(each)
        data = buffer.numpy().data
        fill(connection, data)
        pass_on(data)
        hashed.update(data)
        buffers.unpack(each, buffer)
    digest = memoryview(bytearray(hashed.digest_size))
    fill(connection, digest)
    pass_on(digest)
    return digest == hashed.digest()


def _ignore(_: Data | None) -> None:
    """Take data that nobody else needs."""


def _destination(entry: shards.Entry, live: torch.Tensor | None) -> torch.Tensor:
    dtype = TORCH[entry.dtype]
    if live is None or live.is_conj() or live.is_neg():  # such a tensor has other values than its memory
        return torch.empty(entry.shape, dtype=dtype, device="cpu")
    fits = live.dtype == dtype and tuple(live.shape) == entry.shape and live.is_contiguous()
    return live if fits else torch.empty(entry.shape, dtype=dtype, device="cpu")


def _is_alone(entry: shards.Entry) -> bool:
    return entry.stop - entry.start >= ALONE


def _host_memory(size: int, locked: bool) -> torch.Tensor:
    """`size` bytes of the host's memory.

    locked: page-locked memory, if the driver can lock it. A device copies faster to and from it. torch keeps it for
    later calls.
    """
    if locked:
        with suppress(RuntimeError):
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _await_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until these tensors' devices have done all work: another thread's stream does not wait for it."""
    for device in {each.device for each in tensors if each.is_cuda}:
        torch.cuda.synchronize(device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, as bytes."""
    found = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    at = tensor.storage_offset() * tensor.element_size()
    return found.set_(tensor.untyped_storage(), at, (tensor.nbytes,))  # type: ignore[call-overload, no-any-return]
