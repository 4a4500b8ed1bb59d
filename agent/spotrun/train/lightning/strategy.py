"""The strategy of a Lightning Trainer in `run.fit`: the workers of spotrun, with its model wrapper.

Read in pytorch_lightning 2.6: `DDPStrategy`, `Strategy.optimizer_step`, `_process_dataloader`, `_DataFetcher`.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from spotrun.errors import MisuseError
from spotrun.train.dealt import Dealt
from spotrun.train.distributed import rank_and_world
from spotrun.train.lightning.dealt import Deal
from spotrun.train.lightning.package import INSTEAD, environments, pl

if TYPE_CHECKING:
    from spotrun.train.run import Run


class Workers(pl.strategies.DDPStrategy):
    """As `DDPStrategy`, but the process group and the model wrapper are spotrun's.

    given: the strategy that it takes the place of. layer_sync: what makes layers exchange values, such as BatchNorm's.
    deal: what deals batches to the workers; None: each worker has a part of the samples for itself.
    """

    def __init__(self, run: Run, given: Any, layer_sync: Any, deal: Deal | None) -> None:
        super().__init__(
            accelerator=given.accelerator,
            parallel_devices=[run.device] * workers_per_node(),
            cluster_environment=environments.TorchElasticEnvironment(),
            checkpoint_io=given._checkpoint_io,
            precision_plugin=given._precision_plugin,
            **getattr(given, "_ddp_kwargs", {}),
        )
        self._run, self._deal = run, deal
        self._layer_sync = layer_sync  # a strategy for one device does not keep it
        self.set_world_ranks()

    @property
    def root_device(self) -> torch.device:
        return self._run.device

    @property
    def global_rank(self) -> int:
        return rank_and_world()[0]

    @property
    def world_size(self) -> int:
        if _is_asked_by_script():
            self._run._size_is_read("trainer.world_size")
        return rank_and_world()[1]

    @property
    def num_nodes(self) -> int:
        if _is_asked_by_script():
            self._run._size_is_read("trainer.num_nodes")
        return rank_and_world()[1] // workers_per_node()

    @num_nodes.setter
    def num_nodes(self, nodes: int) -> None:
        """The job file decides."""

    @property
    def local_rank(self) -> int:
        return self._run.local_rank

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        rank, world = rank_and_world()
        if self._deal is not None and self._trains():
            rank, world, self._deal.own_sampler = 0, 1, False  # the batches of one order are dealt
        return {"num_replicas": world, "rank": rank}

    def set_world_ranks(self) -> None:
        """A worker that warms up, alone, is not the one that logs."""
        membership = self._run._membership
        alone = membership is not None and membership.context.warm_up
        place: Any = rank_zero_only
        place.rank = self.global_rank or int(alone)

    def setup_distributed(self) -> None:
        self.set_world_ranks()

    def setup(self, trainer: Any) -> None:
        if trainer.state.fn == "fit" or dist.is_initialized():
            return super().setup(trainer)
        # A validation or a test without a process group, with which Lightning would send rank 0's model to the others.
        module: Any = self.lightning_module
        self.precision_plugin.convert_module(module)
        self.model_to_device()
        self.setup_precision_plugin()
        return None

    def configure_ddp(self) -> None:
        module: Any = self.lightning_module
        self.model = self._run.ddp(module, **self._ddp_kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        model: Any = self.model
        model.exchange(False)
        yield
        model.exchange(True)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The gradients come before the optimizer's step, not in it: the state is whole until all workers have them."""
        plugin: Any = self.precision_plugin
        own = not type(plugin).optimizer_step.__module__.startswith(pl.__name__)
        if own or getattr(plugin, "scaler", None) is not None:  # a scaler does so
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight = self._run._batch.weight
        weighted = closure_loss if weight == 1 else closure_loss * weight
        return super().backward(weighted, optimizer, *args, **kwargs)

    def process_dataloader(self, dataloader: Any) -> Any:
        if self._deal is not None and self._trains():
            return with_beginning(dataloader, self._deal)
        self._run._size_is_read("the number of batches")
        sampler = getattr(dataloader, "sampler", None)
        if isinstance(sampler, DistributedSampler):  # the script's own keeps the rank that this worker had before
            sampler.rank = self.global_rank
        return with_beginning(dataloader) if self._trains() else dataloader

    def _trains(self) -> bool:
        """Whether the Trainer asks for a loader of training."""
        module: Any = self.lightning_module
        return bool(module.trainer.training)


def workers_per_node() -> int:
    """How many workers each node has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _is_asked_by_script() -> bool:
    """Whether the script reads the property that calls this, and not Lightning or spotrun."""
    frame: Any = sys._getframe(2)
    if _is_of_lightning(frame) and frame.f_code.co_name in ("world_size", "num_nodes"):
        frame = frame.f_back  # out of `Trainer.world_size`
    return not _is_of_lightning(frame)


def _is_of_lightning(frame: FrameType) -> bool:
    """Whether this is Lightning's own code, or spotrun's."""
    own = ("lightning", "lightning_fabric", "pytorch_lightning", "spotrun")
    return frame.f_globals["__name__"].split(".")[0] in own


def with_beginning(loader: Any, deal: Deal | None = None) -> Any:
    """Have the loader begin where `begin_at` says. It does not load the batches before. deal: as in `Workers`."""
    if not isinstance(loader, DataLoader):
        raise MisuseError(f"run.fit needs a torch.utils.data.DataLoader for training, not a {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        raise MisuseError(f"run.fit does not support an IterableDataset for training ({INSTEAD})")
    name = _sampler_name(loader)
    whole = getattr(loader, name)
    left = whole if isinstance(whole, Remaining) else Remaining(whole)
    if deal is not None:
        left.whole = deal.wrap(loader, left.whole)
    vars(loader)[name] = left  # a DataLoader forbids the plain assignment
    return loader


def begin_at(combined: Any, done: int) -> None:
    """Have the loader of the training samples skip so many batches when it is asked for its next epoch."""
    if len(loaders := combined.flattened) != 1:  # a shorter one would begin again within an epoch
        raise MisuseError(f"run.fit needs one DataLoader for training, not {len(loaders)} ({INSTEAD})")
    getattr(loaders[0], _sampler_name(loaders[0])).done = done


def places(loader: Any) -> tuple[object, ...]:
    """This loader and its samplers, which Lightning may have wrapped."""
    sampler, whole = getattr(loader, "sampler", None), loader.batch_sampler
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", None)
    while isinstance(whole, Remaining | Dealt):
        whole = whole.whole if isinstance(whole, Remaining) else whole.batch_sampler
    return loader, sampler, whole, getattr(whole, "sampler", None), inner


def _sampler_name(loader: Any) -> str:
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


class Remaining:
    """What is left of a sampler's epoch. The sampler draws its order when the epoch begins.

    done: what it has had. It is 0 outside of `begin_at`, because a script may go through its loader for other ends.
    """

    def __init__(self, whole: Any) -> None:
        self.whole, self.done = whole, 0

    def __iter__(self) -> Iterator[Any]:
        left, done = iter(self.whole), self.done
        first = list(itertools.islice(left, done + 1))[done:]
        return itertools.chain(first, left)

    def __len__(self) -> int:
        return len(self.whole)

    def __getattr__(self, name: str) -> Any:
        if name == "whole":  # while a copy is made
            raise AttributeError(name)
        return getattr(self.whole, name)
