"""What the task `run` does: one shell command on many nodes, with their output as it comes."""

from __future__ import annotations

from typing import Any

from scripts import console, control, report, ssh
from scripts.make_command import make_command
from scripts.ssh import Access, Outcome
from spotrun.errors import SpotrunError
from spotrun.text import clean

_KEYS = ("node", "code", "output", "left_out")  # what a program gets of each outcome


def check(command: str, cluster: str) -> None:
    """Raise `SpotrunError` if there is no command. cluster: the cluster file, for the example."""
    if not command.strip():
        example = make_command(cluster, "run", "CMD='nvidia-smi -L'")
        raise SpotrunError(f"run: no command; for example: {example}")


def run(access: Access, node: str, command: str, patience: float, json: bool) -> int:
    """Run a command on one node, or on all that run now if `node` is empty. Returns the exit status.

    patience: seconds that the command may take. Raises `SpotrunError`, for example if there are no nodes.
    """
    nodes = [node] if node else [each["name"] for each in control.ask(access, "status")["nodes"] if _reachable(each)]
    if not nodes:
        raise SpotrunError("run: the cluster has no nodes now; they come with a job. NODE=head is always there")
    outcomes: list[Outcome] = []

    def show(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if json:
            console.answer({key: getattr(outcome, key) for key in _KEYS})
        elif not outcome.reached or not outcome.output:
            _say(outcome.node, outcome.output or f"(exit status {outcome.code})")

    try:
        if ssh.run(access, nodes, command, patience, show, (lambda *_: None) if json else _say):
            return 0
    except KeyboardInterrupt:
        console.warn(f"\nspotrun: run: interrupted; the command may still run there, for at most {patience:g} s")
        return 130
    failed = [each for each in outcomes if each.code]
    console.warn(f"spotrun: run: {report.failures(failed, len(nodes))}")
    return 1 if any(each.reached for each in failed) else 3


def _say(node: str, text: str) -> None:
    for line in clean(text).splitlines():
        console.say(f"{node}: {line}")


def _reachable(node: dict[str, Any]) -> bool:
    return bool(node["state"] == "running" and node["pool"] != ssh.HEAD)
