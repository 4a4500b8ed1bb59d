"""A worker dies, or freezes, while a state is sent: all others end as soon as the agents release them."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from spotrun.state.slots import Record
from spotrun.train import connections, transfer
from spotrun.train.distributed import join_process_group
from spotrun.train.slot_files import layout
from tests.helpers import SLOW, wait_for
from tests.train.forks import forked
from tests.train.meeting import meeting

DONOR, HELPER, FIRST, SECOND = range(4)  # FIRST receives from both and passes the state on to SECOND
ENDED, FAILED = 0, 3  # exit codes
SIZE = 1 << 24  # bytes of each tensor: more than sockets hold
MIDDLE = 20  # messages that FIRST has received when something happens


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("who", [DONOR, HELPER, FIRST, SECOND], ids=["donor", "helper", "first", "second"])
def test_a_worker_is_gone_in_the_middle_of_a_transfer(tmp_path: Path, who: int, fault: signal.Signals) -> None:
    with meeting(4) as group:
        ranks = [forked.Process(target=take_part, args=(group, rank, tmp_path), daemon=True) for rank in range(4)]
        for each in ranks:
            each.start()
        try:
            wait_for((tmp_path / "middle").exists, what="the middle of the transfer")
            pid = ranks[who].pid
            assert pid is not None
            os.kill(pid, fault)
            (tmp_path / "released").touch()
            for rank in {DONOR, HELPER, FIRST, SECOND} - {who}:
                ranks[rank].join(30 * SLOW)
        finally:
            for each in ranks:
                each.kill()
                each.join()
    codes = [each.exitcode for each in ranks]
    assert codes[who] == -signal.SIGKILL
    assert codes[SECOND] == (FAILED if who != SECOND else -signal.SIGKILL)
    assert codes[FIRST] == (FAILED if who != FIRST else -signal.SIGKILL)
    assert all(codes[rank] in (ENDED, FAILED) for rank in {DONOR, HELPER} - {who})


def take_part(group: dict[str, str], rank: int, folder: Path) -> None:
    """A worker's part in the transfer. Each message takes some milliseconds."""
    os.environ.update(group, RANK=str(rank), LOCAL_RANK="0")
    join_process_group(torch.device("cpu"), "gloo")
    dist.barrier()
    threading.Thread(target=obey, args=(folder / "released",), daemon=True).start()
    received, receive = [0], dist.recv

    def receive_slowly(data: torch.Tensor, sender: int, group: dist.ProcessGroup | None) -> None:
        time.sleep(0.005)
        receive(data, sender, group)
        received[0] += 1
        if (rank, received[0]) == (FIRST, MIDDLE):
            (folder / "middle").touch()

    dist.recv = receive_slowly  # type: ignore[assignment]
    hop = transfer.chain_place((DONOR, FIRST, SECOND), rank, None, (HELPER,))
    try:
        if hop is not None and rank != DONOR:
            transfer.receive({}, hop)
        else:
            tensors = {name: torch.full((SIZE,), number, dtype=torch.uint8) for number, name in enumerate("abcd")}
            source = transfer.OwnState(Record("job", 1, 7, 0, "", {}), layout(tensors), tensors, tensors)
            helps = partial(transfer.help_send, source, 1, 1, FIRST, None)
            transfer.finish(helps() if hop is None else transfer.send(source.record, source, hop))
    except RuntimeError:
        connections.break_all()
        os._exit(FAILED)
    os._exit(ENDED)


def obey(released: Path) -> None:
    """What a worker does if its agent releases it."""
    while not released.exists():
        time.sleep(0.02)
    connections.break_all()
