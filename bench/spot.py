"""spotrun with its defaults, on its local cloud. The cluster is brought up and the job is submitted as by an operator.

The machines are of one pool. Its group recreates lost machines, as in a cloud. If the scenario has no replacement, the
zone has no more machines.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.processes import tail
from bench.systems import BOOT_DELAY, NODES, NOTICE, START_TIMEOUT, BenchError, Scenario, Workload, stepping
from bench.watch import Watch

if TYPE_CHECKING:
    from scripts.ssh import Access
    from spotrun.cloud.local.cloud import LocalCloud

HERE = Path(__file__).parent
CLUSTER, ZONE = "bench", "local-a"
_STARTING = 0.2  # of BOOT_DELAY, the part in which the machine itself boots


class Spotrun:
    """The job under spotrun, for one run."""

    name = "spotrun"

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._folder: Path | None = None
        self._cloud: LocalCloud | None = None
        self._access: Access | None = None

    def start(self, scenario: Scenario, workload: Workload, folder: Path, watch: Watch) -> None:
        from scripts import jobs
        from scripts import site as sites
        from spotrun.errors import SpotrunError

        self._folder = folder
        os.environ["SPOTRUN_HOME"] = str(home(folder))
        try:
            spec = sites.load(str(write_cluster(folder, NODES if scenario.fault == "join" else None)))
            sites.site(spec).up()
            self._access = sites.site(spec).access()
            self._cloud = find_cloud(folder)
            self._submitted = jobs.submit(
                self._access, spec, str(_write_job(folder, scenario, workload, watch.path)), _ignore
            )
        except SpotrunError as error:
            raise BenchError(f"spotrun: {error}\n{tail(folder)}") from error
        if not watch.until(lambda events: stepping(events, scenario.nodes), START_TIMEOUT):
            raise BenchError(f"spotrun: no step on {scenario.nodes} nodes within {START_TIMEOUT:g} s\n{tail(folder)}")
        if not watch.until(lambda _: self._standing_by() >= scenario.spares, START_TIMEOUT):
            raise BenchError(f"spotrun: the spare was not ready within {START_TIMEOUT:g} s\n{tail(folder)}")
        if scenario.fault != "join" and not scenario.replaced:
            self._wait(self._cloud.stockout(ZONE, True))
        self._wait(self._cloud.sizes())  # the connection stands before the fault is timed

    def fault(self, scenario: Scenario) -> tuple[float, str]:
        assert self._cloud is not None
        if scenario.fault == "join":
            now = time.time()
            self._wait(self._cloud.market(ZONE, capacity=NODES + 1))
            return now, ""
        victim = str(self._status()["job"]["members"][-1])
        now = time.time()
        if scenario.fault == "notice":
            self._wait(self._cloud.preempt(victim, NOTICE))
        elif scenario.fault == "freeze":
            self._wait(self._cloud.freeze(victim))
        else:
            self._wait(self._cloud.kill(victim))
        return now, victim

    def stop(self) -> None:
        """Stop the job and wait until its machines are gone."""
        from scripts import control

        assert self._access is not None
        control.ask(self._access, "stop")
        deadline = time.monotonic() + START_TIMEOUT
        while self._status()["nodes"]:
            if time.monotonic() > deadline:
                raise BenchError("spotrun: the nodes of a stopped job are still there")

    def tick(self) -> None:
        """The cloud does by itself what is due."""

    def close(self) -> None:
        if self._cloud is not None:
            self._wait(self._cloud.close())
            self._cloud = None
        self._runner.close()
        if self._folder is not None:
            remove(self._folder)

    def _status(self) -> dict[str, Any]:
        from scripts import control

        assert self._access is not None
        found: dict[str, Any] = control.ask(self._access, "status")
        return found

    def _standing_by(self) -> int:
        """How many spares have run the script's set-up, and wait."""
        ready = [node for node in self._status()["nodes"] if node["phase"] == "ready"]
        return sum(not str(node["doing"]).startswith("warming up") for node in ready)

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)


def home(folder: Path) -> Path:
    """The operator's state of a run whose files are in `folder`."""
    return folder / "home"


def remove(folder: Path) -> None:
    """Take down the cluster that a run with this folder brought up, if it did."""
    if home(folder).exists():
        from spotrun.cloud.local import cloud as client

        client.down(CLUSTER, home(folder))


def find_cloud(folder: Path) -> LocalCloud:
    from spotrun.cloud.local import cloud as client

    cloud = client.find(CLUSTER, home(folder))
    if cloud is None:
        raise BenchError(f"spotrun: the local cloud ended as soon as it was up\n{tail(folder)}")
    return cloud


def write_cluster(folder: Path, capacity: int | None = None) -> Path:
    """A cluster file for this folder's cluster. capacity: the most machines that the zone gives; None: no limit."""
    cluster = {
        "name": CLUSTER,
        "cloud": "local",
        "pools": [{"name": "spot", "zone": ZONE, "max": NODES + 1}],
        "local": {"share_torch": False, "boot_delay": _STARTING, "recreate_delay": BOOT_DELAY - _STARTING},
    }
    if capacity is not None:
        cluster["local"] |= {"capacity": {ZONE: capacity}}  # type: ignore[operator]
    return _write(folder / "cluster.yaml", cluster)


def _write_job(folder: Path, scenario: Scenario, workload: Workload, events: Path) -> Path:
    """A folder with the files that the job needs, which is what reaches the nodes."""
    job, joins = folder / "job", int(scenario.fault == "join")
    job.mkdir()
    script = f"train_{workload.trainer or 'spotrun'}.py"
    for name in {"work.py", "train_spotrun.py", "trainer_work.py", "die_with_agent.py", script}:
        shutil.copy(HERE / name, job / name)
    return _write(
        job / "job.yaml",
        {
            "name": "bench",
            "script": script,
            "nodes": {"min": scenario.min_nodes, "max": scenario.nodes + joins, "spares": scenario.spares},
            "grow_interval": "1s" if joins else "30s",
            "procs_per_node": 1,
            "env": {"BENCH_EVENTS": str(events), "OMP_NUM_THREADS": "1", **workload.env},
        },
    )


def _write(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(json.dumps(values, indent=2))  # JSON is YAML
    return path


def _ignore(_: str) -> None:
    pass
