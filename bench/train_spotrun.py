"""The same training as in train_plain.py, written for spotrun: no checkpoint code, no resume code."""

from __future__ import annotations

import torch
import work
from torch import nn
from torch.utils.data import DataLoader

import spotrun
from spotrun.train.boundary import Boundary
from spotrun.train.regroup import Membership


def mark_regroups() -> None:
    """Mark the phases of a regroup, too: a worker that joins another generation is as good as a new process."""
    wait, join, regroup = Membership.wait, Membership.join, Boundary.regroup

    def marked_wait(self: Membership, step: int, error: BaseException | None) -> None:
        if error is not None:
            work.mark("failed")
        wait(self, step, error)
        work.mark_joining()

    def marked_join(self: Membership) -> None:
        join(self)
        work.mark("grouped")

    def marked_regroup(self: Boundary) -> None:
        regroup(self)
        work.mark("restored", self._state.step)

    Membership.wait, Membership.join = marked_wait, marked_join  # type: ignore[method-assign]
    Boundary.regroup = marked_regroup  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    mark_regroups()
    work.mark("entered")
    run = spotrun.init(seed=0, backend="gloo")  # NCCL does not let workers share a GPU
    work.mark("grouped")
    work.set_up()
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
            if not run._boundary.must_regroup:  # a step that does not count
                work.mark("step", run.step + 1)


if __name__ == "__main__":
    main()
