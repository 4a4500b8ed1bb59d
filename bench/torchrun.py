"""torchrun as a user would run it on machines that vanish: plain, tuned, and as it comes (stock).

A node is a torchrun agent with its workers, on a loopback address of its own. The rendezvous store is in the agent of
the first node. That node is never the victim, because without it the job ends under torchrun. The survivor's address
sorts first, which is torchrun's good case.

A spare is a third agent of the same job. Under `--nnodes=2:2` torchrun keeps it in its redundancy list until a member
is gone, which is what "standing by" means there. With no replacement the job is `--nnodes=1:2`.
"""

from __future__ import annotations

import base64
import os
import pickle
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench.processes import free_port, launch, signal_tree, tail
from bench.systems import BOOT_DELAY, NOTICE, START_TIMEOUT, BenchError, Scenario, Workload, stepping
from bench.watch import Watch

HERE = Path(__file__).parent
MAX_RESTARTS = 100  # with the default, 0, the first interruption ends the job
VICTIM = 1


@dataclass(frozen=True)
class Settings:
    """How torchrun is configured. rdzv: --rdzv-conf. group_timeout: seconds, of the script's process group."""

    name: str
    what: str
    own_store: bool = True  # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    rdzv: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    group_timeout: int = 1800


_TUNED_RDZV = (
    "keep_alive_interval=1",
    "keep_alive_max_attempt=3",
    "last_call_timeout=1",
    "close_timeout=5",
    "heartbeat_timeout=2",
    "read_timeout=20",
)
_OWN_STORE = "`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`"
PLAIN = Settings("plain", f"torchrun's defaults, {_OWN_STORE}, `--max-restarts={MAX_RESTARTS}`")
TUNED = Settings(
    "tuned",
    f"as plain, and `--rdzv-conf={','.join(_TUNED_RDZV)}`, `--monitor-interval=0.05`, `--shutdown-timeout=5`, "
    "a process group timeout of 10 s in the script",
    rdzv=_TUNED_RDZV,
    options=("--monitor-interval=0.05", "--shutdown-timeout=5"),
    group_timeout=10,
)
STOCK = Settings("stock", f"as plain, without {_OWN_STORE}", own_store=False)


class Torchrun:
    """The job under torchrun, for one run."""

    def __init__(self, settings: Settings) -> None:
        self.name = settings.name
        self._settings = settings
        self._port = free_port()
        self._agents: dict[int, int] = {}  # node number → pid
        self._due: list[tuple[float, str]] = []  # (monotonic time, what)
        self._folder, self._workload = Path(), Workload()

    def start(self, scenario: Scenario, workload: Workload, folder: Path, watch: Watch) -> None:
        if scenario.fault == "join":
            raise BenchError(f"{self.name}: {scenario.title} is not measured with torchrun, which restarts all workers")
        self._folder = folder
        self._nnodes = f"{scenario.min_nodes}:{scenario.nodes}"
        self._events, self._workload = watch.path, workload
        (folder / "checkpoints").mkdir()
        for node in range(scenario.nodes):
            self._launch(node)
        if not watch.until(lambda events: stepping(events, scenario.nodes), START_TIMEOUT):
            raise BenchError(
                f"{self.name}: no step on {scenario.nodes} nodes within {START_TIMEOUT:g} s\n{tail(folder)}"
            )
        for spare in range(scenario.spares):
            self._launch(scenario.nodes + spare)
        if not watch.until(lambda _: self._standing_by() >= scenario.spares, START_TIMEOUT):
            raise BenchError(f"{self.name}: the spare did not join within {START_TIMEOUT:g} s\n{tail(folder)}")

    def fault(self, scenario: Scenario) -> tuple[float, str]:
        pid = self._agents[VICTIM]
        now = time.time()
        if scenario.fault == "notice":  # as the clouds' shutdown scripts do it
            os.kill(pid, signal.SIGTERM)
            self._due.append((time.monotonic() + NOTICE, "take"))
        else:
            signal_tree(pid, signal.SIGKILL if scenario.fault == "kill" else signal.SIGSTOP)
        if scenario.replaced:
            self._due.append((time.monotonic() + BOOT_DELAY, "replace"))
        return now, _name(VICTIM)

    def tick(self) -> None:
        for item in [item for item in self._due if item[0] <= time.monotonic()]:
            self._due.remove(item)
            if item[1] == "take":
                signal_tree(self._agents[VICTIM], signal.SIGKILL)
            else:
                self._launch(max(self._agents) + 1)

    def close(self) -> None:
        for pid in self._agents.values():
            signal_tree(pid, signal.SIGKILL)
        self._agents.clear()

    def _launch(self, node: int) -> None:
        settings = self._settings
        address = f"127.0.0.{11 + node}"
        conf = [*settings.rdzv, f"is_host={int(node == 0)}"]  # every node here has the store's host name
        arguments = [
            "-m",
            "torch.distributed.run",
            f"--nnodes={self._nnodes}",
            "--nproc-per-node=1",
            f"--max-restarts={MAX_RESTARTS}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self._port}",
            "--rdzv-id=bench",
            f"--rdzv-conf={','.join(conf)}",
            f"--local-addr={address}",
            *settings.options,
            str(HERE / f"train_{self._workload.trainer or 'plain'}.py"),
            f"--checkpoints={self._folder / 'checkpoints'}",
            f"--group-timeout={settings.group_timeout}",
        ]
        self._agents[node] = launch(arguments, self._env(node), self._folder / f"{_name(node)}.log")

    def _env(self, node: int) -> dict[str, str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH", "SPOTRUN", "BENCH"))}
        env |= {"OMP_NUM_THREADS": "1", "BENCH_NODE": _name(node), "BENCH_EVENTS": str(self._events)}
        env |= self._workload.env
        env |= {"BENCH_PID": str(os.getpid()), "TMPDIR": str(self._folder)}
        if self._settings.own_store:
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        return env

    def _standing_by(self) -> int:
        """How many agents wait as spares, by the rendezvous state that torchrun keeps in its store."""
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", self._port, is_master=False, timeout=timedelta(seconds=10))
        state: Any = pickle.loads(base64.b64decode(store.get("torch.rendezvous.bench")))  # our own processes wrote it
        return len(state.redundancy_list)


def _name(node: int) -> str:
    return f"node-{node}"
