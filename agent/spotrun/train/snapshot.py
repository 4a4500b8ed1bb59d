"""Snapshots: the training state in the node's memory after a step. Training waits for one memory copy.

The two slot files (see `spotrun.state.slots`) are mapped and filled with pages in advance. The training thread copies
the tensors into one of them. A background thread hashes that slot and writes the commit record.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from spotrun.state import slots
from spotrun.state.control import NONE, Control
from spotrun.train.copier import Copier
from spotrun.train.encoding import Encoder
from spotrun.train.progress import Progress
from spotrun.train.sections import Place, Plan, Sections
from spotrun.train.slot_files import TRIES, Entries, SlotFile, layout
from spotrun.train.staging import Copying, Stage

log = logging.getLogger(__name__)

PATIENCE = 10.0  # seconds that an urgent snapshot waits for a slot that is being uploaded
FALL_BACK = 1.0  # seconds after which it may overwrite the newest snapshot instead
RESERVED = 5.0  # seconds in which the agent must begin to read a slot that it asked for
AGAIN = 2.0  # seconds for which the record of a stop's snapshot is tried again: workers may wait for it to join others
EAGER = 64 << 20  # bytes: a larger slot is laid out beside training, unless the snapshot is urgent


@dataclass(frozen=True)
class _Snapshot:
    """A snapshot whose copies have begun."""

    slot: int
    step: int
    tree: Any  # what is not a tensor, as JSON values
    entries: Entries
    copying: Copying | None  # copies under way; None: those of this worker are complete
    together: bool  # whether other workers copy a part of it
    alone: bool  # whether it is that of a stop, or the last one


@dataclass
class _Shared:
    """A snapshot that is announced to the node's other workers."""

    step: int
    slot: int
    held: ExitStack  # the slot's lock


class Writer(Copier):
    """Writes this node's snapshots. One writer per node: the state is the same on all ranks.

    control: receives `copied`, `committed` and `stall`. The slot of its `snapshot_at` step stays untouched until the
    agent has had time to lock it. stage: copies tensors of a GPU. trouble: called when a snapshot is copied; the
    snapshot is committed only if it returns "". sections: those of the node's other workers. equal: the places of
    tensors that these may copy.
    """

    def __init__(
        self,
        folder: Path,
        job: str,
        generation: int,
        control: Control,
        stage: Stage | None = None,
        trouble: Callable[[], str] = lambda: "",
        sections: Sections | None = None,
        equal: Callable[[], set[Place]] = set,
    ) -> None:
        super().__init__(control, stage)
        self._trouble, self._sections, self._equal = trouble, sections, equal
        self._folder, self._job, self._generation = folder, job, generation
        folder.mkdir(parents=True, exist_ok=True)
        self._slots: dict[int, SlotFile] = {}
        self._plans: dict[int, Plan] = {}  # by slot: how its snapshots are shared
        self._shared: _Shared | None = None  # announced, and not begun
        found = slots.newest(folder, job)
        self._newest = found[0][0] if found else 1
        self._steps = {slot: record.step for slot, record in found}
        self._committed = dict.fromkeys(slots.SLOTS, (-math.inf, 0))  # when, and `last_read` of the slot then
        self.dropped = False  # whether the last snapshot was dropped
        self._together = False  # whether other workers copied a part of the last snapshot
        self.newest_step = NONE
        self.written = (NONE, NONE)  # (generation, step) of the newest snapshot that this writer has committed
        self.progress = Progress(control)
        self.shares = sections is not None  # whether the node has other workers, which may copy a part

    def stall(self) -> float | None:
        """See `Copier`. Includes the delay of the node's other workers."""
        found = super().stall()
        if self._together and self._sections is not None and found is not None:
            self._stalls[-1].seconds = max(self._stalls[-1].seconds, self._sections.stall())
            self.known = None
            found = super().stall()
            self.known = None  # the others' delay may still grow
        return found

    def prepare(self, tensors: dict[str, torch.Tensor], hurry: Event | None = None) -> None:
        """Lay out the next slot, so that the first snapshot costs no more than the others. hurry: see `SlotFile`."""
        target = 1 - self._newest
        with slots.writing(self._folder, target) as free:
            if free:
                self._lay_out(target, layout(tensors), hurry)

    def renew(self, generation: int) -> None:
        """Write for another generation from now on. Nothing may be under way."""
        self._running, self._copying, self._generation, self.dropped = None, None, generation, False
        found = slots.newest(self._folder, self._job)
        self._newest = found[0][0] if found else 1
        self._steps = {slot: record.step for slot, record in found}
        self._committed = dict.fromkeys(slots.SLOTS, (-math.inf, 0))
        for slot in list(self._slots):
            if self.mapped(slot) is None:  # a state came from another node
                self._forget(slot)

    def mapped(self, slot: int) -> SlotFile | None:
        """The slot's file as this process has mapped it; None: it has not, or the file has been replaced."""
        file, path = self._slots.get(slot), slots.data_path(self._folder, slot)
        return file if file is not None and path.exists() and path.stat().st_ino == file.inode else None

    def make_room(self, state: Callable[[Encoder], Any]) -> None:
        """`prepare` beside training. Call it when the first step has made the optimizer's state."""
        if not self._busy and self._shared is None:
            self._collect()
            encoder = Encoder()
            state(encoder)
            self._do(self.prepare, encoder.tensors, self._hurry)

    def announce(self, step: int, exact: bool) -> bool:
        """Have the node's workers copy the snapshot of a later step together. False: `take` it when it is due.

        Its slot is locked, and without a record, from now on. exact: of this step, not of a step soon after it.
        """
        target = 1 - self._newest
        if self._sections is None or self._shared is not None or self._busy or not self._sections.ready():
            return False
        self._collect()
        if not exact:
            step = max(step, self._sections.ahead() + 1)
        with ExitStack() as held:
            if self._claim(held, wait=False) != target:
                return False
            slots.revoke(self._folder, target)
            self._steps.pop(target, None)
            if self._sections.announce(target, step):
                self._shared = _Shared(step, target, held.pop_all())
        return self._shared is not None

    @property
    def announced(self) -> int:
        """The step of the snapshot that is announced; NONE: none is."""
        return NONE if self._shared is None else self._shared.step

    def take(
        self, step: int, state: Callable[[Encoder], Any], beside: set[int], wait: bool, alone: bool = False
    ) -> bool:
        """Snapshot what `state(encoder)` encodes. False: no snapshot now, because the last one is not committed, the
        slot is being read, or a large slot is being laid out for tensors of new shapes.

        beside: data pointers of tensors that nothing changes before the next `guard`. wait: the snapshot is urgent, so
        wait for the last commit, and up to `PATIENCE` seconds for the reader. alone: this worker copies everything,
        even if the node's other workers could copy a part. On the CPU, a thread makes these copies: call `guard` or
        `settle` before anything changes a tensor.
        """
        shared, self._shared = self._shared, None
        if shared is None:
            if self._busy and not wait:
                return False
            self.settle()
            self._collect()
        held = ExitStack() if shared is None else shared.held
        with held:
            target = self._claim(held, wait) if shared is None else shared.slot
            together = shared is not None and shared.step == step and not alone
            return target is not None and self._begin(held, target, step, state, beside, wait, together, alone)

    def settle(self, timeout: float | None = None) -> None:
        """Wait until the snapshot under way is committed. Raises its error, or `TimeoutError`.

        An announced one is given up, and its slot is unlocked.
        """
        shared, self._shared = self._shared, None
        if shared is not None and self._sections is not None:
            with shared.held:
                self._sections.withdraw()
        super().settle(timeout)

    def _begin(
        self,
        held: ExitStack,
        target: int,
        step: int,
        state: Callable[[Encoder], Any],
        beside: set[int],
        wait: bool,
        together: bool,
        alone: bool,
    ) -> bool:
        """Copy the state into a slot whose lock is in `held`, and have it committed. See `take`."""
        started = time.monotonic()
        encoder = Encoder()
        tree = state(encoder)
        plan = Plan.of(encoder.tensors, self._equal() if self._sections is not None else set())
        laying = time.monotonic()
        together = together and plan == self._plans.get(target)
        if not together and not self._fence_off(held, target, plan, wait):
            return False
        if plan.entries and plan.entries[-1].stop > EAGER and not wait and not self._ready(target, plan.entries):
            self._do(self._make_room, held.pop_all(), target, plan.entries)
            return False
        self._lay_out(target, plan.entries)
        laid_out = time.monotonic()
        self.progress.begin(step, len(self._slots[target].mapped))
        slots.revoke(self._folder, target)
        own = self._own(encoder.tensors, plan) if together else encoder.tensors
        self._copying = copying = self._copy(own, self._slots[target].views, beside, alone)
        self.dropped, self._together = False, together
        if copying is None and not together:
            self.progress.copied(step)
        if self._stage is not None or not alone:  # otherwise training does not wait for the copies
            self._count(time.monotonic() - laid_out + laying - started, laid_out - laying, copying)
        snapshot = _Snapshot(target, step, tree, plan.entries, copying, together, alone)
        self._do(self._commit, held.pop_all(), snapshot)
        self._share(target, plan)
        return True

    def _fence_off(self, held: ExitStack, target: int, plan: Plan, wait: bool) -> bool:
        """Keep the other workers from writing into the slot. False: one of them still does, and `wait` is False.

        If its copy does not end soon, the slot gets a new file.
        """
        if self._sections is None:
            return True
        self._sections.withdraw()
        began = time.monotonic()
        while self._fits(target, plan.entries):
            with ExitStack() as lock:
                if lock.enter_context(slots.filling(self._folder, target, alone=True)):
                    held.push(lock.pop_all())
                    return True
            if not wait:
                return False
            if time.monotonic() - began > FALL_BACK:
                self._forget(target)
            time.sleep(0.001)
        return True

    def _own(self, tensors: dict[str, torch.Tensor], plan: Plan) -> dict[str, torch.Tensor]:
        """What this worker copies when the node's workers copy together."""
        workers = 1 if self._sections is None else self._sections.workers
        others = plan.equal - plan.section(0, workers)
        return {name: tensor for name, tensor in tensors.items() if name not in others}

    def _share(self, slot: int, plan: Plan) -> None:
        """Have the other workers map the slot, if that is worth while."""
        if self._sections is not None and self._plans.get(slot) != plan:
            self._plans[slot] = plan
            self._sections.say_layout(slot, plan.number(self._slots[slot].inode) if plan.pays else NONE)

    def _claim(self, held: ExitStack, wait: bool) -> int | None:
        """Lock the slot of the older snapshot, or the other one if the older one is being read for long."""
        began = time.monotonic()
        target = 1 - self._newest
        while True:
            if not self._reserved(target) and held.enter_context(slots.writing(self._folder, target)):
                return target
            held.close()
            waited = time.monotonic() - began
            # The slot that is being read is whole. It stays so if this process dies while it writes the other slot.
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

    def _commit(self, held: ExitStack, snapshot: _Snapshot) -> None:
        target, step = snapshot.slot, snapshot.step
        with held:
            held.push(lambda kind, *_: None if kind is None else self._drop(snapshot))
            if not self._land(held, snapshot):
                return
            self._check_trouble(step)  # now: whatever is aborted from now on, what is copied is right
            mapped = self._slots[target].mapped
            record = slots.Record(
                self._job, self._generation, step, len(mapped), xxhash.xxh3_128_hexdigest(mapped), snapshot.tree
            )
            self._committed[target] = (time.monotonic(), slots.last_read(self._folder, target))
            try:
                slots.commit(self._folder, target, record, AGAIN if snapshot.alone else 0.0)
            except OSError as error:
                self._drop(snapshot)
                log.warning("the snapshot of step %d is dropped: its record cannot be written: %s", step, error)
                return
            if self._steps.get(1 - target) == step:
                self._revoke_twin(1 - target)
            self._newest, self._steps[target] = target, step
            self.newest_step, self.written = step, record.order
            self.progress.committed(step)
        other = 1 - target
        if not self._ready(other, snapshot.entries) and not self._reserved(other):
            with slots.writing(self._folder, other) as free:
                if free:  # lay out the other slot in the same way, while training goes on
                    self._lay_out(other, snapshot.entries, self._hurry)

    def _land(self, held: ExitStack, snapshot: _Snapshot) -> bool:
        """Wait until all of the snapshot is in the slot. False: a part of it cannot be used, so it is dropped."""
        copying, step = snapshot.copying, snapshot.step
        changed = [] if copying is None else copying.land()
        missing = ""
        if snapshot.together and self._sections is not None:
            missing = self._sections.wait(step, max(PATIENCE, 2 * self.progress.expected))
            self._sections.withdraw()
            if not missing and not held.enter_context(slots.filling(self._folder, snapshot.slot, alone=True)):
                missing = "another worker still writes into its slot"
        if changed or missing:
            # Without a record: some tensors may be partly of this step, partly of another one.
            self._drop(snapshot)
            if changed:
                self._tear(step, changed)
            else:
                log.warning("the snapshot of step %d is dropped: %s", step, missing)
            return False
        if copying is not None or snapshot.together:
            self.progress.copied(step)
        return True

    def _drop(self, snapshot: _Snapshot) -> None:
        """Take another snapshot soon: this one has no record."""
        self._steps.pop(snapshot.slot, None)
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

    def _ready(self, slot: int, entries: Entries) -> bool:
        """Whether the slot has this layout, and all pages that it gets beside training."""
        return self._fits(slot, entries) and (self._slots[slot].filled or self._slots[slot].tries >= TRIES)

    def _make_room(self, held: ExitStack, target: int, entries: Entries) -> None:
        with held:
            self._lay_out(target, entries, self._hurry)

    def _lay_out(self, slot: int, entries: Entries, hurry: Event | None = None) -> None:
        """Map the slot's file with room for these tensors, and fill it. Needs its lock. hurry: see `SlotFile`."""
        if not self._fits(slot, entries):
            slots.revoke(self._folder, slot)
            self._forget(slot)
            self._slots[slot] = SlotFile.create(slots.data_path(self._folder, slot), entries)
        if not (file := self._slots[slot]).filled:
            file.fill(hurry)
            if self._stage is not None and file.filled:
                self._stage.pin(file.flat)

    def _forget(self, slot: int) -> None:
        """Close the slot's map. No other worker may use the slot until it is laid out again."""
        self._plans.pop(slot, None)
        if self._sections is not None:
            self._sections.say_layout(slot, NONE)
        old = self._slots.pop(slot, None)
        if self._stage is not None and old is not None:
            self._stage.unpin(old.flat)
