"""Run one scenario, from its cluster's start to its end, and collect its problems."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.processes import STANDALONE
from bench.soak import checks
from bench.soak.plan import EPOCHS, LASTING, STEPS, TWOFOLD, Fault, Scenario
from bench.soak.site import JOB, Site
from spotrun.errors import SpotrunError

LONGEST = 600.0  # seconds that a whole job may take; undisturbed it takes about 20
GONE = 120.0  # seconds after a job's end in which its machines must be gone
POLL = 0.05


@dataclass
class Outcome:
    """The result of a scenario.

    problems: a text for each failed check. done: the faults that happened. seconds: from the job's submission to its
    end. interruptions: as the head counts them. lost: steps done again. longest: seconds of the longest wait.
    commit: of spotrun's code; empty if it is unknown.
    """

    scenario: Scenario
    problems: list[str] = field(default_factory=list)
    done: list[Fault] = field(default_factory=list)
    seconds: float = 0.0
    interruptions: int = 0
    lost: int = 0
    longest: float = 0.0
    commit: str = ""


def drive(scenario: Scenario, folder: Path, undisturbed: Callable[[Scenario], str]) -> Outcome:
    """Run a scenario in a folder. Afterwards only files in the folder are left. Raises no `Exception`."""
    outcome = Outcome(scenario)
    site = Site(folder, scenario)
    try:
        site.up()
        _train(site, scenario, outcome)
        outcome.problems += _check(site, scenario, folder / "out", undisturbed)
    except Exception:
        outcome.problems.append(traceback.format_exc())
    finally:
        (folder / "status.json").write_text(json.dumps(site.newest, indent=1))
        try:
            outcome.problems += site.close()
        except Exception:
            outcome.problems.append(traceback.format_exc())
    return outcome


def baseline(scenario: Scenario, folder: Path) -> str:
    """The digest of the undisturbed run, under torchrun, with as many ranks as the job has nodes."""
    folder.mkdir(parents=True)
    launch = [sys.executable, *STANDALONE, f"--nproc-per-node={scenario.most}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launch, str(JOB / scenario.shape.script), *scenario.arguments(str(folder), pause=0.0)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False)
    if ran.returncode:
        raise SpotrunError(f"the undisturbed run failed ({ran.returncode}): {ran.stderr[-4000:]}")
    return _digest(folder)


@dataclass
class _Open:
    """A fault that is undone later, or has a second part. what: what it hit. due: when, in epoch seconds; inf: when the
    generation after `generation` has begun."""

    fault: Fault
    what: str
    due: float
    generation: int

    def is_due(self, site: Site) -> bool:
        if self.due == math.inf and site.generation > self.generation:
            self.due = time.time() + self.fault.seconds
        return time.time() >= self.due


def _train(site: Site, scenario: Scenario, outcome: Outcome) -> None:
    """Submit the job, and cause each fault at its time, until the job has ended."""
    began = time.time()
    site.submit(scenario)
    coming = list(scenario.faults)
    still_open: list[_Open] = []
    excused: list[checks.Span] = []
    while not site.ended and time.time() - began < LONGEST:
        for each in [each for each in still_open if each.is_due(site)]:
            still_open.remove(each)
            site.end(each.fault, each.what)
        if coming and site.newest and _share(site.newest) >= coming[0].at:
            now, generation = time.time(), site.generation
            try:
                what = site.begin(coming[0])
            except SpotrunError:
                time.sleep(POLL)  # no node or no head at the moment: try again soon
                continue
            fault = coming.pop(0)
            outcome.done.append(fault)
            if fault.kind in (*LASTING, *TWOFOLD):
                due = math.inf if fault.kind == "joining" else now + fault.seconds
                still_open.append(_Open(fault, what, due, generation))
                excused.append((now, now + fault.seconds))
        time.sleep(POLL)
    for each in still_open:
        site.end(each.fault, each.what)
    outcome.seconds = time.time() - began
    _note(site, outcome, excused)


def _note(site: Site, outcome: Outcome, excused: list[checks.Span]) -> None:
    job: dict[str, Any] = site.newest.get("job") or {}
    interruptions = job.get("interruptions") or []
    outcome.interruptions = len(interruptions)
    outcome.lost = sum(each["steps_lost"] or 0 for each in interruptions)
    outcome.longest = max((each["seconds"] or 0.0 for each in interruptions), default=0.0)
    if job.get("phase") != "succeeded":
        outcome.problems.append(f"the job is {job.get('phase')}: {job.get('reason')}")
    outcome.problems += checks.check_failures(job.get("restarts") or 0)
    outcome.problems += checks.check_waits(site.beats, excused)


def _check(site: Site, scenario: Scenario, out: Path, undisturbed: Callable[[Scenario], str]) -> list[str]:
    """Check what the job has written, and that its machines go away."""
    if (site.newest.get("job") or {}).get("phase") != "succeeded":
        return []
    lines = [line for path in out.glob("steps-*.jsonl") for line in path.read_text().splitlines()]
    wrong = checks.check_samples([json.loads(line) for line in lines], EPOCHS, scenario.samples)
    if scenario.fixed:
        wrong += checks.check_weights(_digest(out), undisturbed(scenario))
    deadline = time.time() + GONE
    while left := site.machines():
        if time.time() > deadline:
            return [*wrong, f"machines are left {GONE:g} s after the job: {', '.join(left)}"]
        time.sleep(POLL)
    return wrong


def _share(status: dict[str, Any]) -> float:
    return float(status["job"]["step"] or 0) / (STEPS * EPOCHS)


def _digest(folder: Path) -> str:
    return str(json.loads((folder / "final.json").read_text())["digest"])
