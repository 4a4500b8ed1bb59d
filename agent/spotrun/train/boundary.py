"""The step boundary: heartbeat, snapshot, drain. Also what comes before the first step: restoring the state."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from spotrun.state.control import ABLE, EXIT_DRAINED, EXIT_PEER, NEEDS_RELEASE, NONE, Context, Control
from spotrun.state.points import Header, is_substitute
from spotrun.train import agreement, collectives, distributed, failures, first_use, group_health, optimizer_state
from spotrun.train.distributed import LEAVE_WAIT, NotBegun, cpu_group, join_alone, leave_together, rank_and_world
from spotrun.train.encoding import Encoder, refuse_sharded
from spotrun.train.exactness import Exactness
from spotrun.train.idle_optimizer import IdleOptimizer
from spotrun.train.metrics import Clock, Metrics
from spotrun.train.noted_state import NotedState
from spotrun.train.parallel import Parallel
from spotrun.train.profiling import Profiling
from spotrun.train.regroup import Loop, Membership
from spotrun.train.restore import NOTHING, Found, Order, gather, restore
from spotrun.train.rng import reseed
from spotrun.train.sampler import ElasticSampler
from spotrun.train.schedule import Snapshots
from spotrun.train.training_state import TrainingState
from spotrun.train.transfer import OwnState

log = logging.getLogger(__name__)

TOGETHER = 600.0  # seconds that workers on GPUs wait for each other, at most; the head has shorter limits for a drain
LOGGED = 0.1  # seconds that a snapshot waits until what was logged before it is on the disk


class Boundary:
    """What a worker does between two steps. Without spotrun (no context, no control), it counts and shares buffers.

    metrics: what the script logs. clock: measures steps. profiling: records some steps, if an operator asks for it.
    snapshots: this worker's part in them. models: what `run.ddp` made.
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
        membership: Membership | None,
    ) -> None:
        self.metrics = Metrics(control, context.metrics if context is not None else "")
        self.clock = Clock()
        self.profiling = Profiling(control, context, device)
        self.snapshots = Snapshots(state, device, local_rank, models, self.clock, self._trouble)
        self._context, self._control, self._state = context, control, state
        self._device, self._local_rank, self._group, self._models = device, local_rank, group, models
        self.sharing: list[Parallel] = []  # the models whose buffers are shared at the end of a step
        self._rank, self._membership = rank_and_world()[0], membership
        self._own: Order = NOTHING  # the generation and the step of the state in this process, if it is whole
        self._live: OwnState | None = None  # that state, if others can have it from here
        self._noted: NotedState | None = None  # None: after a failure, the state comes from a snapshot
        self.exactness: Exactness | None = None  # only on a GPU, in exact mode
        self._health = group_health.GroupHealth()
        self.loop = Loop(self._leave_loop)
        if membership is not None:
            membership.loop = self.loop
        self.must_regroup = False  # whether this worker must join another generation before it goes on
        self._void: BaseException | None = None  # why the step under way does not count
        self._allocated: list[torch.optim.Optimizer] = []  # those with a state that is not loaded yet
        self._idle: list[IdleOptimizer] = []  # the optimizers in a step that does not count
        self._finished = -1  # the step at which the last loop over epochs has ended
        self._doubt = False  # whether a state that this worker has saved may have been the reason for a failure
        self._spoiled = False  # whether another state has been written over the one that the script began with
        # Under spotrun, if another worker is gone, this process ends with an exit code of its own.
        self.exit_if_a_peer_fails = failures.Handled(self._end)
        # If another worker is gone, the step under way does not count, and `regroup` follows. If it cannot: as above.
        self.void_if_a_peer_fails = failures.Handled(self._make_void)

    def begin(self) -> None:
        """Restore the saved state, if there is one, and prepare the first snapshot."""
        if self._context is None or self._control is None:
            return
        control, state, encoder = self._control, self._state, Encoder()
        with self.exit_if_a_peer_fails:
            refuse_sharded(state.objects)
            state.encode(encoder)  # every rank checks what a snapshot can hold before it fetches a state
        if self._membership is not None:
            self._membership.look_at(state.objects.values(), encoder.tensors.values())
            control.able = self._membership.able()
            if control.able == ABLE or (control.able == NEEDS_RELEASE and self._context.exact):
                self._noted = NotedState.of(state.objects.values(), self._models, always=self._context.exact)
            if self._noted is not None and control.able == NEEDS_RELEASE:
                self.exactness = Exactness.of(self._device)
                self._noted = None if self.exactness is None else self._noted
            if self._noted is None and self._context.exact:
                log.warning("exact: true does not help this script: after a death, the newest snapshot counts")
        if self._context.warm_up:
            return self._enter(control)
        with self.exit_if_a_peer_fails:
            found = self._find(self._context)
            if found is not None:
                self._load(found)
                found.settle()
                reseed(state.seed, state.step, 0, self._rank)
            self.snapshots.prepare(self._context, control, new=found is None)
        self._tell_restored(control, found)

    def check(self, whole: bool) -> None:
        """Raise an error if the step under way does not count. whole: its collectives have begun; await them."""
        if whole and self.exactness is not None:
            self.exactness.wait()
        else:
            failures.check()

    def end_step(self, sampler: ElasticSampler | None, position: int) -> None:
        """Count the step, unless a collective has failed, and move the sampler or the state to this position.

        Tell the agent that it has ended, take a snapshot if one is due, and leave if the agent says so.
        """
        control, state = self._control, self._state
        try:
            for model in self.sharing:
                model.share_buffers()
            if failures.void or self.exactness is not None:
                self.check(whole=True)
        except Exception as error:
            if not self.void_if_a_peer_fails.handle(error):
                raise
            return
        state.step = step = state.step + 1
        if sampler is None:
            state.consumed = position
        else:
            sampler.position = position
        if control is None:
            return
        stop_at, snapshot_at, profile = self.clock.tick(control, step)
        draining = step == stop_at
        if (noted := self._noted) is not None and step >= noted.next:
            noted.end_step(step, self.clock.step_seconds)
            self.clock.resume()
        try:
            if (forced := draining or step == snapshot_at) or step >= self.snapshots.next_check:
                self.snapshots.end_step(forced, draining)
        except Exception as error:
            handled = self._end if draining or self._membership is None else self.void_if_a_peer_fails.handle
            if not handled(error):
                raise
            return
        if draining:
            self._leave(control)
        elif profile != NONE or self.profiling.profiler is not None:
            self.profiling.end_step(step)
            self.clock.resume()

    def regroup(self) -> None:
        """Leave this generation and join the next one. Afterwards the state is the newest one that a member has.

        The process ends instead if it cannot go on from that state: a restarted one can.
        """
        assert self._membership is not None
        assert self._control is not None
        assert self._context is not None
        error, self._void, self.must_regroup, self._doubt = self._void, None, False, False
        self._keep(self._context, error)
        if self._membership.survives:  # on a GPU, it stays true until this worker joins another generation
            failures.void = False
        self.profiling.drop("the generation has ended; ask again when the job trains")
        for optimizer in self._idle:
            optimizer.end()
        self._idle.clear()
        while True:
            if not self._membership.disconnect(failed=error is not None):
                self._exit(self._control, EXIT_PEER if error or self._context.warm_up else EXIT_DRAINED)
            self.snapshots.refuse()
            if self._live is None:
                self.snapshots.settle_quietly()
            self.metrics.flush()  # the agent takes the block once this worker waits
            self._membership.wait(self._state.step, error)
            self._health = group_health.GroupHealth()
            try:
                self._membership.join()
                self._continue(self._membership.context, self._control)
                return
            except Exception as failed:
                failures.void |= isinstance(failed, torch.AcceleratorError | torch.OutOfMemoryError)  # a fork follows
                if not failures.is_peer_failure(failed):
                    raise
                if not isinstance(failed, NotBegun):
                    if not self._membership.survives and (self.exactness is None or self._own == NOTHING):
                        self._end(failed)
                    error, self._doubt = failed, True

    def finish(self, begun: bool) -> None:
        """Snapshot the finished state, and wait until the snapshot is committed. begun: whether the loop had epochs."""
        self._finished = self._state.step if begun else self._finished
        with self.exit_if_a_peer_fails:
            self.snapshots.finish()

    def settle(self) -> None:
        """Wait until the snapshot under way is committed, or this worker's part of it is copied."""
        with self.exit_if_a_peer_fails:
            self.snapshots.settle()

    def _leave_loop(self) -> None:
        """The script leaves its loop over `run.steps`. End this process if the step does not count."""
        if self._noted is not None:  # between two loops, the script may change the state without a step
            self._noted.forget()
        with self.exit_if_a_peer_fails:
            failures.check(self._void)

    def _make_void(self, error: Exception) -> bool:
        """See `void_if_a_peer_fails`. Returns whether the script goes on, in a step that does not count."""
        with self.exit_if_a_peer_fails:
            if self._void is None:
                if self._membership is None or not self._membership.can_go_on() or not failures.is_peer_failure(error):
                    return self._end(error)
                self._void, failures.void, self.must_regroup = error, True, True
                if not self._membership.disconnect(failed=True):  # now: the others wait for this worker
                    return self._end(error)
                join_alone()  # the script's own collectives in the rest of the step have no one to wait for
                self._idle = [IdleOptimizer(each) for each in self._state.optimizers]
            # Later in such a step, a graph may lead through a DDP instance that is gone: then the error says
            # nothing, and an error of the script comes again when the step is done again.
            for model in self._models:
                model.drop_gradients()
        return True

    def _end(self, error: Exception) -> bool:
        """See `exit_if_a_peer_fails`. Returns False, so that the error goes on, if this process does not end."""
        if self._context is None or self._control is None or not failures.is_peer_failure(error):
            return False
        what = f"step {self._state.step}: another worker is gone"
        failures.end(self._context, self._control, self._rank, what, error)

    def _enter(self, control: Control) -> None:
        """Join the first generation of this worker, which has warmed up."""
        if not control.able:
            assert self._membership is not None
            why = self._membership.why_not() or "the script does not use run.ddp, or makes process groups of its own"
            log.warning("this worker cannot wait for a generation: %s", why)
            failures.leave(EXIT_PEER)
        if control.able == NEEDS_RELEASE:  # the end of an NCCL group waits for the node's other workers
            leave_together(self._device, self._group, TOGETHER)
        self._allocated = first_use.prepare(self._device, self._models, self._state.optimizers)
        self.regroup()

    def see_collective(self, name: str, values: Iterable[Any]) -> None:
        """The script gives these to a collective of this name."""
        if self._noted is not None:
            self._noted.check_collective(values)
        if self.exactness is not None and name in collectives.MESSAGES:
            self.exactness.messages += 1
            if self._noted is not None:
                self._noted.unsure = True

    def _keep(self, context: Context, error: BaseException | None) -> None:
        """Find out whether this process has a whole state, and whether it can give it to others.

        error: why the step under way does not count; None: all steps count. On a GPU, others get the state from this
        process only in exact mode: after a stop, it is in a snapshot.
        """
        self._drop_own()
        state = self._state
        if context.warm_up:
            return
        if error is not None and (self._noted is None or not self._noted.put_back(state.step)):
            return
        self._own = (context.generation, state.step)
        if self._membership is None or not (self._membership.survives or (self.exactness is not None and error)):
            return
        self._live = OwnState.of(context.job, self._own, state)

    def _drop_own(self) -> None:
        """The state in this process may not be whole from now on."""
        self._own, self._live = NOTHING, None

    def _continue(self, context: Context, control: Control) -> None:
        """Go on in a new generation."""
        state, self._context, self._rank = self._state, context, rank_and_world()[0]
        self._group = cpu_group(self._device)
        found = self._find(context, self._live)
        begins = self.snapshots.writer is None and self.snapshots.section is None  # it is before its first step
        here = found is not None and (self.loop.enters_again or found.record.state["run"]["epoch"] == state.epoch)
        if not begins and (found is None or not here or found.record.step == self._finished):
            # The script is not at the state's place, or its first state is lost. Members that are there fail with it.
            raise dist.DistError("the next generation is in another epoch or has no state: the script must start again")
        if found is not None and found.record.order != self._own:
            self._load(found)
        if found is not None:  # newcomers have no gradients either
            for parameter in (parameter for model in self._models for parameter in model.parameters()):
                parameter.grad = None
        self.snapshots.guard_copies()
        unsaved = [] if self._membership is None else self._membership.unsaved(state.objects.values())
        equal = agreement.agree_on_models(self._models, unsaved, self._group) and found is not None
        if not equal and self.exactness is not None:  # DDP sends all models: an abort may spoil them
            self._drop_own()
        for model in self._models:
            model.rebuild(equal)
        if found is not None:
            found.settle()
            reseed(state.seed, state.step, 0, self._rank)
        if begins:
            self.snapshots.prepare(context, control, new=found is None)
        else:
            self.snapshots.settle_quietly()
            self.snapshots.renew(context.generation)
        distributed.synchronize(self._device)  # DDP's constructor may have had collectives
        failures.check()
        self.check(whole=True)
        self._tell_restored(control, found)
        self._live = None  # it may have copies of tensors

    def _find(self, context: Context, live: OwnState | None = None) -> Found | None:
        """The state to continue from. Every rank must call this. live: that of this process, if it is whole."""
        if self.exactness is not None:
            self.exactness.renew(self._group)
        able = self.exactness is not None or (self._membership is not None and self._membership.survives)
        if context.exact and not all(each[0] for each in gather([int(able)], self._group)):
            if self.exactness is not None:
                log.warning("exact: true has no effect: not every worker can wait for the others")
            self.exactness = self._noted = None  # a rank cannot wait for one that does not
        writer = self.snapshots.writer
        trusted = max(writer.written, self._own) if writer is not None and not self._doubt else NOTHING
        # An object that changes what it loads would damage the snapshot.
        may_map = self._device.type == "cpu" and self._state.only_reads()
        mapped = writer.mapped if writer is not None and may_map else lambda _: None
        found = restore(context, self._local_rank, self._group, trusted, self._destinations, mapped, live)
        if found is None:
            for each in self._allocated:
                optimizer_state.clear(each)
        self._allocated.clear()
        if found is None and self._spoiled:
            raise dist.DistError("the state that this worker was about to get is lost: the script must start again")
        return found

    def _destinations(self) -> dict[str, torch.Tensor]:
        """The tensors that receive a state. From now on, their values are not those that the script gave them."""
        self.snapshots.guard_copies()
        self._drop_own()
        self._spoiled = True
        return self._state.destinations()

    def _load(self, found: Found) -> None:
        assert found.tensors is not None
        if not self._state.only_reads():  # an object may write into the memory that is being sent
            found.settle()
        self.snapshots.guard_copies()
        self._drop_own()
        self._spoiled = True
        self._state.load(found.record, found.tensors)

    def _tell_restored(self, control: Control, found: Found | None) -> None:
        """Say at which step this worker begins, and whether a snapshot of this node has that state."""
        writer, step = self.snapshots.writer, self._state.step
        kept = found is not None and (found.kept or (writer is not None and writer.written == found.record.order))
        control.begun = control.copied = control.committed = step if kept else NONE
        self.snapshots.begin(snapshot_soon=not kept and found is not None and found.tensors is None)
        if self._noted is not None:
            self._noted.begin(step, self.clock.step_seconds, inside=self.loop.inside)
        self.clock.begin()
        control.restored = time.time()
        control.base = control.step = step
        assert self._context is not None
        begun = Header(self._context.job, self._context.generation, self._rank, step, self._state.epoch)
        self.metrics.begin(begun, is_substitute(self._rank, self._local_rank, len(self._context.controls)))

    def _trouble(self) -> str:
        """Why the snapshot that was just copied must not be committed; empty: it may be."""
        self.metrics.flush(LOGGED)  # the steps before a saved state are not done again
        fails_by_itself = self._membership is None or self._membership.survives  # a collective whose peer is gone
        return self._health.trouble() or ("" if fails_by_itself else group_health.abort_elsewhere())

    def _leave(self, control: Control) -> None:
        """Leave the generation at the stop step: to wait for another one, or to end this process."""
        able, writer = self._membership.able() if self._membership is not None else 0, self.snapshots.writer
        if able == NEEDS_RELEASE:  # the others wait for local rank 0, as in `_enter`
            self.settle()
        together = leave_together(self._device, self._group, TOGETHER if able == NEEDS_RELEASE else LEAVE_WAIT)
        waits = able == ABLE and self.snapshots.has_begun(self._state.step)
        if not waits:  # otherwise others can have the state from the memory of this process
            self.settle()
        # A drain without its snapshot loses steps. The exit code must show that.
        lost = not waits and writer is not None and writer.newest_step != self._state.step
        # On a GPU, the end of the group would disturb a worker that still uses it. So this worker leaves only if all
        # have said that they are done, or if the agent releases it, which may come a moment after a peer's release.
        if not lost and able and (together or able != NEEDS_RELEASE or failures.becomes_void(LEAVE_WAIT)):
            self._void = None if together or able != NEEDS_RELEASE else dist.DistError("another worker is gone")
            self.must_regroup = True
            return
        self._exit(control, EXIT_PEER if lost else EXIT_DRAINED)

    def _exit(self, control: Control, code: int) -> NoReturn:
        control.exit = code
        failures.leave(code)
