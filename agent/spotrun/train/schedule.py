"""When this worker takes a snapshot of its node's state, or copies a part of one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from spotrun.errors import SpotrunError
from spotrun.state.control import NONE, Context, Control
from spotrun.train import failures
from spotrun.train.copy_guard import CopyGuard
from spotrun.train.encoding import Encoder
from spotrun.train.metrics import Clock
from spotrun.train.parallel import Parallel
from spotrun.train.sections import Place, Section, Sections, equal_tensors
from spotrun.train.snapshot import EAGER, PATIENCE, Writer
from spotrun.train.staging import stage_for
from spotrun.train.training_state import TrainingState

log = logging.getLogger(__name__)

LAST = 60.0  # seconds for which the last snapshot is tried again
AGAIN = 1.0  # seconds between two tries
STALL_SHARE = 0.01  # share of training time that adaptive snapshots may cost
CHECK_EVERY = 8  # steps from one check whether a snapshot is due to the next one, at most: a check takes 4 µs
SHORT = 0.05  # seconds: after a longer step, always check. A snapshot that was dropped waits for the next check


def pays(steps: int, stall: float, step_seconds: float) -> bool:
    """Whether a stall of `stall` seconds, once in so many steps, stays under 1 % of the time; 0 seconds: not known."""
    return step_seconds <= 0 or stall <= STALL_SHARE * step_seconds * steps


def next_check(step: int, newest: int, fixed: int, stall: float, step_seconds: float) -> int:
    """The step at which to check again whether a snapshot is due. None is due at `step`.

    newest: step of the newest snapshot. fixed: steps from one snapshot to the next; 0: see `pays`. stall: seconds.
    """
    if step_seconds <= 0 or step_seconds > SHORT:
        return step + 1
    left: float = fixed - step % fixed if fixed else stall / (STALL_SHARE * step_seconds) - (step - newest)
    if not fixed:
        left /= 2  # the next steps may take longer
    return step + max(1, int(min(CHECK_EVERY, left)))


class Snapshots:
    """This worker's part in its node's snapshots. Before `prepare`, it has none.

    writer: takes snapshots, on local rank 0. section: copies a part of them, on the other ranks. guard: protects the
    copies of a GPU's state. clock: measures steps. models: what `run.ddp` made. trouble: why the snapshot that was just
    copied must not be committed; empty: it may be. next_check: the first step at whose end `end_step` must be called
    again; for a forced snapshot, call it sooner.
    """

    def __init__(
        self,
        state: TrainingState,
        device: torch.device,
        local_rank: int,
        models: Sequence[Parallel],
        clock: Clock,
        trouble: Callable[[], str],
    ) -> None:
        self.writer: Writer | None = None
        self.section: Section | None = None
        self.guard: CopyGuard | None = None
        self._state, self._device, self._local_rank, self._models = state, device, local_rank, models
        self._clock, self._trouble = clock, trouble
        self._fixed = 0  # steps from one snapshot to the next; 0: adaptive
        self._control: Control | None = None
        self._newest = 0  # step of the newest snapshot
        self._base = 0  # step at which the newest generation began
        self.next_check = 0

    def prepare(self, context: Context, control: Control, new: bool) -> None:
        """new: no state was restored. After a restore others may wait: a large slot is laid out during the steps."""
        stage, folder = stage_for(self._device), Path(context.slots)
        workers = [Control(Path(path)) for path in context.controls]
        self._fixed, self._control = context.snapshot_interval, control
        copier: Writer | Section
        if self._local_rank == 0:
            sections = Sections(control, workers[1:]) if len(workers) > 1 else None
            copier = self.writer = writer = Writer(
                folder, context.job, context.generation, control, stage, self._trouble, sections, self._equal
            )
            # With a limit: on a GPU, the copy may be queued behind a collective whose peer is gone.
            failures.before_leaving(lambda: writer.settle(max(PATIENCE, 2 * writer.progress.expected)))
            encoder = Encoder()
            self._state.encode(encoder)
            if new or sum(each.nbytes for each in encoder.tensors.values()) <= EAGER:
                writer.prepare(encoder.tensors)
        elif len(workers) > 1:
            place = (self._local_rank, len(workers))
            copier = self.section = section = Section(
                folder, place, control, workers[0], self._state.encode, self._equal, stage, self._trouble
            )
            failures.before_leaving(lambda: section.settle(PATIENCE))
        else:
            return
        self.guard = CopyGuard(copier, stage, self._state.optimizers) if stage is not None else None

    def begin(self, snapshot_soon: bool) -> None:
        """A generation begins.

        snapshot_soon: take a snapshot at the next chance. This node has the state in memory only.
        """
        self._base = self._newest = self._state.step
        self.next_check = 0
        if self.writer is not None and snapshot_soon:
            self.writer.dropped = True

    def end_step(self, forced: bool, alone: bool) -> None:
        """Take a snapshot if it is forced or due. alone: without the node's other workers (see `Writer.take`)."""
        self._end_step(forced, alone)
        self._clock.resume()

    def _end_step(self, forced: bool, alone: bool) -> None:
        if self.guard is not None:
            self.guard.end_step()
        # A forced snapshot must not be dropped: all of it is copied before training goes on.
        beside = set if forced or self.guard is None else self.guard.beside
        step, writer = self._state.step, self.writer
        self.next_check = 0
        if self.section is not None:
            self.section.end_step(step, beside, alone)
        if writer is None:
            return
        fixed, stall = self._fixed, writer.known
        if stall is None:
            stall = writer.stall()
        due, announced = self._due(writer, step, stall), writer.announced if writer.shares else NONE
        if forced or announced == step or (fixed and due):
            self._take(writer, beside(), forced or fixed > 0, alone)
        elif announced != NONE or (writer.shares and self._announce(writer, step + 1, stall)):
            return
        elif due:
            self._take(writer, beside(), False, alone)
        elif self._base == step - 1:
            writer.make_room(self._state.encode)  # the first step has made the optimizer's state
        elif stall is not None and self.guard is None and not writer.shares:
            self.next_check = next_check(step, self._newest, fixed, stall, self._clock.step_seconds)

    def finish(self) -> None:
        """Wait until a snapshot of the finished state is committed."""
        deadline = time.monotonic() + LAST
        while True:
            self.end_step(forced=True, alone=True)
            self.settle()
            step, writer = self._state.step, self.writer
            if writer is None or (writer.newest_step == step and not writer.dropped):
                return
            if time.monotonic() > deadline:
                raise SpotrunError(f"the last state, of step {step}, could not be kept: the warnings above say why")
            time.sleep(AGAIN)  # without it the job's result would be an older state

    def has_begun(self, step: int) -> bool:
        """False if this worker takes the node's snapshots, and has not begun that of this step."""
        return self.writer is None or self.writer.progress.step == step

    def guard_copies(self) -> None:
        """Call before the state changes outside a step: wait until it is copied."""
        if self.writer is not None:
            self.writer.guard()

    def settle(self) -> None:
        """Wait until the snapshot under way is committed, or this worker's part of it is copied."""
        for each in filter(None, (self.writer, self.section)):
            each.settle()

    def refuse(self) -> None:
        """Copy no part of a snapshot until `renew`."""
        if self.section is not None:
            self.section.refuse()

    def settle_quietly(self) -> None:
        """As `settle`, but an error of a snapshot does not matter: it is only logged."""
        for each in filter(None, (self.writer, self.section)):
            try:
                each.settle()
            except Exception as error:
                log.warning("a snapshot failed: %s", error)

    def renew(self, generation: int) -> None:
        """Go on in another generation. Nothing may be under way."""
        if self.writer is not None:
            self.writer.renew(generation)
        elif self.section is not None:
            self.section.renew()

    def _equal(self) -> set[Place]:
        return equal_tensors(self._models, self._state.optimizers)

    def _due(self, writer: Writer, step: int, stall: float | None) -> bool:
        """Whether a snapshot is due at this step. stall: what the last one cost."""
        if stall is None:  # not known yet: the host can be steps ahead of a GPU
            return self._fixed > 0 and step % self._fixed == 0
        if self._fixed:
            return writer.dropped or step % self._fixed == 0
        return writer.dropped or pays(step - self._newest, stall, self._clock.step_seconds)

    def _announce(self, writer: Writer, step: int, stall: float | None) -> bool:
        """Have the node's workers copy the snapshot of the next step together, if one is due then and they can."""
        wanted = self._control is not None and self._control.snapshot_at == step
        return (wanted or self._due(writer, step, stall)) and writer.announce(step, exact=wanted or self._fixed > 0)

    def _take(self, writer: Writer, beside: set[int], wait: bool, alone: bool) -> None:
        if writer.take(self._state.step, self._state.encode, beside, wait, alone):
            self._newest = self._state.step
        elif wait:
            log.warning("no snapshot of step %d: its slot is still being read", self._state.step)
