"""How fast an urgent job gets a machine of a full cluster, and how long the job that makes room pauses.

python -m bench.jobs [--runs 5] [--out bench/RESULTS.md]

A job of low priority trains on all machines. In each run, an urgent job of one node is submitted. When it has made a
step, it is stopped, and the other job gets the machine back.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from bench.phases import Event
from bench.processes import sweep, tail
from bench.report import describe_machine, write_section
from bench.spot import CLUSTER, HERE, home, remove
from bench.systems import BenchError, stepping
from bench.watch import Watch
from spotrun.machine.processes import adopt_orphans

MACHINES = 3
PATIENCE = 600.0
STEPS = 10  # steps between two changes
FIRST_STEP, PAUSE = "from the submission to the urgent job's first step", "pause of the job that makes room"
OWN = "from the submission to that step, without importing torch"
IMPORT = "import torch, while the other job drains"
MARKS = {
    "submit over SSH, until its launcher is started on a node": "launched",
    IMPORT: "imported",
    "until its worker is forked": "created",
    "until the script has its modules": "entered",
    "until it is in its process group": "grouped",
    "until it has model and state": "restored",
    "until its first step is complete": "step",
}
GOALS = {OWN: 1.5, PAUSE: 0.5}  # seconds


class Cluster:
    """A local cluster for this benchmark, and the events of its jobs."""

    def __init__(self, folder: Path) -> None:
        from scripts import site as sites

        self.folder, self.watches = folder, dict[str, Watch]()
        os.environ["SPOTRUN_HOME"] = str(home(folder))
        path = folder / "cluster.yaml"
        pools = [{"name": "spot", "zone": "local-a", "max": MACHINES}]
        path.write_text(
            json.dumps(
                {"name": CLUSTER, "cloud": "local", "pools": pools, "local": {"boot_delay": 0.2, "share_torch": False}}
            )
        )
        self.spec = sites.load(str(path))
        sites.site(self.spec).up()
        self.access = sites.site(self.spec).access()

    def submit(self, name: str, **job: object) -> str:
        """Submit a job that marks its events. Returns its id."""
        from scripts import jobs

        folder = self.folder / name
        folder.mkdir()
        shutil.copy(HERE / "work.py", folder / "work.py")
        shutil.copy(HERE / "train_spotrun.py", folder / "train.py")
        self.watches[name] = Watch(self.folder / f"{name}.jsonl")
        env = {"BENCH_EVENTS": str(self.watches[name].path), "OMP_NUM_THREADS": "1"}
        job = {"name": name, "script": "train.py", "env": env, "procs_per_node": 1, "heartbeat_timeout": 30, **job}
        (folder / "job.yaml").write_text(json.dumps(job))
        return jobs.submit(self.access, self.spec, str(folder / "job.yaml"), lambda _: None)

    def events(self, name: str, good: Callable[[list[Event]], bool], what: str) -> list[Event]:
        """A job's events, once they are good. Raises `BenchError`."""
        watch = self.watches[name]
        if not watch.until(good, PATIENCE):
            raise BenchError(f"not seen within {PATIENCE:g} s: {what}\n{tail(self.folder)}")
        return watch.events

    def ask(self, *words: str) -> Any:
        from scripts import control

        return control.ask(self.access, *words)

    def close(self) -> None:
        for watch in self.watches.values():
            watch.close()
        remove(self.folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.jobs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("bench/RESULTS.md"))
    args = parser.parse_args()
    load = os.getloadavg()[0]
    adopt_orphans()
    try:
        rows = measure(args.runs)
    except BenchError as error:
        print(f"bench-jobs: {error}", file=sys.stderr)
        return 1
    finally:
        sweep()
    text = render(rows, describe_machine(), f"{datetime.now(UTC).date()}", load)
    write_section(args.out, "jobs", text)
    print(f"{text}\nwritten to {args.out}")
    return 0


def measure(runs: int) -> dict[str, list[float]]:
    """Seconds of each thing timed, by name, `runs` of each."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="spotrun-jobs-", ignore_cleanup_errors=True) as name:
        cluster = Cluster(Path(name))
        try:
            cluster.submit("low", nodes={"min": 1, "max": MACHINES}, grow_interval=1)
            for index in range(runs):
                _settle(cluster)
                for what, seconds in _one(cluster, f"urgent-{index}").items():
                    found.setdefault(what, []).append(seconds)
                shown = ", ".join(f"{what}: {found[what][-1]:.2f} s" for what in (FIRST_STEP, OWN, PAUSE))
                print(f"{time.strftime('%H:%M:%S')}  {index + 1}/{runs}  {shown}", flush=True)
        finally:
            cluster.close()
    return found


def _settle(cluster: Cluster) -> None:
    """Wait until the low job has made some steps on all machines, from now on."""
    began = time.time()

    def settled(events: list[Event]) -> bool:
        new = [event for event in events if event.time > began and event.name == "step"]
        nodes = {node: [event for event in new if event.node == node] for node in {event.node for event in new}}
        return len(nodes) == MACHINES and all(len(steps) >= STEPS for steps in nodes.values())

    cluster.events("low", settled, f"{STEPS} steps of the low job on {MACHINES} machines")


def _one(cluster: Cluster, name: str) -> dict[str, float]:
    """Submit an urgent job, await its first step, and stop it."""
    began = time.time()
    job = cluster.submit(name, priority=5)
    events = cluster.events(name, lambda events: stepping(events, nodes=1), "the urgent job's first step")
    first: dict[str, float] = {}
    for event in events:
        first.setdefault(event.name, event.time)
    first |= _ancestors(events[0].pid, first["created"], began)
    low = cluster.events(
        "low", lambda events: any(event.time > first["step"] for event in events), "the low job's next step"
    )
    cluster.ask("stop", "--job", job)
    times = [began, *(first[mark] for mark in MARKS.values())]
    parts = dict(zip(MARKS, (after - before for before, after in pairwise(times)), strict=True))
    total = first["step"] - began
    return {FIRST_STEP: total, OWN: total - parts[IMPORT], **parts, PAUSE: pause(low, began)}


def pause(events: Iterable[Event], since: float) -> float:
    """The longest time between two steps of a job, if the second one ended after `since`. Any rank's step counts."""
    done: dict[int, float] = {}
    for event in sorted(events):
        if event.name == "step":
            done.setdefault(event.step, event.time)
    times = sorted(done.values())
    return max((after - before for before, after in pairwise(times) if after > since), default=0.0)


def _ancestors(pid: int, created: float, began: float) -> dict[str, float]:
    """When the start of a worker's launcher began, and when the launcher was forked: torch is imported then.

    The first is the start of the launcher's template, or the fork from a template that had torch before the job came.
    created: when the worker was forked, by the clock of its events. began: when the job was submitted.
    """
    worker = psutil.Process(pid)
    _, launcher, template = worker.parents()[:3]
    offset = created - worker.create_time()  # psutil counts from a boot time in whole seconds
    forked, started = launcher.create_time() + offset, template.create_time() + offset
    return {"launched": started if started > began else forked, "imported": forked}


def render(rows: dict[str, list[float]], machine: str, day: str, load: float) -> str:
    """The section of the results."""
    held = [
        f"{what}: under {goal:g} s, {'held' if statistics.median(rows[what]) < goal else 'not held'}"
        for what, goal in GOALS.items()
    ]
    lines = [
        "## An urgent job on a full cluster",
        "",
        f"{day}, {machine}. A job trains on all {MACHINES} machines of a local cluster, and an urgent job of one node "
        f"is submitted. Seconds, medians of {len(rows[PAUSE])} runs. The load average of other "
        f"work was {load:.0f}. Goals: {'; '.join(held)}.",
        "",
        "| what | seconds | range |",
        "|---|---|---|",
    ]
    for what, seconds in rows.items():
        name = f"**{what}**" if what in (FIRST_STEP, OWN, PAUSE) else what
        lines.append(f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f} to {max(seconds):.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
