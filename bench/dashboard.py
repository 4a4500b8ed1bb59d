"""How long the dashboard takes with many runs, and with a run of ten million points.

python -m bench.dashboard [--runs 50] [--points 200000] [--large 10000000] [--out bench/RESULTS.md]

The bucket is a folder. The dashboard's real server runs in a process of its own, and Chromium opens a run if it is
installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.cookiejar import CookieJar
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench import spot
from bench.footprint import MEGABYTE, sample
from bench.report import describe_machine, write_section
from bench.systems import BenchError
from spotrun.dashboard import history
from spotrun.dashboard.live import Live
from spotrun.dashboard.records import Records
from spotrun.dashboard.server import Dashboard, serving
from spotrun.head.job_state import JobState
from spotrun.spec import ClusterSpec, JobSpec
from spotrun.state import points
from spotrun.state.points import Call, Header
from spotrun.store import Store, job_key, metrics_key

CLUSTER, TOKEN = spot.CLUSTER, "the-token-of-the-benchmark"
NAMES = 5  # numbers in a call of run.log
CALLS = 20_000  # in a block
BEGIN = 1_790_000_000.0  # epoch seconds of the first call
LARGE = "large-20261101-000000"
GOAL = 1.0  # seconds
MEMORY = 150.0  # MB that the goal allows


@dataclass
class Measured:
    """Seconds of each request, in order; MB of the server and of a head."""

    listing: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # of a run of the usual size
    again: list[float] = field(default_factory=list)
    large: list[float] = field(default_factory=list)  # each answer about the large run until all of it is read
    paint: float | None = None  # from opening the large run's page until its first chart; None: no Chromium
    memory: float = 0.0
    memory_large: float = 0.0
    head: float = 0.0  # MB of a head that has found these runs in its bucket, and has listed the newest


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.dashboard", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--points", type=int, default=200_000, help="of each run")
    parser.add_argument("--large", type=int, default=10_000_000, help="points of one more run")
    parser.add_argument("--out", type=Path, default=Path("bench/RESULTS.md"))
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)  # a bucket: serve it until stdin ends
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(_serve(args.serve))
        return 0
    with tempfile.TemporaryDirectory(prefix="spotrun-dashboard-") as folder:
        store = Store(folder)
        jobs = [f"run{number}-20261101-{number:06d}" for number in range(1, args.runs + 1)]
        for job in jobs:
            write(store, job, args.points)
        write(store, LARGE, args.large)
        found = measure(folder, jobs)
    text = render(found, args.runs, args.points, args.large)
    write_section(args.out, "dashboard", text)
    print(f"{text}\nwritten to {args.out}")
    return 0


def write(store: Store, job: str, count: int) -> None:
    """A run that has ended, with `count` points of `NAMES` names."""
    spec = JobSpec.kept({"script": "train.py"})
    state = JobState(id=job, name="bench", cluster=CLUSTER, code="", spec=spec, submitted=BEGIN, phase="succeeded")
    store.put(job_key(job, "state.json"), state.replace(ended=BEGIN + 1).model_dump_json().encode())
    steps = range(1, count // NAMES + 1)
    for number, start in enumerate(range(0, len(steps), CALLS), 1):
        lines = [points.line(Header(job, 1, 0, 0))]
        for step in steps[start : start + CALLS]:
            values = {f"value{index}": (step * 7919 % 1009 + index) / (step + 10.0) for index in range(NAMES)}
            lines.append(points.line(Call(step, BEGIN + step / 100, dict(values), 0, 64.0 * step)))
        store.put(metrics_key(job, 1, number), points.compress(b"".join(lines)))


def measure(folder: str, jobs: list[str]) -> Measured:
    found = Measured()
    with _server(folder) as (process, port):
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))

        def get(path: str) -> Any:
            with opener.open(address + path, timeout=120) as response:
                return response.read()

        def enter(door: str) -> str:
            """The address of the pages. door: the address with the token."""
            with opener.open(door, timeout=120) as response:
                return str(response.url).rstrip("/")

        address = enter(door := f"http://127.0.0.1:{port}/?token={TOKEN}")
        for _ in range(5):
            found.listing.append(_timed(lambda: get("/api/jobs"))[0])
        for job in jobs:
            for times in (found.first, found.again):
                times.append(_timed(lambda job=job: get(f"/api/runs/{job}/curves"))[0])  # type: ignore[misc]
        found.memory = process.memory_info().rss / 1e6
        found.paint = _first_chart(door, f"{address}/#/run/{LARGE}")
    with _server(folder) as (process, port):
        address = enter(f"http://127.0.0.1:{port}/?token={TOKEN}")
        unread = 1
        while unread:
            seconds, answer = _timed(lambda: get(f"/api/runs/{LARGE}/curves"))
            unread = json.loads(answer)["unread"]
            found.large.append(seconds)
        found.memory_large = process.memory_info().rss / 1e6
    found.head = _head(Path(folder))
    return found


def render(found: Measured, runs: int, count: int, large: int) -> str:
    """The section of the results."""

    def row(what: str, seconds: float, worst: float | None = None, goal: bool = True) -> str:
        most = seconds if worst is None else worst
        return f"| {what} | {seconds:.2f} | {most:.2f} | {('yes' if most < GOAL else 'no') if goal else ''} |"

    paint = "| the page of the large run, until its first chart | not measured: no Chromium | | |"
    if found.paint is not None:
        paint = row("the page of the large run in Chromium, until its first chart", found.paint)
    held = ("yes" if each < MEMORY else "no" for each in (found.memory, found.memory_large, found.head))
    return "\n".join(
        [
            "## The dashboard with many runs and points",
            "",
            f"{datetime.now(UTC).date().isoformat()}, {describe_machine()}. {runs} runs with {count:,} points each, "
            f"and one with {large:,}, of {NAMES} names; the bucket is a folder. The server runs on the operator's "
            f"computer. Goals: under {GOAL:g} s, and under {MEMORY:g} MB.",
            "",
            "| what | s, median | s, most | held |",
            "|---|---|---|---|",
            row("the list of runs", median(found.listing), max(found.listing)),
            row("the curves of a run, for the first time", median(found.first), max(found.first)),
            row("the same run again", median(found.again), max(found.again)),
            row("the large run: an answer with a part of the curves", median(found.large), max(found.large)),
            paint,
            row(f"the large run: all of it, in {len(found.large)} answers", sum(found.large), goal=False),
            "",
            "| memory | MB | held |",
            "|---|---|---|",
            f"| the server, after the curves of {runs} runs | {found.memory:.0f} | {next(held)} |",
            f"| the server, after the large run | {found.memory_large:.0f} | {next(held)} |",
            f"| a head with these runs, after it has listed the newest | {found.head:.0f} | {next(held)} |",
        ]
    )


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.monotonic()
    found = work()
    return time.monotonic() - began, found


@contextmanager
def _server(folder: str) -> Iterator[tuple[psutil.Process, int]]:
    """The server's process and its port."""
    command = [sys.executable, "-m", "bench.dashboard", "--serve", folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield psutil.Process(process.pid), int(process.stdout.readline())
        finally:
            process.kill()


def _head(bucket: Path) -> float:
    """MB of the head of a cluster that has the objects of this bucket, after it has listed all jobs."""
    from scripts import control
    from scripts import site as sites
    from spotrun.cloud.local.layout import Layout

    with tempfile.TemporaryDirectory(prefix="spotrun-head-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.environ["SPOTRUN_HOME"] = str(home := spot.home(folder))
        site = sites.site(sites.load(str(spot.write_cluster(folder))))
        try:
            site.up()
            spot.remove(folder)  # its bucket stays, and the next head reads it from the start
            shutil.copytree(bucket, Layout.of(home, CLUSTER).bucket, copy_function=os.link, dirs_exist_ok=True)
            site.up()
            if not control.ask(site.access(), "jobs"):
                raise BenchError("the head has not found the runs in its bucket")
            ((_, megabytes, _),) = sample(folder, "history", set(), 5.0)
            return megabytes * MEGABYTE / 1e6
        finally:
            spot.remove(folder)


async def _serve(folder: Path) -> None:
    live, records = Live(), Records(Store(str(folder)), CLUSTER)
    cluster = ClusterSpec(name=CLUSTER, cloud="local", pools=({"name": "p", "zone": "local-a"},))  # type: ignore[arg-type]
    live.lose("no head: this is a benchmark", history.read(records, cluster))
    dashboard = Dashboard(records, live, _NoHead(), TOKEN)
    async with serving(dashboard) as port:
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


class _NoHead:
    async def change(self, verb: str, job: str, to: int | None) -> dict[str, Any]:
        raise AssertionError("the benchmark changes no job")

    async def metrics(self) -> str:
        return ""


def _first_chart(door: str, page: str) -> float | None:
    """Seconds until a browser that has the token shows a chart of a page; None: there is no browser."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        return None
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox", "--disable-dev-shm-usage"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        opened = browser.new_page()
        opened.goto(door)
        opened.wait_for_selector("nav")
        began = time.monotonic()
        opened.goto(page)
        opened.wait_for_selector("canvas", timeout=60_000)
        seconds = time.monotonic() - began
        browser.close()
        return seconds


if __name__ == "__main__":
    sys.exit(main())
