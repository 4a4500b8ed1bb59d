"""What a training script sees: `spotrun.init()` and the `Run` it returns.

The same script runs under plain `python` (one process), under `torchrun`, and under spotrun, which sets
`SPOTRUN_CONTEXT`. Only then are there snapshots, drains and something to restore.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spotrun.errors import SpotrunError
from spotrun.state import slots
from spotrun.state.control import EXIT_DRAINED, EXIT_PEER, NONE, Context, Control
from spotrun.train import batches, metrics
from spotrun.train.copy_guard import CopyGuard
from spotrun.train.distributed import choose_device, cpu_group, join_process_group, leave_together, rank_and_world
from spotrun.train.encoding import Encoder, Stateful, refuse_sharded
from spotrun.train.failures import before_leaving, end, is_peer_failure, leave
from spotrun.train.group_health import GroupHealth
from spotrun.train.loading import load
from spotrun.train.parallel import Parallel
from spotrun.train.restore import restore
from spotrun.train.rng import reseed
from spotrun.train.snapshot import PATIENCE, Reader, Writer, next_interval
from spotrun.train.staging import stage_for

log = logging.getLogger(__name__)


def init(seed: int = 0, backend: str | None = None) -> Run:
    """Join the other workers, if there are any, and seed all random number generators.

    seed: of everything random in this job. backend: of the process group; by default gloo, and NCCL for CUDA tensors.
    """
    entered = time.time()
    context = Context.from_env()
    control = None
    if context is not None:
        control = Control(Path(context.control))
        control.entered = entered
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = choose_device(local_rank, insist=context is not None)
    try:
        join_process_group(device, backend)
    except Exception as error:
        if context is not None and control is not None and is_peer_failure(error):
            end(context, control, int(os.environ.get("RANK", "0")), "cannot join the other workers", error)
        raise
    run = Run(seed, device, local_rank, context, control)
    if control is not None and context is not None:
        control.pid, control.rank, control.generation = os.getpid(), run.rank, context.generation
        control.grouped = time.time()
    return run


class Run:
    """One worker's part in a training run. Made by `spotrun.init()`.

    rank, world_size, local_rank, device: this worker's place. step: steps completed since the job began, in every
    generation. epoch: the current one. padding: this batch repeats a sample only to keep the ranks in step (its loss
    counts nothing). completes_step: `run.backward` of this batch is the last one before `optimizer.step()`; False only
    with `accumulate`.
    """

    def __init__(
        self, seed: int, device: torch.device, local_rank: int, context: Context | None, control: Control | None
    ) -> None:
        self.rank, self.world_size = rank_and_world()
        self.local_rank = local_rank
        self.device = device
        self.step = 0
        self.epoch = 0
        self._seed = seed
        self._context, self._control = context, control
        self._group = cpu_group(device)
        self._models: list[Parallel] = []
        self._tracked: dict[str, Stateful] = {}
        self._optimized: list[torch.optim.Optimizer] = []
        self._writer: Writer | None = None
        self._guard: CopyGuard | None = None  # on a GPU
        self._consumed = 0  # batches of this epoch, of a loader without an ElasticSampler
        self._epochs = 1
        self._stepped: int | None = None  # epoch in which steps() was called
        self._loader: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._ahead: list[Any] = []  # batches fetched early
        self._batch = batches.Batch(1.0, True, 0, 0)
        self._metrics = metrics.Metrics()
        self._clock = metrics.Clock()
        self._snapped = 0
        self._fence = threading.Lock()
        reseed(seed, "init")

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def padding(self) -> bool:
        return self._batch.padding

    @property
    def completes_step(self) -> bool:
        return self._batch.last

    @property
    def batch_ids(self) -> list[int] | None:
        """Indices into the dataset of this rank's current batch, without padding; None without an ElasticSampler."""
        sampler = batches.sampler_of(self._loader)
        return None if sampler is None or self._batch.own is None else sampler.indices(self._batch.own)

    def print(self, *values: object) -> None:
        """Print on rank 0 only, at once."""
        if self.is_main:
            print(*values, flush=True)

    def ddp(self, module: nn.Module, **options: Any) -> Parallel:
        """The module, moved to `run.device`, its gradients averaged over the workers. `options` go to DDP."""
        with self._guarded():
            self._models.append(Parallel(module, self.device, **options))
        return self._models[-1]

    def track(self, **objects: Stateful) -> None:
        """Name what makes up the training state; if there is a saved one, it is loaded into these objects now.

        Call it once, before the first step. Raises `SpotrunError` if an object has no state_dict and load_state_dict.
        """
        if self._tracked:
            raise SpotrunError("run.track was called before: name everything in one call")
        if not objects:
            raise SpotrunError("run.track() tracks nothing; write run.track(model=model, optimizer=optimizer, …)")
        for name, item in objects.items():
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise SpotrunError(
                    f"run.track({name}=…): a {type(item).__name__} has no state_dict() and load_state_dict()"
                )
        self._tracked = objects
        self._optimized = [item for item in objects.values() if isinstance(item, torch.optim.Optimizer)]
        if self._context is not None and self._control is not None:
            with self._guarded():
                self._begin(self._context, self._control)

    def epochs(self, n: int) -> Iterator[int]:
        """Epochs 0 … n - 1, from the restored one on. An epoch restored after its last step is yielded too."""
        self._epochs = n
        for epoch in range(self.epoch, n):
            if epoch != self.epoch:
                self.epoch, self._consumed = epoch, 0
            yield epoch
        # The finished state, which the head puts into the bucket: after a restart, no epoch is left to go through.
        self.epoch, self._consumed = n, 0
        if self._writer is not None:
            with self._guarded():
                self._snapshot(forced=True)
                self._writer.settle()

    def steps(self, loader: Any, accumulate: int = 1) -> Iterator[Any]:
        """The loader's batches, on `run.device`, from the restored position on. The body's end is the step boundary.

        There the snapshot is taken, and there a worker stops when it is told to. accumulate: batches in one step; call
        the optimizer when `run.completes_step`. A step left by `break` does not count.
        """
        self._check_steps(loader)
        self._clock.resume()
        with self._guard or nullcontext():  # what follows the loop may change the state in any way
            for current in self._feed(loader, accumulate):
                self._batch = current
                reseed(self._seed, self.step, self._batch.number, self.rank)
                batch = self._next()
                if batch is _END:
                    break
                for model in self._models:
                    model.exchange(self._batch.last)
                yield batch if self.device.type == "cpu" else batches.to_device(batch, self.device)
                self._clock.samples += current.samples
                if current.last:
                    self._boundary()
        self._next()  # lets the loader end its workers
        self._iterator = iter(())
        reseed(self._seed, self.step, 0, self.rank)  # what follows draws the same after a restart
        self._publish(now=True)

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()` for a batch's mean loss, weighted: the gradient is the mean over all samples of the step.

        If another worker is gone, this process ends here (under spotrun) or raises what the process group raised.
        """
        weight = self._batch.weight
        with self._guarded():
            (loss if weight == 1 else loss * weight).backward()  # type: ignore[no-untyped-call]
        if self._guard is not None and self._batch.last:
            self._guard()

    def log(self, **values: Any) -> None:
        """Show numbers (0-dim tensors too) in the job's display. Cheap: they are read a few times a second only."""
        self._metrics.update(values)
        self._publish()

    # From here on: what happens at a step boundary, and before the first.

    def _begin(self, context: Context, control: Control) -> None:
        refuse_sharded(self._tracked)
        self._encode(Encoder())  # says on every rank what cannot be kept, before a state is fetched
        found = restore(context, self.local_rank, self._group)
        if found is not None:
            self._load(Path(context.slots), *found)
        if self.local_rank == 0:
            stage, trouble = stage_for(self.device), GroupHealth().trouble
            self._writer = Writer(Path(context.slots), context.job, context.generation, control, stage, trouble)
            # Not for ever: on a GPU the copy may be queued behind a collective whose peer is gone.
            writer = self._writer
            before_leaving(lambda: writer.settle(max(PATIENCE, 2 * writer.progress.expected)))
            encoder = Encoder()
            self._encode(encoder)
            self._writer.prepare(encoder.tensors)
            self._guard = CopyGuard(self._writer, stage, self._optimized) if stage is not None else None
        if found is not None:
            control.copied = control.committed = self.step
        self._snapped = self.step
        control.restored = time.time()
        control.base = control.step = self.step

    def _load(self, folder: Path, slot: int, record: slots.Record) -> None:
        own, objects = record.state["run"], record.state["objects"]
        if missing := sorted(self._tracked.keys() - objects.keys()):
            raise SpotrunError(
                f"the saved state of step {record.step} has no {missing[0]!r}, which run.track names; it has "
                f"{', '.join(sorted(objects))}. Submit a changed script as a new job"
            )
        if dropped := sorted(objects.keys() - self._tracked.keys()):
            log.warning("saved state of %s is not tracked any more, left out", ", ".join(dropped))
        reader = Reader(folder, slot)
        for name, item in self._tracked.items():
            load(item, objects[name], reader)
        self._seed, self.step, self.epoch, self._consumed = own["seed"], own["step"], own["epoch"], own["consumed"]
        for optimizer in self._optimized:
            # A scheduler that steps first thing in this process would warn that the optimizer has not.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        reseed(self._seed, self.step, 0, self.rank)

    def _encode(self, encoder: Encoder) -> dict[str, Any]:
        own = {"seed": self._seed, "step": self.step, "epoch": self.epoch, "consumed": self._consumed}
        objects = {name: encoder.encode(item.state_dict(), name) for name, item in self._tracked.items()}
        return {"run": own, "objects": objects}

    def _check_steps(self, loader: Any) -> None:
        if self._stepped == self.epoch:
            raise SpotrunError(
                f"run.steps was called twice in epoch {self.epoch}: go through epochs with run.epochs(n), "
                "and through an evaluation loader without run.steps"
            )
        self._stepped = self.epoch
        if self._context is None:
            return
        if not self._tracked:
            raise SpotrunError("run.steps before run.track(…): nothing is tracked, so no state can be saved")
        batches.check(loader, self._tracked.values())

    def _feed(self, loader: Any, accumulate: int) -> Iterator[batches.Batch]:
        """Begin to iterate the loader where the state says; what its batches mean for the steps."""
        if self._writer is not None:
            with self._guarded():
                self._writer.settle()  # a loader's worker, forked now, would inherit the slot's lock
        self._loader = loader
        sampler = batches.sampler_of(loader)
        batch = getattr(loader, "batch_size", None) or 1
        if sampler is None:
            total = batches.length_of(loader, accumulate)
            self._skip(loader, self._consumed)
            self._estimate(None if total is None else -(-total // accumulate), self._consumed // accumulate)
            return batches.plain(self._consumed, total, batch, accumulate)
        drop_last = bool(getattr(loader, "drop_last", False))
        sampler.bind(batch, drop_last)
        sampler.set_epoch(self.epoch)
        reseed(self._seed, self.step, "loader", self.rank)  # seeds of the loader's workers
        self._iterator = iter(loader)
        done = sampler.position // (batch * self.world_size * accumulate)
        self._estimate(batches.steps_in(sampler.n, batch, self.world_size, accumulate, drop_last), done)
        return batches.elastic(sampler.position, sampler.n, batch, self.world_size, self.rank, accumulate, drop_last)

    def _skip(self, loader: Any, count: int) -> None:
        """Start a loader without an ElasticSampler and pass over the batches this epoch has had.

        Its shuffling is drawn with the first batch, so that one is fetched under the epoch's own seed.
        """
        if hasattr(getattr(loader, "sampler", None), "set_epoch"):
            loader.sampler.set_epoch(self.epoch)
        reseed(self._seed, "epoch", self.epoch, self.rank)
        self._iterator = iter(loader)
        self._ahead = [next(self._iterator, _END)]
        if count:
            log.warning(
                "passing over %d batches to where the epoch was left; an ElasticSampler needs no such pass, and keeps "
                "each sample to once an epoch when the number of workers changes",
                count,
            )
            self._ahead.clear()
            for _ in range(count - 1):
                next(self._iterator, None)

    def _next(self) -> Any:
        return self._ahead.pop() if self._ahead else next(self._iterator, _END)

    def _estimate(self, in_epoch: int | None, done: int) -> None:
        if self._control is not None and in_epoch is not None:
            self._control.total_steps = self.step - done + in_epoch * max(1, self._epochs - self.epoch)

    def _boundary(self) -> None:
        with self._guarded():
            for model in self._models:
                model.share_buffers()
        self.step += 1
        sampler = batches.sampler_of(self._loader)
        if sampler is None:
            self._consumed = self._batch.end
        else:
            sampler.position = self._batch.end
        control = self._control
        if control is None:
            return
        self._clock.tick(control)
        with self._fence:  # a full fence: the agent writes stop_at, then reads step
            control.step = self.step
        stop_at, snapshot_at = control.stop_at, control.snapshot_at
        draining = stop_at != NONE and self.step == stop_at
        with self._guarded():
            self._snapshot(draining or self.step == snapshot_at)
        self._publish(now=draining)
        if draining:
            code = EXIT_DRAINED
            leave_together(self.device, self._group)
            if self._writer is not None:
                with self._guarded():
                    self._writer.settle()
                # Without its snapshot this is no drain: what is lost must show.
                code = EXIT_DRAINED if self._writer.newest_step == self.step else EXIT_PEER
            control.exit = code
            leave(code)
        self._clock.resume()

    def _snapshot(self, forced: bool) -> None:
        if self._writer is None or self._context is None:
            return
        if self._guard is not None:
            self._guard.end_step()
        fixed, stall = self._context.snapshot_interval, self._writer.stall()
        if fixed:
            due = self.step % fixed == 0
        else:  # what the last one costs may not be known yet: the host can be steps ahead of a GPU
            due = stall is not None and self.step - self._snapped >= next_interval(stall, self._clock.step_seconds)
        if not (due or forced or (self._writer.dropped and stall is not None)):
            if self._control is not None and self._control.base == self.step - 1:
                self._writer.make_room(self._encode)  # the first step has made the optimizer's state
            return
        # One that is asked for must not be dropped: all of it is copied before training goes on.
        beside = set() if forced or self._guard is None else self._guard.beside()
        if self._writer.take(self.step, self._encode, beside, wait=forced or fixed > 0):
            self._snapped = self.step
        elif forced or fixed:
            log.warning("no snapshot of step %d: its slot is still being read", self.step)

    def _publish(self, now: bool = False) -> None:
        if self._control is not None:
            self._metrics.publish(self._control, now)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Under spotrun, a peer's death ends this process with its own exit code: it is no error of the script."""
        try:
            yield
        except Exception as error:
            if self._context is None or self._control is None or not is_peer_failure(error):
                raise
            end(self._context, self._control, self.rank, f"step {self.step}: another worker is gone", error)


_END = object()
