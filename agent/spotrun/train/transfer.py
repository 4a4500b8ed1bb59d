"""Sending a state from worker to worker, straight into the tensors of those who lack it.

The donor reads it from a slot, or from its own tensors. The bytes travel as they lie in a slot, and their checksum
follows them. A receiver hashes what has arrived while the rest arrives, and writes no file: its next snapshot fills its
slot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import xxhash

from spotrun.errors import CorruptError
from spotrun.state import shards, slots
from spotrun.train.encoding import TORCH
from spotrun.train.slot_files import Entries

CHUNK = 64 << 20  # bytes in one message, at most
ALONE = 1 << 20  # bytes of a tensor that has messages of its own; smaller ones share them
DIGEST = 32  # characters of a checksum


@dataclass(frozen=True)
class Hop:
    """A worker's place in the chain: the ranks from which it receives and to which it sends. None: there is none."""

    before: int | None
    after: int | None
    group: dist.ProcessGroup | None  # takes CPU tensors


@dataclass(frozen=True)
class Message:
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

    def digest(self, parts: Sequence[torch.Tensor]) -> str:
        """The checksum of the header and all bytes after it. parts: these bytes."""


class OwnState:
    """The state in this process's own tensors. Nothing may change them while it is sent.

    record: has no checksum.
    """

    def __init__(self, record: slots.Record, entries: Entries, tensors: Mapping[str, torch.Tensor]) -> None:
        self.record, self.entries, self._tensors = record, entries, tensors

    @property
    def header(self) -> bytes:
        return shards.header(self.entries)

    def bytes_of(self, start: int, stop: int, entries: Entries) -> torch.Tensor:
        parts = []
        for entry in (each for each in entries if each.stop > each.start):
            tensor = self._tensors[entry.name].detach().resolve_conj().resolve_neg().contiguous()
            parts.append(_bytes(tensor)[max(0, start - entry.start) : stop - entry.start].cpu())
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def digest(self, parts: Sequence[torch.Tensor]) -> str:
        hashed = xxhash.xxh3_128(self.header)
        for each in parts:
            hashed.update(each.numpy().data)
        return hashed.hexdigest()


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


def messages(entries: Entries) -> list[Message]:
    """The messages for tensors that lie in this order, without gaps."""
    found: list[Message] = []
    together: list[shards.Entry] = []

    def flush() -> None:
        if together and together[-1].stop > together[0].start:
            found.append(Message(together[0].start, together[-1].stop, tuple(together)))
        together.clear()

    for entry in entries:
        if entry.stop - entry.start >= ALONE:
            flush()
            starts = range(entry.start, entry.stop, CHUNK)
            found += [Message(at, min(at + CHUNK, entry.stop), (entry,)) for at in starts]
            continue
        if together and entry.stop - together[0].start > CHUNK:
            flush()
        together.append(entry)
    flush()
    return found


def send(record: slots.Record, source: Source, hop: Hop) -> list[tuple[Any, torch.Tensor]]:
    """Begin to send a state. Returns the sends under way, each with its data.

    The source must not change before all of them have ended.
    """
    relay(json.dumps(asdict(record)).encode(), hop)
    relay(source.header, hop)
    parts = [source.bytes_of(each.start, each.stop, each.entries) for each in messages(source.entries)]
    sends = [_begin(each, hop) for each in parts]
    # Other threads send meanwhile.
    return [*sends, _begin(torch.frombuffer(bytearray(source.digest(parts).encode()), dtype=torch.uint8), hop)]


def _begin(data: torch.Tensor, hop: Hop) -> tuple[Any, torch.Tensor]:
    """Begin to send to the next rank."""
    assert hop.after is not None
    return dist.isend(data, hop.after, group=hop.group), data


def receive(into: Mapping[str, torch.Tensor], hop: Hop) -> tuple[slots.Record, Received, bool]:
    """Receive a state, and pass it on: (record, tensors, whether the bytes have the donor's checksum).

    into: tensors by name. Those of the right shape and type receive the values; the others are made.
    """
    record = slots.Record(**json.loads(relay(None, hop)))
    header = relay(None, hop)
    entries = shards.parse_header(header[8:])
    tensors = {entry.name: _destination(entry, into.get(entry.name)) for entry in entries}
    hashed = xxhash.xxh3_128(header)
    passed_on: list[tuple[Any, torch.Tensor]] = []
    with ThreadPoolExecutor(1, thread_name_prefix="checksum") as beside:
        for each in messages(entries):
            data = _room(each, tensors)
            # One at a time: with several, gloo (torch 2.13) does not always notice the sender's death.
            dist.recv(data, hop.before, group=hop.group)
            if hop.after is not None:
                passed_on.append(_begin(data, hop))
            beside.submit(hashed.update, data.numpy().data)
            if not _is_alone(each.entries[0]):
                _unpack(each, data, tensors)
        digest = torch.empty(DIGEST, dtype=torch.uint8)
        dist.recv(digest, hop.before, group=hop.group)
        if hop.after is not None:
            passed_on.append(_begin(digest, hop))
        for work, _ in passed_on:
            work.wait()
    return record, Received(tensors), hashed.hexdigest() == digest.numpy().tobytes().decode(errors="replace")


def relay(data: bytes | None, hop: Hop) -> bytes:
    """Send bytes to the next rank, and return them. data: the bytes; None: receive them first."""
    size = torch.tensor([0 if data is None else len(data)])
    _pass_on(size, data is None, hop)
    note = torch.empty(int(size), dtype=torch.uint8)
    if data is not None:
        note.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    _pass_on(note, data is None, hop)
    return note.numpy().tobytes()


def _pass_on(data: torch.Tensor, receives: bool, hop: Hop) -> None:
    if receives:
        dist.recv(data, hop.before, group=hop.group)
    if hop.after is not None:
        dist.send(data, hop.after, group=hop.group)


def _destination(entry: shards.Entry, live: torch.Tensor | None) -> torch.Tensor:
    dtype = TORCH[entry.dtype]
    if live is None or live.is_conj() or live.is_neg():  # such a tensor has other values than its memory
        return torch.empty(entry.shape, dtype=dtype)
    fits = live.dtype == dtype and tuple(live.shape) == entry.shape and live.is_contiguous()
    return live if fits else torch.empty(entry.shape, dtype=dtype)


def _is_alone(entry: shards.Entry) -> bool:
    return entry.stop - entry.start >= ALONE


def _room(message: Message, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The memory into which the message goes."""
    first = message.entries[0]
    if _is_alone(first):
        return _bytes(tensors[first.name])[message.start - first.start : message.stop - first.start]
    return torch.empty(message.stop - message.start, dtype=torch.uint8)


def _unpack(message: Message, data: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the small tensors of a message to where they belong."""
    for entry in message.entries:
        if entry.stop > entry.start:
            _bytes(tensors[entry.name]).copy_(data[entry.start - message.start : entry.stop - message.start])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, as bytes."""
    found = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    at = tensor.storage_offset() * tensor.element_size()
    return found.set_(tensor.untyped_storage(), at, (tensor.nbytes,))  # type: ignore[call-overload, no-any-return]


def chain_place(chain: Sequence[int], rank: int, group: dist.ProcessGroup | None) -> Hop | None:
    """The rank's place in the chain; None: it has none, or nobody else is in the chain."""
    if rank not in chain or len(chain) == 1:
        return None
    at = chain.index(rank)
    return Hop(chain[at - 1] if at else None, chain[at + 1] if at + 1 < len(chain) else None, group)
