"""A local cluster for one scenario: bring it up, run a job, follow the job, cause faults, take it down."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil

from bench.soak.checks import Beat
from bench.soak.plan import Fault, Scenario
from scripts import bundle, control
from scripts import site as sites
from scripts.home import home
from spotrun.cloud.base import Instance
from spotrun.cloud.local import cloud, procs
from spotrun.cloud.local.cloud import LocalCloud
from spotrun.cloud.local.layout import Layout
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec, JobSpec

JOB = Path(__file__).parent / "job"
NAME, ZONE = "soak", "local-a"
FLAP = 0.3  # a slow bucket answers for this many seconds, then fails for as many, in turn
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Site:
    """One cluster below a folder. newest: the head's last status document; beats: the job's steps so far."""

    def __init__(self, folder: Path, scenario: Scenario) -> None:
        os.environ["SPOTRUN_HOME"] = str(folder / "home")
        self.spec = ClusterSpec.model_validate(
            {
                "name": NAME,
                "cloud": "local",
                "pools": [{"name": "spot", "zone": ZONE, "max": scenario.most + 1 + scenario.spares}],
                "local": {"boot_delay": 0.2, "recreate_delay": 1.0},
            }
        )
        self.layout = Layout.of(home(), NAME)
        self.newest: dict[str, Any] = {}
        self.beats: list[Beat] = []
        self._out = folder / "out"
        self._bucket = Bucket(self.layout.bucket)
        self._runner = asyncio.Runner()
        self._cloud: LocalCloud | None = None
        self._closing = threading.Event()
        self._follower: threading.Thread | None = None

    def up(self) -> None:
        """Bring the cluster up. Raises `SpotrunError`."""
        sites.site(self.spec).up()
        self.access = sites.site(self.spec).access()
        self._cloud = cloud.find(NAME, home())

    def submit(self, scenario: Scenario) -> None:
        """Submit the scenario's job, and follow it from now on."""
        self._out.mkdir()
        job = JobSpec.model_validate(
            {
                "name": NAME,
                "script": scenario.shape.script,
                "args": scenario.arguments(str(self._out)),
                "nodes": {"min": scenario.least, "max": scenario.most, "spares": scenario.spares},
                "procs_per_node": 1,
                "exact": scenario.exact,
                "checkpoint_interval": "3s",
                "grow_interval": "2s",
                "hang_timeout": "30s",
                "max_restarts": 10,
                "env": {"OMP_NUM_THREADS": "1"},
            }
        )
        packed = bundle.upload(self.access.store, JOB, job.script)
        request = {"job": job.model_dump(mode="json"), "code": packed.sha256}
        self.job = str(control.ask(self.access, "submit", data=request)["job"])
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()

    @property
    def ended(self) -> bool:
        return bool(self.newest) and bool(self.newest["job"]["ended"])

    @property
    def generation(self) -> int:
        """The number of the job's newest generation that began; 0: none did."""
        return int(self.newest["job"]["generation"]) if self.newest else 0

    def begin(self, fault: Fault) -> str:
        """Cause a fault; returns what it hits (a node, a zone …). Raises `SpotrunError` if that is not possible now."""
        if fault.kind in ("bucket", "slow"):
            self._bucket.disturb(FLAP if fault.kind == "slow" else None)
            return "bucket"
        assert self._cloud is not None
        if fault.kind == "head":
            self._do(self._cloud.kill("head"))
            return "head"
        if fault.kind == "relaunch":
            control.ask(self.access, "relaunch", "--job", self.job)
            return self.job
        if fault.kind == "dry":
            self._do(self._cloud.stockout(ZONE, True))
            return ZONE
        members = self.newest["job"]["members"]
        if not members:
            raise SpotrunError("no node trains at the moment")
        node = str(members[fault.rank % len(members)])
        match fault.kind:
            case "preempt":
                self._do(self._cloud.preempt(node, fault.seconds))
            case "freeze" | "cut":
                self._do(getattr(self._cloud, fault.kind)(node))
            case "blind":
                self._kill(["head", node])
            case _:
                self._kill([node] if fault.kind != "double" else [node, *_after(node, members)])
        return node

    def end(self, fault: Fault, what: str) -> None:
        """Undo a lasting fault, or cause the second part of a twofold one, if the machines are still there."""
        assert self._cloud is not None
        members = (self.newest.get("job") or {}).get("members") or []
        with contextlib.suppress(SpotrunError):
            match fault.kind:
                case "again" | "joining":
                    self._kill(_after(what, members))
                case "newcomer":
                    self._kill([name for name in self.machines() if name not in members])
                case "freeze":
                    self._do(self._cloud.thaw(what))
                case "cut":
                    self._do(self._cloud.join(what))
                case "dry":
                    self._do(self._cloud.stockout(ZONE, False))
                case _:
                    self._bucket.restore()

    def machines(self) -> list[str]:
        """The names of the nodes' machines."""
        assert self._cloud is not None
        found: list[Instance] = self._do(self._cloud.nodes())
        return [each.name for each in found if each.pool != "head" and each.state != "terminated"]

    def close(self) -> list[str]:
        """Take the cluster down; returns what is left of it. Nothing should be left."""
        self._closing.set()
        self._bucket.restore()
        if self._cloud is not None:
            with contextlib.suppress(SpotrunError):
                self._do(self._cloud.close())
        self._runner.close()
        subnet = self._subnet() if self._cloud is not None else ""  # Ctrl-C may have come while it was brought up
        cloud.down(NAME, self.layout.state.parent.parent)
        if self._follower is not None:
            self._follower.join(60)
        return left(self.layout, subnet)

    def _kill(self, nodes: list[str]) -> None:
        """Kill these machines at one time, as far as they are there."""
        assert self._cloud is not None
        for node in nodes:
            with contextlib.suppress(SpotrunError):
                self._do(self._cloud.kill(node))

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    def _subnet(self) -> str:
        assert self._cloud is not None
        return self._cloud.endpoint.removeprefix("http://").rpartition(".")[0] + "."

    def _follow(self) -> None:
        """Keep the newest status. If the head does not answer, connect again."""
        while not self._closing.is_set():
            try:
                with control.open_head(self.access) as head:
                    for status in head.follow(self.job):
                        job = status["job"]
                        self.beats.append(Beat(time.time(), int(job["step"] or 0), int(job["checkpoint"] or 0)))
                        self.newest = status
                        if job["ended"] or self._closing.is_set():
                            return
            except SpotrunError:
                self._closing.wait(0.2)


class Bucket:
    """A bucket that can stop answering: its folder and a file swap names in one step."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.with_name("no-bucket")
        self._away = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._flapping: threading.Thread | None = None

    def disturb(self, flap: float | None) -> None:
        """From now on every request fails. flap: fail for this many seconds, work for as many, in turn."""
        self.restore()
        self._ended.clear()
        self._put(away=True)
        if flap is not None:
            self._flapping = threading.Thread(target=self._flap, args=(flap,), daemon=True)
            self._flapping.start()

    def restore(self) -> None:
        """From now on every request works again."""
        self._ended.set()
        if self._flapping is not None:
            self._flapping.join()
            self._flapping = None
        self._put(away=False)

    def _flap(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            self._put(away=not self._away)

    def _put(self, away: bool) -> None:
        with self._lock:
            if away == self._away:
                return
            if away:
                self._file.touch(mode=0o600)
            _exchange(self._path, self._file)
            self._away = away


def _after(node: str, members: list[str]) -> list[str]:
    """The member that comes after this one, if there is another."""
    at = members.index(node) if node in members else -1
    return [name for name in members[at + 1 :] + members[: max(at, 0)] if name != node][:1]


def left(layout: Layout, subnet: str) -> list[str]:
    """Processes, ports, mounts and memory that are left of a cluster that was taken down.

    subnet: how the addresses of its machines begin; empty: not known, so ports are not looked at.
    """
    found = [f"process {pid} is left" for pid in sorted(procs.of_cluster(layout.unique))]
    if layout.tmpfs.exists():
        found.append(f"{layout.tmpfs} is left")
    listening = (each.laddr for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
    found += [f"port {each.port} of {each.ip} is left" for each in listening if subnet and each.ip.startswith(subnet)]
    return found + [f"{place} is still mounted" for place in _mounts() if str(layout.state) in place]


def _mounts() -> Iterator[str]:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        yield line.split()[1]


def _exchange(one: Path, other: Path) -> None:
    """Swap two paths in one step: both exist at every moment (renameat2(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(one))
