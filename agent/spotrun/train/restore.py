"""Agreeing on the state to continue from, and bringing it to every node.

Each node offers its newest whole snapshot. Rank 0 looks for a newer checkpoint. The best offer by (generation, step)
wins. Each node that lacks this state receives the record and the file, unchanged, in a slot of its own. The state goes
from node to node in a chain, so no node sends it twice. Ranks that need nothing take no part.
"""

from __future__ import annotations

import json
import logging
import mmap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from spotrun.errors import CorruptError, NotFound, SpotrunError, StoreError
from spotrun.state import slots
from spotrun.state.control import Context
from spotrun.train.distributed import rank_and_world
from spotrun.train.slot_files import map_file

log = logging.getLogger(__name__)

Order = tuple[int, int]  # (generation, step)
NOTHING: Order = (-1, -1)
CHUNK = 64 << 20  # bytes in one message
READER_PATIENCE = 300.0  # seconds: limit for the agent to copy its part of a large snapshot to disk


def best_of(offers: Sequence[Order]) -> tuple[Order, int]:
    """(the best offer, the first rank that has it). The offer is `NOTHING` if no rank has a state."""
    best = max(offers)
    return best, offers.index(best)


@dataclass(frozen=True)
class Route:
    """The way of a state to the nodes that lack it."""

    chain: tuple[int, ...]  # ranks that pass the state on: the donor, then the leader of each node that lacks it
    waiting: Mapping[int, int]  # the other ranks of these nodes, each with the leader of its node


def route(offers: Sequence[Sequence[int]]) -> Route:
    """The way of the best state. offers: (generation, step, local rank) of every rank, in order."""
    best, donor = best_of([(offer[0], offer[1]) for offer in offers])
    chain, waiting, leader = [donor], {}, 0
    for rank, (*offer, local_rank) in enumerate(offers):
        if local_rank == 0:
            leader = rank
            if tuple(offer) != best:
                chain.append(rank)
        elif leader in chain[1:]:
            waiting[rank] = leader
    return Route(tuple(chain), waiting)


def restore(context: Context, local_rank: int, group: dist.ProcessGroup | None) -> tuple[int, slots.Record] | None:
    """Bring the best state into a slot of this node: (slot, record), on every rank. None: there is no state.

    group: takes CPU tensors; None: the default group. Every rank must call this.
    """
    folder = Path(context.slots)
    folder.mkdir(parents=True, exist_ok=True)
    # One process of each node looks. The others find the result in the same folder.
    own = _offer(folder, context.job) if local_rank == 0 else NOTHING
    best, _ = best_of([(found[0], found[1]) for found in _gather(own, group)])
    if rank_and_world()[0] == 0 and (fetched := _newer_checkpoint(context, folder, best)):
        own = fetched
    offers = _gather((*own, local_rank), group)
    best, _ = best_of([(offer[0], offer[1]) for offer in offers])
    if best == NOTHING:
        return None
    _bring(folder, context.job, route(offers), group)
    for slot, record in slots.newest(folder, context.job):
        if record.order == best:
            return slot, record
    raise SpotrunError(f"no snapshot of generation {best[0]}, step {best[1]} in {folder}, though it was just put there")


def _offer(folder: Path, job: str) -> Order:
    """The newest whole snapshot here. A damaged one loses its record, so that it is overwritten first."""
    for slot, record in slots.newest(folder, job):
        try:
            slots.verify(folder, slot, record)
        except CorruptError as error:
            log.warning("%s; skipped", error)
            slots.revoke(folder, slot)
            continue
        return record.order
    return NOTHING


def _newer_checkpoint(context: Context, folder: Path, best: Order) -> Order | None:
    """Download the newest whole checkpoint that is newer than `best`, if there is one."""
    newer = [order for order in context.checkpoints if tuple(order) > best]
    if not newer:
        return None
    # Imported late: most restarts find the state in memory.
    from spotrun.store import Store
    from spotrun.train import download

    store = Store(context.bucket)
    for _, step in newer:
        slot = _free_slot(folder, context.job)
        try:
            with _held(folder, slot):
                return _patiently(partial(download.fetch, store, context.job, step, folder, slot))
        except (CorruptError, NotFound) as error:
            log.warning("checkpoint skipped: %s", error)
        except StoreError as error:
            if best == NOTHING:
                raise
            log.warning("continuing with the state in memory: %s", error)
            return None
    if best == NOTHING:
        # A start at step 0 would look like success, and its checkpoints would replace those that can be repaired.
        raise SpotrunError(
            f"none of the {len(newer)} checkpoints of job {context.job} can be read; the warnings above name the files."
            " Restore them in the bucket and relaunch the job, or submit it as a new one"
        )
    return None


def _patiently(fetch: Callable[[], slots.Record]) -> Order:
    """Retry while the bucket does not answer: the job cannot do anything else."""
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
    """The slot without this node's newest snapshot."""
    found = slots.newest(folder, job)
    return 1 - found[0][0] if found else 0


def _gather(own: Sequence[int], group: dist.ProcessGroup | None) -> list[list[int]]:
    """The values of every rank."""
    _, world = rank_and_world()
    if world == 1:
        return [list(own)]
    found = [torch.zeros(len(own), dtype=torch.int64) for _ in range(world)]
    dist.all_gather(found, torch.tensor(own, dtype=torch.int64), group=group)
    return [each.tolist() for each in found]


def _bring(folder: Path, job: str, way: Route, group: dist.ProcessGroup | None) -> None:
    """Do this rank's part of the transfer, if it has one."""
    rank, _ = rank_and_world()
    if rank in way.waiting:
        dist.recv(torch.empty(1), way.waiting[rank], group=group)
    if rank not in way.chain or len(way.chain) == 1:
        return
    at = way.chain.index(rank)
    before = way.chain[at - 1] if at > 0 else None
    after = way.chain[at + 1] if at + 1 < len(way.chain) else None
    if before is None:
        slot, record = slots.newest(folder, job)[0]
        _pass_on_record(record, before, after, group)
        _pass_on(_buffer(slots.data_path(folder, slot), record.size, False), before, after, group)
        return
    slot, record = _free_slot(folder, job), _pass_on_record(None, before, after, group)
    with _held(folder, slot):
        slots.revoke(folder, slot)
        _pass_on(_buffer(slots.data_path(folder, slot), record.size, True), before, after, group)
        slots.verify(folder, slot, record)
        slots.commit(folder, slot, record)
    for other in (other for other, leader in way.waiting.items() if leader == rank):
        dist.send(torch.ones(1), other, group=group)


def _pass_on_record(
    record: slots.Record | None, before: int | None, after: int | None, group: dist.ProcessGroup | None
) -> slots.Record:
    """Send the record to the next rank, after receiving it if it is None."""
    text = b"" if record is None else json.dumps(asdict(record)).encode()
    size = torch.tensor([len(text)])
    _pass_on(size, before, after, group)
    data = bytearray(int(size)) if record is None else bytearray(text)
    note = torch.frombuffer(data, dtype=torch.uint8)
    _pass_on(note, before, after, group)
    return slots.Record(**json.loads(note.numpy().tobytes())) if record is None else record


def _pass_on(data: torch.Tensor, before: int | None, after: int | None, group: dist.ProcessGroup | None) -> None:
    """Receive `data` from rank `before` and send it to rank `after`, in chunks. None: there is no such rank."""
    sent = []
    for chunk in data.split(CHUNK):  # type: ignore[no-untyped-call]
        if before is not None:
            dist.recv(chunk, before, group=group)
        if after is not None:
            sent.append(dist.isend(chunk, after, group=group))
    for work in filter(None, sent):
        work.wait()


@contextmanager
def _held(folder: Path, slot: int) -> Iterator[None]:
    """Lock a slot for writing. An uploader of the last generation may still be reading it."""
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
    """The file's bytes as a tensor: a new file in a shared map (write), or a private map of the file."""
    if not write:
        with path.open("rb") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    return torch.frombuffer(map_file(path, size), dtype=torch.uint8)
