"""The same training as in train_plain.py, written for spotrun: no checkpoint code, no resume code."""

from __future__ import annotations

import torch
import work
from torch import nn
from torch.utils.data import DataLoader

import spotrun


def main() -> None:
    torch.set_num_threads(1)
    work.mark("entered")
    run = spotrun.init(seed=0)
    work.mark("grouped")
    model = run.ddp(work.build_model())
    optimizer = work.build_optimizer(model)
    data = work.build_data()
    sampler = spotrun.ElasticSampler(data, seed=0)
    loader = DataLoader(data, batch_size=work.BATCH, sampler=sampler)
    run.track(model=model, optimizer=optimizer, sampler=sampler)
    work.mark("restored", run.step)
    loss_fn = nn.CrossEntropyLoss()
    pace = work.Pace()
    for _ in run.epochs(1_000_000):
        for x, y in run.steps(loader):
            run.backward(loss_fn(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            pace.wait()
            work.mark("step", run.step + 1)


if __name__ == "__main__":
    main()
