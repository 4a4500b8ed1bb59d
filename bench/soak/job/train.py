"""The jobs of the soak: small models whose state is hard to restore exactly. `--shape` names one.

It runs under torchrun and spotrun. Each rank writes the samples of every step, and rank 0 a digest of the final state.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import as_gpu  # type: ignore[import-not-found]  # beside this script
import common  # type: ignore[import-not-found]
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spotrun

args = common.parse()
if args.gpu:
    as_gpu.imitate()


def norm() -> nn.Module:
    """A model with running statistics, which are not parameters."""
    convolution = (nn.Unflatten(1, (1, 16)), nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8))  # works with a batch of one
    return nn.Sequential(*convolution, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14, 4))


def dropout() -> nn.Module:
    """A model that draws random numbers in every step."""
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4), nn.Dropout(0.1))


def large() -> nn.Module:
    """A model whose state takes some time to send: 1.4 million parameters."""
    return nn.Sequential(nn.Linear(16, 1200), nn.ReLU(), nn.Linear(1200, 1200), nn.ReLU(), nn.Linear(1200, 4))


def recurrent() -> nn.Module:
    """A model with many small tensors."""
    return nn.Sequential(nn.Unflatten(1, (4, 4)), nn.LSTM(4, 16, batch_first=True), Last(), nn.Linear(16, 4))


class Last(nn.Module):
    def forward(self, found: tuple[torch.Tensor, object]) -> torch.Tensor:
        return found[0][:, -1]


def discriminator() -> nn.Module:
    """A model that tells data from what the generator makes."""
    return nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def generator() -> nn.Module:
    """A model that makes data from noise."""
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))


MODELS = {
    "norm": norm,
    "dropout": dropout,
    "accumulate": norm,
    "loaders": dropout,
    "pair": recurrent,
    "scaler": norm,
    "gan": discriminator,
    "large": large,
    "phases": dropout,
}
SECOND = {"pair": dropout, "gan": generator}
torch.set_num_threads(1)
run = spotrun.init(seed=5)
torch.manual_seed(0)
inputs = torch.randn(args.samples, 16, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(torch.arange(args.samples), inputs, inputs[:, :4].argmax(1))
models = {"model": run.ddp(MODELS[args.shape]())}
if args.shape in SECOND:
    models["second"] = run.ddp(SECOND[args.shape]())
optimizers = {f"{name}_optimizer": torch.optim.AdamW(each.parameters(), lr=1e-2) for name, each in models.items()}
if args.gpu:
    as_gpu.hold(models.values(), optimizers.values())
schedulers = {f"{name}_schedule": torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for name, each in optimizers.items()}
sampler = spotrun.ElasticSampler(dataset, seed=3)
loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler, num_workers=args.loaders)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7, enabled=args.shape == "scaler")
run.track(**models, **optimizers, **schedulers, scaler=scaler, sampler=sampler)
record = (args.out / f"steps-{run.generation}-{run.rank}.jsonl").open("a", buffering=1)


def fit(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A step of classifiers."""
    loss = torch.stack([nn.functional.cross_entropy(model(x), y) for model in models.values()]).sum()
    run.backward(scaler.scale(loss))
    if run.completes_step:
        for optimizer in optimizers.values():
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    return loss


def play(x: torch.Tensor) -> torch.Tensor:
    """A step of a GAN: the discriminator learns first, then the generator."""
    made = models["second"](torch.randn(len(x), 8))
    told = models["model"](torch.cat([x, made.detach()]))
    truth = torch.cat([torch.ones(len(x), 1), torch.zeros(len(x), 1)])
    loss = nn.functional.binary_cross_entropy_with_logits(told, truth)
    run.backward(loss)
    optimizers["model_optimizer"].step()
    optimizers["model_optimizer"].zero_grad()
    told = models["model"](made)
    run.backward(nn.functional.binary_cross_entropy_with_logits(told, torch.ones(len(x), 1)))
    optimizers["second_optimizer"].step()
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    return loss


def epochs() -> Iterator[int]:
    """All epochs. Before the second loop, if there is one, the learning rate changes."""
    if args.shape == "phases":
        yield from run.epochs(1)
        for optimizer in optimizers.values() if run.epoch == 1 else ():
            optimizer.param_groups[0]["lr"] = 3e-2
    yield from run.epochs(common.EPOCHS)


for epoch in epochs():
    for ids, x, y in run.steps(loader, accumulate=args.accumulate):
        # Written before the gradient can reach another rank: after that, the step may count even if this node is taken.
        seen = [] if run.padding else ids.tolist()
        line = {"generation": run.generation, "epoch": epoch, "step": run.step + 1, "ids": seen}
        record.write(json.dumps(line) + "\n")
        loss = play(x) if args.shape == "gan" else fit(x, y)
        run.log(loss=loss)
        time.sleep(args.pause / args.accumulate)
    for scheduler in schedulers.values():
        scheduler.step()

common.write_final(run, args.out, models.values(), optimizers.values())
