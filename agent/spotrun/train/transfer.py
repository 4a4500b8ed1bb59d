"""Sending a state from worker to worker, straight into the tensors of those who lack it.

The donor reads it from a slot, or from its own tensors. The bytes travel as they lie in a slot, and their checksum
follows them. A receiver hashes what has arrived while the rest arrives, and writes no file: its next snapshot fills its
slot.

One connection rarely fills a network: AWS limits it to 5 or 10 Gbit/s
(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-network-bandwidth.html). So other ranks that have the
same state help the donor: they send some of the large tensors to the first receiver. The donor's checksum is of all.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist
import xxhash

from spotrun.errors import CorruptError
from spotrun.state import shards, slots
from spotrun.train import connections
from spotrun.train.encoding import TORCH, Encoder
from spotrun.train.sections import Place, place
from spotrun.train.slot_files import Entries, layout
from spotrun.train.training_state import TrainingState

# Bytes in one message, at most. A sender that dies in the middle of a message leaves gloo (torch 2.13) waiting for the
# rest. That happened in 2 of 3 tests with 64 MiB, in 2 of 26 with 4 MiB, and in none of 6 with 1 MiB.
CHUNK = 1 << 20
ALONE = 1 << 20  # bytes of a tensor that has messages of its own; smaller ones share them
DIGEST = 32  # characters of a checksum
AHEAD = 64  # messages of a GPU's state that are in the host's memory at a time


@dataclass(frozen=True)
class Hop:
    """A worker's place in the chain: the ranks from which it receives and to which it sends. None: there is none.

    helpers: ranks that send a part to the first receiver. Only the donor and the first receiver know them.
    """

    before: int | None
    after: int | None
    group: dist.ProcessGroup | None  # takes CPU tensors; not the default group of a later generation
    helpers: tuple[int, ...] = ()


Sends = list[tuple[Any, torch.Tensor]]  # under way, each with its data
_Arrival = tuple[Callable[[], torch.Tensor], "Future[torch.Tensor]"]


@dataclass(frozen=True)
class Message:
    """A range of a slot file's bytes, counted from the end of the header: whole small tensors, or a part of one."""

    start: int
    stop: int
    entries: Entries


class Source(Protocol):
    """What a donor sends.

    equal: names of tensors that are the same in all sources from which a receiver gets parts. is_copied: whether
    `bytes_of` takes memory. xxh3: the checksum of the header and all bytes after it; empty: not known.
    """

    entries: Entries
    is_copied: bool
    xxh3: str

    @property
    def equal(self) -> Collection[str]:
        """See above."""

    @property
    def header(self) -> bytes:
        """The bytes before the first tensor."""

    def bytes_of(self, start: int, stop: int, entries: Entries) -> torch.Tensor:
        """A range of the bytes after the header, which has only bytes of these entries."""


class OwnState:
    """The state in this process's own tensors. Nothing may change them while it is sent.

    record: has no checksum. equal: names of tensors that are equal on all ranks.
    """

    def __init__(
        self, record: slots.Record, entries: Entries, tensors: Mapping[str, torch.Tensor], equal: Collection[str] = ()
    ) -> None:
        self.record, self.entries, self._tensors, self.equal = record, entries, tensors, sorted(equal)
        self.is_copied, self.xxh3 = any(each.device.type != "cpu" for each in tensors.values()), ""
        self._whole: dict[str, torch.Tensor] = {}  # copies of tensors that are not contiguous

    @classmethod
    def of(cls, job: str, order: tuple[int, int], state: TrainingState, equal: Collection[Place]) -> OwnState:
        """The state of this (generation, step). equal: where the tensors are that are equal on all ranks."""
        encoder = Encoder()
        record = slots.Record(job, *order, 0, "", state.encode(encoder))
        names = {name for name, each in encoder.tensors.items() if place(each) in equal}
        return cls(record, layout(encoder.tensors), encoder.tensors, names)

    @property
    def mark(self) -> int:
        """See `restore.Offer`. The other ranks have the same names, shapes and types."""
        text = "\n".join(self.equal).encode()
        return xxhash.xxh3_64_intdigest(self.header + text) >> 1 | 1 if text else 0

    @property
    def header(self) -> bytes:
        return shards.header(self.entries)

    def bytes_of(self, start: int, stop: int, entries: Entries) -> torch.Tensor:
        parts = []
        for entry in (each for each in entries if each.stop > each.start):
            parts.append(_bytes(self._contiguous(entry.name))[max(0, start - entry.start) : stop - entry.start].cpu())
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _contiguous(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name].detach()
        if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            return tensor
        if name not in self._whole:
            self._whole[name] = tensor.resolve_conj().resolve_neg().contiguous()
        return self._whole[name]


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


def shares(parts: Sequence[Message], equal: Collection[str], senders: int) -> list[int]:
    """Who sends each message: 0 is the donor, the others are helpers. Each sends about the same number of bytes."""
    equal, loads, found = set(equal), [0] * senders, []
    for each in parts:
        first = each.entries[0]
        sender = loads.index(min(loads)) if _is_alone(first) and first.name in equal else 0
        loads[sender] += each.stop - each.start
        found.append(sender)
    return found


def send(record: slots.Record, source: Source, hop: Hop) -> Sends:
    """Begin to send a state. Returns the sends under way, for `finish`. The source must not change before that."""
    assert hop.after is not None
    parts = messages(source.entries)
    who = shares(parts, source.equal, 1 + len(hop.helpers))
    relay(json.dumps({"record": vars(record), "who": who}).encode(), hop)
    relay(source.header, hop)
    sends: Sends = []
    hashed = None if source.xxh3 else xxhash.xxh3_128(source.header)
    for each, sender in zip(parts, who, strict=True):
        if sender > 0 and hashed is None:
            continue
        data = source.bytes_of(each.start, each.stop, each.entries)
        if sender == 0:
            _begin(sends, data, hop.after, hop.group, source.is_copied)
        if hashed is not None:  # other threads send meanwhile
            hashed.update(data.numpy().data)
    xxh3 = source.xxh3 if hashed is None else hashed.hexdigest()
    _begin(sends, torch.frombuffer(bytearray(xxh3.encode()), dtype=torch.uint8), hop.after, hop.group)
    return sends


def help_send(source: Source, number: int, helpers: int, to: int, group: dist.ProcessGroup | None) -> Sends:
    """Begin to send a helper's part, as `send`. number: the helper's, from 1 to `helpers`. to: the first receiver."""
    sends: Sends = []
    group = group or dist.group.WORLD
    parts = messages(source.entries)
    for each, sender in zip(parts, shares(parts, source.equal, 1 + helpers), strict=True):
        if sender == number:
            data = source.bytes_of(each.start, each.stop, each.entries)
            _begin(sends, data, to, group, source.is_copied)
    return sends


def finish(sends: Sends) -> None:
    """Wait until these sends have ended. Raises `DistError` if a receiver is gone."""
    under_way = sends.copy()  # gloo (torch 2.13) waits for ever if it is asked to wait again
    sends.clear()
    if under_way:
        connections.call(lambda: [work.wait() for work, _ in under_way])


def _begin(sends: Sends, data: torch.Tensor, to: int, group: dist.ProcessGroup | None, is_copy: bool = False) -> None:
    """Begin to send data, and add it to `sends`. is_copy: wait so that few copies are in memory."""
    if is_copy and len(sends) >= AHEAD:
        first = sends[: AHEAD // 2]
        del sends[: AHEAD // 2]
        finish(first)
    sends.append((dist.isend(data, to, group=group), data))


def receive(into: Mapping[str, torch.Tensor], hop: Hop) -> tuple[slots.Record, Received, bool]:
    """Receive a state, and pass it on: (record, tensors, whether the bytes have the donor's checksum).

    into: tensors by name. Those of the right shape and type receive the values; the others are made.
    """
    told = json.loads(relay(None, hop))
    header = relay(None, hop)
    entries = shards.parse_header(header[8:])
    tensors = {entry.name: _destination(entry, into.get(entry.name)) for entry in entries}
    hashed = xxhash.xxh3_128(header)
    passed_on: Sends = []
    parts = messages(entries)
    who = told["who"] if hop.helpers else [0] * len(parts)
    with ThreadPoolExecutor(1, thread_name_prefix="checksum") as beside, _Lanes(hop) as lanes:
        arrivals = [lanes.begin(partial(_room, each, tensors), sender) for each, sender in zip(parts, who, strict=True)]
        last = lanes.begin(partial(torch.empty, DIGEST, dtype=torch.uint8), 0)
        for each, arrival in zip(parts, arrivals, strict=True):
            data = connections.result(arrival)
            if hop.after is not None:
                _begin(passed_on, data, hop.after, hop.group)
            beside.submit(hashed.update, data.numpy().data)
            if not _is_alone(each.entries[0]):
                _unpack(each, data, tensors)
        digest = connections.result(last)
        if hop.after is not None:
            _begin(passed_on, digest, hop.after, hop.group)
        finish(passed_on)
    whole = hashed.hexdigest() == digest.numpy().tobytes().decode(errors="replace")
    return slots.Record(**told["record"]), Received(tensors), whole


class _Lanes:
    """Receives from the donor and its helpers at the same time, a thread for each of them.

    From each of them one message at a time: with several, gloo (torch 2.13) does not always notice the sender's death.
    A thread may wait for a message for ever, see `connections`. So nobody waits for the threads after an error: the
    connections are broken, and no thread begins to receive again.
    """

    def __init__(self, hop: Hop) -> None:
        assert hop.before is not None
        self._group, self._over = hop.group, False
        self._queues: list[SimpleQueue[_Arrival | None]] = []
        for sender in (hop.before, *hop.helpers):
            self._queues.append(SimpleQueue())
            arguments = (self._queues[-1], sender)
            threading.Thread(target=self._receive, args=arguments, name="spotrun-receive", daemon=True).start()

    def begin(self, room: Callable[[], torch.Tensor], sender: int) -> Future[torch.Tensor]:
        """Receive this after all that has been begun with this sender. sender: as in `shares`. room: makes memory."""
        future: Future[torch.Tensor] = Future()
        self._queues[sender].put((room, future))
        return future

    def __enter__(self) -> _Lanes:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._over = kind is not None
        for each in self._queues:
            each.put(None)
        if self._over:
            connections.break_all()

    def _receive(self, queue: SimpleQueue[_Arrival | None], sender: int) -> None:
        while (found := queue.get()) is not None and not self._over:
            room, future = found
            try:
                data = room()
                dist.recv(data, sender, group=self._group)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(data)


def relay(data: bytes | None, hop: Hop) -> bytes:
    """Send bytes to the next rank, and return them. data: the bytes; None: receive them first."""
    size = torch.tensor([0 if data is None else len(data)], device="cpu")
    _pass_on(size, data is None, hop)
    note = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    if data is not None:
        note.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    _pass_on(note, data is None, hop)
    return note.numpy().tobytes()


def _pass_on(data: torch.Tensor, receives: bool, hop: Hop) -> None:
    if receives:
        connections.call(lambda: dist.recv(data, hop.before, group=hop.group))
    if hop.after is not None:
        connections.call(lambda: dist.send(data, hop.after, group=hop.group))


def _destination(entry: shards.Entry, live: torch.Tensor | None) -> torch.Tensor:
    dtype = TORCH[entry.dtype]
    if live is None or live.is_conj() or live.is_neg():  # such a tensor has other values than its memory
        return torch.empty(entry.shape, dtype=dtype, device="cpu")
    fits = live.dtype == dtype and tuple(live.shape) == entry.shape and live.is_contiguous()
    return live if fits else torch.empty(entry.shape, dtype=dtype, device="cpu")


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


def chain_place(
    chain: Sequence[int], rank: int, group: dist.ProcessGroup | None, helpers: tuple[int, ...] = ()
) -> Hop | None:
    """The rank's place in the chain; None: it has none, or nobody else is in the chain."""
    if rank not in chain or len(chain) == 1:
        return None
    at = chain.index(rank)
    before, after = chain[at - 1] if at else None, chain[at + 1] if at + 1 < len(chain) else None
    return Hop(before, after, group or dist.group.WORLD, helpers if at < 2 else ())
