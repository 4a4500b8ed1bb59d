"""Steps of a Trainer with the same samples for any number of workers: `run.train(trainer, global_batch=…)`.

The batches of a step go to the workers in turn, as with `run.steps(loader, global_batch=…)`. See `train/dealt.py`.

Read in transformers 5.24: `_run_epoch`, `set_initial_training_values`, `training_step`, `compute_loss`.
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


class Deal:
    """Has a Trainer train with `global_batch` samples in each step, for any number of workers."""

    def __init__(self, trainer: Any, global_batch: int) -> None:
        args, loading = trainer.args, trainer.accelerator.dataloader_config
        call = f"run.train(trainer, global_batch={global_batch!r})"
        global_batch, batch = batches.whole_number(global_batch, call), args.per_device_train_batch_size
        if global_batch <= 0 or global_batch % batch:
            raise MisuseError(f"{call}: give a multiple of per_device_train_batch_size, {batch}")
        for wrong, what in (
            (args.gradient_accumulation_steps > 1, "leave out gradient_accumulation_steps: it follows from both"),
            (not hasattr(trainer.train_dataset, "__len__"), "the training dataset needs a length"),
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
        self.number = 0  # of this rank's batch in its step
        self._load, trainer.get_train_dataloader = trainer.get_train_dataloader, self._load_dealt
        self._lose, trainer.compute_loss = trainer.compute_loss, self._weighted_loss
        self._tell, trainer._get_num_items_in_batch = trainer._get_num_items_in_batch, self._count_items

    def settle_in(self, rank: int, world: int) -> None:
        """This worker's rank, and the number of workers, are known or have changed."""
        batches.warn_of_idle(self.size, self._batch, world)
        self._rank, self._world = rank, world
        self._trainer.args.gradient_accumulation_steps = -(-self._count // world)

    def begin_batch(self, number: int) -> int:
        """This batch of the step begins: its number among the batches of all ranks."""
        self.number = number
        return number * self._world + self._rank

    def _load_dealt(self) -> Any:
        args = self._trainer.args
        own, args.gradient_accumulation_steps = args.gradient_accumulation_steps, self._count
        loader = self._load()  # with group_by_length, the order follows from the batches in a step: here, of all ranks
        args.gradient_accumulation_steps = own
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
        vars(inner)["batch_sampler"] = Dealt(sampler, self._count, self._world, self._rank)  # it forbids `=`
        self._epoch = Epoch.of(sampler, self._batch, self.samples, self._world, self._rank)
        return loader

    def _factor(self, number: int) -> float:
        return 1.0 if self._epoch is None else self._epoch.factor(self._trainer.state.global_step, number)

    def _weighted_loss(self, *args: Any, **options: Any) -> Any:
        """Takes the place of a Trainer's `compute_loss`."""
        found = self._lose(*args, **options)
        if not self._trainer.model.training:
            return found
        factor = self._factor(self.number)
        if factor and options.get("num_items_in_batch") is not None:
            return found  # it is divided by the number of items of all ranks
        return (found[0] * factor, *found[1:]) if isinstance(found, tuple) else found * factor

    def _count_items(self, samples: list[Any], *args: Any, **options: Any) -> Any:
        """Takes the place of a Trainer's `_get_num_items_in_batch`: repeated samples do not count."""
        counted = [
            each if self._factor(number) or not isinstance(each, Mapping) else _without_labels(each)
            for number, each in enumerate(samples)
        ]
        return self._tell(counted, *args, **options)


def _without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: batch[name] for name in ("labels", "shift_labels") if isinstance(batch.get(name), torch.Tensor)}
    return {**batch, **{name: torch.full_like(each, -100) for name, each in found.items()}}
