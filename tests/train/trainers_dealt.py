"""Scripts with a Trainer of Hugging Face whose steps have the same samples for any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from spotrun.errors import SpotrunError
from tests.train.scripts import SAMPLES
from tests.train.trainers import Net, Trained


def layers() -> nn.Sequential:
    """Without BatchNorm, whose running statistics are those of rank 0's batches."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 4))


def dealt(plan: Any, out: Path) -> None:
    script = Trained(plan, out, gradient_accumulation_steps=1)
    script.net.layers = layers()
    script.run.train(script.trainer, global_batch=plan.global_batch)
    script.save()


class Tokens(Net):
    """Its loss is that of a language model: divided by the number of all items of a step that count."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None) -> dict[str, torch.Tensor]:
        if self.training and self._script is not None:
            self._script.see(labels, True)
        logits, wanted = self.layers(x), torch.where(labels % 3 == 0, -100, labels % 4)
        loss = nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
        return {"loss": loss / (wanted.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)}


def tokens(plan: Any, out: Path) -> None:
    script = Trained(plan, out, gradient_accumulation_steps=1)
    trainer, net = script.trainer, Tokens(script)
    net.layers = layers()
    trainer.model = trainer.model_wrapped = net
    trainer.model_accepts_loss_kwargs = True
    script.run.train(trainer, global_batch=plan.global_batch)
    script.save()


class Grouped(Trainer):
    """Its order follows from the number of samples in a step, as with group_by_length. It keeps its loader."""

    _own: Any = None

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        size = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return [at for start in range(0, SAMPLES, size) for at in reversed(range(start, min(start + size, SAMPLES)))]

    def get_train_dataloader(self) -> Any:
        self._own = self._own or super().get_train_dataloader()
        return self._own


def grouped(plan: Any, out: Path) -> None:
    script = Trained(plan, out, Grouped, gradient_accumulation_steps=1)
    script.net.layers = layers()
    script.run.train(script.trainer, global_batch=plan.global_batch)
    script.save()


def refused(plan: Any, out: Path) -> None:
    """What does not fit."""
    script = Trained(plan, out)
    for size in (32, 12, 0, 1.5):
        try:
            script.run.train(script.trainer, global_batch=size)  # type: ignore[arg-type]
        except SpotrunError as error:
            print("refused:", error, flush=True)
        script.trainer.args.gradient_accumulation_steps = 1
    script.trainer.accelerator.dataloader_config.split_batches = True
    try:
        script.run.train(script.trainer, global_batch=32)
    except SpotrunError as error:
        print("refused:", error, flush=True)
