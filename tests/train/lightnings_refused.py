"""Scripts for a Trainer of PyTorch Lightning that `run.fit` refuses, or with which all workers restart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import BackboneFinetuning, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from spotrun.errors import SpotrunError
from tests.train.lightnings import BATCH, Fitted, Net
from tests.train.scripts import Buffered, Numbered


def refused(plan: Any, out: Path) -> None:
    """It prints what is wrong with its calls, and trains in between."""
    script = Fitted(plan, out)
    run, trainer, net = script.run, script.trainer, script.net
    given = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1}

    def attempt(trainer: Any, *args: Any) -> None:
        try:
            run.fit(trainer, *args)
        except SpotrunError as error:
            print("refused:", error, flush=True)

    attempt(run)
    attempt(type("Trainer", (), {"__module__": "transformers.trainer"})())
    attempt(trainer)
    attempt(trainer, lightning.pytorch.LightningModule())
    attempt(pl.Trainer(devices=2, **given), net)
    attempt(pl.Trainer(reload_dataloaders_every_n_epochs=1, **given), net)
    attempt(pl.Trainer(val_check_interval="00:00:10:00", **given), net)
    attempt(pl.Trainer(callbacks=[StochasticWeightAveraging(1e-2)], **given), net)
    attempt(pl.Trainer(callbacks=[BackboneFinetuning()], **given), net)
    with patch("spotrun.train.lightning.package._OLDEST", (99, 5)):
        attempt(trainer, net)
    net.automatic_optimization = False
    attempt(trainer, net)
    net.automatic_optimization = True
    run.ddp(nn.Linear(2, 2))
    attempt(trainer, net)
    run._models.clear()
    with patch.dict(run._state.objects, net=net):
        attempt(trainer, net)
    loader = DataLoader(Numbered(), BATCH)
    run.fit(trainer, torch.compile(net, disable=True), loader, loader)
    attempt(trainer, net)
    try:
        trainer.fit(net, loader)
    except SpotrunError as error:
        print("refused:", error, flush=True)


def sized(plan: Any, out: Path, place: Callable[[Any], Any] = lambda trainer: trainer) -> None:
    """Its learning rate follows from the number of workers, which a newcomer does not know yet."""
    script = Fitted(plan, out)

    def configure_optimizers() -> Any:
        return torch.optim.SGD(script.net.parameters(), lr=0.1 * place(script.trainer).world_size)

    vars(script.net)["configure_optimizers"] = configure_optimizers
    script.fit()


sized_by_strategy = partial(sized, place=lambda trainer: trainer.strategy)


def with_sampler(plan: Any, out: Path) -> None:
    """Its module makes a sampler in its set-up, for the number of workers."""
    script = Fitted(plan, out)
    vars(script.net)["setup"] = lambda stage: DistributedSampler(Numbered())
    script.fit()


class Many(Net):
    """It logs more metrics than can be kept."""

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.log_dict({f"own {each}": each / 7 for each in range(256)}, on_epoch=True, on_step=False)
        return super().training_step(batch, number)


class Grouped(Net):
    """It logs for a part of the workers."""

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.log("part", 1.0, sync_dist_group=dist.group.WORLD)
        return super().training_step(batch, number)


def _with(kind: type[Net]) -> Callable[[Any, Path], None]:
    def script(plan: Any, out: Path) -> None:
        fitted = Fitted(plan, out)
        fitted.net = kind(fitted)
        fitted.fit()

    return script


many, grouped = _with(Many), _with(Grouped)


def with_two_loaders(plan: Any, out: Path) -> None:
    """Its batches come from two loaders."""
    Fitted(plan, out).fit({name: DataLoader(Numbered(), BATCH) for name in "ab"})


def synchronized(plan: Any, out: Path) -> None:
    """Torch's SyncBatchNorm needs a GPU."""
    Fitted(plan, out, sync_batchnorm=True).fit()


def without_a_length(plan: Any, out: Path) -> None:
    """Its samples come from an IterableDataset."""
    Fitted(plan, out).fit(DataLoader(Buffered(), BATCH))


def with_callbacks(plan: Any, out: Path) -> None:
    """Its module adds a callback that trains on its own."""
    script = Fitted(plan, out)
    vars(script.net)["configure_callbacks"] = lambda: StochasticWeightAveraging(1e-2)
    script.fit()
