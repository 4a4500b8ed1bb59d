"""How much of its machine the head takes with many agents and jobs, and how fast its orders reach the agents.

python -m bench.scale [--agents 10,100,300,1000] [--jobs 1,10,100] [--seconds 15] [--out bench/RESULTS.md]

One process is the head, others are the agents. They talk as in a cluster: over TLS, each agent with its own secret.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.report import describe_machine, write_section
from bench.scale_head import DEVICES
from bench.systems import BenchError

MEGABYTE = 1 << 20
CLIENTS = 2  # processes that the agents are divided among
INTERRUPTIONS = 5  # nodes that are lost, one after the other
NICE = 5  # of the agents' processes, so that they do not take the head's time
PATIENCE = 240.0  # seconds until all jobs train
GROUP = "all"  # of all jobs
GOALS = (1000, 60, 300, 1.0, 0.5)  # agents; percent of a core, MB, seconds of an order, seconds of an interruption


@dataclass(frozen=True)
class Row:
    """What was measured with these agents and jobs. Times of turns: (median, 95th percentile), in milliseconds."""

    agents: int
    jobs: int
    head: float  # percent of a core
    clients: float  # percent of a core, all of the agents' processes
    others: float  # percent of a core, everything else on the machine
    memory: float  # MB resident, of the head
    turns: float  # a second
    cpu: tuple[float, float]  # of the head's main thread
    wall: tuple[float, float]
    interruptions: tuple[float, ...]  # for each: seconds from the closed connection until the head has planned
    order: float  # seconds from the request to stop all jobs until the last agent has its order


class Process:
    """A process of the benchmark. A thread reads and keeps the lines that it writes. log: for its errors."""

    def __init__(self, log: Path, module: str, *args: object, nice: int = 0) -> None:
        command = ["nice", "-n", str(nice), sys.executable, "-m", module, *map(str, args)]
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.lines.append(json.loads(line))

    @property
    def failure(self) -> str:
        """Empty, or the end of what the process said before it ended."""
        if self._process.poll() is None:
            return ""
        return f"a process has ended ({self._process.returncode}): {self._log.read_text()[-2000:] or 'it said nothing'}"

    def tell(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def used(self) -> float:
        """Seconds of CPU so far."""
        return float(sum(psutil.Process(self._process.pid).cpu_times()[:2]))

    @property
    def memory(self) -> float:
        return float(psutil.Process(self._process.pid).memory_info().rss) / MEGABYTE

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()


class Cluster:
    """A head, its agents and its jobs, for one measurement."""

    def __init__(self, folder: Path, agents: int, jobs: int) -> None:
        self.agents, self.jobs, self._folder = agents, jobs, folder
        port = _free_port()
        self.head = Process(folder / "head.log", "bench.scale_head", folder, agents, port)
        self.clients: list[Process] = []
        self.lost: set[str] = set()
        self._chunk = -(-agents // CLIENTS)
        try:
            self.wait(lambda: bool(self.head.lines), "the head listens")
            for index in range(jobs):
                self._submit(index)
            for first in range(0, agents, self._chunk):
                count = min(self._chunk, agents - first)
                log = folder / f"agents-{first}.log"
                self.clients.append(Process(log, "bench.scale_agents", folder, first, count, nice=NICE))
            self.wait(self._settled, "all jobs train")
        except BaseException:
            self.end()
            raise

    def _submit(self, index: int) -> None:
        """Submit a job. Jobs have machines of their own if there are enough, else one device each."""
        job: dict[str, object] = {
            "name": f"job{index}",
            "script": "train.py",
            "checkpoint_interval": 86400,
            "group": GROUP,
        }
        if self.agents >= self.jobs:
            each = self.agents // self.jobs
            job |= {"nodes": {"min": max(1, each // 2), "max": each}, "grow_interval": 86400}
        else:
            job |= {"nodes": 1, "devices": 1}
        self.ask("submit", {"job": job, "code": "0" * 64})

    @property
    def running(self) -> int:
        """How many of the jobs have devices."""
        return min(self.jobs, self.agents * DEVICES)

    def ask(self, verb: str, body: dict[str, object] | None = None) -> Any:
        """The answer of the head's control socket."""
        command = ["curl", "-s", "--unix-socket", str(self._folder / "control"), f"http://head/{verb}"]
        if body is not None:
            command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    def newest(self) -> dict[str, dict[str, Any]]:
        """By node: the newest order."""
        found: dict[str, dict[str, Any]] = {}
        for client in self.clients:
            for line in list(client.lines):
                if "node" in line and line["node"] not in self.lost:
                    found[line["node"]] = line
        return found

    def training(self) -> dict[str, list[str]]:
        """By job: the nodes that train it."""
        found: dict[str, list[str]] = {}
        for node, line in self.newest().items():
            for job, (generation, _) in line["jobs"].items():
                if generation:
                    found.setdefault(job, []).append(node)
        return found

    def _settled(self) -> bool:
        training = self.training()
        nodes = {node for nodes in training.values() for node in nodes}
        most = self.agents // self.jobs * self.jobs if self.agents >= self.jobs else -(-self.running // DEVICES)
        return len(training) == self.running and len(nodes) >= most

    def lose(self) -> float:
        """Lose a node and its machine.

        Returns seconds. They begin when the head sees the end of the connection, and end when the head has planned
        each job of the node without the node.
        """
        training = self.training()
        job, nodes = max(training.items(), key=lambda item: len(item[1]))
        victim = nodes[-1]
        jobs = [job for job, nodes in training.items() if victim in nodes]
        before = len(self.head.lines)
        self.lost.add(victim)
        self.head.tell(f"kill {victim}")
        self._client_of(victim).tell(f"lose {victim}")
        if len(nodes) > 1:
            self._client_of(nodes[0]).tell(f"fail {nodes[0]} {job}")

        def planned() -> list[float]:
            return [line["at"] for line in self.head.lines[before:] if line.get("job") in jobs]

        self.wait(lambda: len(planned()) >= len(jobs), f"the head plans without {victim}")
        closed = next(line["at"] for line in self.head.lines[before:] if line.get("lost") == victim)
        return float(max(planned()[: len(jobs)])) - float(closed)

    def stop(self) -> float:
        """Stop all jobs. Seconds from the request until the last agent has its order."""
        waiting = {node for nodes in self.training().values() for node in nodes}
        began = time.time()
        self.ask("stop", {"group": GROUP})
        arrived: dict[str, float] = {}

        def told() -> bool:
            for client in self.clients:
                for line in list(client.lines):
                    orders = line.get("jobs", {}).values()
                    ends = all(stop_at is not None or not generation for generation, stop_at in orders)
                    if line["at"] > began and "node" in line and ends:
                        arrived.setdefault(line["node"], line["at"])
            return waiting <= arrived.keys()

        self.wait(told, "all agents have their orders to stop")
        return max(arrived[node] for node in waiting) - began

    def _client_of(self, node: str) -> Process:
        return self.clients[int(node.rpartition("-")[2]) // self._chunk]

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Poll until `done`. Raises `BenchError`."""
        deadline = time.monotonic() + PATIENCE
        while not done():
            if failures := [each.failure for each in (self.head, *self.clients) if each.failure]:
                raise BenchError(f"{self.agents} agents, {self.jobs} jobs: {failures[0]}")
            if time.monotonic() > deadline:
                raise BenchError(f"{self.agents} agents, {self.jobs} jobs: not within {PATIENCE:.0f} s: {what}")
            time.sleep(0.1)

    def end(self) -> None:
        for process in (*self.clients, self.head):
            process.end()


def measure(agents: int, jobs: int, seconds: float) -> Row:
    """Measure one head with these numbers of agents and jobs. Raises `BenchError`."""
    with tempfile.TemporaryDirectory(prefix="spotrun-scale-", ignore_cleanup_errors=True) as name:
        cluster = Cluster(Path(name), agents, jobs)
        try:
            time.sleep(5.0)  # the first steps are done, and the head has looked at its cloud
            turns, head, clients, others, took = _sample(cluster, seconds)
            interruptions = []
            for _ in range(min(INTERRUPTIONS, agents // 4)):
                interruptions.append(cluster.lose())
                time.sleep(2.0)  # the next generation trains
            memory = cluster.head.memory
            return Row(
                agents, jobs, head, clients, others, memory, turns["turns"] / took, tuple(turns["cpu"]),
                tuple(turns["wall"]), tuple(interruptions), cluster.stop(),
            )  # fmt: skip
        finally:
            cluster.end()


def _sample(cluster: Cluster, seconds: float) -> tuple[dict[str, Any], float, float, float, float]:
    """Of the next seconds: the turns, percent of a core of head, agents and others, and how long it really took."""
    cluster.head.tell("turns")
    began, busy = time.monotonic(), _busy()
    head, clients = cluster.head.used(), sum(client.used() for client in cluster.clients)
    time.sleep(seconds)  # the length of the measurement
    took = time.monotonic() - began
    head, clients = cluster.head.used() - head, sum(client.used() for client in cluster.clients) - clients
    others = _busy() - busy - head - clients
    before = len(cluster.head.lines)
    cluster.head.tell("turns")
    cluster.wait(lambda: any("turns" in line for line in cluster.head.lines[before:]), "the head has said its turns")
    turns = next(line for line in cluster.head.lines[before:] if "turns" in line)
    return turns, *(100 * each / took for each in (head, clients, others)), took  # type: ignore[return-value]


def _busy() -> float:
    """Seconds of CPU that the whole machine has used."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - getattr(times, "guest", 0) - getattr(times, "guest_nice", 0))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def render(rows: Sequence[Row], machine: str, day: str, seconds: float) -> str:
    """The section of the results."""
    lines = [
        "## The head with many agents and jobs",
        "",
        f"{day}, {machine}. Simulated agents in {CLIENTS} processes (`nice -n {NICE}`) on the same machine: each has "
        f"the real connection, over TLS, and {DEVICES} workers that step all the time. Processor time over "
        f"{seconds:.0f} s. If there are fewer agents than jobs, a job that trains has one device, and the other jobs "
        "wait. A turn: median, 95th percentile. An interruption: the cloud no longer lists a machine, and its "
        "connection ends. The time is from that end until the head has planned without the node and queued the "
        "orders (median, most). An order: from one request to stop all jobs until the orders have reached all "
        "agents. The agents have only the processor time that the head leaves.",
        "",
        _goals(rows),
        "",
        "| agents | jobs | head, of a core | resident, MB | turns/s | a turn, ms of CPU | a turn, ms |"
        " interruption planned, s | order at all, s | agents, of a core | others, of a core |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        planned = f"{median(row.interruptions):.2f}, {max(row.interruptions):.2f}" if row.interruptions else "-"
        lines.append(
            f"| {row.agents:,} | {row.jobs} | **{row.head:.0f} %** | {row.memory:.0f} | {row.turns:.1f} |"
            f" {row.cpu[0]:.1f}, {row.cpu[1]:.1f} | {row.wall[0]:.1f}, {row.wall[1]:.1f} | {planned} |"
            f" {row.order:.2f} | {row.clients:.0f} % | {row.others:.0f} % |"
        )
    return "\n".join([*lines, "", *_plot(rows)]) + "\n"


def _goals(rows: Sequence[Row]) -> str:
    agents, head, memory, order, interruption = GOALS
    found = [row for row in rows if row.agents == agents]
    judged = [
        (f"under {head} % of a core", [row.head < head for row in found]),
        (f"under {memory} MB", [row.memory < memory for row in found]),
        (f"an order to all of them within {order:g} s", [row.order < order for row in found]),
        (
            f"an interruption planned within {interruption:g} s",
            [max(row.interruptions, default=0) < interruption for row in found],
        ),
    ]
    said = (
        f"{goal}: {f'held in {sum(held)} of {len(held)} rows' if held else 'not measured'}" for goal, held in judged
    )
    return f"Goals with {agents:,} agents: {'; '.join(said)}."


def _plot(rows: Sequence[Row]) -> list[str]:
    """A chart that GitHub draws: the head's share of a core by agents, a line for each number of jobs."""
    agents, jobs = sorted({row.agents for row in rows}), sorted({row.jobs for row in rows})
    found = {(row.agents, row.jobs): row.head for row in rows}
    lines = [
        "```mermaid",
        "xychart-beta",
        f'    title "The head, percent of a core; lines from the first: {", ".join(map(str, jobs))} jobs"',
        f'    x-axis "agents" [{", ".join(map(str, agents))}]',
        '    y-axis "percent of a core" 0 --> 100',
    ]
    lines += [f"    line [{', '.join(f'{found.get((n, each), 0):.1f}' for n in agents)}]" for each in jobs]
    return [*lines, "```"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.scale", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agents", default="10,100,300,1000", help="how many, each")
    parser.add_argument("--jobs", default="1,10,100", help="how many, each")
    parser.add_argument("--seconds", type=float, default=15, help="over which CPU time is counted")
    parser.add_argument("--out", type=Path, default=Path("bench/RESULTS.md"))
    args = parser.parse_args()
    rows = []
    for agents in map(int, args.agents.split(",")):
        for jobs in map(int, args.jobs.split(",")):
            try:
                rows.append(measure(agents, jobs, args.seconds))
                print(rows[-1], flush=True)
            except BenchError as error:
                print(f"bench-scale: {error}", file=sys.stderr)
    text = render(rows, describe_machine(), f"{datetime.now(UTC).date()}", args.seconds)
    write_section(args.out, "scale", text)
    print(f"{text}\nwritten to {args.out}")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
