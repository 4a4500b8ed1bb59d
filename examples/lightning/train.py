"""A network that learns to tell spirals apart, with the Trainer of PyTorch Lightning. Nothing is downloaded.

Besides the import, two lines are for spotrun: `spotrun.init()`, before the Trainer, and `run.fit(trainer, …)` instead
of `trainer.fit(…)`.
"""

import argparse
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import spotrun

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--samples", type=int, default=6000)
parser.add_argument("--out", type=Path, default="model", help="the folder for the model")
options = parser.parse_args()

run = spotrun.init(seed=0)


def spirals(count: int, seed: int) -> TensorDataset:
    """Points in the plane, each on one of three arms."""
    random = torch.Generator().manual_seed(seed)
    arms = torch.randint(0, 3, (count,), generator=random)
    along = torch.rand(count, generator=random)
    angles = 5 * along + 2.1 * arms + 0.15 * torch.randn(count, generator=random)
    return TensorDataset(torch.stack((along * angles.cos(), along * angles.sin()), 1), arms)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        found = self.layers(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(found, batch[1]), sync_dist=True)
        self.log("accuracy", (found.argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


torch.manual_seed(0)
net = Net()
trainer = pl.Trainer(
    max_epochs=options.epochs,
    log_every_n_steps=20,
    enable_checkpointing=False,  # spotrun keeps the state
    enable_progress_bar=False,
    logger=False,  # what the Trainer logs is in the job's metrics
)
train, test = spirals(options.samples, 1), spirals(512, 2)
run.fit(trainer, net, DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=256))
if run.is_main:
    print({name: round(float(each), 4) for name, each in trainer.callback_metrics.items()})
    options.out.mkdir(exist_ok=True)
    torch.save(net.state_dict(), options.out / "model.pt")
