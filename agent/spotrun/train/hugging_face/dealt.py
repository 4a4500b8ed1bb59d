"""Steps of a Trainer with the same samples for any number of workers: `run.train(trainer, global_batch=…)`.

The batches of a step go to the workers in turn, as with `run.steps(loader, global_batch=…)`. See `train/dealt.py`.

The loss is weighted where the Trainer gives it to accelerate, so a `training_step` or a `compute_loss` of a subclass
need not know of this.

Read in transformers 5.24: `_run_epoch`, `set_initial_training_values`, `training_step`, `_get_num_items_in_batch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from torch.utils.data import DistributedSampler

from spotrun.errors import MisuseError
from spotrun.train import batches
from spotrun.train.dealt import Dealt, Epoch
from spotrun.train.rng import reseed
from spotrun.train.training_state import TrainingState


class Deal:
    """Has a Trainer train with `global_batch` samples in each step, for any number of workers."""

    def __init__(self, trainer: Any, global_batch: int, state: TrainingState) -> None:
        """state: has the seed."""
        args, loading, data = trainer.args, trainer.accelerator.dataloader_config, trainer.train_dataset
        call = f"run.train(trainer, global_batch={global_batch!r})"
        global_batch, batch = batches.whole_number(global_batch, call), args.per_device_train_batch_size
        if global_batch <= 0 or global_batch % batch:
            raise MisuseError(f"{call}: give a multiple of per_device_train_batch_size, {batch}")
        for wrong, what in (
            (args.gradient_accumulation_steps > 1, "leave out gradient_accumulation_steps: global_batch sets it"),
            (data is not None and not hasattr(data, "__len__"), "the training dataset needs a length"),
            (not args.average_tokens_across_devices, "leave average_tokens_across_devices=True"),
            (loading.split_batches or loading.dispatch_batches, "leave out split_batches and dispatch_batches"),
            (not loading.use_seedable_sampler, "leave use_seedable_sampler=True"),
            (args.train_sampling_strategy == "batch_rebalance", "leave out batch_rebalance"),
        ):
            if wrong:
                raise MisuseError(f"{call}: {what}")
        self.size = batches.StepSize(1, global_batch)
        self.samples = global_batch
        self._trainer, self._batch, self._count = trainer, batch, global_batch // batch
        self._epoch: Epoch | None = None
        self._state, self._number = state, 0  # the number of the epoch
        self._enters, self._start = True, 0  # an epoch that the Trainer enters may have had steps; its first step
        self.number = 0  # of this rank's batch in its step
        self._weight, self._is_weighted = 1.0, False  # of the batch in `training_step`; whether its loss has it
        self._loads = self._counts = False  # whether the Trainer loads the samples of a step; has counted their items
        self._load, trainer.get_train_dataloader = trainer.get_train_dataloader, self._load_dealt
        self._fetch, trainer.get_batch_samples = trainer.get_batch_samples, self._fetch_step
        self._tell, trainer._get_num_items_in_batch = trainer._get_num_items_in_batch, self._count_items
        self._train, trainer.training_step = trainer.training_step, self._weighted_step
        self._backward, trainer.accelerator.backward = trainer.accelerator.backward, self._weighted_backward

    def settle_in(self, rank: int, world: int) -> None:
        """Use this rank, and this number of workers, from now on."""
        batches.warn_of_idle(self.size, self._batch, world)
        self._rank, self._world = rank, world
        self._trainer.args.gradient_accumulation_steps = -(-self._count // world)

    def begin_epoch(self, number: int) -> None:
        """Note the first step of this epoch. The Trainer's count does not say it: a callback may end an epoch early."""
        self._number, self._start = number, self._trainer.state.global_step
        if self._enters and self._epoch is not None:
            self._start -= self._start % self._epoch.steps
        self._enters = False

    def begin_batch(self, number: int) -> int:
        """This rank's batch of this number in the step begins. Returns its number among the batches of all ranks."""
        self.number = number
        return number * self._world + self._rank

    def _load_dealt(self) -> Any:
        args = self._trainer.args
        rounds, args.gradient_accumulation_steps = args.gradient_accumulation_steps, self._count
        loader = self._load()  # with group_by_length, the order follows from the batches in a step: here, of all ranks
        args.gradient_accumulation_steps = rounds
        inner = getattr(loader, "base_dataloader", loader)  # accelerate's wrapper only asks this one
        sampler = getattr(inner, "batch_sampler", None)
        if isinstance(sampler, BatchSamplerShard | Dealt):  # a Trainer may keep its loader
            sampler = sampler.batch_sampler
        if sampler is None or isinstance(loader, DataLoaderDispatcher) or not hasattr(sampler, "__len__"):
            raise MisuseError("run.train: global_batch needs a DataLoader whose batches each rank loads for itself")
        if isinstance(getattr(sampler, "sampler", None), DistributedSampler):
            raise MisuseError("run.train: global_batch needs a DataLoader without a DistributedSampler")
        if (size := getattr(sampler, "batch_size", None) or self._batch) != self._batch:
            raise MisuseError(f"run.train: the DataLoader has batch_size={size}, and the Trainer {self._batch}")
        own = Dealt(sampler, self._count, self._world, self._rank, self._seed_batch)
        vars(inner)["batch_sampler"] = own  # it forbids `=`
        vars(inner)["_iterator"] = None  # with persistent workers, this one would go on with other batches
        self._epoch, self._enters = Epoch.of(sampler, self._batch, self.samples, self._world, self._rank), True
        return loader

    def _seed_batch(self, number: int) -> None:
        reseed(self._state.seed, "batch", self._number, number)

    def _factor(self, number: int, divisor: int = 0) -> float:
        """See `Epoch.factor`."""
        step = self._trainer.state.global_step - self._start
        return 1.0 if self._epoch is None else self._epoch.factor(step, number, divisor)

    def _weighted_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Takes the place of a Trainer's `training_step`."""
        trainer, self._is_weighted = self._trainer, False
        by_items, own = trainer.loss_is_scaled_for_ga, trainer.compute_loss_func is not None
        whole = by_items is None and own  # then the Trainer does not divide the loss, also if no items are counted
        if by_items is None:
            by_items = trainer.model_accepts_loss_kwargs or own
        self._weight = weight = self._factor(self.number, divisor=int(whole))
        if weight and by_items and num_items_in_batch is not None:
            self._weight = weight = 1.0  # the loss is divided by the number of items of all ranks
        loss = self._train(model, inputs, num_items_in_batch)
        self._weight = 1.0
        if not self._is_weighted:
            raise MisuseError("run.train: global_batch needs a training_step that calls accelerator.backward(loss)")
        return loss * weight

    def _weighted_backward(self, loss: Any, *args: Any, **options: Any) -> None:
        """Takes the place of accelerate's `backward`."""
        self._is_weighted = True
        self._backward(loss * self._weight, *args, **options)

    def _fetch_step(self, *args: Any, **options: Any) -> Any:
        """Takes the place of a Trainer's `get_batch_samples`."""
        self._loads, self._counts = True, False
        try:
            samples, items = self._fetch(*args, **options)
        finally:
            self._loads = False
        if items is not None and not self._counts:
            raise MisuseError("run.train: global_batch needs a get_batch_samples that calls _get_num_items_in_batch")
        return samples, items

    def _count_items(self, samples: list[Any], *args: Any, **options: Any) -> Any:
        """Takes the place of a Trainer's `_get_num_items_in_batch`: repeated samples do not count."""
        self._counts = True
        if self._loads:
            counted = [each for number, each in enumerate(samples) if self._factor(number)]
            samples = counted or [_without_labels(each) if isinstance(each, Mapping) else each for each in samples]
        return self._tell(samples, *args, **options)


def _without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: batch[name] for name in ("labels", "shift_labels") if isinstance(batch.get(name), torch.Tensor)}
    return {**batch, **{name: torch.full_like(each, -100) for name, each in found.items()}}
