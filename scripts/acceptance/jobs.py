"""The jobs of an acceptance: what they run, and which of their machines are taken meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PROBES = Path(__file__).parent / "probes"
VIT = Path(__file__).parents[2] / "examples" / "vit"
# One computer runs all machines of the local cloud. If it is busy, a node may be silent for longer than elsewhere.
_LOCAL = {"heartbeat_timeout": "15s"}
# NCCL names the transport between machines in its debug output alone:
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-debug
_NCCL = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}


@dataclass(frozen=True)
class Taken:
    """A machine that is taken: how (`preempt`, `kill`), and from which step of the job on."""

    kind: str
    step: int


@dataclass(frozen=True)
class Plan:
    """A job of an acceptance. script, args, nodes: as in a job file."""

    script: str = "train.py"
    args: tuple[str, ...] = ()
    nodes: int = 1
    folder: Path = PROBES  # the job's folder
    settings: dict[str, Any] | None = None  # the other keys of its job file
    take: tuple[Taken, ...] = ()  # machines that are taken, one after the other
    ways: bool = False  # whether SSH to a node is tried while the job runs
    expects: tuple[str, ...] = ("train",)  # the probes whose lines its log must have
    steady: bool = False  # whether it runs on on-demand machines with GPUs only

    def job_file(self, name: str, steady: Sequence[str] = ()) -> dict[str, Any]:
        """What its job file says. steady: the pools for a job with `steady`."""
        return {
            "name": name.replace(" ", "-"),
            "script": self.script,
            "args": list(self.args),
            "nodes": self.nodes,
            **(self.settings or {}),
            **({"pools": list(steady)} if self.steady and steady else {}),
        }


def plans(cloud: str) -> dict[str, Plan]:
    """All jobs, by name. On the local cloud, their training steps are as short as possible."""
    train = ("--steps=300", "--pause=0.005" if cloud == "local" else "--pause=0.05")
    watch = ("--watch",) if cloud == "gcp" else ()
    here = _LOCAL if cloud == "local" else {}
    first = Taken("preempt", 60)
    alone = (*train, "--fitness", "--hold=60", *watch)
    faults = Plan(settings=here, args=(*train, "--hold=60,150"), nodes=2, take=(first, Taken("kill", 150)))
    # Four GB of state, so that its transfer to a new machine takes long enough to be measured.
    heavy = ("--mib=3815",)
    pair = Plan("pair.py", nodes=2, settings={"env": _NCCL}, expects=("all-reduce",))
    return {
        "single": Plan(args=alone, settings=here, take=(first,), ways=True, expects=("train", "fitness")),
        "large": Plan(args=(*train, "--mib=2048", "--hold=60"), take=(first,)),
        "reference": replace(faults, args=train, take=()),
        "faults": faults,
        "gpu": Plan("device.py", settings=_OFTEN, expects=("fitness", "matrix", "copy", "fork")),
        "gpu tests": Plan("tests.py", settings=_ALONE, expects=("tests",)),
        "gpu pair": pair,
        "moved pair": pair,
        "gpu vit": Plan(args=("--batch-size=256", "--steps=300"), nodes=2, folder=VIT, expects=()),
        "gpu reference": Plan(args=(*train, *heavy), nodes=2),
        "gpu faults": replace(faults, args=(*faults.args, *heavy), expects=("train", "segments")),
        "gpu maintenance": Plan(args=(*train, "--hold=60", "--watch"), take=(first,), steady=True),
    }


_OFTEN = {"max_restarts": 0, "snapshot_interval": 10}
# The image lacks what the tests require. One worker runs them, because two tests start two processes on one device.
_ALONE = {
    "procs_per_node": 1,
    "max_restarts": 0,
    "requirements": ["pytest>=8.3", "pytest-asyncio>=0.25", "pytest-timeout>=2.3", "hypothesis>=6.120"],
}
