"""Sending a snapshot from worker to worker, straight into the tensors of those who lack it.

The bytes travel as they lie in the donor's slot, so a receiver can compare their checksum with the record's. It hashes
what has arrived while the rest arrives, and writes no file: its next snapshot fills its slot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from spotrun.errors import CorruptError
from spotrun.state import shards, slots
from spotrun.train.encoding import TORCH
from spotrun.train.slot_files import Entries, Reader

CHUNK = 64 << 20  # bytes in one message, at most
ALONE = 1 << 20  # bytes of a tensor that has messages of its own; smaller ones share them


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


def send(record: slots.Record, reader: Reader, hop: Hop) -> list[Any]:
    """Begin to send a committed slot. Returns the sends under way: the slot must not change before they have ended."""
    relay(json.dumps(asdict(record)).encode(), hop)
    relay(reader.header, hop)
    assert hop.after is not None
    data = reader.data
    return [dist.isend(data[each.start : each.stop], hop.after, group=hop.group) for each in messages(reader.entries)]


def receive(into: Mapping[str, torch.Tensor], hop: Hop) -> tuple[slots.Record, Received, bool]:
    """Receive a state, and pass it on: (record, tensors, whether the bytes are those of the record).

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
                passed_on.append((dist.isend(data, hop.after, group=hop.group), data))
            beside.submit(hashed.update, data.numpy().data)
            if not _is_alone(each.entries[0]):
                _unpack(each, data, tensors)
        for work, _ in passed_on:
            work.wait()
    return record, Received(tensors), hashed.hexdigest() == record.xxh3


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
    found = torch.empty(0, dtype=torch.uint8)
    at = tensor.storage_offset() * tensor.element_size()
    return found.set_(tensor.untyped_storage(), at, (tensor.nbytes,))  # type: ignore[call-overload, no-any-return]


def chain_place(chain: Sequence[int], rank: int, group: dist.ProcessGroup | None) -> Hop | None:
    """The rank's place in the chain; None: it has none, or nobody else is in the chain."""
    if rank not in chain or len(chain) == 1:
        return None
    at = chain.index(rank)
    return Hop(chain[at - 1] if at else None, chain[at + 1] if at + 1 < len(chain) else None, group)
