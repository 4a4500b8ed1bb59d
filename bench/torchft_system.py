"""torchft (https://github.com/pytorch/torchft) on gloo: every node is a replica group, and a lighthouse counts them.

It has no spares: three replica groups train, and two go on when one is lost. It needs an environment of its own, which
`prepare` makes once, because torchft pins versions that spotrun does not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench.phases import Event
from bench.processes import free_port, launch, signal_tree, tail
from bench.systems import NODES, START_TIMEOUT, BenchError, Scenario, Workload, stepping
from bench.watch import Watch

ROOT = Path(__file__).parents[1]
VENV = ROOT / ".venv-torchft"
PACKAGES = ("torchft==0.2.0", "numpy")
SCRIPT = Path(__file__).parent / "train_torchft.py"
REPLICAS = NODES + 1
INSTALL = 600.0  # seconds
_VICTIM = REPLICAS - 1


@dataclass(frozen=True)
class Settings:
    """How torchft is configured.

    heartbeat_ms: silence after which the lighthouse takes a replica for dead. group: timeout of the process group, in
    seconds. manager: timeout of the manager, in seconds. corrected: whether the script has a correction, without which
    it may end: see `CorrectedDDP` in train_torchft.py.
    """

    name: str
    what: str
    heartbeat_ms: int = 5000
    group: float = 5.0
    manager: float = 10.0
    corrected: bool = True


SLOW = 4  # factor of the timeouts with 100 M parameters: a step takes seconds on this machine
DEFAULTS = Settings(
    "torchft",
    "torchft 0.2.0 with its defaults (heartbeats time out after 5 s), the timeouts of its own example (5 s for the "
    "process group, 10 s for the manager; with 100 M parameters four times as long), and a DDP hook of the script",
)
TUNED = Settings(
    "torchft-tuned",
    "as torchft, with `--heartbeat_timeout_ms=1000` and a timeout of 3 s for the process group",
    heartbeat_ms=1000,
    group=3.0,
)
STOCK = Settings(
    "torchft-stock",
    "as torchft, with the DDP hook that torchft 0.2.0 has (`torchft/ddp.py`): it asserts that the all-reduce has left "
    "a future. With gloo, an all-reduce in which a peer is lost leaves none, so the scripts of the survivors end",
    corrected=False,
)


class Unavailable(BenchError):
    """torchft cannot be installed here. The message says why."""


def prepare() -> Path:
    """The interpreter of torchft's environment, which is made if it is missing. Raises `Unavailable`."""
    python = VENV / "bin" / "python"
    done = VENV / ".installed"
    if done.exists():
        return python
    constraints = ["-c", str(ROOT / "constraints.txt")]
    try:
        _run(sys.executable, "-m", "venv", "--clear", str(VENV))
        _run(str(python), "-m", "pip", "install", "--quiet", *constraints, *PACKAGES)
        _run(str(python), "-c", "import torchft")
    except (subprocess.SubprocessError, OSError) as error:
        text = getattr(error, "stderr", b"") or b""
        last = text.decode(errors="replace").strip().splitlines()[-1:] or [str(error)]
        raise Unavailable(f"torchft cannot be installed: {last[0]}") from error
    done.touch()
    return python


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=INSTALL, capture_output=True)


class Torchft:
    """The job under torchft, for one run."""

    def __init__(self, settings: Settings) -> None:
        self.name = settings.name
        self._settings = settings
        self._python = prepare()
        self._replicas: dict[int, tuple[int, Any]] = {}  # number → (pid, the replica's store)
        self._lighthouse = 0
        self._joins = False
        self._folder, self._workload, self._events = Path(), Workload(), Path()

    def start(self, scenario: Scenario, workload: Workload, folder: Path, watch: Watch) -> None:
        if scenario.fault not in ("kill", "join"):
            raise BenchError(f"{self.name}: {scenario.title} is not measured with torchft")
        self._folder, self._workload, self._events = folder, workload, watch.path
        self._port = free_port()
        self._lighthouse = launch(
            [f"--bind=[::]:{self._port}", f"--min_replicas={NODES}", *self._timeouts()],
            self._env(),
            folder / "lighthouse.log",
            str(self._python.parent / "torchft_lighthouse"),
        )
        members = NODES if scenario.fault == "join" else REPLICAS
        for number in range(members):
            self._launch(number)
        watch.until(lambda events: stepping(events, members) or _ended(events), START_TIMEOUT)
        if not stepping(watch.events, members):
            raise BenchError(f"{self.name}: {no_start(watch.events, members)}\n{tail(folder)}")

    def fault(self, scenario: Scenario) -> tuple[float, str]:
        now = time.time()
        if scenario.fault == "join":
            self._joins = True
        else:
            signal_tree(self._replicas[_VICTIM][0], signal.SIGKILL)
        return now, _name(_VICTIM)

    def tick(self) -> None:
        """Start the newcomer. Not in `fault`: the newcomer would end with the thread that calls `fault`."""
        if self._joins:
            self._joins = False
            self._launch(_VICTIM)

    def close(self) -> None:
        for pid in [self._lighthouse, *(pid for pid, _ in self._replicas.values())]:
            if pid:
                signal_tree(pid, signal.SIGKILL)
        self._replicas.clear()

    def _timeouts(self) -> list[str]:
        return [f"--heartbeat_timeout_ms={self._settings.heartbeat_ms}"]

    def _launch(self, number: int) -> None:
        from torch.distributed import TCPStore

        # A replica group has a store of its own, as torchrun would give it.
        store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=START_TIMEOUT), wait_for_workers=False)
        slow = SLOW if self._workload.size == "100M" else 1
        env = self._env() | {
            "BENCH_NODE": _name(number),
            "BENCH_EVENTS": str(self._events),
            "BENCH_PID": str(os.getpid()),
            "BENCH_REPLICA": str(number),
            "BENCH_GROUP_TIMEOUT": str(self._settings.group * slow),
            "BENCH_MANAGER_TIMEOUT": str(self._settings.manager * slow),
            "BENCH_MIN": str(NODES),
            "BENCH_CORRECTED": str(int(self._settings.corrected)),
            "TORCHFT_LIGHTHOUSE": f"http://localhost:{self._port}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "RANK": "0",
            "WORLD_SIZE": "1",
            **self._workload.env,
        }
        log = self._folder / f"{_name(number)}.log"
        self._replicas[number] = (launch([str(SCRIPT)], env, log, str(self._python)), store)

    def _env(self) -> dict[str, str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH", "SPOTRUN", "BENCH"))}
        return env | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self._folder)}


def no_start(events: list[Event], members: int) -> str:
    """Why a job counts as not started."""
    until = "before a replica ended" if _ended(events) else f"within {START_TIMEOUT:g} s"
    return f"no step on all {members} replicas {until}"


def _ended(events: list[Event]) -> bool:
    return any(event.name == "ended" for event in events)


def _name(number: int) -> str:
    return f"node-{number}"
