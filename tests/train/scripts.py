"""Training scripts of other kinds than that of `tests.train.generations`. A plan names one of them.

Each takes the plan and the folder for what it leaves: `final-<rank>.pt`, and lines of `seen-<pid>.jsonl`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset

import spotrun

SAMPLES, BATCH, EPOCHS = 104, 8, 3
Data = Any


class Numbered(Dataset[Any]):
    """Samples with their numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(16, generator=torch.Generator().manual_seed(index), device="cpu"), index


class Buffered(IterableDataset[Any]):
    """The same in an order that a buffer makes, as WebDataset does, with the global generator."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        data, buffer = Numbered(), list[int]()
        for index in range(SAMPLES):
            buffer.append(index)
            if len(buffer) > 20:
                yield data[buffer.pop(random.randrange(len(buffer)))]
        random.shuffle(buffer)
        yield from map(data.__getitem__, buffer)


class Script:
    """What these scripts have in common: a model with a BatchNorm, an optimizer, a loader, and notes."""

    def __init__(self, plan: Any, out: Path, frozen: int = 0, **options: Any) -> None:
        """frozen: how many layers are frozen at first. options: of `run.ddp`."""
        self.run, self.plan, self.out = spotrun.init(seed=5), plan, out
        layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
        layers[:frozen].requires_grad_(False)
        self.model = self.run.ddp(layers, **options)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        data = Numbered()
        self.sampler = spotrun.ElasticSampler(data, seed=1)
        self.loader: Any = DataLoader(data, batch_size=BATCH, sampler=self.sampler)

    def track(self, **more: Any) -> None:
        self.run.track(model=self.model, optimizer=self.optimizer, sampler=self.sampler, **more)

    def step(self, model: Any, x: torch.Tensor, index: torch.Tensor, **note: Any) -> None:
        loss = nn.functional.cross_entropy(model(x).float(), index % 4)
        if self.run.step == self.plan.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.run.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.note(ids=index.tolist(), **note)

    def note(self, **values: Any) -> None:
        with (self.out / f"seen-{os.getpid()}.jsonl").open("a") as file:
            place = {"generation": self.run.generation, "rank": self.run.rank, "step": self.run.step}
            print(json.dumps({**place, "epoch": self.run.epoch, **values}), file=file)

    def train(self, model: Any = None, after: Callable[[], None] = lambda: None) -> None:
        for _ in self.run.epochs(EPOCHS):
            for x, index in self.run.steps(self.loader):
                self.step(model or self.model, x, index)
                after()

    def save(self, **more: Any) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, **more}, self.out / f"final-{self.run.rank}.pt")


def frozen(plan: Any, out: Path) -> None:
    """As a GAN: each step ends with its first model frozen."""
    script = Script(plan, out)
    other = script.run.ddp(nn.Linear(4, 1))
    its = torch.optim.Adam(other.parameters())
    script.track(other=other, its=its)
    for _ in script.run.epochs(EPOCHS):
        for x, index in script.run.steps(script.loader):
            script.model.requires_grad_(True)
            script.step(script.model, x, index)
            script.model.requires_grad_(False)
            script.run.backward(other(script.model.module(x)).square().mean())
            its.step()
            its.zero_grad()
    script.model.requires_grad_(True)
    script.save(other=other.state_dict())


def averaged(plan: Any, out: Path) -> None:
    """An average of the weights that contains a copy of what `run.ddp` has returned."""
    script = Script(plan, out)
    mean = torch.optim.swa_utils.AveragedModel(
        script.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    script.track(mean=mean)
    script.train(after=lambda: mean.update_parameters(script.model))
    script.save(mean=mean.state_dict())


def wrapped(plan: Any, out: Path) -> None:
    """What is tracked is a module around the one that `run.ddp` has returned."""
    script = Script(plan, out)
    outer = nn.Sequential(script.model)
    script.run.track(outer=outer, optimizer=script.optimizer, sampler=script.sampler)
    script.train(outer)
    script.save()


def evaluating(plan: Any, out: Path) -> None:
    """Rank 0 leaves each second step in the mode for evaluation."""
    script = Script(plan, out)
    script.track()

    def evaluate() -> None:
        script.model.train(script.run.step % 2 == 0 or not script.run.is_main)

    for _ in script.run.epochs(EPOCHS):
        for x, index in script.run.steps(script.loader):
            script.model.train()
            script.step(script.model, x, index)
            evaluate()
    script.save()


def drawing(plan: Any, out: Path) -> None:
    """It draws random numbers after `run.track`, and at the beginning of each epoch."""
    script = Script(plan, out)
    script.track()
    noise = torch.randn(16)
    for _ in script.run.epochs(EPOCHS):
        scale = random.choice([0.5, 1.0, 2.0, 4.0, 8.0]) + float(torch.rand(1))
        for x, index in script.run.steps(script.loader):
            script.step(script.model, x * scale + noise, index, scale=scale)
    script.save()


def phases(plan: Any, out: Path) -> None:
    """Two loops over epochs, each with another learning rate."""
    script = Script(plan, out)
    script.track()
    for epochs, rate in ((1, 1e-3), (4, 1e-2)):
        for group in script.optimizer.param_groups:
            group["lr"] = rate
        for _ in script.run.epochs(epochs):
            for x, index in script.run.steps(script.loader):
                script.step(script.model, x, index)
    script.save()


def unfreezing(plan: Any, out: Path) -> None:
    """The last layer first, then all of them."""
    script = Script(plan, out, frozen=3)
    script.track()
    for epochs in (1, EPOCHS):
        for _ in script.run.epochs(epochs):
            for x, index in script.run.steps(script.loader):
                script.step(script.model, x, index)
        script.model.requires_grad_(True)
    script.save()


def with_loader(loader: Callable[[], Any]) -> Callable[[Any, Path], None]:
    def script(plan: Any, out: Path) -> None:
        found = Script(plan, out)
        found.loader = loader()
        found.run.track(model=found.model, optimizer=found.optimizer)
        found.train()
        found.save()

    return script


seeded = with_loader(
    lambda: DataLoader(Numbered(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))
)
buffered = with_loader(lambda: DataLoader(Buffered(), batch_size=BATCH))
distributed = with_loader(lambda: DataLoader(Numbered(), batch_size=BATCH, sampler=DistributedSampler(Numbered())))


def sharded(plan: Any, out: Path) -> None:
    """At the beginning of an epoch, each worker makes a loader of its own part of the data."""
    script = Script(plan, out)
    script.run.track(model=script.model, optimizer=script.optimizer)
    for _ in script.run.epochs(EPOCHS):
        own = Subset(Numbered(), range(script.run.rank, SAMPLES, script.run.world_size))
        for x, index in script.run.steps(DataLoader(own, batch_size=BATCH)):
            script.step(script.model, x, index)


def generated(plan: Any, out: Path) -> None:
    """In each epoch it makes a generator of batches."""
    script = Script(plan, out)
    script.run.track(model=script.model, optimizer=script.optimizer)
    for _ in script.run.epochs(EPOCHS):
        loader = DataLoader(Numbered(), batch_size=BATCH)
        for x, index in script.run.steps(batch for batch in loader):
            script.step(script.model, x, index)
    script.save()


class Part(IterableDataset[Any]):
    """Each worker's own part. The processes of a loader ask for its place."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return map(Numbered().__getitem__, range(self.run.rank, SAMPLES, self.run.world_size))


def parts(plan: Any, out: Path) -> None:
    """The process that loads its data stays from epoch to epoch."""
    script = Script(plan, out)
    script.loader = DataLoader(
        Part(script.run), BATCH, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    script.run.track(model=script.model, optimizer=script.optimizer)
    script.train()
    script.save()


def lengths(plan: Any, out: Path) -> None:
    """Its schedule depends on how many steps a worker makes."""
    script = Script(plan, out)
    total = EPOCHS * len(script.loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(script.optimizer, lambda step: max(0.0, 1 - step / total))
    script.track(scheduler=scheduler)
    script.train(after=scheduler.step)
    script.save()


def unwrapped(plan: Any, out: Path) -> None:
    """It forgets `run.ddp`, so no gradients are exchanged."""
    run, model, data = spotrun.init(seed=5), nn.Linear(16, 4), Numbered()
    optimizer, sampler = torch.optim.SGD(model.parameters(), lr=0.1), spotrun.ElasticSampler(data, seed=1)
    run.track(model=model, optimizer=optimizer, sampler=sampler)
    for _ in run.epochs(EPOCHS):
        for x, index in run.steps(DataLoader(data, batch_size=BATCH, sampler=sampler)):
            run.backward(nn.functional.cross_entropy(model(x), index % 4))
            optimizer.step()


def unnamed_optimizer(plan: Any, out: Path) -> None:
    """It forgets to track its optimizer."""
    script = Script(plan, out)
    script.run.track(model=script.model, sampler=script.sampler)
    script.train()
    script.save()


def unnamed_scheduler(plan: Any, out: Path) -> None:
    """It forgets to track its scheduler."""
    script = Script(plan, out)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(script.optimizer, 10)
    script.track()
    script.train(after=scheduler.step)
    script.save()


def low_precision(plan: Any, out: Path) -> None:
    """The optimizer keeps numbers that are more precise than the parameters."""
    script = Script(plan, out)
    model = script.model.bfloat16()
    script.optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    script.track()
    for _ in script.run.epochs(EPOCHS):
        for x, index in script.run.steps(script.loader):
            script.step(model, x.bfloat16(), index)
    script.save()


def passing(plan: Any, out: Path) -> None:
    """It goes through its loader again after training, as `update_bn` does."""
    script = Script(plan, out)
    script.track()
    script.train()
    script.save(again=sorted(int(index) for _, batch in script.loader for index in batch))


def summing(plan: Any, out: Path) -> None:
    """It has a collective of its own: `plan.collective` says where."""
    script = Script(plan, out)

    def sum_up(place: str) -> None:
        if plan.collective == place and torch.distributed.is_initialized():
            torch.distributed.all_reduce(torch.ones(3))

    sum_up("before run.track")
    script.track()
    sum_up("after run.track")
    if plan.collective == "run.ddp":
        script.run.ddp(nn.Linear(1, 1))
    for _ in script.run.epochs(EPOCHS):
        sum_up("before the loop")
        for x, index in script.run.steps(script.loader):
            script.step(script.model, x, index)
        sum_up("after the loop")
    sum_up("at the end")
    script.save()


def refrozen(plan: Any, out: Path) -> None:
    """Its first layer is trained in the second epoch only."""
    script = Script(plan, out, frozen=1, find_unused_parameters=True)
    script.track()
    layers: Any = script.model.module
    for epoch in script.run.epochs(EPOCHS):
        layers[0].requires_grad_(epoch == 1)
        for x, index in script.run.steps(script.loader):
            script.step(script.model, x, index)
    script.save()


class Batches:
    """A loader that makes no tensors of its own."""

    def __init__(self, sampler: spotrun.ElasticSampler) -> None:
        self.sampler, self.batch_size = sampler, BATCH

    def __iter__(self) -> Iterator[Data]:
        numbers = iter(self.sampler)
        while own := list(itertools.islice(numbers, BATCH)):
            yield torch.stack([Numbered()[number][0] for number in own]), torch.tensor(own, device="cpu")


def elsewhere(plan: Any, out: Path) -> None:
    """New tensors are on another device than the model, unless a call names one: as with a default device of "cuda"."""
    script = Script(plan, out)
    script.optimizer = torch.optim.SGD(script.model.parameters(), lr=0.1, momentum=0.9)
    script.loader = Batches(script.sampler)
    torch.set_default_device("meta")
    script.track()
    script.train()
    script.save()


class Cached(nn.Module):
    """As a rotary embedding: it has a table for the longest sequence so far, which no state_dict has."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)
        self.grow(16)

    def grow(self, size: int) -> None:
        self.register_buffer("table", torch.ones(size), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.table) < 64:
            self.grow(64)
        return self.inner(x) * self.table[:16].mean()


def caching(plan: Any, out: Path) -> None:
    """Its model makes a buffer larger in the first step."""
    script = Script(plan, out)
    script.model = script.run.ddp(Cached())
    script.optimizer = torch.optim.SGD(script.model.parameters(), lr=0.1)
    script.track()
    script.train()
    script.save()


def keeping(plan: Any, out: Path) -> None:
    """It keeps the process group in a variable."""
    script = Script(plan, out)
    world = torch.distributed.group.WORLD
    script.track()
    script.train(after=lambda: torch.distributed.all_reduce(torch.ones(3), group=world))
    script.save()
