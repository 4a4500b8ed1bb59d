"""The same training as in train_plain.py under torchft: a step counts when all replica groups commit it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))  # as in train_plain.py
if not os.path.exists(f"/proc/{os.environ.get('BENCH_PID', os.getppid())}"):
    sys.exit("the benchmark is gone")

from datetime import timedelta  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import work  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torchft import (  # type: ignore[import-not-found]  # noqa: E402
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)


def main() -> None:
    torch.set_num_threads(1)
    work.mark("entered")
    work.set_up()
    model = work.build_model()
    plain = work.build_optimizer(model)
    timeout = timedelta(seconds=float(os.environ["BENCH_TIMEOUT"]))
    replica = int(os.environ["BENCH_REPLICA"])

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        min_replica_size=int(os.environ["BENCH_MIN"]),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        replica_id=f"replica_{replica}",
        timeout=timeout,
    )
    train(manager, DistributedDataParallel(manager, model), Optimizer(manager, plain), replica)


def train(manager: Any, model: nn.Module, optimizer: Any, replica: int) -> None:
    data = work.build_data()
    sampler = DistributedSampler(data, replica_rank=replica, num_replica_groups=3, group_rank=0, num_replicas=1)
    loss_fn = nn.CrossEntropyLoss()
    pace, members = work.Pace(), -1
    while True:
        for x, y in DataLoader(data, batch_size=work.BATCH, sampler=sampler):
            before = manager.current_step()
            optimizer.zero_grad()  # begins the quorum of this step
            loss_fn(model(x), y).backward()
            optimizer.step()  # only if all replica groups commit
            pace.wait()
            if manager.current_step() == before:
                work.mark("failed")
                continue
            if (now := manager.num_participants()) != members:
                members = now
                work.mark("grouped")
                work.mark("restored", before)
            work.mark("step", manager.current_step())


if __name__ == "__main__":
    main()
