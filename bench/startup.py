"""How long an agent takes on the local cloud, from the start of its process until the head has its first report.

python -m bench.startup [--runs 5] [--out bench/RESULTS.md]

The agent tells its service manager when it has joined (sd_notify). That moment is measured. The agent has then
connected to the head. It takes a job later, when the health gate has passed. A second process does the same work, and
each part is timed. `import torch` is timed for comparison; an agent does not wait for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from bench.processes import sweep
from bench.report import describe_machine, write_section
from bench.spot import CLUSTER, find_cloud, home, remove
from bench.systems import BenchError
from spotrun.machine.processes import adopt_orphans

GOAL = 1.0  # seconds
PATIENCE = 120.0
AGENT = ("-m", "spotrun.cli", "agent")
JOINED = "from process start to joined"
INTERPRETER = "the interpreter"
TORCH = "for comparison: `python -c 'import torch'`"
# What the agent does at its start, with its own modules. Each line of output is a name and seconds. The agent starts
# the connection and the gate together; here the gate comes second.
PARTS = """
import asyncio, os, time
began = time.perf_counter()
import spotrun.node.boot, spotrun.cli
def say(name):
    global began
    now = time.perf_counter(); print(name, now - began, flush=True); began = now
say("imports")
from spotrun.node import boot
from spotrun.node.agent import Agent, Settings
from spotrun.node.health.gate import Gate
from spotrun.machine.metadata import detect
from spotrun.machine.systemd import Systemd
from spotrun.store import Store
async def main():
    async with await detect() as metadata:
        identity, attributes = await boot._identify(metadata)
        say("metadata")
        store = await asyncio.to_thread(Store, attributes["spotrun-bucket"])
        agent = Agent(Settings.from_env(), identity, attributes, store, Systemd())
        gate = Gate(agent, Settings.from_env(), metadata, attributes)
        say("bucket, agent")
        agent._publish()
        joined = asyncio.Event()
        agent.connection._on_joined = joined.set
        connection = asyncio.create_task(agent.connection.run())
        await joined.wait()
        say("head.json, TLS link, first report")
        await gate.run()
        assert agent.unfit == ()
        say("health gate, beside the link; no GPUs here")
        os._exit(0)
asyncio.run(main())
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.startup", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("bench/RESULTS.md"))
    args = parser.parse_args()
    adopt_orphans()
    try:
        rows = measure(args.runs)
    except BenchError as error:
        print(f"bench-startup: {error}", file=sys.stderr)
        return 1
    finally:
        sweep()
    text = render(rows, describe_machine(), f"{datetime.now(UTC).date()}")
    write_section(args.out, "startup", text)
    print(f"{text}\nwritten to {args.out}")
    return 0


def measure(runs: int) -> dict[str, list[float]]:
    """Seconds of each thing timed, by name, `runs` of each. The cluster is up, and its only job waits for machines."""
    from scripts import site as sites
    from spotrun.errors import SpotrunError

    found: dict[str, list[float]] = {JOINED: [], INTERPRETER: []}
    with tempfile.TemporaryDirectory(prefix="spotrun-startup-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.environ["SPOTRUN_HOME"] = str(home(folder))
        try:
            spec = sites.load(str(_write_cluster(folder)))
            sites.site(spec).up()
            environment = _machine(folder, sites.site(spec).access(), spec)
            for _ in range(runs):
                found[JOINED].append(_time_joining(environment, folder))
                found[INTERPRETER].append(_time(["-c", "pass"], environment))
                for part, seconds in _time_parts(environment):
                    found.setdefault(part, []).append(seconds)
                found.setdefault(TORCH, []).append(_time(["-c", "import torch"], environment))
        except SpotrunError as error:
            raise BenchError(str(error)) from error
        finally:
            remove(folder)
    return found


def render(rows: dict[str, list[float]], machine: str, day: str) -> str:
    """The section of the results."""
    joined = statistics.median(rows[JOINED])
    goal = "held" if joined < GOAL else "not held"
    lines = [
        "## From an agent's start until it has joined",
        "",
        f"{day}, {machine}. On the local cloud, from the start of the process until the head has its first report; "
        f"seconds, medians of {len(rows[JOINED])} runs. Goal: under {GOAL:g} s: {goal}. The parts were measured in "
        "another process, which does the same things one after the other.",
        "",
        "Joined means connected: the head knows the node, and learns of notices. The node takes a job only after the "
        "health gate has passed. Here the gate had little to do, because there were no GPUs. On a machine with GPUs, "
        "**every** start of the agent also runs nvidia-smi twice, and a matrix product on each GPU. For this "
        "product, a process imports torch (below, from a warm disk). With EFA, it also runs fi_info and loads NCCL's "
        "plugin. With one H100 and without EFA, all of this took 2.4 s. A first boot adds the machine's own boot, and "
        "reads all of this from a cold disk.",
        "",
        "| what | seconds | range |",
        "|---|---|---|",
    ]
    for what, seconds in rows.items():
        name = f"**{what}**" if what == JOINED else what
        lines.append(f"| {name} | {statistics.median(seconds):.3f} | {min(seconds):.3f} to {max(seconds):.3f} |")
    return "\n".join(lines) + "\n"


def _write_cluster(folder: Path) -> Path:
    """A cluster file with room for two machines, each in a zone of its own."""
    pools = [{"name": zone, "zone": f"local-{zone}", "max": 1} for zone in ("a", "b")]
    path = folder / "cluster.yaml"
    path.write_text(
        json.dumps(
            {"name": CLUSTER, "cloud": "local", "pools": pools, "local": {"boot_delay": 0, "share_torch": False}}
        )
    )
    return path


def _machine(folder: Path, access: Any, spec: Any) -> dict[str, str]:
    """The environment of an agent on a machine that the cloud lists; the machine's own agent is suspended.

    A job brings the machine. It needs another one too, whose zone is dry, so it never begins.
    """
    from scripts import jobs

    asyncio.run(_dry(folder))
    job = folder / "job"
    job.mkdir()
    (job / "train.py").write_text("")
    (job / "job.yaml").write_text(json.dumps({"script": "train.py", "nodes": 2}))
    jobs.submit(access, spec, str(job / "job.yaml"), lambda _: None)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for process in psutil.process_iter():
            try:
                command, environment = process.cmdline(), process.environ()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if command[1:4] == list(AGENT) and str(home(folder)) in " ".join(environment.values()):
                process.suspend()
                own = {name: str(folder / name) for name in ("SPOTRUN_TMPFS", "SPOTRUN_SCRATCH")}
                return {**environment, **own, "SPOTRUN_LOG": "WARNING"}
        time.sleep(0.1)
    raise BenchError(f"no machine has started an agent within {PATIENCE:g} s")


async def _dry(folder: Path) -> None:
    """Have the second zone give no machines."""
    cloud = find_cloud(folder)
    try:
        await cloud.stockout("local-b", True)
    finally:
        await cloud.close()


def _time_joining(environment: dict[str, str], folder: Path) -> float:
    """Seconds until a new agent tells its service manager that it has joined."""
    place = folder / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(place))
        ear.settimeout(PATIENCE)
        began = time.perf_counter()
        agent = subprocess.Popen([sys.executable, *AGENT], env={**environment, "NOTIFY_SOCKET": str(place)})
        try:
            while "READY=1" not in ear.recv(4096).decode():
                pass
            return time.perf_counter() - began
        except TimeoutError:
            raise BenchError(f"an agent has not joined within {PATIENCE:g} s") from None
        finally:
            agent.terminate()
            agent.wait()
            place.unlink()


def _time_parts(environment: dict[str, str]) -> list[tuple[str, float]]:
    command = [sys.executable, "-c", PARTS]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
    if done.returncode != 0:
        raise BenchError(f"the process that is timed part by part ended with {done.returncode}")
    cells = [line.rpartition(" ") for line in done.stdout.splitlines()]
    return [(name, float(seconds)) for name, _, seconds in cells]


def _time(arguments: list[str], environment: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], env=environment, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
