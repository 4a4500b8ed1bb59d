"""What is measured (scenarios), and what a system under measurement must offer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from bench.phases import Event, Phases
from bench.watch import Watch

NODES = 2
BOOT_DELAY = 1.2  # seconds from an interruption until the replacement begins to start, in every system
NOTICE = 30.0  # seconds from a notice until the node is gone, as on Google Cloud
START_TIMEOUT = 120.0


class BenchError(Exception):
    """A run did not start. The message has the last lines of the logs."""


@dataclass(frozen=True)
class Scenario:
    """One node of two or three is lost, or a third one joins."""

    name: str
    title: str  # as the report calls it
    fault: Literal["kill", "freeze", "notice", "join"]
    nodes: int = NODES  # that train at first
    spares: int = 0  # nodes that stand by
    replaced: bool = False  # whether another machine replaces the lost one
    min_nodes: int = NODES  # nodes that the job may go on with


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("spare", "SIGKILL, a spare stands by", "kill", spares=1),
        Scenario("cold", "SIGKILL, cold replacement", "kill", replaced=True),
        Scenario("shrink", "SIGKILL, no replacement", "kill", min_nodes=1),
        Scenario("three", "SIGKILL of one of three, two go on", "kill", nodes=NODES + 1),
        Scenario("freeze", "frozen (SIGSTOP), a spare stands by", "freeze", spares=1),
        Scenario("notice", "preempted with notice, a spare stands by", "notice", spares=1),
        Scenario("fixed", "preempted with notice, cold replacement", "notice", replaced=True),
        Scenario("join", "a third node joins", "join"),
    )
}


@dataclass(frozen=True)
class Workload:
    """What the job trains. size: a name of SIZES. setup: seconds that the script's set-up takes.

    trainer: whose Trainer the script has; empty: it has none.
    """

    size: str = "1.1M"
    setup: float = 0.0
    trainer: Literal["", "hugging_face", "lightning"] = ""

    @property
    def parameters(self) -> int:
        """Of the model: three linear layers, with their biases (see bench/work.py)."""
        hidden = SIZES[self.size]
        return hidden * hidden + (64 + 1 + 1 + 10) * hidden + 10

    @property
    def env(self) -> dict[str, str]:
        """The variables that bench/work.py reads."""
        return {"BENCH_HIDDEN": str(SIZES[self.size]), "BENCH_SETUP": f"{self.setup:g}"}

    @property
    def large(self) -> bool:
        """Whether a step takes a good part of a second."""
        return self.parameters > 10_000_000


SIZES = {"0.1M": 280, "1.1M": 1024, "25M": 4960, "100M": 9960}  # width of the hidden layers


@dataclass(frozen=True)
class Run:
    """One measured run.

    phases: None if no step followed within the timeout (a hang). usual: seconds of a step before the fault; None: not
    known. steps: when the nodes that are not lost completed steps, in seconds since the fault, the nodes together.
    """

    system: str
    scenario: str
    phases: Phases | None
    workload: Workload = Workload()
    usual: float | None = None
    steps: tuple[float, ...] = ()


class System(Protocol):
    """One way to run the job, for one run. `folder` is empty at first, and is deleted after the run."""

    name: str

    def start(self, scenario: Scenario, workload: Workload, folder: Path, watch: Watch) -> None:
        """Bring up the scenario's nodes and its spares and start the job, whose workers write to `watch.path`.

        Returns when the job steps on all nodes and the spares are ready. Raises `BenchError`.
        """

    def fault(self, scenario: Scenario) -> tuple[float, str]:
        """Do to one node what the scenario says. Returns when (epoch seconds), and the node's name in the events."""

    def tick(self) -> None:
        """Do what is due, such as start the replacement. It is called repeatedly after the fault."""

    def close(self) -> None:
        """End everything. Also called after an error, or twice."""


def stepping(events: list[Event], nodes: int = NODES, steps: int = 1) -> bool:
    """Whether workers on `nodes` different nodes have each completed `steps` steps."""
    return len({event.node for event in events if event.name == "step" and event.step >= steps}) >= nodes
