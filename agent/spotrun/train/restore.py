"""Agreeing on the state to continue from, and bringing it to every node.

Each node offers its newest whole snapshot, and each rank the state in its own memory, if that is known to be whole.
Rank 0 looks for a newer checkpoint. The best offer by (generation, step) wins. The ranks that lack this state receive
it in their own memory (see `train/transfer.py`). It goes from rank to rank in a chain, so no rank sends it twice. Ranks
that need nothing take no part. A snapshot that this process sends, or has not written itself, is verified meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from spotrun.backoff import read_twice
from spotrun.errors import CorruptError, NotFound, SpotrunError, StoreError
from spotrun.state import slots
from spotrun.state.control import Context
from spotrun.train.distributed import rank_and_world
from spotrun.train.slot_files import Reader, SlotFile
from spotrun.train.streams import NOWHERE, Address, Listener
from spotrun.train.transfer import OwnState, Received, Source, receive, send

log = logging.getLogger(__name__)

Order = tuple[int, int]  # (generation, step)
NOTHING: Order = (-1, -1)
ROUNDS = 4  # both snapshots of a node may be damaged, and a trusted one is only verified in a further round
BUCKET_PATIENCE = 300.0  # seconds to go on asking a bucket that does not answer; less than a usual `start_timeout`
BUCKET_PATIENCE_WITH_STATE = 30.0  # the same, if the state in memory is hardly older: then that one counts
PAUSE = 30.0  # seconds between two such requests, at most
READER_PATIENCE = 300.0  # seconds: limit for the agent to copy its part of a large snapshot to disk
WIDTH = 16  # whole numbers that a rank tells the others; a release that tells more of them still understands this one


def best_of(offers: Sequence[Order]) -> tuple[Order, int]:
    """(the best offer, the first rank that has it). The offer is `NOTHING` if no rank has a state."""
    best = max(offers)
    return best, offers.index(best)


@dataclass
class Found:
    """The state to continue from."""

    record: slots.Record
    tensors: Reader | Received | None  # None: the state is that of this process already
    kept: bool  # whether this node has it in a slot
    sending: Listener | None  # gives the state to another rank; see `settle`

    def settle(self) -> None:
        """Wait until the state is sent to the next rank. Raises if that rank is gone."""
        if self.sending is not None:
            self.sending.wait()


@dataclass(frozen=True)
class Offer:
    """What a rank has.

    slot: its node's newest snapshot, which only local rank 0 offers. trusted: whether that needs no check. live: the
    state in the rank's own memory. address: where others can get a state from it.
    """

    slot: Order
    local_rank: int
    trusted: bool = False
    live: Order = NOTHING
    address: Address = NOWHERE

    @property
    def best(self) -> Order:
        return max(self.slot, self.live)

    @property
    def numbers(self) -> list[int]:
        """What the other ranks `read`."""
        return [*self.slot, self.local_rank, int(self.trusted), *self.live, *self.address.numbers]

    @classmethod
    def read(cls, numbers: Sequence[int]) -> Offer:
        """The offer with these numbers. More of them are ignored."""
        at, slot_step, local_rank, trusted, live_at, live_step = numbers[:6]
        return cls((at, slot_step), local_rank, bool(trusted), (live_at, live_step), Address.read(numbers[6:]))


def route(offers: Sequence[Offer]) -> tuple[int, ...]:
    """The ranks that pass the best state on: the donor, then every rank that has it neither in memory nor in a slot.

    offers: of every rank, in order. A rank that has the state in its memory is the donor, if there is one.
    """
    best, donor = best_of([offer.best for offer in offers])
    if any(offer.live == best for offer in offers):
        _, donor = best_of([offer.live for offer in offers])
    chain, slot = [donor], NOTHING
    for rank, offer in enumerate(offers):
        if offer.local_rank == 0:
            slot = offer.slot
        if slot != best and offer.live != best:
            chain.append(rank)
    return tuple(chain)


def restore(
    context: Context,
    local_rank: int,
    group: dist.ProcessGroup | None,
    trusted: Order = NOTHING,
    into: Callable[[], Mapping[str, torch.Tensor]] = dict,
    mapped: Callable[[int], SlotFile | None] = lambda _: None,
    live: OwnState | None = None,
) -> Found | None:
    """Find the best state, on every rank. None: there is none. Every rank must call this.

    group: takes CPU tensors; None: the default group. trusted: a snapshot of this order here is checked only if it is
    sent. into: returns the tensors, by name, into which a received state goes. mapped: returns a slot's file, if this
    process has mapped it; else None. live: the state in this process's memory, if it is whole. Raises `DistError` if a
    trusted state that this rank sends is damaged, or if a state has arrived damaged.
    """
    folder, mine = Path(context.slots), NOTHING if live is None else live.record.order
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(ROUNDS):
        # One process of each node looks. The others find the result in the same folder.
        own = _newest(folder, context.job) if local_rank == 0 else NOTHING
        best, _ = best_of([(each[0], each[1]) for each in gather(max(own, mine), group)])
        if rank_and_world()[0] == 0 and (fetched := _newer_checkpoint(context, folder, best)):
            own = trusted = fetched  # the download has compared its checksums with the manifest's
        with ThreadPoolExecutor(1, thread_name_prefix="verify") as beside, _listening() as listener:
            address = NOWHERE if listener is None else listener.address
            offer = Offer(own, local_rank, own == trusted, mine, address)
            offers = [Offer.read(each) for each in gather(offer.numbers, group)]
            if (best := max(each.best for each in offers)) == NOTHING:
                return None
            doubtful = any(each.slot == best and not each.trusted for each in offers)
            source, chain = live if mine == best else None, route(offers)
            checks = best == own and (own != trusted or (source is None and rank_and_world()[0] in chain[:-1]))
            verified = beside.submit(_verify, folder, context.job, best) if checks else None
            found, whole = _bring(folder, context.job, best, chain, offers, listener, into, mapped, source)
        if mine != best and isinstance(found.tensors, Received):  # into the memory that was offered
            live, mine = None, NOTHING
        damage = None if verified is None else verified.result()
        whole = whole and damage is None
        if not doubtful and not whole:
            # The receivers of a trusted state do not know of the damage: the next collective fails without this rank.
            raise dist.DistError(f"the state of step {best[1]} is damaged: {damage or 'its checksum is wrong'}")
        # All ranks must know whether each rank has the whole state: if one snapshot is damaged, all ranks pass over it.
        if not doubtful or all(each[0] for each in gather([int(whole)], group)):
            return found
        found.settle()
        if damage is not None:  # only now: until the gather above, the node's other workers looked for this snapshot
            _pass_over(folder, *_slot_of(folder, context.job, best), damage)
        trusted = NOTHING
    raise SpotrunError(f"the state of job {context.job} was damaged each time that it was read: see the warnings above")


@contextmanager
def _listening() -> Iterator[Listener | None]:
    """Where others can get a state from this worker. It ends here, unless a state is being sent. None: no others."""
    listener = Listener() if rank_and_world()[1] > 1 else None
    try:
        yield listener
    finally:
        if listener is not None and not listener.sends:
            listener.close()


def _newest(folder: Path, job: str) -> Order:
    """The order of the newest snapshot here. Its data is not verified, but all of it is there.

    Raises OSError if this process has too many files open: otherwise it would go on from an older state.
    """
    for slot, record in slots.newest(folder, job, strict=True):
        try:
            Reader(folder, slot)
        except (CorruptError, FileNotFoundError) as error:
            _pass_over(folder, slot, record, error)
        else:
            return record.order
    return NOTHING


def _verify(folder: Path, job: str, order: Order) -> CorruptError | None:
    """What is wrong with the data of a snapshot here; None: nothing."""
    try:
        slots.verify(folder, *_slot_of(folder, job, order))
    except CorruptError as error:
        return error
    return None


def _pass_over(folder: Path, slot: int, record: slots.Record, error: Exception) -> None:
    """Take the record of a damaged snapshot away, so that it is overwritten first."""
    path = slots.data_path(folder, slot)
    log.warning("snapshot %s (step %d) is damaged, and skipped: %s", path, record.step, error)
    slots.revoke(folder, slot)


def _slot_of(folder: Path, job: str, order: Order) -> tuple[int, slots.Record]:
    for slot, record in slots.newest(folder, job):
        if record.order == order:
            return slot, record
    raise SpotrunError(f"no snapshot of generation {order[0]}, step {order[1]} in {folder}: it was there a moment ago")


def _bring(
    folder: Path,
    job: str,
    best: Order,
    chain: Sequence[int],
    offers: Sequence[Offer],
    listener: Listener | None,
    into: Callable[[], Mapping[str, torch.Tensor]],
    mapped: Callable[[int], SlotFile | None],
    live: OwnState | None,
) -> tuple[Found, bool]:
    """Do this rank's part of the transfer, if it has one: (the best state, whether what was received is whole)."""
    rank = rank_and_world()[0]
    at = chain.index(rank) if rank in chain else -1
    sending = listener if 0 <= at < len(chain) - 1 else None
    if at > 0:
        before = chain[at - 1]
        record, received, whole = receive(into(), offers[before].address, sending)
        if not whole:
            log.warning("the state of step %d that rank %d has sent is damaged", record.step, before)
        return Found(record, received, False, sending), whole
    if live is not None:
        found, source = Found(live.record, None, False, sending), cast(Source, live)
    else:
        slot, record = _slot_of(folder, job, best)
        reader = Reader(folder, slot, mapped(slot))
        found, source = Found(record, reader, True, sending), reader
    if sending is not None:
        send(found.record, source, sending)
    return found, True


def _newer_checkpoint(context: Context, folder: Path, best: Order) -> Order | None:
    """Download the newest whole checkpoint that is newer than `best`, if there is one."""
    newer = [order for order in context.checkpoints if tuple(order) > best]
    if not newer:
        return None
    # Imported late: most restarts find the state in memory.
    from spotrun.store import Store
    from spotrun.train import download

    def fetch(step: int, slot: int) -> slots.Record:
        read = partial(download.fetch, Store(context.bucket), context.job, step, folder, slot)
        return read_twice(read, CorruptError, NotFound)  # an older state would lose steps

    # A state of an older generation may be hours old: a spare node has that of the generation in which it was last.
    near = best[0] == newer[0][0]
    patience = BUCKET_PATIENCE_WITH_STATE if near else BUCKET_PATIENCE
    for _, step in newer:
        slot = _free_slot(folder, context.job)
        try:
            with _held(folder, slot):
                return _patiently(partial(fetch, step, slot), patience)
        except (CorruptError, NotFound) as error:
            log.warning("checkpoint skipped: %s", error)
        except StoreError as error:
            if not near:
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


def _patiently(fetch: Callable[[], slots.Record], patience: float) -> Order:
    """Retry while the bucket does not answer, for so many seconds: the job cannot do anything else."""
    deadline, pause = time.monotonic() + patience, 1.0
    while True:
        try:
            return fetch().order
        except NotFound:
            raise
        except StoreError as error:
            if time.monotonic() > deadline:
                raise
            log.warning("%s; trying again in %g s", error, pause)
            time.sleep(pause)
            pause = min(2 * pause, PAUSE)


def _free_slot(folder: Path, job: str) -> int:
    """The slot without this node's newest snapshot."""
    found = slots.newest(folder, job)
    return 1 - found[0][0] if found else 0


def gather(own: Sequence[int], group: dist.ProcessGroup | None) -> list[list[int]]:
    """The values of every rank."""
    _, world = rank_and_world()
    if world == 1:
        return [list(own)]
    mine = torch.tensor([*own, *[0] * (WIDTH - len(own))], dtype=torch.int64, device="cpu")
    found = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(found, mine, group=group)
    return [each.tolist() for each in found]


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
