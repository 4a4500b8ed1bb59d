"""Scripts with a Trainer of Hugging Face whose steps have the same samples for any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from spotrun.errors import SpotrunError
from tests.train.scripts import SAMPLES
from tests.train.trainers import Net, Samples, Trained


def layers() -> nn.Sequential:
    """Without BatchNorm, whose running statistics are those of rank 0's batches."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 4))


class Noisy(Samples):
    """Each sample gets noise when it is loaded."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = super().__getitem__(index)
        return {**found, "x": found["x"] + 0.3 * torch.randn(16)}


def dealt(plan: Any, out: Path) -> None:
    script = Trained(plan, out, gradient_accumulation_steps=1)
    script.trainer.train_dataset = Noisy()
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


class Own(Trainer):
    """Its step is its own, with a mean loss, and without dropout. The Trainer counts the items of its batches."""

    loss_is_scaled_for_ga = False

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.eval()
        loss = model(**self._prepare_inputs(inputs))["loss"] / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        found: torch.Tensor = loss.detach()
        return found

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        found = model(**inputs)
        return (found["loss"], found) if return_outputs else found["loss"]


class Ending(TrainerCallback):
    """Its first epoch ends early."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step == 2


def own(plan: Any, out: Path) -> None:
    script = Trained(plan, out, Own, Ending(), gradient_accumulation_steps=1)
    script.net.layers = layers()
    script.trainer.model_accepts_loss_kwargs = True
    script.run.train(script.trainer, global_batch=plan.global_batch)
    script.save()


class Silent(Trainer):
    """Its step does without accelerate."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss: torch.Tensor = model(**inputs)["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


class CountingItself(Trainer):
    """It counts the items of its batches, with those that it will repeat."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        found = [next(epoch_iterator) for _ in range(num_batches)]
        return found, sum(len(each["labels"]) for each in found)


def silent(plan: Any, out: Path) -> None:
    kind = Silent if plan.script.endswith("silent") else CountingItself
    script = Trained(plan, out, kind, gradient_accumulation_steps=1)
    try:
        script.run.train(script.trainer, global_batch=32)
    except SpotrunError as error:
        print("refused:", error, flush=True)


counting_itself = silent


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
    """It would not skip samples when it goes on."""
    script = Trained(plan, out, Grouped, gradient_accumulation_steps=1, ignore_data_skip=True)
    script.net.layers = layers()
    script.run.train(script.trainer, global_batch=plan.global_batch)
    script.save()


def staying(plan: Any, out: Path) -> None:
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    script = Trained(plan, out, Grouped, gradient_accumulation_steps=1, **options)
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
