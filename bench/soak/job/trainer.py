"""The soak's job with a Trainer of Hugging Face. It writes what train.py writes."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import as_gpu  # type: ignore[import-not-found]  # beside this script
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import spotrun

EPOCHS = 2
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--shape", required=True)
parser.add_argument("--samples", type=int, required=True)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--loaders", type=int, default=0, help="processes that load data, for each rank")
parser.add_argument("--pause", type=float, default=0.0, help="seconds added to each step")
parser.add_argument("--gpu", action="store_true", help="imitate a GPU: see as_gpu.py")
args = parser.parse_args()
if args.gpu:
    as_gpu.imitate()
torch.set_num_threads(1)
run = spotrun.init(seed=5)
torch.manual_seed(0)
record = (args.out / f"steps-{run.generation}-{run.rank}-{time.time_ns()}.jsonl").open("a", buffering=1)
inputs = torch.randn(args.samples, 16, generator=torch.Generator().manual_seed(1))


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
            epoch = run.step // (trainer.state.max_steps // EPOCHS)
            line = {"generation": run.generation, "epoch": epoch, "step": run.step + 1, "ids": labels.tolist()}
            record.write(json.dumps(line) + "\n")
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, inputs[labels][:, :4].argmax(1)), "logits": logits}


class Pace(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        time.sleep(args.pause)


options = TrainingArguments(
    str(args.out / "trainer"),
    num_train_epochs=EPOCHS,
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
    make = run.ddp

    def held(*given: Any, **named: Any) -> Any:
        model = make(*given, **named)
        as_gpu.hold([model], [trainer.optimizer])
        return model

    run.ddp = held  # type: ignore[method-assign]
run.train(trainer)

assert trainer.model is not None
assert trainer.optimizer is not None
digest = hashlib.sha256()
for name, tensor in sorted(trainer.model.state_dict().items()):
    digest.update(name.encode() + tensor.numpy().tobytes())
for state in trainer.optimizer.state_dict()["state"].values():
    for value in state.values():
        digest.update(value.numpy().tobytes())
if run.rank == 0:
    result = {"world_size": run.world_size, "step": run.step, "digest": digest.hexdigest()}
    (args.out / "final.json").write_text(json.dumps(result))
