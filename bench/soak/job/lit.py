"""The soak's job with a Trainer of PyTorch Lightning. It writes what train.py writes."""

from __future__ import annotations

import json
import time
from typing import Any

import as_gpu  # type: ignore[import-not-found]  # beside this script
import common  # type: ignore[import-not-found]
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

args = common.parse()
run, record, inputs = common.begin(args)
data = TensorDataset(inputs, torch.arange(args.samples))


class Net(pl.LightningModule):
    """It has running statistics, draws random numbers, and keeps the results of a validation until its end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4))
        self.found: list[torch.Tensor] = []

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[0][:, :4].argmax(1))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        line = {"generation": run.generation, "epoch": trainer.current_epoch, "step": run.step + 1}
        record.write(json.dumps({**line, "ids": batch[1].tolist()}) + "\n")
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.found.append(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", torch.stack(self.found).mean(), sync_dist=True)
        self.found.clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if args.gpu:
            as_gpu.hold([], [optimizer])
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        return [optimizer], [{"scheduler": plateau, "monitor": "val_loss"}]  # so a wrong val_loss shows in the weights


class Pace(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(args.pause / args.accumulate)


net = Net()
trainer = pl.Trainer(
    max_epochs=common.EPOCHS,
    accumulate_grad_batches=args.accumulate,
    accelerator="cpu",
    val_check_interval=80,
    log_every_n_steps=7,
    callbacks=[Pace()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
if args.gpu:
    as_gpu.hold_later(run, list)
loader = DataLoader(data, args.batch, shuffle=True, num_workers=args.loaders)
run.fit(trainer, net, loader, DataLoader(TensorDataset(inputs[:64], torch.arange(64)), args.batch))

common.write_final(run, args.out, [net], trainer.optimizers)
