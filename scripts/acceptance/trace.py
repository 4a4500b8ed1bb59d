"""Follows one job of an acceptance: notes when things are first seen, and takes machines meanwhile."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from scripts import control, faults, jobs, logs, report
from scripts.acceptance import ways
from scripts.acceptance.jobs import Plan
from scripts.acceptance.record import Facts
from scripts.control import Status
from scripts.ssh import HEAD, Access
from spotrun.errors import SpotrunError

# The parts of a pause. Each ends at one of the times in an interruption's `phases`.
PARTS = ("noticed and ordered", "forked", "imported", "grouped", "restored", "first step")
_LOGS = 60.0  # seconds for an ended job's last log to reach the bucket
_AGAIN = 0.5
_TRIES = 3  # of SSH to a node, whose server may be busy


@dataclass
class Trace:
    """The results of a job."""

    job: str  # its id
    last: Status = field(default_factory=dict)  # its last status
    marks: dict[str, float] = field(default_factory=dict)  # when something was seen first, epoch seconds
    lines: list[dict[str, Any]] = field(default_factory=list)  # what its probes printed
    taken: list[tuple[str, str]] = field(default_factory=list)  # (kind, node) of the machines that were taken
    nodes: dict[str, float] = field(default_factory=dict)  # when each of the job's machines was first seen
    events: dict[str, None] = field(default_factory=dict)  # the texts of the head's events, in order
    ways: Facts | None = None  # results of SSH to a node; None: it has not worked yet
    ways_error: str = ""  # why SSH to a node failed

    def all(self, probe: str) -> list[dict[str, Any]]:
        """The lines of a probe. Raises `SpotrunError` if there are none."""
        if found := [line for line in self.lines if line["probe"] == probe]:
            return found
        raise SpotrunError(f"job {self.job}: probe {probe!r} printed nothing")

    def said(self, probe: str) -> dict[str, Any]:
        """The newest line of a probe. Raises `SpotrunError` if there is none."""
        return self.all(probe)[-1]

    def interruption(self, kind: str) -> Status:
        """The interruption of that kind, alone or with others. Raises `SpotrunError` if there was none."""
        every: list[Status] = self.last["interruptions"]
        found = next((each for each in every if kind in each["kind"].split("+")), None)
        if found is None:
            seen = ", ".join(each["kind"] for each in self.last["interruptions"]) or "none"
            raise SpotrunError(f"job {self.job}: no interruption of kind {kind} is in its record; others: {seen}")
        return found


class Watch:
    """A `display.Display` that notes times, takes machines, and stops a job that takes too long."""

    def __init__(self, access: Access, plan: Plan, trace: Trace, limit: float) -> None:
        self._access, self._plan, self._trace, self._limit = access, plan, trace, limit
        self._deadline = time.monotonic() + limit
        self._todo = list(plan.take)
        self._tries = 0

    def show(self, status: Status) -> None:
        job, nodes = status["job"], [node for node in status["nodes"] if node["pool"] != HEAD]
        if job is None:
            return
        note(self._trace, job, nodes, time.time())
        self._trace.events |= dict.fromkeys(str(event["text"]) for event in status["events"])
        if time.monotonic() > self._deadline:
            with contextlib.suppress(SpotrunError):
                control.ask(self._access, "stop", "--job", self._trace.job)
            why = job["reason"] or "; ".join(each["text"] for each in job["conditions"] if "text" in each)
            late = f"job {self._trace.job} is {job['phase']} after {self._limit / 60:.0f} min"
            raise SpotrunError(f"{late}: {why or _problems(status)}")
        if job["phase"] != "running" or not job["members"]:
            return
        if self._plan.ways and self._trace.ways is None and self._tries < _TRIES:
            self._try_ways(str(job["members"][0]))
        # A new generation must have begun since the last machine was taken, and must have completed a step.
        taken = len(self._trace.taken)
        if self._todo and job["step"] >= self._todo[0].step and job["generation"] > taken and faults.recovered(job):
            self._take(self._todo[0].kind, status)
            del self._todo[0]

    def say(self, text: str) -> None:
        """Ignore lines that are only for a terminal."""

    def _try_ways(self, node: str) -> None:
        self._tries += 1
        try:
            self._trace.ways = ways.into_node(self._access, node)
            self._trace.ways_error = ""
        except SpotrunError as error:
            self._trace.ways_error = str(error)

    def _take(self, kind: str, status: Status) -> None:
        node = faults.victim(status)
        assert node is not None, status
        self._trace.marks[f"{kind} asked for"] = time.time()
        control.ask(self._access, kind, node)
        self._trace.taken.append((kind, node))


def note(trace: Trace, job: Status, nodes: Iterable[Status], now: float) -> None:
    """Note the time of everything that is seen for the first time."""
    trace.last = job
    for node in nodes:
        trace.nodes.setdefault(node["name"], now)
        for mark, seen in (
            ("listed", True),
            ("running", node["state"] == "running"),
            ("joined", node["phase"] is not None),
            ("fit", node["phase"] not in (None, "checking", "unfit")),
            ("notice seen", node["notice"] is not None),
        ):
            if seen:
                trace.marks.setdefault(mark, now)
    if job["members"]:
        trace.marks.setdefault("chosen", now)
    if job["step"] > 0:
        trace.marks.setdefault("first step", now)


def follow(access: Access, plan: Plan, job: str, limit: float) -> Trace:
    """Follow a job to its end, and read what its probes printed. Raises `SpotrunError` unless the job succeeded.

    limit: seconds for the job, with the boot of its machines.
    """
    trace = Trace(job)
    trace.last = jobs.follow(access, job, Watch(access, plan, trace, limit))["job"]
    if trace.last["phase"] != "succeeded":
        raise SpotrunError(report.report(trace.last))
    deadline = time.monotonic() + _LOGS
    while True:
        trace.lines = read(access, job)
        if set(plan.expects) <= {line["probe"] for line in trace.lines} or time.monotonic() > deadline:
            break
        time.sleep(_AGAIN)
    if len(trace.taken) < len(plan.take):
        raise SpotrunError(f"job {job} ended before {plan.take[len(trace.taken)].kind} could be tried")
    return trace


def read(access: Access, job: str) -> list[dict[str, Any]]:
    """The lines of probes in a job's logs, in the order of generations, with node and rank."""
    found = []
    for log in sorted(logs.every(access.store, job), key=lambda each: (each.generation, each.node, int(each.rank))):
        text = "".join(logs.read(access.store, log.key))
        found += [line | {"node": log.node, "rank": int(log.rank)} for line in map(_parsed, text.splitlines()) if line]
    return found


def _parsed(text: str) -> dict[str, Any]:
    """A line of a probe; empty for any other line."""
    if not text.startswith('{"probe": '):
        return {}
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) and isinstance(line.get("probe"), str) else {}


def boot(trace: Trace) -> Facts:
    """Seconds from the job's submission to each mark."""
    began = float(trace.last["submitted"])
    order = ("listed", "running", "joined", "fit", "chosen", "first step")
    return {f"{mark} after s": round(trace.marks[mark] - began, 2) for mark in order if mark in trace.marks}


def pause(interruption: Status) -> Facts:
    """An interruption's pause by part, in seconds, from the last step before it to the first one after it."""
    facts: Facts = {"steps lost": int(interruption["steps_lost"] or 0)}
    if interruption["seconds"] is not None:
        facts["pause s"] = round(float(interruption["seconds"]), 3)
    times = [float(interruption["at"]), *map(float, interruption["phases"])]
    last = times[0]
    for part, at in zip(PARTS, times[1:], strict=False):
        if at > 0:
            facts[f"{part} s"] = round(max(0.0, at - last), 3)
            last = max(last, at)
    return facts


def _problems(status: Status) -> str:
    found = [f"pool {pool['name']}: {pool['problem']}" for pool in status["pools"] if pool["problem"]]
    return "; ".join(found) or "`make status` may say more"
