"""Snapshots: the training state in the node's memory after a step. Training waits for one memory copy.

The two slot files (see `spotrun.state.slots`) are mapped and filled with pages in advance. The training thread copies
the tensors into one of them. A background thread hashes that slot and writes the commit record.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from spotrun.state import slots
from spotrun.state.control import NONE, Control
from spotrun.train.encoding import Encoder
from spotrun.train.slot_files import Entries, SlotFile, layout
from spotrun.train.staging import Copying, Stage

log = logging.getLogger(__name__)

STALL_SHARE = 0.01  # share of training time that adaptive snapshots may cost
PATIENCE = 10.0  # seconds that an urgent snapshot waits for a slot that is being uploaded
FALL_BACK = 1.0  # seconds after which it may overwrite the newest snapshot instead
RESERVED = 5.0  # seconds in which the agent must begin to read a slot that it asked for
EAGER = 64 << 20  # bytes: a larger slot is laid out beside training, unless the snapshot is urgent
SLOW = 0.5e9  # bytes per second: assumed rate of copying and hashing, until it is measured


def next_interval(stall: float, step_seconds: float) -> int:
    """The smallest number of steps between snapshots that keeps a stall of `stall` seconds under 1 % of the time."""
    if stall <= 0 or step_seconds <= 0:
        return 1
    return max(1, math.ceil(stall / (STALL_SHARE * max(step_seconds, 1e-6))))


@dataclass
class _Stall:
    """What a snapshot cost training."""

    seconds: float
    copying: Copying | None  # copies that may delay the device; None when their delay is part of `seconds`


class Writer:
    """Writes this node's snapshots. One writer per node: the state is the same on all ranks.

    control: receives `copied`, `committed` and `stall`. The slot of its `snapshot_at` step stays untouched until the
    agent had time to lock it. stage: copies tensors of a GPU. trouble: called when a snapshot is copied; the snapshot
    is committed only if it returns "".
    """

    def __init__(
        self,
        folder: Path,
        job: str,
        generation: int,
        control: Control,
        stage: Stage | None = None,
        trouble: Callable[[], str] = lambda: "",
    ) -> None:
        self._trouble = trouble
        self._folder, self._job, self._generation, self._control = folder, job, generation, control
        folder.mkdir(parents=True, exist_ok=True)
        self._slots: dict[int, SlotFile] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._running: Future[None] | None = None
        found = slots.newest(folder, job)
        self._newest = found[0][0] if found else 1
        self._steps = {slot: record.step for slot, record in found}
        self._committed = dict.fromkeys(slots.SLOTS, (-math.inf, 0))  # when, and `last_read` of the slot then
        self._stage = stage
        self._copying: Copying | None = None  # copies that wait for their guard
        self._torn: frozenset[str] = frozenset()  # tensors that changed too early: never again copied beside training
        self.dropped = False  # whether the last snapshot was torn
        self._stalls = deque([_Stall(0.0, None)], maxlen=3)  # the first few snapshots are taken at any cost
        self.newest_step = NONE
        self.progress = Progress(control)

    def stall(self) -> float | None:
        """Seconds that a snapshot delays training, without layouts. None: not known yet for the last snapshot.

        The minimum of the last few: the process may have been stopped during one.
        """
        for each in self._stalls:
            if each.copying is not None and (seconds := each.copying.seconds()) is not None:
                each.seconds += seconds
                each.copying = None
                self._control.stall += seconds
        if self._stalls[-1].copying is not None:
            return None
        return min(each.seconds for each in self._stalls if each.copying is None)

    def guard(self) -> None:
        """Call before tensors that are copied beside training change: the device waits for their copies."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.guard()

    def doubt(self) -> None:
        """Call instead of `guard` while a CUDA graph is recorded: its replay changes tensors unnoticed."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.doubt()

    def prepare(self, tensors: dict[str, torch.Tensor]) -> None:
        """Lay out the next slot, so that the first snapshot costs no more than the others."""
        target = 1 - self._newest
        with slots.writing(self._folder, target) as free:
            if free:
                self._lay_out(target, layout(tensors))

    def make_room(self, state: Callable[[Encoder], Any]) -> None:
        """`prepare` beside training. Call it when the first step has made the optimizer's state."""
        if self._running is None or self._running.done():
            self._collect()
            encoder = Encoder()
            state(encoder)
            self._running = self._pool.submit(self.prepare, encoder.tensors)

    def take(self, step: int, state: Callable[[Encoder], Any], beside: set[int], wait: bool) -> bool:
        """Snapshot what `state(encoder)` encodes. False: no snapshot now, because the last one is not committed, the
        slot is being read, or a large slot is being laid out for tensors of new shapes.

        beside: data pointers of tensors that nothing changes before the next `guard`. wait: the snapshot is urgent, so
        wait for the last commit, and up to `PATIENCE` seconds for the reader.
        """
        if wait:
            self.settle()
        elif self._running is not None and not self._running.done():
            return False
        self._collect()
        held = ExitStack()
        target = self._claim(held, wait)
        if target is None:
            return False
        with ExitStack() as on_error:
            on_error.push(held.__exit__)
            started = time.monotonic()
            encoder = Encoder()
            tree = state(encoder)
            laying = time.monotonic()
            entries = layout(encoder.tensors)
            if entries and entries[-1].stop > EAGER and not wait and not self._fits(target, entries):
                self._running = self._pool.submit(self._make_room, held, target, entries)
                on_error.pop_all()
                return False
            self._lay_out(target, entries)
            laid_out = time.monotonic()
            self.progress.begin(step, len(self._slots[target].mapped))
            slots.revoke(self._folder, target)
            self._copying = copying = self._copy(encoder.tensors, self._slots[target].views, beside)
            self.dropped = False
            if copying is None:
                self.progress.copied(step)
            ended = time.monotonic()
            self._stalls.append(_Stall((ended - laid_out) + (laying - started), copying))
            self._control.stall += ended - started
            self._running = self._pool.submit(self._commit, held, target, step, tree, entries, copying)
            on_error.pop_all()
        return True

    def settle(self, timeout: float | None = None) -> None:
        """Wait until the snapshot under way is committed. Raises its error, or `TimeoutError`."""
        if self._running is not None:
            self._running.result(timeout)

    def _collect(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def _claim(self, held: ExitStack, wait: bool) -> int | None:
        """Lock the slot of the older snapshot, or the other one if the older one is being read for long."""
        began = time.monotonic()
        target = 1 - self._newest
        while True:
            if not self._reserved(target) and held.enter_context(slots.writing(self._folder, target)):
                return target
            held.close()
            waited = time.monotonic() - began
            # The slot being read is whole. It remains if this process dies while it overwrites the newer one.
            if wait and waited > FALL_BACK and slots.read(self._folder, target) is not None:
                if held.enter_context(slots.writing(self._folder, 1 - target)):
                    return 1 - target
                held.close()
            if not wait or waited > PATIENCE:
                return None
            time.sleep(0.005)

    def _reserved(self, slot: int) -> bool:
        """Whether the agent asked for the snapshot in this slot and may still lock it."""
        wanted = self._control.snapshot_at
        if wanted == NONE or self._steps.get(slot) != wanted:
            return False
        since, last_read = self._committed[slot]
        return time.monotonic() - since < RESERVED and slots.last_read(self._folder, slot) == last_read

    def _copy(
        self, tensors: dict[str, torch.Tensor], views: dict[str, torch.Tensor], beside: set[int]
    ) -> Copying | None:
        staged = {}
        for name, tensor in tensors.items():
            if self._stage is not None and self._stage.takes(tensor):
                staged[name] = tensor
            else:
                views[name].copy_(tensor.resolve_conj().resolve_neg())
        if self._stage is None or not staged:
            return None
        # An inference tensor has no version, so a change would go unnoticed.
        aside = {
            name: tensor
            for name, tensor in staged.items()
            if tensor.data_ptr() in beside and name not in self._torn and not tensor.is_inference()
        }
        pairs = [(tensor, views[name]) for name, tensor in staged.items()]
        return Copying(self._stage.start(pairs, [name in aside for name in staged]), aside)

    def _commit(
        self, held: ExitStack, target: int, step: int, tree: Any, entries: Entries, copying: Copying | None
    ) -> None:
        with held:
            if copying is not None:
                if changed := copying.land():
                    self._drop(target, step, changed)
                    return
                self.progress.copied(step)
            mapped = self._slots[target].mapped
            record = slots.Record(
                self._job, self._generation, step, len(mapped), xxhash.xxh3_128_hexdigest(mapped), tree
            )
            self._committed[target] = (time.monotonic(), slots.last_read(self._folder, target))
            self._check_trouble(step)
            slots.commit(self._folder, target, record)
            if self._steps.get(1 - target) == step:
                self._revoke_twin(1 - target)
            self._newest, self._steps[target] = target, step
            self.newest_step = step
            self.progress.committed(step)
        other = 1 - target
        if self._fits(other, entries):
            return
        # Lay out the other slot in the same way, while training goes on.
        with ExitStack() as lock:
            if not self._reserved(other) and lock.enter_context(slots.writing(self._folder, other)):
                self._lay_out(other, entries)

    def _drop(self, target: int, step: int, changed: list[str]) -> None:
        """Leave the slot without a record: some of its tensors may be partly of this step, partly of a later one."""
        log.warning(
            "the snapshot of step %d is dropped: %s changed during the copy, before run.backward had ended. "
            "From now on it is copied first, and the GPU waits for that copy",
            step,
            changed[0] if len(changed) == 1 else f"{changed[0]} and {len(changed) - 1} other tensors",
        )
        self._torn |= frozenset(changed)
        self._steps.pop(target, None)
        self.progress.dropped()
        self.dropped = True

    def _check_trouble(self, step: int) -> None:
        """Raise `DistBackendError` if the copied state cannot be trusted. The slot stays without a record."""
        if trouble := self._trouble():
            self.progress.dropped()
            raise dist.DistBackendError(f"no snapshot of step {step}: {trouble}")

    def _revoke_twin(self, slot: int) -> None:
        """Only one snapshot of a step may count: drop the other one, which is of a moment before the epoch's end."""
        with slots.writing(self._folder, slot) as free:
            if free:
                slots.revoke(self._folder, slot)

    def _fits(self, slot: int, entries: Entries) -> bool:
        """Whether the slot has this layout."""
        return slot in self._slots and self._slots[slot].entries == entries

    def _make_room(self, held: ExitStack, target: int, entries: Entries) -> None:
        with held:
            self._lay_out(target, entries)

    def _lay_out(self, slot: int, entries: Entries) -> None:
        """Map the slot's file with room for these tensors, unless it has this layout. Needs the slot's lock."""
        if self._fits(slot, entries):
            return
        slots.revoke(self._folder, slot)
        old = self._slots.pop(slot, None)
        if self._stage is not None and old is not None:
            self._stage.unpin(old.flat)
        self._slots[slot] = new = SlotFile.create(slots.data_path(self._folder, slot), entries)
        if self._stage is not None:
            self._stage.pin(new.flat)


class Progress:
    """Tells the agent how far a snapshot is, and how long it may take: a state of 100 GB takes longer than one of 1 MB.

    When a worker's peer is gone, the agent ends the worker after its snapshot is committed, and waits for as long as
    that may take.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._size = 0  # bytes of the newest snapshot
        self._began = 0.0  # monotonic seconds
        self._paces: deque[float] = deque(maxlen=3)  # seconds per byte of the last snapshots

    @property
    def expected(self) -> float:
        """Seconds that the newest snapshot takes from its beginning to its record, at the slowest recent pace."""
        return self._size * max(self._paces, default=1 / SLOW)

    def begin(self, step: int, size: int) -> None:
        """A snapshot of `size` bytes begins."""
        self._size, self._began = size, time.monotonic()
        self._control.expected = self.expected
        self._control.begun = step

    def copied(self, step: int) -> None:
        """The state is in memory, without its hash and its record."""
        self._control.copied = step

    def committed(self, step: int) -> None:
        """The snapshot counts."""
        took = time.monotonic() - self._began
        self._paces.append(took / max(1, self._size))
        self._control.took = took
        self._control.committed = step

    def dropped(self) -> None:
        """The snapshot will not count, so nobody has to wait for it."""
        self._control.begun = self._control.copied = self._control.committed
