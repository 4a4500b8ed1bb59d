"""The same training as in train_plain.py under torchft: a step counts when all replica groups commit it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import die_with_agent  # noqa: F401
import torch
import work
from torch import nn
from torch.utils.data import DataLoader
from torchft import (  # type: ignore[import-not-found]
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)


class CorrectedDDP(DistributedDataParallel):
    """torchft's DDP, and an all-reduce that fails only makes the step void, as torchft intends.

    In torchft 0.2.0 the hook asserts that the all-reduce has left a future. With gloo, an all-reduce in which a peer is
    lost leaves none, so the script of every survivor ends.
    """

    @staticmethod
    def _comm_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        state.allreduce(bucket.buffer()).wait()  # on the CPU the mean is there now. An error is noted in the manager
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def main() -> None:
    torch.set_num_threads(1)
    work.mark("entered")
    work.set_up()
    model = work.build_model()
    plain = work.build_optimizer(model)
    group, whole = (float(os.environ[f"BENCH_{name}_TIMEOUT"]) for name in ("GROUP", "MANAGER"))
    replica = int(os.environ["BENCH_REPLICA"])

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=group)),
        min_replica_size=int(os.environ["BENCH_MIN"]),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        replica_id=f"replica_{replica}",
        timeout=timedelta(seconds=whole),
    )
    parallel = CorrectedDDP if os.environ["BENCH_CORRECTED"] == "1" else DistributedDataParallel
    train(manager, parallel(manager, model), Optimizer(manager, plain), replica)


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
