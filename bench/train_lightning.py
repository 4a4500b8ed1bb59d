"""The same training with a Trainer of PyTorch Lightning, for spotrun, and as a user writes it for torchrun.

Under torchrun, it goes on from the newest checkpoint, which is in a shared folder.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import die_with_agent  # noqa: F401
import pytorch_lightning as pl
import torch
import trainer_work
import work
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = work.build_model()

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = work.build_optimizer(self.layers)
        return optimizer


class Marks(pl.Callback):
    """Says where the Trainer is, and keeps its pace."""

    def __init__(self) -> None:
        self._pace = work.Pace()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        work.mark("restored", trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._pace.wait()
        work.mark("step", trainer.global_step)


def main() -> None:
    options, run = trainer_work.parse(), trainer_work.begin()
    own: dict[str, Any] = {"enable_checkpointing": False}
    callbacks: list[pl.Callback] = [Marks()]
    if run is None:
        group = timedelta(seconds=options.group_timeout)
        own = {"strategy": DDPStrategy(timeout=group), "devices": 1, "num_nodes": int(os.environ["WORLD_SIZE"])}
        callbacks.append(ModelCheckpoint(options.checkpoints, every_n_train_steps=options.save_every, save_last=True))
    work.mark("grouped")
    work.set_up()
    trainer = pl.Trainer(
        max_steps=options.steps,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **own,
    )
    loader = DataLoader(work.build_data(), batch_size=work.BATCH, shuffle=True)
    try:
        if run is not None:
            run.fit(trainer, Module(), loader)
        else:
            trainer.fit(Module(), loader, ckpt_path="last")
    except BaseException:
        work.mark("failed")
        raise


if __name__ == "__main__":
    main()
