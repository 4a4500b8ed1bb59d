"""Steps of a Lightning Trainer with the same samples for any number of workers: `run.fit(…, global_batch=…)`.

The batches of a step go to the workers in turn, as with `run.steps(loader, global_batch=…)`. See `train/dealt.py`.

A Trainer counts a worker's batches in an epoch. Between two steps, their number is a multiple of a step's batches. So
the count follows from the steps of the epoch if the number of workers changes.

Read in pytorch_lightning 2.6: `_FitLoop.setup_data`, `_TrainingEpochLoop`.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler

from spotrun.errors import MisuseError
from spotrun.train import batches
from spotrun.train.batches import Batch
from spotrun.train.dealt import Dealt, Epoch
from spotrun.train.distributed import rank_and_world


class Deal:
    """Has a Trainer train with `global_batch` samples in each step, for any number of workers."""

    def __init__(self, trainer: Any, global_batch: int) -> None:
        self._call = f"run.fit(…, global_batch={global_batch!r})"
        self.samples = batches.whole_number(global_batch, self._call)
        for wrong, what in (
            (self.samples <= 0, "give a number above 0"),
            (trainer.accumulate_grad_batches != 1, "leave out accumulate_grad_batches: global_batch sets it"),
            (trainer.overfit_batches != 0.0, "leave out overfit_batches"),
            (
                trainer.limit_train_batches != 1.0 or isinstance(trainer.limit_train_batches, int),  # 1: one batch
                "leave out limit_train_batches and fast_dev_run",
            ),
            (trainer.check_val_every_n_epoch is None, "leave out check_val_every_n_epoch=None"),
        ):
            if wrong:
                raise MisuseError(f"{self._call}: {what}")
        self._trainer, self._epoch = trainer, Epoch(0, 1, self.samples, 1, 0)
        self.own_sampler = True  # whether a DistributedSampler is the script's own, and not Lightning's
        self._stops = False  # whether the script has asked, in the middle of a step, that training stops

    def check_schedulers(self) -> None:
        """Raise `MisuseError` if a scheduler counts batches."""
        for each in self._trainer.lr_scheduler_configs:
            if each.interval == "step" and each.frequency != 1:
                raise MisuseError(f"{self._call}: leave out a scheduler's frequency, or set its interval to epoch")

    def wrap(self, loader: Any, sampler: Any) -> Dealt:
        """The batch sampler of the loader for training: its own one, `sampler`, gives the batches of all ranks."""
        rank, world = rank_and_world()
        if isinstance(sampler, Dealt):  # of this loader, for the workers that there were before
            sampler = sampler.batch_sampler
        inner, batch = getattr(sampler, "sampler", None), loader.batch_size or getattr(sampler, "batch_size", 0)
        if loader.batch_sampler is None or not batch:
            what = "the DataLoader" if loader.batch_sampler is None else f"{type(sampler).__name__}, the batch_sampler,"
            raise MisuseError(f"{self._call}: {what} needs a batch_size")
        if not hasattr(inner, "__len__") and isinstance(sampler, BatchSampler):
            raise MisuseError(f"{self._call}: {type(inner).__name__}, the sampler, needs a length")
        if self.samples % batch:
            raise MisuseError(f"{self._call}: give a multiple of the DataLoader's batch_size, {batch}")
        own, self.own_sampler = self.own_sampler, True
        if isinstance(inner, DistributedSampler) and own:
            raise MisuseError(f"{self._call}: leave out the DistributedSampler: Lightning makes what is needed")
        size = batches.StepSize(1, self.samples)
        batches.warn_of_idle(size, batch, world)
        count = self.samples // batch
        self._epoch = Epoch.of(sampler, batch, self.samples, world, rank)
        self._trainer.accumulate_grad_batches = -(-count // world)
        self._check_interval(-(-len(sampler) // count))
        return Dealt(sampler, count, world, rank)

    def _check_interval(self, steps: int) -> None:
        """steps: of an epoch. Lightning compares with this worker's batches."""
        interval = self._trainer.val_check_interval
        if isinstance(interval, int) and interval > steps and self._trainer.limit_val_batches > 0:
            raise MisuseError(
                f"{self._call}: val_check_interval={interval} counts steps, and an epoch has only {steps}: give a "
                "smaller number, or check_val_every_n_epoch"
            )

    def begin_epoch(self) -> None:
        """Have the Trainer count steps, not batches, to find out when to validate. Called in mid-epoch, too."""
        self._stops = False  # that was in a step that does not count
        trainer, each = self._trainer, self._trainer.accumulate_grad_batches
        steps = trainer.val_check_interval
        if isinstance(steps, float):  # a part of an epoch
            steps = max(1, int(-(-trainer.num_training_batches // each) * steps))
        trainer.val_check_batch = steps * each

    def end_batch(self) -> None:
        """A batch ends. The last step of an epoch may have fewer batches, and counts, too."""
        trainer, progress = self._trainer, self._trainer.fit_loop.epoch_loop.batch_progress
        if progress.is_last_batch:
            each, ready = trainer.accumulate_grad_batches, progress.current.ready
            full = -(-ready // each) * each % trainer.val_check_batch == 0
            trainer.val_check_batch = ready if full else ready + 1

    def stop_later(self) -> None:
        """A batch has ended. If training must stop, its step ends first, so that no sample is lost."""
        trainer = self._trainer
        self._stops, trainer.should_stop = self._stops or trainer.should_stop, False
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            self._stops, trainer.should_stop = False, self._stops

    def recount(self, each: int) -> None:
        """A state is loaded that was noted between two steps, when a step had `each` batches of a worker."""
        progress, now = self._trainer.fit_loop.epoch_loop.batch_progress.current, self._trainer.accumulate_grad_batches
        for name, count in vars(progress).items():
            setattr(progress, name, count // each * now)

    def batch(self, ready: int, end: int) -> Batch:
        """The worker's next batch in an epoch of which it has had `ready`. end: as in `Batch`."""
        each, epoch = self._trainer.accumulate_grad_batches, self._epoch
        step, at = divmod(ready, each)
        weight, number = epoch.factor(step, at, divisor=each), at * epoch.world + epoch.rank
        return Batch(weight, True, end, epoch.samples(step, at), number)
