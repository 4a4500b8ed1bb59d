"""Scripts for a Trainer of PyTorch Lightning. A plan names one of them, as those of `tests.train.scripts`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch
import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from pytorch_lightning.loggers import CSVLogger, Logger
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

import spotrun
from spotrun.errors import SpotrunError
from tests.train.scripts import SAMPLES, Buffered, Numbered, Script

BATCH, EPOCHS, ACCUMULATE = 8, 3, 2  # with two workers: 4 steps an epoch


class History(Logger):
    """Keeps what the Trainer logs. A restarted worker has less of it than one that has joined again."""

    def __init__(self, script: Fitted) -> None:
        super().__init__()
        self._script = script

    name = version = "history"

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._script.note(ids=[], logged={**metrics, "at": step})


class Net(pl.LightningModule):
    """It logs, and its script sees the numbers of the samples."""

    layers: Any
    script: Fitted

    def __init__(self, script: Fitted) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 4))
        self.__dict__["script"] = script

    def loss(self, batch: Any) -> torch.Tensor:
        x, index = batch
        return nn.functional.cross_entropy(self.layers(x).float(), index % 4)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.script.see(batch[1], "")
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("own", loss, on_epoch=True, on_step=False, sync_dist=True)
        if number == 0:
            self.log("most", loss.detach(), reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, number: int) -> Any:
        self.script.see(batch[1], "validation")
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, number: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        return [optimizer], [
            {"scheduler": steps, "interval": "step"},
            {"scheduler": plateau, "interval": "epoch", "monitor": "val_loss"},
        ]


class Fitted(Script):
    """A script with a Trainer: it validates, logs, and may stop early."""

    def __init__(self, plan: Any, out: Path, **options: Any) -> None:
        self.run, self.plan, self.out = spotrun.init(seed=5), plan, out
        torch.manual_seed(5)
        self.net = Net(self)
        given = {
            "max_epochs": EPOCHS,
            "accumulate_grad_batches": ACCUMULATE,
            "gradient_clip_val": 1.0,
            "accelerator": "cpu",
            "logger": History(self),
            "log_every_n_steps": 1,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [EarlyStopping("val_loss", patience=9)],
            "default_root_dir": str(out / "trainer"),
        }
        self.trainer = pl.Trainer(**{**given, **options})

    def fit(self, train: Any = None, **options: Any) -> None:
        train = DataLoader(Numbered(), BATCH, shuffle=True) if train is None else train
        self.run.fit(self.trainer, self.net, train, DataLoader(Numbered(), BATCH), **options)

    def see(self, labels: torch.Tensor, place: str) -> None:
        if self.run.step == self.plan.die_at and place == self.plan.die_in:
            os.kill(os.getpid(), signal.SIGKILL)
        if not place:
            self.note(ids=labels.tolist())

    def save(self, **more: Any) -> None:
        metrics = {name: float(each) for name, each in self.trainer.callback_metrics.items()}
        schedulers = [each.scheduler.state_dict() for each in self.trainer.lr_scheduler_configs]
        state: dict[str, Any] = {"model": self.net.state_dict(), "optimizer": self.trainer.optimizers[0].state_dict()}
        state |= {"metrics": metrics, "schedulers": schedulers, "epoch": self.trainer.current_epoch}
        torch.save({**state, **more}, self.out / f"final-{self.run.rank}.pt")


def fitted(plan: Any, out: Path) -> None:
    """Like most scripts with a Trainer."""
    script = Fitted(plan, out)
    script.fit()
    script.save(random=torch.rand(1))


def with_workers(plan: Any, out: Path) -> None:
    """Its loaders have workers, which stay from one epoch to the next in training."""
    script = Fitted(plan, out)
    own: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}  # as in a job, not as in tests
    train = DataLoader(Numbered(), BATCH, shuffle=True, persistent_workers=True, **own)
    script.run.fit(script.trainer, script.net, train, DataLoader(Numbered(), BATCH, **own))
    script.save()


class Data(pl.LightningDataModule):
    """Its loaders draw an order from the global generator."""

    def train_dataloader(self) -> Any:
        weights = WeightedRandomSampler([1 + number % 3 for number in range(SAMPLES)], SAMPLES)
        return DataLoader(Noisy(), BATCH, sampler=weights, drop_last=True)

    def val_dataloader(self) -> Any:
        return [DataLoader(Numbered(), BATCH), DataLoader(Noisy(), BATCH)]


class Noisy(Numbered):
    """Samples with noise from the global generator."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x, index = super().__getitem__(index)
        return x + 0.1 * torch.randn(16), index


class Largest(pl.Callback):
    """Keeps the largest loss of each validation."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, loss: Any, *_: Any) -> None:
        self.found.append(float(loss))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("largest", max(self.found) + len(self.found), sync_dist=True)
        self.found = []


class Unusual(Net):
    """Most of it is frozen. It logs in many ways, and keeps results of a validation until its end."""

    accuracy: Any
    sum: Any

    def __init__(self, script: Fitted) -> None:
        super().__init__(script)
        self.layers[0].requires_grad_(False)
        self.mean = nn.Linear(32, 4).requires_grad_(False)
        self.accuracy = torchmetrics.MeanMetric()
        self.sum = torchmetrics.SumMetric()
        self.results: list[list[torch.Tensor]] = [[], []]
        self.counts: dict[str, Any] = {"batches": torch.zeros(()), "all": 0}

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = super().training_step(batch, number)
        if self.global_rank == 0:
            self.log("only_here", loss, rank_zero_only=True)
        self.log_dict({"a": loss * 2, "b": 3.0}, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss

    def validation_step(self, batch: Any, number: int, dataloader_idx: int = 0) -> torch.Tensor:
        self.script.see(batch[1], "validation")
        loss = self.loss(batch)
        self.results[dataloader_idx].append(loss)
        self.sum(loss)
        self.counts["batches"] += 1
        self.counts["all"] += 1
        self.log("val_loss", loss, sync_dist=True, add_dataloader_idx=False) if not dataloader_idx else None
        self.accuracy(loss)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def on_validation_epoch_end(self) -> None:
        for name, each in zip("xy", self.results, strict=True):
            self.log(f"mean_{name}", torch.stack(each).mean(), sync_dist=True)
            each.clear()
        self.log_dict({name: float(each) for name, each in self.counts.items()}, sync_dist=True)
        self.log("sum", self.sum.compute())
        self.sum.reset()
        self.counts.update(batches=torch.zeros(()), all=0)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.mean.weight.lerp_(self.layers[3].weight, 0.1)

    def on_train_epoch_end(self) -> None:
        self.log("end", float(self.trainer.global_step))


def unusual(plan: Any, out: Path) -> None:
    """It validates within epochs, and its training ends within one."""
    best = ModelCheckpoint(out / "best", monitor="val_loss", save_top_k=2, save_last=True)
    options = {"val_check_interval": 3, "max_steps": 8, "max_epochs": -1, "precision": "bf16-mixed"}
    more = {"accumulate_grad_batches": 1, "limit_val_batches": 2, "enable_checkpointing": True}
    script = Fitted(plan, out, callbacks=[best, Largest()], **options, **more)
    torch.manual_seed(5)
    script.net = Unusual(script)
    script.run.fit(script.trainer, script.net, datamodule=Data())
    tested = script.trainer.validate(script.net, datamodule=Data(), verbose=False)
    names = sorted(Path(each).name for each in best.best_k_models)
    script.save(best=[names, Path(best.best_model_path).name], tested=tested)


class Rare(Net):
    """It logs a metric object in the first batch of an epoch only, and so in a newcomer's first epoch not at all."""

    mean: Any

    def __init__(self, script: Fitted) -> None:
        super().__init__(script)
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = super().training_step(batch, number)
        self.mean(loss.detach())
        if number == 0:
            self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


def rare(plan: Any, out: Path) -> None:
    """Not all ranks have its metric object at the end of an epoch, unless all drop it."""
    script = Fitted(plan, out)
    torch.manual_seed(5)
    script.net = Rare(script)
    script.fit()
    script.save()


def stopping(plan: Any, out: Path) -> None:
    """Its training stops early: its loss never counts as better."""
    early = EarlyStopping("val_loss", mode="max", patience=3, min_delta=100.0)
    script = Fitted(plan, out, callbacks=[early], val_check_interval=2)
    script.fit()
    if plan.fail_at == script.run.step:
        raise ValueError("a bug in the script")
    script.save(stopped=early.stopped_epoch)


def plain(plan: Any, out: Path) -> None:
    """It has Lightning's own loggers and checkpoints."""
    shown = {"enable_checkpointing": True, "enable_progress_bar": True, "enable_model_summary": True}
    script = Fitted(plan, out, logger=CSVLogger(out / str(os.getpid())), callbacks=None, **shown)
    script.fit()
    script.trainer.test(script.net, DataLoader(Numbered(), BATCH))
    script.save()


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
    attempt(trainer, torch.compile(net, backend="eager"))
    attempt(trainer, lightning.pytorch.LightningModule())
    attempt(pl.Trainer(devices=2, **given), net)
    attempt(pl.Trainer(reload_dataloaders_every_n_epochs=1, **given), net)
    attempt(pl.Trainer(val_check_interval="00:00:10:00", **given), net)
    attempt(pl.Trainer(callbacks=[StochasticWeightAveraging(1e-2)], **given), net)
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
    script.fit()
    attempt(trainer, net)


def sized(plan: Any, out: Path) -> None:
    """Its learning rate follows from the number of workers, which a newcomer does not know yet."""
    script = Fitted(plan, out)

    def configure_optimizers() -> Any:
        return torch.optim.SGD(script.net.parameters(), lr=0.1 * script.trainer.world_size)

    vars(script.net)["configure_optimizers"] = configure_optimizers
    script.fit()


class Many(Net):
    """It logs more metrics than can be kept."""

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.log_dict({f"own {each}": each / 7 for each in range(256)}, on_epoch=True, on_step=False)
        return super().training_step(batch, number)


def many(plan: Any, out: Path) -> None:
    script = Fitted(plan, out)
    script.net = Many(script)
    script.fit()


def without_a_length(plan: Any, out: Path) -> None:
    """Its samples come from an IterableDataset."""
    Fitted(plan, out).fit(DataLoader(Buffered(), BATCH))


def with_two_loaders(plan: Any, out: Path) -> None:
    """Its batches come from two loaders."""
    Fitted(plan, out).fit({name: DataLoader(Numbered(), BATCH) for name in "ab"})


def with_callbacks(plan: Any, out: Path) -> None:
    """Its module adds a callback that trains on its own."""
    script = Fitted(plan, out)
    vars(script.net)["configure_callbacks"] = lambda: StochasticWeightAveraging(1e-2)
    script.fit()
