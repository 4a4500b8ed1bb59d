"""Machines that a demonstration takes away along the way: `preempt@25%,kill@120`. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from spotrun.errors import SpotrunError

KINDS = {"preempt": "preempt with notice", "kill": "hard kill, no notice"}
DEMO = "preempt@25%,kill@60%"


@dataclass(frozen=True)
class Fault:
    """Take a node once the job is at `at`: a step, or a share of all steps if `share`."""

    kind: str
    at: float
    share: bool = False

    def __str__(self) -> str:
        """kill@120, kill@60%"""
        return f"{self.kind}@{self.at * 100:g}%" if self.share else f"{self.kind}@{self.at:g}"


def parse(text: str) -> list[Fault]:
    """The faults, in the order in which they are due. Raises `SpotrunError`."""
    if text.strip().lower() in ("", "none"):
        return []
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*([a-z]+)@([0-9]+(?:\.[0-9]+)?)(%?)\s*", word)
        if match is None or match[1] not in KINDS or (match[3] and float(match[2]) > 100):
            raise SpotrunError(
                f"FAULTS: {word.strip()!r}: allowed: kind@step or kind@share% with kind {' or '.join(KINDS)}, separated"
                " by commas, such as preempt@25%,kill@120; or none"
            )
        found.append(Fault(match[1], float(match[2]) / (100 if match[3] else 1), bool(match[3])))
    return found


def due(faults: list[Fault], job: dict[str, Any], generation: int) -> Fault | None:
    """The next fault, if it is time for it. generation: the one that the last fault hit; a newer one must train now."""
    if not faults or job["phase"] != "running" or job["generation"] <= generation or not recovered(job):
        return None
    first, total = faults[0], job["total_steps"]
    if first.share and total <= 0:  # the job's length is not known yet
        return None
    return first if job["step"] >= first.at * (total if first.share else 1) else None


def recovered(job: dict[str, Any]) -> bool:
    """Whether a step has been completed since the last interruption. Until then, another one would merge with it."""
    interruptions = job["interruptions"]
    return not interruptions or interruptions[-1]["seconds"] is not None


def victim(status: dict[str, Any]) -> str | None:
    """The node to take: the last one of the generation, by rank."""
    members = (status["job"] or {}).get("members") or []
    if members:
        return str(members[-1])
    running = [node["name"] for node in status["nodes"] if node["phase"] == "running"]
    return running[-1] if running else None
