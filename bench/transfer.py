"""How long a newcomer waits for the state, over one connection and over several, if each connection has a limit.

python -m bench.transfer [--size 25M] [--times 5] [--out bench/RESULTS.md]

Two processes on this machine: one has the state in memory, the other is the newcomer. A socket option
(SO_MAX_PACING_RATE) limits each connection, as the networks of clouds do. For comparison: a bare gloo broadcast.
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

from bench import broadcast
from bench.processes import answer
from bench.report import describe_machine, write_section
from bench.systems import SIZES, Workload
from spotrun.train.streams import COUNT

SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; not in Python's socket module
PATIENCE = 300.0  # seconds
# Gbit/s of a connection: AWS's limits outside and inside of a cluster placement group. 0: no limit
LIMITS = (5, 10, 0)
STREAMS = (1, 2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.transfer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=list(SIZES), default="25M", help="parameters of the model")
    parser.add_argument("--times", type=int, default=5, help="transfers in each row")
    parser.add_argument("--out", type=Path, default=Path("bench/RESULTS.md"))
    args = parser.parse_args()
    rows = {(limit, count): measure(args.size, limit, count, args.times) for limit in LIMITS for count in STREAMS}
    text = render(args.size, args.times, rows, broadcast.measure(Workload(args.size), args.times))
    write_section(args.out, "transfer", text)
    print(f"\n{text}\nwritten to {args.out}")


def measure(size: str, limit: int, streams: int, times: int) -> list[float]:
    """Seconds of each transfer. limit: Gbit/s of a connection; 0: no limit. streams: how many connections."""
    with tempfile.TemporaryDirectory(prefix="spotrun-transfer-", dir="/dev/shm") as folder:
        arguments = (folder, SIZES[size], limit, streams, times)
        found: list[float] | None = answer(_work, 2, arguments, PATIENCE)
    if found is None:
        raise SystemExit("bench.transfer: a process failed: its output is above")
    return found


def render(size: str, times: int, rows: dict[tuple[int, int], list[float]], reference: float) -> str:
    """The section of the results."""
    lines = [
        f"| {f'{limit} Gbit/s' if limit else 'none'} | {streams} | {statistics.median(found):.2f} "
        f"| {min(found):.2f} to {max(found):.2f} |"
        for (limit, streams), found in rows.items()
    ]
    return "\n".join(
        [
            "## A newcomer's state over several connections",
            "",
            f"{datetime.now(UTC).date().isoformat()}, {describe_machine()}. {size} parameters and what AdamW keeps for "
            "them, from a rank that has them in memory to one that lacks them, both on this machine. A connection is "
            "limited as clouds do it: on AWS to 5 Gbit/s, and to 10 Gbit/s in a cluster placement group. Seconds until "
            f"the newcomer has the state, {times} transfers in each row. spotrun uses {COUNT} connections. A bare gloo "
            f"broadcast of the same state takes {reference:.2f} s without a limit.",
            "",
            "| limit of a connection | connections | median | range |",
            "|---|---|---|---|",
            *lines,
        ]
    )


def _work(rank: int, port: int, folder: str, hidden: int, limit: int, count: int, times: int, results: Any) -> None:
    os.environ.update(BENCH_HIDDEN=str(hidden), MASTER_ADDR="127.0.0.1")
    import torch
    import torch.distributed as dist

    import spotrun.train.transfer
    from bench import work
    from spotrun.state.control import Context
    from spotrun.state.slots import Record
    from spotrun.train import streams
    from spotrun.train.restore import restore
    from spotrun.train.slot_files import layout
    from spotrun.train.transfer import OwnState

    torch.set_num_threads(1)
    spotrun.train.transfer.COUNT = count  # type: ignore[attr-defined]
    if limit:
        send_all = streams._send_all
        streams._send_all = lambda connection, items: send_all(_limited(connection, limit), items)
    wait = timedelta(seconds=PATIENCE)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=wait)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait)
    tensors = {
        f"{number}.{name}": torch.ones_like(each.detach())
        for name, each in work.build_model().named_parameters()
        for number in range(3)
    }
    entries, own = layout(tensors), Path(folder) / str(rank)
    context = Context("bench", 2, str(rank), "", str(own), "")
    seconds = []
    for step in range(times + 1):
        live = OwnState(Record("bench", 1, step, 0, "", {}), entries, tensors) if rank == 0 else None
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


def _limited(connection: socket.socket, limit: int) -> socket.socket:
    """The connection, with a limit in Gbit/s."""
    connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, limit * 10**9 // 8)
    return connection


if __name__ == "__main__":
    main()
