"""How much memory and CPU the head and the agents take, while they are idle and while a job trains.

python -m bench.footprint [--seconds 20] [--out bench/RESULTS.md]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil

from bench.processes import sweep
from bench.report import describe_machine, write_section
from bench.spot import Spotrun, home
from bench.systems import BenchError, Scenario, Workload
from bench.watch import Watch
from spotrun.machine.processes import adopt_orphans

MEGABYTE = 1 << 20
SCENARIO = Scenario("footprint", "two nodes train, a third stands by", "kill", spares=1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.footprint", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20, help="over which CPU time is counted")
    parser.add_argument("--out", type=Path, default=Path("bench/RESULTS.md"))
    args = parser.parse_args()
    adopt_orphans()
    try:
        rows = measure(args.seconds)
    except BenchError as error:
        print(f"bench-footprint: {error}", file=sys.stderr)
        return 1
    finally:
        sweep()
    text = render(rows, describe_machine(), f"{datetime.now(UTC).date()}", args.seconds)
    write_section(args.out, "footprint", text)
    print(f"{text}\nwritten to {args.out}")
    return 0


def measure(seconds: float) -> list[tuple[str, float, float]]:
    """(what, resident MB, percent of a core) of each process of ours."""
    with tempfile.TemporaryDirectory(prefix="spotrun-footprint-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        watch, system = Watch(folder / "events.jsonl"), Spotrun()
        try:
            system.start(SCENARIO, Workload(), folder, watch)
            busy = {event.node for event in watch.events if event.name == "step"}
            rows = sample(folder, "a job on two nodes, one spare", busy, seconds)
            system.stop()
            return rows + sample(folder, "no job, no nodes", busy, seconds)
        finally:
            system.close()
            watch.close()


def sample(folder: Path, state: str, busy: set[str], seconds: float) -> list[tuple[str, float, float]]:
    """(what, resident MB, percent of a core) of the head and the agents of this folder's cluster.

    state: what the cluster does meanwhile. busy: nodes whose workers train. seconds: over which CPU time is counted.
    """
    found = []
    for process in psutil.process_iter():
        try:
            command, environment = process.cmdline(), process.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if command[1:3] != ["-m", "spotrun.cli"] or str(home(folder)) not in " ".join(environment.values()):
            continue
        role = command[3]
        if role == "agent":
            role = "agent, workers train" if environment.get("SPOTRUN_NODE") in busy else "agent, idle"
        found.append((f"{role}: {state}", process, sum(process.cpu_times()[:2])))
    time.sleep(seconds)  # the length of the measurement
    return [
        (what, process.memory_info().rss / MEGABYTE, (sum(process.cpu_times()[:2]) - before) / seconds * 100)
        for what, process, before in found
    ]


def render(rows: list[tuple[str, float, float]], machine: str, day: str, seconds: float) -> str:
    """The section of the results."""
    lines = [
        "## What the head and the agents take",
        "",
        f"{day}, {machine}. Processor time over {seconds:.0f} s. Goals: under 80 MB resident, under 2 % of a core "
        "when idle.",
        "",
        "| process | resident, MB | of a core |",
        "|---|---|---|",
    ]
    lines += [f"| {what} | {memory:.0f} | {cpu:.2f} % |" for what, memory, cpu in sorted(rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
