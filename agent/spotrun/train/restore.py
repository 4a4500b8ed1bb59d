"""Agreeing on the state to go on from, and bringing it to every node.

Each node offers its newest whole snapshot; rank 0 looks for a newer checkpoint. The best by (generation, step) is
taken; nodes without it get it over the process group, record and file as they are, into a slot of their own.
"""

from __future__ import annotations

import json
import logging
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from spotrun import slots
from spotrun.control import Context
from spotrun.errors import CorruptError, NotFound, SpotrunError, StoreError
from spotrun.train.place import place
from spotrun.train.snapshot import map_file

log = logging.getLogger(__name__)

Order = tuple[int, int]  # (generation, step)
NOTHING: Order = (-1, -1)
CHUNK = 64 << 20  # bytes in one broadcast
READER_PATIENCE = 300.0  # seconds that the agent may take to copy its part of a large snapshot to disk


def best_of(offers: Sequence[Order]) -> tuple[Order, int]:
    """(the best offer, the first rank that has it). `NOTHING` if nobody has anything."""
    best = max(offers)
    return best, offers.index(best)


def restore(context: Context, local_rank: int, group: dist.ProcessGroup | None) -> tuple[int, slots.Record] | None:
    """Bring the best state there is into a slot of this node: (slot, record), on every rank. None: a fresh start.

    group: one that takes CPU tensors; None for the default one. Every rank must call this.
    """
    folder = Path(context.slots)
    folder.mkdir(parents=True, exist_ok=True)
    # One process per node looks; the others of the node find the result in the same folder.
    own = _offer(folder, context.job) if local_rank == 0 else NOTHING
    best, _ = best_of(_gather(own, group))
    if place()[1] == 0 and (fetched := _newer_checkpoint(context, folder, best)):
        own = fetched
    offers = _gather(own, group)
    best, donor = best_of(offers)
    if best == NOTHING:
        return None
    lacking = [offer != best for offer in _gather_leaders(offers, local_rank, group)]
    if any(lacking):
        _transfer(folder, context.job, donor, own == best, local_rank == 0, group)
        if place()[0] > 1:
            dist.barrier(group)
    for slot, record in slots.newest(folder, context.job):
        if record.order == best:
            return slot, record
    raise SpotrunError(f"no snapshot of generation {best[0]}, step {best[1]} in {folder}, though it was just put there")


def _offer(folder: Path, job: str) -> Order:
    """The newest whole snapshot here. Damaged ones lose their record, so that they are overwritten first."""
    for slot, record in slots.newest(folder, job):
        try:
            slots.verify(folder, slot, record)
        except CorruptError as error:
            log.warning("%s; passed over", error)
            slots.revoke(folder, slot)
            continue
        return record.order
    return NOTHING


def _newer_checkpoint(context: Context, folder: Path, best: Order) -> Order | None:
    """Fetch the newest whole checkpoint that is newer than `best`, if there is one."""
    newer = [order for order in context.checkpoints if tuple(order) > best]
    if not newer:
        return None
    # Imported only now: most restarts find the state in memory.
    from spotrun.store import Store
    from spotrun.train import checkpoint

    store = Store(context.bucket)
    for _, step in newer:
        slot = _free_slot(folder, context.job)
        try:
            with _held(folder, slot):
                return _patiently(partial(checkpoint.fetch, store, context.job, step, folder, slot))
        except (CorruptError, NotFound) as error:
            log.warning("checkpoint passed over: %s", error)
        except StoreError as error:
            if best == NOTHING:
                raise
            log.warning("going on with what is in memory: %s", error)
            return None
    if best == NOTHING:
        # Beginning anew would look like success, and push out checkpoints that someone could still mend.
        raise SpotrunError(
            f"none of the {len(newer)} checkpoints of job {context.job} can be read; the warnings above name the files."
            " Restore them in the bucket and relaunch the job, or submit it as a new one"
        )
    return None


def _patiently(fetch: Callable[[], slots.Record]) -> Order:
    """Try again while the bucket is away: the job has nothing better to do."""
    for pause in (1.0, 2.0, 4.0, 8.0, 16.0):
        try:
            return fetch().order
        except NotFound:
            raise
        except StoreError as error:
            log.warning("%s; trying again in %g s", error, pause)
            time.sleep(pause)
    return fetch().order


def _free_slot(folder: Path, job: str) -> int:
    """The slot that does not hold this node's newest snapshot."""
    found = slots.newest(folder, job)
    return 1 - found[0][0] if found else 0


def _gather(own: Order, group: dist.ProcessGroup | None) -> list[Order]:
    world, _ = place()
    if world == 1:
        return [own]
    found = [torch.zeros(2, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(found, torch.tensor(own, dtype=torch.int64), group=group)
    return [(int(pair[0]), int(pair[1])) for pair in found]


def _gather_leaders(offers: list[Order], local_rank: int, group: dist.ProcessGroup | None) -> list[Order]:
    """Offers of those ranks that look for their node."""
    flags = _gather((local_rank, 0), group)
    return [offer for offer, flag in zip(offers, flags, strict=True) if flag[0] == 0]


def _transfer(folder: Path, job: str, donor: int, has_it: bool, leads: bool, group: dist.ProcessGroup | None) -> None:
    """Broadcast the donor's slot; every leading rank without it keeps it in a slot."""
    giving = place()[1] == donor
    text = b""
    if giving:
        slot, record = slots.newest(folder, job)[0]
        text = json.dumps(asdict(record)).encode()
    size = torch.tensor([len(text)])
    dist.broadcast(size, donor, group=group)
    note = torch.frombuffer(bytearray(text), dtype=torch.uint8) if giving else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(note, donor, group=group)
    record = slots.Record(**json.loads(note.numpy().tobytes()))
    if giving:
        _broadcast(_buffer(slots.data_path(folder, slot), record.size, False), record.size, donor, group)
    elif has_it or not leads:
        _broadcast(None, record.size, donor, group)
    else:
        slot = _free_slot(folder, job)
        with _held(folder, slot):
            slots.revoke(folder, slot)
            _broadcast(_buffer(slots.data_path(folder, slot), record.size, True), record.size, donor, group)
            slots.verify(folder, slot, record)
            slots.commit(folder, slot, record)


def _broadcast(data: torch.Tensor | None, size: int, donor: int, group: dist.ProcessGroup | None) -> None:
    """Send or receive `size` bytes in chunks; without `data` they are thrown away."""
    for start in range(0, size, CHUNK):
        stop = min(size, start + CHUNK)
        chunk = torch.empty(stop - start, dtype=torch.uint8) if data is None else data[start:stop]
        dist.broadcast(chunk, donor, group=group)


@contextmanager
def _held(folder: Path, slot: int) -> Iterator[None]:
    """Lock a slot to write it; an uploader of the last generation may still be reading it."""
    deadline = time.monotonic() + READER_PATIENCE
    while True:
        with slots.writing(folder, slot) as free:
            if free:
                yield
                return
        if time.monotonic() > deadline:
            raise SpotrunError(
                f"{slots.data_path(folder, slot)} has been locked by its reader for {READER_PATIENCE:g} s"
            )
        time.sleep(0.005)


def _buffer(path: Path, size: int, write: bool) -> torch.Tensor:
    """The file's bytes as a tensor: shared and new to write it, a private map to read it."""
    if not write:
        with path.open("rb") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    return torch.frombuffer(map_file(path, size), dtype=torch.uint8)
