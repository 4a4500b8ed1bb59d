"""The soak's job with a Trainer of Hugging Face. It writes what train.py writes."""

from __future__ import annotations

import json
import time
from typing import Any

import as_gpu  # type: ignore[import-not-found]  # beside this script
import common  # type: ignore[import-not-found]
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

args = common.parse()
run, record, inputs = common.begin(args)


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": inputs[index], "labels": index}


class Net(nn.Module):
    """It has running statistics, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            epoch = run.step // (trainer.state.max_steps // common.EPOCHS)
            line = {"generation": run.generation, "epoch": epoch, "step": run.step + 1, "ids": labels.tolist()}
            record.write(json.dumps(line) + "\n")
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, inputs[labels][:, :4].argmax(1)), "logits": logits}


class Pace(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        time.sleep(args.pause)


options = TrainingArguments(
    str(args.out / "trainer"),
    num_train_epochs=common.EPOCHS,
    per_device_train_batch_size=args.batch,
    gradient_accumulation_steps=args.accumulate,
    dataloader_num_workers=args.loaders,
    learning_rate=1e-2,
    warmup_steps=9,
    logging_steps=7,
    eval_strategy="steps",
    eval_steps=40,
    save_strategy="no",
    ddp_find_unused_parameters=False,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(Net(), options, train_dataset=Samples(args.samples), eval_dataset=Samples(64), callbacks=[Pace()])
if args.gpu:
    as_gpu.hold_later(run, lambda: [trainer.optimizer])
run.train(trainer)

common.write_final(run, args.out, [trainer.model], filter(None, [trainer.optimizer]))
