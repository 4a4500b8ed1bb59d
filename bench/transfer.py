"""How long a newcomer waits for the state, from one rank and from several, if each connection has a limit.

python -m bench.transfer [--size 25M] [--times 5] [--out bench/RESULTS.md]

The ranks are processes on this machine. Each has the whole state in memory, but for the last one, the newcomer. A
socket option (SO_MAX_PACING_RATE) limits each connection, as the networks of clouds do.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bench.processes import answer
from bench.report import describe_machine, write_section
from bench.systems import SIZES

SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; not in Python's socket module
PATIENCE = 300.0  # seconds
LIMITS = (5, 10)  # Gbit/s of a connection: AWS's limits outside and inside of a cluster placement group
SENDERS = (1, 2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.transfer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=list(SIZES), default="25M", help="parameters of the model")
    parser.add_argument("--times", type=int, default=5, help="transfers in each row")
    parser.add_argument("--out", type=Path, default=Path("bench/RESULTS.md"))
    args = parser.parse_args()
    rows = {(limit, count): measure(args.size, limit, count, args.times) for limit in LIMITS for count in SENDERS}
    text = render(args.size, args.times, rows)
    write_section(args.out, "transfer", text)
    print(f"\n{text}\nwritten to {args.out}")


def measure(size: str, limit: int, senders: int, times: int) -> list[float]:
    """Seconds of each transfer. limit: Gbit/s of a connection."""
    with tempfile.TemporaryDirectory(prefix="spotrun-transfer-", dir="/dev/shm") as folder:
        arguments = (folder, SIZES[size], limit, senders + 1, times)
        found: list[float] | None = answer(_work, senders + 1, arguments, PATIENCE)
    if found is None:
        raise SystemExit("bench.transfer: a process failed: its output is above")
    return found


def render(size: str, times: int, rows: dict[tuple[int, int], list[float]]) -> str:
    """The section of the results."""
    lines = [
        f"| {limit} Gbit/s | {senders} | {statistics.median(found):.2f} | {min(found):.2f} to {max(found):.2f} |"
        for (limit, senders), found in rows.items()
    ]
    return "\n".join(
        [
            "## A newcomer's state from several ranks",
            "",
            f"{datetime.now(UTC).date().isoformat()}, {describe_machine()}. {size} parameters and what AdamW keeps for "
            f"them, from ranks that have them in memory to one that lacks them, over gloo. All ranks are processes on "
            "this machine, and each connection is limited as clouds do it: on AWS to 5 Gbit/s, and to 10 Gbit/s in a "
            f"cluster placement group. Seconds until the newcomer has the state, {times} transfers in each row.",
            "",
            "| limit of a connection | ranks that send | median | range |",
            "|---|---|---|---|",
            *lines,
        ]
    )


def _work(rank: int, port: int, folder: str, hidden: int, limit: int, world: int, times: int, results: Any) -> None:
    os.environ["BENCH_HIDDEN"] = str(hidden)
    import torch
    import torch.distributed as dist

    from bench import work
    from spotrun.state.control import Context
    from spotrun.state.slots import Record
    from spotrun.train.restore import restore
    from spotrun.train.slot_files import layout
    from spotrun.train.transfer import OwnState

    torch.set_num_threads(1)
    wait = timedelta(seconds=PATIENCE)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=wait)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=wait)
    _limit_connections(limit)
    tensors = {
        f"{number}.{name}": torch.ones_like(each.detach())
        for name, each in work.build_model().named_parameters()
        for number in range(3)
    }
    entries, own = layout(tensors), Path(folder) / str(rank)
    context = Context("bench", 2, str(rank), "", str(own), "")
    seconds = []
    for step in range(times + 1):
        live = OwnState(Record("bench", 1, step, 0, "", {}), entries, tensors, tensors) if rank < world - 1 else None
        dist.barrier()
        began = time.monotonic()
        found = restore(context, 0, None, into=lambda: tensors, live=live)
        assert found is not None
        found.settle()
        dist.barrier()
        seconds.append(time.monotonic() - began)
    if rank == 0:
        results.put(seconds[1:])  # the first one makes the memory
    dist.barrier()
    os._exit(0)


def _limit_connections(limit: int) -> None:
    """Limit each TCP connection of this process. limit: Gbit/s."""
    for handle in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(handle)) as found:
                found.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, limit * 10**9 // 8)
        except OSError:  # it is no socket, or was closed meanwhile
            continue


if __name__ == "__main__":
    main()
