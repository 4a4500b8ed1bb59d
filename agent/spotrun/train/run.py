"""What a training script sees: `spotrun.init()` and the `Run` it returns.

The same script runs under plain `python` (one process), under `torchrun`, and under spotrun, which sets
`SPOTRUN_CONTEXT`. Only spotrun takes snapshots, drains workers and restores state (see `spotrun.train.boundary`).
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from time import monotonic, time
from typing import Any

import torch
from torch import nn

from spotrun.errors import MisuseError
from spotrun.state.control import NONE, Context, Control, warm_up_store
from spotrun.train import batches, collectives, failures, frameworks
from spotrun.train.boundary import Boundary
from spotrun.train.distributed import (
    NCCL_ENVIRONMENT,
    choose_device,
    cpu_group,
    join_process_group,
    leave_at_exit,
    rank_and_world,
)
from spotrun.train.encoding import Stateful
from spotrun.train.parallel import Exchange, Parallel, include_unfrozen
from spotrun.train.regroup import Membership
from spotrun.train.rng import Seeds, reseed, seed_all
from spotrun.train.sampler import ElasticSampler, when_asked
from spotrun.train.training_state import TrainingState


def init(seed: int = 0, backend: str | None = None) -> Run:
    """Join the other workers, if there are any, and seed all random number generators.

    seed: of all random numbers in this job. backend: of the process group; default: gloo, and NCCL for CUDA tensors.
    """
    entered = time()
    seed = batches.whole_number(seed, f"spotrun.init(seed={seed!r})")
    context, control = Context.from_env(), None
    if context is not None:
        control = Control(Path(context.control)).checked()
        # It would write the worker's snapshots and numbers. But a script may start the one that trains.
        if control.pid == os.getppid() and (control.entered or multiprocessing.parent_process() is not None):
            raise MisuseError("spotrun.init: a worker has started this process. Leave out torch.multiprocessing.spawn")
        control.entered = entered
        control.seed = seed if abs(seed) < 1 << 62 else NONE
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = choose_device(local_rank, insist=context is not None)
    if device.type == "cuda" and context is not None and context.regroups:
        for name, value in NCCL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    if device.type == "cpu":  # otherwise, each worker of a Trainer trains for itself
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    alone = warm_up_store(context.controls[0]) if context is not None and context.warm_up else None
    try:
        joined = join_process_group(device, backend, alone)
    except Exception as error:
        if context is not None and control is not None and failures.is_peer_failure(error):
            failures.end(context, control, int(os.environ.get("RANK", "0")), "cannot join the other workers", error)
        raise
    run = Run(seed, device, local_rank, context, control, backend)
    if joined and context is None:  # spotrun's own workers end in another way
        leave_at_exit(run._models)
    if control is not None and context is not None:
        control.pid, control.rank, control.generation = os.getpid(), run.rank, context.generation
        control.grouped = time()
    return run


class Run:
    """One worker's part in a training run. `spotrun.init()` makes it.

    rank, local_rank, device: this worker's place. `rank` and `world_size` may change in `track`, and at the end of a
    step: ask for them each time.
    """

    def __init__(
        self,
        seed: int,
        device: torch.device,
        local_rank: int,
        context: Context | None,
        control: Control | None,
        backend: str | None = None,
    ) -> None:
        self.rank, self._world_size = rank_and_world()
        self.local_rank, self.device = local_rank, device
        self._control = control  # only under spotrun
        self._state = TrainingState(seed)
        self._models: list[Parallel] = []
        self._exchange = Exchange(self._models)
        self._membership: Membership | None = None  # only under spotrun
        if context is not None and control is not None:
            self._membership = Membership(context, control, device, backend, self._models)
        self._boundary = Boundary(
            context, control, self._state, device, local_rank, cpu_group(device), self._models, self._membership
        )
        self._clock = self._boundary.clock
        self._epochs, self._ended = 1, -1  # _ended: epochs of the loops over epochs that have ended; -1: none has
        self._stepped: int | None = None  # the epoch in which steps() was called
        self._sampler: ElasticSampler | None = None  # of the loader that was given to steps()
        self._iterator: Iterator[Any] = iter(())
        self._batch = batches.Batch(1.0, True, 0, 0)
        self._inside = False  # whether a step is under way
        self._tracked = False  # whether run.track has returned
        self._sizes: tuple[float | None, int] = (None, 0)  # samples in an epoch, and in one of its positions
        if context is not None:
            collectives.watch(self._void_if_in_step, self._see_collective)
            when_asked(lambda: self._size_is_read("len(loader)"))
        reseed(seed, "init")

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def world_size(self) -> int:
        """How many workers train together now.

        If a script reads it before `run.track`, its set-up may depend on it: all workers restart when it may change.
        """
        self._size_is_read("run.world_size")
        return self._world_size

    def _size_is_read(self, by: str) -> None:
        if self._membership is not None and self._stepped != self.epoch:
            self._membership.see_size_read(by, tracked=bool(self._state.objects))

    @property
    def generation(self) -> int:
        """The number of the generation that this worker is in: it rises with each interruption. 0 without spotrun."""
        return 0 if self._membership is None else self._membership.context.generation

    @property
    def step(self) -> int:
        """Steps completed since the job began, in all generations."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._state.epoch

    @property
    def padding(self) -> bool:
        """Whether this batch only repeats samples to keep the ranks in step. Its loss counts nothing."""
        return self._batch.padding

    @property
    def completes_step(self) -> bool:
        """Whether `optimizer.step()` follows `run.backward` of this batch, which is the last one of its step."""
        return self._batch.last

    @property
    def batch_ids(self) -> list[int] | None:
        """Indices into the dataset of this rank's current batch, without padding; None without an ElasticSampler."""
        sampler = self._sampler
        return None if sampler is None or self._batch.own is None else sampler.indices(self._batch.own)

    def print(self, *values: object) -> None:
        """Print on rank 0 only, and flush."""
        if self.is_main:
            print(*values, flush=True)

    def ddp(self, module: nn.Module, **options: Any) -> Parallel:
        """The module on `run.device`. Its gradients are averaged over the workers. `options` go to DDP."""
        self._see_collective("run.ddp", ())
        with self._boundary.exit_if_a_peer_fails:
            self._models.append(model := Parallel(module, self.device, **options))
        if model.shares_buffers:
            self._boundary.sharing.append(model)
        return model

    def track(self, **objects: Stateful) -> None:
        """Name the objects that make up the training state. If a state is saved, load it into these objects now.

        Call it once, before the first step. Raises `MisuseError` if an object has no state_dict and load_state_dict.
        """
        self._state.name(objects)
        self._boundary.begin()
        self.rank, self._world_size = rank_and_world()  # they have changed if this worker has warmed up
        reseed(self._state.seed, "tracked")
        self._tracked = True

    def epochs(self, n: int) -> Iterator[int]:
        """Epochs 0 … n - 1, beginning with the restored one, even if all steps of that epoch are done.

        A second loop counts on: `run.epochs(8)` after `run.epochs(5)` has three epochs.
        """
        n = batches.whole_number(n, f"run.epochs({n!r})")
        if n <= self._ended:
            more = f"a loop continues the count of the one before. For {n} more, write run.epochs({self._ended + n})"
            raise MisuseError(f"run.epochs({n}) after run.epochs({self._ended}) has no epochs: {more}")
        if self.epoch > n:  # the script has a further loop over epochs, and was in it
            reseed(self._state.seed, "after", n)
            return
        self._epochs, begun = n, self.epoch < n
        for epoch in range(self.epoch, n):
            if epoch != self.epoch:
                self._state.epoch, self._state.consumed = epoch, 0
            reseed(self._state.seed, "body", epoch)
            yield epoch
            if self._stepped is None and self._control is not None:
                batches.warn_of_no_steps(epoch)
                self._stepped = epoch  # once is enough
        # The head puts the finished state into the bucket. A job that restores it has no epoch left.
        if begun:
            self._state.epoch, self._state.consumed = n, 0
        self._ended = n
        self._boundary.finish(begun)
        reseed(self._state.seed, "after", n)  # after a restart, the code after the loop draws the same

    def steps(self, loader: Any, accumulate: int = 1, global_batch: int | None = None) -> Iterator[Any]:
        """The loader's batches on `run.device`, from the restored position on. The body's end is the step boundary.

        At the boundary, the worker takes snapshots, and stops when it is told to. A step left by `break` is void.
        accumulate: batches of each worker in one step. global_batch: instead, samples of all workers in one step, a
        multiple of the loader's batch size. With either, call the optimizer when `run.completes_step`.
        """
        several = (size := batches.step_size(loader, accumulate, global_batch)).several
        self._check_steps(loader)
        boundary, clock, on_cpu = self._boundary, self._clock, self.device.type == "cpu"
        clock.resume()
        with boundary.loop, boundary.snapshots.guard or nullcontext():  # later code may change the state in any way
            feed = self._feed(loader, size)
            while (coming := next(feed, None)) is not None:
                current, seeds = coming
                self._batch = current
                seed_all(seeds)
                batch = next(self._iterator, batches.END)
                if batch is batches.END:
                    break
                if several:
                    self._exchange.begin(current.last)
                self._inside = True
                try:
                    yield batch if on_cpu else batches.to_device(batch, self.device)
                except GeneratorExit:
                    boundary.profiling.end_loop()
                    raise
                finally:
                    self._inside = False
                clock.samples += current.samples
                if current.last and not boundary.must_regroup:
                    boundary.end_step(self._sampler, current.end)
                if boundary.must_regroup:
                    self._join()
                    feed = self._feed(loader, size)
        boundary.profiling.end_loop()
        next(self._iterator, None)  # lets the loader end its workers
        self._iterator = iter(())
        reseed(self._state.seed, self.step, 0, self.rank)  # after a restart, the code after the loop draws the same
        self._boundary.metrics.flush()

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()` for a batch's mean loss, weighted: the gradient is the mean over all samples of the step.

        If another worker is gone, the step does not count: the state goes back at its end, or this process ends here.
        The same holds for the script's own collectives in a step. Without spotrun, the group's error is raised.
        """
        batch, boundary, clock = self._batch, self._boundary, self._clock
        clock.due_at = clock.due_at or monotonic()
        try:
            (loss if batch.weight == 1 else loss * batch.weight).backward()  # type: ignore[no-untyped-call]
            if failures.void or boundary.exactness is not None:
                boundary.check(batch.last)
        except Exception as error:
            if not boundary.void_if_a_peer_fails.handle(error):
                raise
        if batch.last and (guard := boundary.snapshots.guard) is not None:
            guard()

    def train(self, trainer: Any, global_batch: int | None = None, **options: Any) -> Any:
        """`trainer.train(**options)` for a Trainer of Hugging Face, which goes on where it was (docs/training.md)."""
        return frameworks.load(trainer, "hugging_face.train", "run.train").train(self, trainer, options, global_batch)

    def fit(self, trainer: Any, *args: Any, global_batch: int | None = None, **options: Any) -> None:
        """`trainer.fit(…)` for a Trainer of PyTorch Lightning, which goes on where it was (docs/training.md)."""
        package = frameworks.load(trainer, "lightning.package", "run.fit").use(trainer)
        package.fit(self, trainer, args, options, global_batch)

    def log(self, **values: Any) -> None:
        """Keep numbers (0-dim tensors too) in the job's metrics, and show the newest ones in its display.

        Under spotrun, each call on rank 0 is kept, with the step under way. A call takes 10 to 25 microseconds, and
        waits neither for a GPU nor for a disk. A value that is not a number is left out, with a warning.
        """
        if not failures.void:
            step = self._state.step + self._inside
            self._boundary.metrics.log(step, self._state.epoch, self._samples(), not self._inside, values)

    def log_text(self, **values: str) -> None:
        """Keep the first 65,536 characters of texts. Like the next two methods, it is for a few calls a minute."""
        self._log_extra("text", values)

    def log_image(self, **values: Any) -> None:
        """Keep small images: arrays or tensors of uint8, (h, w) or (h, w, 3), at most 1,024 pixels on each side."""
        self._log_extra("image", values)

    def log_histogram(self, **values: Any) -> None:
        """Keep how the values of arrays or tensors are distributed, in 64 bins. The call waits for a GPU."""
        self._log_extra("histogram", values)

    def _log_extra(self, kind: str, values: dict[str, Any]) -> None:
        if not failures.void and self.is_main:
            step = self._state.step + self._inside
            self._boundary.metrics.log_extra(kind, step, self._state.epoch, not self._inside, values)

    def _samples(self) -> float | None:
        """How many samples the job has seen when the step under way is done; None: not known."""
        whole, each = self._sizes
        if whole is None and self.epoch:
            return None
        position = self._state.consumed if self._sampler is None else self._sampler.position
        if self._inside:
            position = self._batch.end
        elif self.epoch >= self._epochs:
            position = 0
        return float(self.epoch * (whole or 0) + position * each)

    def _void_if_in_step(self, error: Exception) -> bool:
        """Whether the script goes on after this error of a collective of its own, in a step that does not count."""
        ours = self._inside and not self._boundary.loop.enters_again
        return ours and self._boundary.void_if_a_peer_fails.handle(error)

    def _see_collective(self, name: str, values: Iterable[Any]) -> None:
        """The script is about to call this collective. A newcomer must not call one that the others have passed."""
        alone = self._tracked and self._stepped != self.epoch and not self._boundary.loop.enters_again
        if alone and self._membership is not None:
            self._membership.restarts(f"the script calls {name} after run.track, and before run.steps in an epoch")
        self._boundary.see_collective(name, values)

    def _join(self) -> None:
        """Leave this generation and join the next one."""
        self._boundary.regroup()
        self.rank, self._world_size = rank_and_world()
        self._clock.resume()

    def _check_steps(self, loader: Any) -> None:
        if self._stepped == self.epoch:
            raise MisuseError(
                f"run.steps was called twice in epoch {self.epoch}: go through epochs with run.epochs(n), "
                "and through an evaluation loader without run.steps"
            )
        self._stepped = self.epoch
        with self._boundary.exit_if_a_peer_fails:
            changed = include_unfrozen(self._models, self._state.objects.values())
        if changed and self._membership is not None:
            self._membership.restarts("layers of a model that run.track does not name were unfrozen")
        if self._membership is None:
            return
        if not self._state.objects:
            raise MisuseError("run.steps before run.track(…): nothing is tracked, so no state can be saved")
        batches.check(loader, self._state.objects.values())
        self._membership.see_loader(loader)

    def _feed(self, loader: Any, size: batches.StepSize) -> Iterator[tuple[batches.Batch, Seeds]]:
        """Start the loader at the restored position, and describe the batches that it will give, with their seeds."""
        described, rank = self._describe(loader, size), 0 if size.global_batch else self.rank
        return batches.with_seeds(described, self._state.seed, self.step, rank)

    def _describe(self, loader: Any, size: batches.StepSize) -> Iterator[batches.Batch]:
        self._boundary.settle()  # a loader's worker, forked now, would inherit the slot's lock
        self._exchange.end()  # a loop that accumulates may have ended before
        self._sampler = sampler = batches.sampler_of(loader)
        batch, world, seed = getattr(loader, "batch_size", None) or 1, self.world_size, self._state.seed
        if sampler is None:
            accumulate, consumed = size.accumulate, self._state.consumed
            total = batches.length_of(loader, accumulate)
            self._iterator = batches.begin_at(loader, seed, self.epoch, self.step, self.rank, consumed, accumulate)
            each = batch * world
            self._sizes = (None if total is None else total * each, each)
            self._estimate(None if total is None else -(-total // accumulate), consumed // accumulate)
            return batches.plain(consumed, total, batch, accumulate)
        drop_last = bool(getattr(loader, "drop_last", False))
        batches.warn_of_idle(size, batch, world)
        sampler.bind(batch, drop_last, size.global_batch)
        sampler.set_epoch(self.epoch)
        reseed(seed, self.step, "loader", self.rank)  # seeds of the loader's workers
        sampler.resume()
        self._iterator = iter(loader)
        self._sizes = (sampler.n, 1)
        done = sampler.position // (size.global_batch or batch * world * size.accumulate)
        self._estimate(batches.steps_in(sampler.n, batch, world, size, drop_last), done)
        return batches.elastic(sampler.position, sampler.n, batch, world, self.rank, size, drop_last)

    def _estimate(self, in_epoch: int | None, done: int) -> None:
        """Tell the agent how many steps the job has, if that is known."""
        if self._control is not None and in_epoch is not None:
            self._control.tell_total(self.step - done + in_epoch * max(1, self._epochs - self.epoch))
