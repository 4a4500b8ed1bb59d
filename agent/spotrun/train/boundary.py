"""The step boundary: heartbeat, snapshot, drain. Also what comes before the first step: restoring the state."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from spotrun.state.control import EXIT_DRAINED, EXIT_PEER, NONE, Context, Control
from spotrun.train import failures
from spotrun.train.copy_guard import CopyGuard
from spotrun.train.distributed import leave_together, rank_and_world
from spotrun.train.encoding import Encoder, refuse_sharded
from spotrun.train.group_health import GroupHealth
from spotrun.train.metrics import Clock, Metrics
from spotrun.train.parallel import Parallel
from spotrun.train.restore import restore
from spotrun.train.rng import reseed
from spotrun.train.sections import Place, Section, Sections, equal_tensors
from spotrun.train.snapshot import PATIENCE, Writer, next_interval
from spotrun.train.staging import stage_for
from spotrun.train.training_state import TrainingState

log = logging.getLogger(__name__)


class Boundary:
    """What a worker does between two steps. Without spotrun (context and control are None) it does nothing.

    metrics: what the script logs. clock: measures steps. writer: takes snapshots, on local rank 0. section: copies a
    part of them, on the other ranks. guard: protects the copies of a GPU's state. models: what `run.ddp` made.
    """

    def __init__(
        self,
        context: Context | None,
        control: Control | None,
        state: TrainingState,
        device: torch.device,
        local_rank: int,
        group: dist.ProcessGroup | None,
        models: Sequence[Parallel],
    ) -> None:
        self.metrics, self.clock = Metrics(), Clock()
        self.writer: Writer | None = None
        self.section: Section | None = None
        self.guard: CopyGuard | None = None
        self._context, self._control, self._state = context, control, state
        self._device, self._local_rank, self._group, self._models = device, local_rank, group, models
        self._rank = rank_and_world()[0]
        self._snapped = 0  # step of the newest snapshot
        self._fence = threading.Lock()

    def begin(self) -> None:
        """Restore the saved state, if there is one, and prepare the first snapshot."""
        if self._context is None or self._control is None:
            return
        control, state = self._control, self._state
        with self.exit_if_a_peer_fails():
            refuse_sharded(state.objects)
            state.encode(Encoder())  # every rank checks what a snapshot can hold before it fetches a state
            found = restore(self._context, self._local_rank, self._group)
            if found is not None:
                state.load(Path(self._context.slots), *found)
                reseed(state.seed, state.step, 0, self._rank)
            self._prepare_snapshots(self._context, control)
        if found is not None:
            control.copied = control.committed = state.step
        self._snapped = state.step
        control.restored = time.time()
        control.base = control.step = state.step

    def end_step(self) -> None:
        """Tell the agent that a step has ended, take a snapshot if one is due, and leave if the agent says so."""
        control, step = self._control, self._state.step
        if control is None:
            return
        self.clock.tick(control)
        with self._fence:  # a full fence: the agent writes stop_at, then reads step
            control.step = step
        stop_at, snapshot_at = control.stop_at, control.snapshot_at
        draining = stop_at != NONE and step == stop_at
        with self.exit_if_a_peer_fails():
            self._snapshot(draining or step == snapshot_at, alone=draining)
        self.publish(now=draining)
        if draining:
            self._leave(control)
        self.clock.resume()

    def finish(self) -> None:
        """Snapshot the finished state, and wait until the snapshot is committed."""
        with self.exit_if_a_peer_fails():
            self._snapshot(forced=True, alone=True)
        self.settle()

    def settle(self) -> None:
        """Wait until the snapshot under way is committed, or this worker's part of it is copied."""
        for each in filter(None, (self.writer, self.section)):
            with self.exit_if_a_peer_fails():
                each.settle()

    def publish(self, now: bool = False) -> None:
        """Show what the script logs, if it is time, or now."""
        if self._control is not None:
            self.metrics.publish(self._control, now)

    @contextmanager
    def exit_if_a_peer_fails(self) -> Iterator[None]:
        """Under spotrun, end this process with its own exit code if another worker is gone: the script is not at fault.

        Elsewhere, the error goes to the script.
        """
        try:
            yield
        except Exception as error:
            if self._context is None or self._control is None or not failures.is_peer_failure(error):
                raise
            what = f"step {self._state.step}: another worker is gone"
            failures.end(self._context, self._control, self._rank, what, error)

    def _prepare_snapshots(self, context: Context, control: Control) -> None:
        stage, trouble, folder = stage_for(self._device), GroupHealth().trouble, Path(context.slots)
        workers = [Control(Path(path)) for path in context.controls]
        copier: Writer | Section
        if self._local_rank == 0:
            sections = Sections(control, workers[1:]) if len(workers) > 1 else None
            copier = self.writer = writer = Writer(
                folder, context.job, context.generation, control, stage, trouble, sections, self._equal
            )
            # With a limit: on a GPU, the copy may be queued behind a collective whose peer is gone.
            failures.before_leaving(lambda: writer.settle(max(PATIENCE, 2 * writer.progress.expected)))
            encoder = Encoder()
            self._state.encode(encoder)
            writer.prepare(encoder.tensors)
        elif len(workers) > 1:
            place = (self._local_rank, len(workers))
            copier = self.section = section = Section(
                folder, place, control, workers[0], self._state.encode, self._equal, stage, trouble
            )
            failures.before_leaving(lambda: section.settle(PATIENCE))
        else:
            return
        self.guard = CopyGuard(copier, stage, self._state.optimizers) if stage is not None else None

    def _equal(self) -> set[Place]:
        return equal_tensors(self._models, self._state.optimizers)

    def _snapshot(self, forced: bool, alone: bool) -> None:
        """Take a snapshot if it is forced or due. alone: without the node's other workers, as nothing else goes on."""
        if self.guard is not None:
            self.guard.end_step()
        # A forced snapshot must not be dropped: all of it is copied before training goes on.
        beside = set if forced or self.guard is None else self.guard.beside
        step, writer = self._state.step, self.writer
        if self.section is not None:
            self.section.end_step(step, beside, alone)
        if writer is None or self._context is None or self._control is None:
            return
        fixed, stall = self._context.snapshot_interval, writer.stall()
        if forced or writer.announced == step or (fixed and self._due(writer, step, stall)):
            self._take(writer, beside(), forced or fixed > 0, alone)
        elif writer.announced != NONE or self._announce(writer, step + 1, fixed, stall):
            return
        elif self._due(writer, step, stall):
            self._take(writer, beside(), False, alone)
        elif self._control.base == step - 1:
            writer.make_room(self._state.encode)  # the first step has made the optimizer's state

    def _due(self, writer: Writer, step: int, stall: float | None) -> bool:
        """Whether a snapshot is due at this step. stall: what the last one cost."""
        fixed = self._context.snapshot_interval if self._context is not None else 0
        if stall is None:  # not known yet: the host can be steps ahead of a GPU
            return fixed > 0 and step % fixed == 0
        if fixed:
            return writer.dropped or step % fixed == 0
        return writer.dropped or step - self._snapped >= next_interval(stall, self.clock.step_seconds)

    def _announce(self, writer: Writer, step: int, fixed: int, stall: float | None) -> bool:
        """Have the node's workers copy the snapshot of the next step together, if one is due then and they can."""
        wanted = self._control is not None and self._control.snapshot_at == step
        return (wanted or self._due(writer, step, stall)) and writer.announce(step, exact=wanted or fixed > 0)

    def _take(self, writer: Writer, beside: set[int], wait: bool, alone: bool) -> None:
        if writer.take(self._state.step, self._state.encode, beside, wait, alone):
            self._snapped = self._state.step
        elif wait:
            log.warning("no snapshot of step %d: its slot is still being read", self._state.step)

    def _leave(self, control: Control) -> None:
        """End this process at its stop step."""
        leave_together(self._device, self._group)
        self.settle()
        # A drain without its snapshot loses steps. The exit code must show that.
        lost = self.writer is not None and self.writer.newest_step != self._state.step
        control.exit = code = EXIT_PEER if lost else EXIT_DRAINED
        failures.leave(code)
