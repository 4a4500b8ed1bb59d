"""Scripts with a Trainer of Lightning whose steps have the same samples for any number of workers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler

from spotrun.errors import SpotrunError
from tests.train.lightnings import BATCH, EPOCHS, Fitted, Net
from tests.train.scripts import SAMPLES, Numbered


class Plain(Net):
    """Without BatchNorm, whose running statistics are those of rank 0's batches. It logs what does not depend on it."""

    def __init__(self, script: Fitted) -> None:
        super().__init__(script)
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 4))
        self.validations: list[int] = []  # after which steps

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.script.see(batch[1], "")
        loss = self.loss(batch)
        counted = torch.zeros(()) if self.script.run.padding else torch.tensor(float(len(batch[1])))
        self.log("samples", counted, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss

    def on_validation_start(self) -> None:
        self.validations.append(self.trainer.global_step)


class Dealt(Fitted):
    """A script that says how large a step is."""

    def __init__(self, plan: Any, out: Path, **options: Any) -> None:
        super().__init__(plan, out, accumulate_grad_batches=1, **options)
        self.net = Plain(self)


def dealt(plan: Any, out: Path) -> None:
    """It validates in the middle of an epoch, too."""
    script = Dealt(plan, out, val_check_interval=2)
    script.fit(global_batch=plan.global_batch)
    script.save(validations=script.net.validations)


class Scheduled(Plain):
    """Its schedule follows from the number of steps."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def weighted(plan: Any, out: Path) -> None:
    """The sampler is the script's own, and draws. The loader stays, and has workers, which stay, too."""
    script = Dealt(plan, out, val_check_interval=0.5, max_epochs=EPOCHS, use_distributed_sampler=False)
    script.net = Scheduled(script)
    own = torch.Generator().manual_seed(3)
    weights = WeightedRandomSampler([1 + number % 3 for number in range(SAMPLES)], SAMPLES, generator=own)
    train = DataLoader(
        Numbered(), BATCH, sampler=weights, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )
    script.fit(train, global_batch=plan.global_batch)
    script.save(validations=script.net.validations)


class Batches:
    """Draws two batches at a time: from an order that its own generator gives, with the global one."""

    def __init__(self) -> None:
        self.batch_size, self.generator = BATCH, torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES, generator=self.generator).tolist()
        for start in range(0, SAMPLES, 2 * BATCH):
            part = order[start : start + 2 * BATCH]
            random.shuffle(part)
            yield from filter(None, (part[:BATCH], part[BATCH:]))


class Endless:
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class Stops(pl.Callback):
    """Training shall stop. It says so when the last step of the third epoch begins."""

    def __init__(self, global_batch: int) -> None:
        self._last = EPOCHS * -(-SAMPLES // global_batch) - 1

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == self._last


def batched(plan: Any, out: Path) -> None:
    """The batches are the script's own, and so is the end of training."""
    own: dict[str, Any] = {"use_distributed_sampler": False, "max_epochs": EPOCHS + 1}
    script = Dealt(plan, out, callbacks=[Stops(plan.global_batch)], **own)
    script.fit(DataLoader(Numbered(), batch_sampler=Batches()), global_batch=plan.global_batch)
    script.save(validations=script.net.validations)


def refused(plan: Any, out: Path) -> None:
    """What does not fit."""
    for size, options in (
        (0, {}),
        (1.5, {}),
        (32, {"accumulate_grad_batches": 2}),
        (32, {"limit_train_batches": 3}),
        (32, {"limit_train_batches": 1}),
        (32, {"overfit_batches": 2}),
        (32, {"check_val_every_n_epoch": None}),
        (12, {}),
        (32, {"val_check_interval": 5}),
    ):
        script = Fitted(plan, out, **{"accumulate_grad_batches": 1, **options})
        refuse(script, None, size)
    for world in (1, 2):  # a job may begin with one worker
        refuse(Dealt(plan, out), DataLoader(Numbered(), BATCH, sampler=DistributedSampler(Numbered(), world, 0)), 32)
    own = {"use_distributed_sampler": False}
    refuse(Dealt(plan, out, **own), DataLoader(Numbered(), batch_sampler=[[1, 2], [3]]), 32)
    refuse(Dealt(plan, out, **own), DataLoader(Numbered(), BATCH, sampler=Endless()), 32)  # type: ignore[arg-type]


def refuse(script: Fitted, train: Any, size: Any) -> None:
    try:
        script.fit(train, global_batch=size)
    except SpotrunError as error:
        print("refused:", error, flush=True)
