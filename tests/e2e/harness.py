"""A local cluster as an operator sees it: everything through SSH, except the faults, which are the cloud's."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.processes import STANDALONE
from bench.soak.checks import samples
from scripts import bundle, control
from scripts import site as sites
from scripts.home import home
from spotrun.cloud.local import cloud as client
from spotrun.cloud.local.cloud import LocalCloud
from spotrun.cloud.local.layout import Layout
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec, JobSpec

TOY = Path(__file__).parent.parent / "jobs" / "toy"
AS_GPU = Path(__file__).parents[2] / "bench" / "soak" / "job" / "as_gpu.py"
PATIENCE = 240.0  # seconds that anything may take on a slow machine
# Seconds for which a machine may be silent, unless the test is about silence. A busy computer can keep an agent from
# reporting for longer than the default. The job would then be interrupted, which few tests allow for.
SILENCE = 60.0
OPTIONS = (
    "epochs",
    "samples",
    "batch",
    "pause",
    "fail",
    "hang",
    "late",
    "slow",
    "step",
    "stretch",
    "lag",
    "drag",
    "flood",
    "fill",
    "largest",
    "leave",
    "find",
    "gpu",
)  # of the toy script; the rest is the job file's


@dataclass(frozen=True)
class Job:
    id: str
    out: Path

    def go(self) -> None:
        """Have a job that was submitted with `slow` hurry again."""
        (self.out / "go").touch()

    def hold_first_step(self, generation: int) -> None:
        """In generations after this one, have workers wait in their first step, before they exchange gradients."""
        self._say("hold", generation)

    def let_first_step_go(self) -> None:
        """Undo `hold_first_step`."""
        self.hold_first_step(1 << 30)

    def step(self, seconds: float) -> None:
        """From now on, each slow step takes so long."""
        self._say("step", seconds)

    def _say(self, name: str, value: float) -> None:
        """Write a file that the script reads, whole or not at all."""
        partial = self.out / f"{name}.part"
        partial.write_text(str(value))
        partial.replace(self.out / name)


class Harness:
    """One cluster; use `submit`, then the rest is about that job."""

    def __init__(self, folder: Path, spec: ClusterSpec) -> None:
        self.folder = folder
        self.spec = spec
        self._changed = threading.Condition()
        self._newest: dict[str, Any] = {}
        self._unseen: deque[dict[str, Any]] = deque(maxlen=0)  # those that `until`, if it runs, has not looked at
        self._job = ""
        self._error: BaseException | None = None
        self._follower: threading.Thread | None = None
        self._closing = False
        sites.site(spec).up()
        self.access = sites.site(spec).access()

    def submit(self, **options: Any) -> Job:
        """Run the toy script. Options of the script by their names, everything else is of the job file.

        A job with `slow` trains until `Job.go`, or for so long that a test on a busy machine is over before.
        """
        options.setdefault("heartbeat_timeout", SILENCE)
        out = self.folder / f"out-{len(list(self.folder.glob('out-*')))}"
        out.mkdir()
        args = ["--out", str(out)]
        for name in [name for name in OPTIONS if name in options]:
            value = options.pop(name)
            if value is not False:
                args += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        job = JobSpec(name="toy", script="train.py", args=tuple(args), **options)
        code = Path(shutil.copytree(TOY, self.folder / f"code-{out.name}"))
        shutil.copy(AS_GPU, code)
        return Job(self.start(job, code), out)

    def start(self, job: JobSpec, code: Path) -> str:
        """Run a job whose files are in the folder `code`. Returns its id."""
        packed = bundle.upload(self.access.store, code, job.script)
        request = {"job": job.model_dump(mode="json"), "code": packed.sha256}
        found = control.ask(self.access, "submit", data=request)
        self.watch(found["job"])
        return str(found["job"])

    def watch(self, job: str) -> None:
        """From here on, the `until…` methods are about this job."""
        with self._changed:
            self._job, self._newest, self._error = job, {}, None
        self._follower = threading.Thread(target=self._follow, args=(job,), daemon=True)
        self._follower.start()

    def until(self, good: Callable[[dict[str, Any]], Any], what: str, timeout: float = PATIENCE) -> dict[str, Any]:
        """The first status document that is good, from the newest one on. AssertionError with the last one otherwise.

        None is passed over: what a busy machine keeps this thread from seeing in time still counts.
        """
        with self._changed:
            self._unseen = deque([self._newest] if self._newest else [])
        try:
            return self._first(good, what, time.monotonic() + timeout)
        finally:
            with self._changed:
                self._unseen = deque(maxlen=0)

    def _first(self, good: Callable[[dict[str, Any]], Any], what: str, deadline: float) -> dict[str, Any]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._error or self._unseen, max(0.0, deadline - time.monotonic()))
                if self._error:
                    raise self._error
                late = time.monotonic() > deadline  # then only the newest counts
                assert self._unseen, f"not seen: {what}\n{self._story()}"
                status = self._unseen.pop() if late else self._unseen.popleft()
            if good(status):
                return status
            assert not status["job"]["ended"], f"ended without: {what}\n{self._story()}"
            assert not late, f"not seen: {what}\n{self._story()}"

    def until_step(self, step: int) -> dict[str, Any]:
        return self.until(lambda s: s["job"]["step"] >= step and s["job"]["phase"] == "running", f"step {step}")

    def until_checkpoint_after(self, step: int, what: str) -> dict[str, Any]:
        return self.until(lambda s: (s["job"]["checkpoint"] or 0) > step, what)

    def until_ended(self, timeout: float = 2 * PATIENCE) -> dict[str, Any]:
        """The job's part of the last status document. pytest shows what is printed of it if the test fails."""
        status = self.until(lambda s: s["job"]["ended"], "the end", timeout)
        job: dict[str, Any] = status["job"]
        if job["interruptions"] or job["failure"]:
            print(disturbances(status))
        return job

    def members(self) -> list[str]:
        """Nodes of the running generation, in rank order."""
        return list(self.until(lambda s: s["job"]["members"], "a generation")["job"]["members"])

    def status(self) -> dict[str, Any]:
        """Asked for now."""
        found: dict[str, Any] = control.ask(self.access, "status")
        return found

    def ctl(self, *words: str) -> Any:
        found = control.ask(self.access, *words)
        if words[0] == "relaunch":
            self.watch(words[-1])
        return found

    def fault(self, kind: str, what: str) -> None:
        """preempt, kill, freeze, thaw, cut, join a node; stockout, restock a zone."""
        if kind in ("stockout", "restock"):
            self.cloud(lambda cloud: cloud.stockout(what, kind == "stockout"))
        else:
            self.cloud(lambda cloud: getattr(cloud, kind)(what))

    def kill_head(self) -> None:
        self.cloud(lambda cloud: cloud.kill("head"))

    def cloud(self, ask: Callable[[LocalCloud], Any]) -> Any:
        """Ask the local cloud itself."""

        async def run() -> Any:
            cloud = client.find(self.spec.name, home())
            assert cloud is not None, "the local cloud does not run"
            try:
                return await ask(cloud)
            finally:
                await cloud.close()

        with ThreadPoolExecutor(1) as other:  # a browser's driver has a loop in this thread
            return other.submit(lambda: asyncio.run(run())).result()

    def logs(self, job: str, generation: int) -> dict[str, str]:
        """Logs in the bucket, by key."""
        store = self.access.store
        keys = store.list(f"jobs/{job}/logs/{generation:04d}")
        return {key: store.get(key).decode(errors="replace") for key in keys}

    def machine_logs(self, lines: int = 100) -> str:
        """The last lines that the head and the agent of each machine have logged."""
        logs = sorted((Layout.of(home(), self.spec.name).state / "nodes").glob("*/init.log"))
        tails = (each.read_text(errors="replace").splitlines()[-lines:] for each in logs)
        return "\n".join(line for log, tail in zip(logs, tails, strict=True) for line in (f"{log.parent.name}:", *tail))

    def close(self) -> None:
        self._closing = True
        client.down(self.spec.name, home())
        if self._follower:
            self._follower.join(30)

    def _follow(self, job: str) -> None:
        """Keep the newest status; a head that is away for a moment is none of our business."""
        while not self._closing:
            try:
                with control.open_head(self.access) as head:
                    for status in head.follow(job):
                        with self._changed:
                            if self._job != job:
                                return  # another job is watched now
                            self._newest = status
                            self._unseen.append(status)
                            self._changed.notify_all()
                        if status["job"]["ended"]:
                            return
            except SpotrunError:
                continue
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return

    def _story(self) -> str:
        rest = {key: value for key, value in self._newest.items() if key != "events"}
        return "\n".join([*told_events(self._newest), json.dumps(rest, indent=1)])


def told_events(status: dict[str, Any]) -> list[str]:
    """The events of a status document, for people."""
    return [f"{event['at'] % 1000:8.2f} {event['kind']}: {event['text']}" for event in status.get("events", [])]


def disturbances(status: dict[str, Any]) -> str:
    """What has disturbed the job of a status document: its interruptions, its failure, and the events."""
    job = status["job"]
    failure = dict(job["failure"] or {})
    trace = failure.pop("traceback", "")
    head = f"job {job['id']}: {job['phase']}, {job['restarts']} restarts, failure: {json.dumps(failure)}"
    return "\n".join([head, *trace.splitlines(), *map(json.dumps, job["interruptions"]), *told_events(status)])


@contextmanager
def running(folder: Path, spec: Mapping[str, Any]) -> Iterator[Harness]:
    """A cluster with a home in this folder; afterwards it is down."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPOTRUN_HOME", str(folder / "home"))
        harness = Harness(folder, ClusterSpec.model_validate(spec))
        try:
            yield harness
        finally:
            harness.close()


def undisturbed(out: Path, ranks: int, **options: Any) -> str:
    """The final digest under plain torchrun; of one rank under plain Python, which starts sooner."""
    args = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, *([*STANDALONE, f"--nproc-per-node={ranks}"] if ranks > 1 else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, str(TOY / "train.py"), "--out", str(out), "--pause", "0", *args],
        check=True,
        env=environment,
        timeout=PATIENCE,
        stdout=subprocess.DEVNULL,
    )
    return digest_of(out)


def closed(status: dict[str, Any]) -> list[dict[str, Any]]:
    """The interruptions after which the job trains again."""
    return [each for each in status["job"]["interruptions"] if each["seconds"] is not None]


def begun(out: Path) -> dict[str, int]:
    """The process that began the script's set-up last, by node."""
    paths = sorted(out.glob("begun@*"), key=lambda path: path.stat().st_mtime)
    return {node: int(pid) for _, node, pid in (path.name.split("@") for path in paths)}


def setups(out: Path) -> Counter[int]:
    """How often each process ran the script's set-up."""
    return Counter(map(int, (out / "setups").read_text().split()))


def final_pids(out: Path) -> set[int]:
    """The processes that ended with the job."""
    return {json.loads(path.read_text())["pid"] for path in out.glob("final-*.json")}


def digest_of(out: Path) -> str:
    """The one digest that all ranks ended with."""
    found = {json.loads(path.read_text())["digest"] for path in out.glob("final-*.json")}
    assert len(found) == 1, found
    return str(found.pop())


def sample_ids(out: Path, epochs: int) -> dict[int, list[int]]:
    """The samples of each epoch, sorted. Of a step done again in a later generation, only that time counts."""
    lines = (line for path in out.glob("steps-*.jsonl") for line in path.read_text().splitlines())
    return samples(map(json.loads, lines), epochs)
