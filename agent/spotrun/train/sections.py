"""Sharing the copy of a snapshot among the workers of a node.

DDP keeps parameters and the state of their optimizers equal on all ranks. So each worker of a node can copy a section
of them, over its own link to the host. Local rank 0 copies everything else, and it alone writes records: it is the
writer. The workers agree by numbers in their control blocks, which are new in each generation:

1. The writer takes a snapshot alone and says which layout the slot has (`layout_0`, `layout_1`). The other workers map
   the slot beside training, and write the same numbers into their blocks.
2. Before a later step, the writer locks the slot, removes its record, and announces (`shared_slot`, `shared_step`).
3. After that step, each worker copies its section, and says so (`section`) or refuses (`refused`).
4. The writer hashes the slot and writes the record when all sections are there. Otherwise the slot has no record.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from spotrun.state import slots
from spotrun.state.control import NONE, Control
from spotrun.state.shards import partition
from spotrun.train.copier import Copier
from spotrun.train.encoding import Encoder
from spotrun.train.parallel import Parallel
from spotrun.train.slot_files import Entries, SlotFile, layout
from spotrun.train.staging import Copying, Stage

log = logging.getLogger(__name__)

MINIMUM = 32 << 20  # bytes. A GPU copies them in about the time that sharing costs (bench/RESULTS.md)
FAILURES = 3  # after so many snapshots in a row that lacked a section, the writer copies alone
TRIES = 3  # boundaries at which a worker compares its layout with the writer's
_POLL = 0.001  # seconds
Place = tuple[int, int]  # address and bytes of a tensor's memory


@dataclass(frozen=True)
class Plan:
    """How the workers of a node share the copy of a state."""

    entries: Entries  # layout of the slot
    equal: frozenset[str]  # names of the tensors that are equal on all ranks

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor], equal: set[Place]) -> Plan:
        """The plan for a state's tensors. equal: the places of those that are equal on all ranks."""
        return cls(layout(tensors), frozenset(name for name, each in tensors.items() if place(each) in equal))

    @property
    def pays(self) -> bool:
        """Whether the equal tensors are so large that sharing is faster."""
        return sum(entry.stop - entry.start for entry in self.entries if entry.name in self.equal) >= MINIMUM

    def section(self, index: int, workers: int) -> frozenset[str]:
        """Names of the equal tensors that one of the workers copies. The writer, index 0, copies all others too."""
        sizes = [entry.stop - entry.start if entry.name in self.equal else 0 for entry in self.entries]
        run = partition(sizes, workers)[index]
        return self.equal & {entry.name for entry in self.entries[run.start : run.stop]}

    def number(self, inode: int) -> int:
        """A number that stands for this plan and a slot's file in a control block."""
        return xxhash.xxh3_64_intdigest(repr((inode, self.entries, sorted(self.equal))).encode()) >> 1


def place(tensor: torch.Tensor) -> Place:
    """Where the tensor's memory is: the same for a parameter and for what its module's state_dict has."""
    return tensor.data_ptr(), tensor.nbytes


def equal_tensors(models: Sequence[Parallel], optimizers: Sequence[torch.optim.Optimizer]) -> set[Place]:
    """The places of tensors that are equal on all ranks: parameters under DDP, and what optimizers keep for them."""
    parameters = [parameter for model in models for parameter in model.equal_parameters()]
    found = {place(parameter) for parameter in parameters}
    for optimizer in optimizers:
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            found |= {place(value) for value in state.values() if isinstance(value, torch.Tensor)}
    return found


class Sections:
    """The sections of a node's other workers, as the writer sees them.

    own: the writer's control block. others: those of the other workers, in the order of their local ranks.
    """

    def __init__(self, own: Control, others: Sequence[Control]) -> None:
        self._own, self._others = own, others
        self._processes = [_Process(each.pid) for each in others]
        self._fence = threading.Lock()
        self._failures = 0
        self._stalled = [each.stall for each in others]  # seconds, before the newest snapshot

    @property
    def workers(self) -> int:
        return len(self._others) + 1

    def say_layout(self, slot: int, number: int) -> None:
        """Tell the others which layout the slot has. NONE: they must not map it."""
        setattr(self._own, f"layout_{slot}", number)

    def ready(self) -> bool:
        """Whether all workers have mapped both slots."""
        wanted = (self._own.layout_0, self._own.layout_1)
        mapped = all((each.layout_0, each.layout_1) == wanted for each in self._others)
        return NONE not in wanted and mapped and self._failures < FAILURES

    def announce(self, slot: int, step: int) -> bool:
        """Have all workers copy their sections after this step. False: one of them may have passed the step."""
        self._stalled = [each.stall for each in self._others]
        self._own.shared_slot = slot
        # Write first, then read. If a worker passes the step now, it sees the announcement, or `ahead` sees the worker.
        with self._fence:
            self._own.shared_step = step
        if self.ahead() >= step:
            self.withdraw()
            return False
        return True

    def ahead(self) -> int:
        """The latest step that one of the others has ended. On a GPU, their hosts may be ahead of this one."""
        return max(each.step for each in self._others)

    def withdraw(self) -> None:
        """Let no worker begin to copy its section."""
        with self._fence:
            self._own.shared_step = NONE

    def wait(self, step: int, seconds: float) -> str:
        """Wait until all sections are copied. Returns why one of them cannot be copied; "": all are."""
        deadline = time.monotonic() + seconds
        while why := self._missing(step):
            if self._lost(step) or time.monotonic() > deadline:
                self._failures += 1
                return why
            time.sleep(_POLL)
        self._failures = 0
        return ""

    def stall(self) -> float:
        """Seconds that the newest snapshot delayed the slowest of the others, as far as is known."""
        return max(each.stall - before for each, before in zip(self._others, self._stalled, strict=True))

    def _missing(self, step: int) -> str:
        late = [number for number, each in enumerate(self._others, 1) if each.section != step]
        return f"local rank {late[0]} has not copied its section" if late else ""

    def _lost(self, step: int) -> bool:
        return any(
            each.section != step and (each.refused == step or process.ended)
            for each, process in zip(self._others, self._processes, strict=True)
        )


@dataclass
class _Mapped:
    """A slot that this worker has mapped."""

    plan: Plan
    file: SlotFile
    pinned: torch.Tensor  # the part of the map that this worker fills


class Section(Copier):
    """Copies this worker's section of each snapshot that the node's writer announces.

    place: this worker's local rank, and the number of workers. lead: the writer's control block. state: encodes the
    state. equal: the places of the tensors that are equal on all ranks. trouble: as for the writer.
    """

    def __init__(
        self,
        folder: Path,
        place: tuple[int, int],
        control: Control,
        lead: Control,
        state: Callable[[Encoder], Any],
        equal: Callable[[], set[Place]],
        stage: Stage | None = None,
        trouble: Callable[[], str] = lambda: "",
    ) -> None:
        super().__init__(control, stage)
        self._folder, self._place, self._lead = folder, place, lead
        self._state, self._equal, self._trouble = state, equal, trouble
        self._writer = _Process(lead.pid)
        self._slots: dict[int, _Mapped] = {}
        self._seen = NONE  # the newest announced step that this worker has answered, or will
        self._tried: dict[int, tuple[int, int]] = {}  # by slot: the writer's layout, and how often it was not ours
        self._fence = threading.Lock()

    def renew(self) -> None:
        """Take part in another generation from now on. It may begin at an earlier step. Nothing may be under way."""
        self._seen, self._running, self._copying = NONE, None, None

    def refuse(self) -> None:
        """Refuse the announced snapshot, if there is one: this worker will not complete that step."""
        if (announced := self._lead.shared_step) > self._seen:
            self._seen = self._control.refused = announced

    def end_step(self, step: int, beside: Callable[[], set[int]], alone: bool) -> None:
        """Copy the section if the snapshot of this step is announced; otherwise map what the writer has laid out.

        beside: data pointers of tensors that nothing changes before the next `guard`. alone: the writer copies alone.
        """
        if not self._busy:
            self._collect()
        self.stall()
        announced = self._lead.shared_step
        if self._seen < announced <= step:
            self._seen = announced
            # This worker may be at a later step than the announced one, for example if it has left a loop early.
            if announced < step or alone or not self._take(step, beside):
                self._control.refused = announced
        elif self._running is None:
            self._map_next()

    def _take(self, step: int, beside: Callable[[], set[int]]) -> bool:
        """Begin to copy. False: this worker cannot."""
        slot = self._lead.shared_slot
        mapped = self._slots.get(slot)
        if mapped is None or self._running is not None:
            return False
        with ExitStack() as held:
            if not held.enter_context(slots.filling(self._folder, slot, alone=False)):
                return False
            # Look while this worker has the lock: no writer writes the file alone now, not even a later generation's.
            if self._lead.shared_step != step or self._writer.ended:
                return False
            began = time.monotonic()
            encoder = Encoder()
            self._state(encoder)
            if Plan.of(encoder.tensors, self._equal()) != mapped.plan:
                return False
            own = {name: encoder.tensors[name] for name in mapped.file.views}
            self._copying = copying = self._copy(own, mapped.file.views, beside())
            self._count(time.monotonic() - began, 0.0, copying)
            if copying is not None:
                self._do(self._land, held.pop_all(), step, copying)
                return True
        self._answer(step, [])
        return True

    def _land(self, held: ExitStack, step: int, copying: Copying) -> None:
        try:
            with held:
                changed = copying.land()
        except BaseException:
            self._control.refused = step
            raise
        self._answer(step, changed)

    def _answer(self, step: int, changed: list[str]) -> None:
        """Tell the writer whether the section counts. Called when the device has copied it or has failed."""
        trouble = self._trouble()
        with self._fence:  # a memory barrier: the writer sees the copies before the answer
            if changed or trouble:
                self._control.refused = step
            else:
                self._control.section = step
        if changed:
            self._tear(step, changed)
        if trouble:
            raise dist.DistBackendError(f"no snapshot of step {step}: {trouble}")

    def _map_next(self) -> None:
        """Map a slot beside training, if the writer has laid out one that is not mapped here."""
        for slot in slots.SLOTS:
            wanted = getattr(self._lead, f"layout_{slot}")
            before, tries = self._tried.get(slot, (NONE, 0))
            if wanted in (NONE, getattr(self._control, f"layout_{slot}")) or (wanted == before and tries == TRIES):
                continue
            self._tried[slot] = (wanted, tries + 1 if wanted == before else 1)
            encoder = Encoder()
            self._state(encoder)
            plan = Plan.of(encoder.tensors, self._equal())
            self._do(self._map, slot, plan, wanted)
            return

    def _map(self, slot: int, plan: Plan, wanted: int) -> None:
        setattr(self._control, f"layout_{slot}", NONE)
        old = self._slots.pop(slot, None)
        if self._stage is not None and old is not None:
            self._stage.unpin(old.pinned)
        names = plan.section(*self._place)
        file = SlotFile.attach(slots.data_path(self._folder, slot), plan.entries, names)
        if file is None or plan.number(file.inode) != wanted:
            return
        pinned = file.fill_views()
        if self._stage is not None and pinned.numel():
            self._stage.pin(pinned)
        self._slots[slot] = _Mapped(plan, file, pinned)
        setattr(self._control, f"layout_{slot}", wanted)


class _Process:
    """Another process of this node. Its pid may name a later process, but its handle does not."""

    def __init__(self, pid: int) -> None:
        self._poll = select.poll()
        self._gone = False
        try:
            self._poll.register(os.pidfd_open(pid), select.POLLIN)
        except OSError:
            self._gone = True

    @property
    def ended(self) -> bool:
        return self._gone or bool(self._poll.poll(0))
