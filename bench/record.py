"""Measured runs in a file, one JSON object in a line, so that rows measured at different times make one report."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from bench.phases import Phases
from bench.systems import Run, Workload


def append(path: Path, run: Run) -> None:
    """Add a run to the file."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(run)) + "\n")


def read(path: Path) -> list[Run]:
    """All runs in the file."""
    return [_parse(line) for line in path.read_text().splitlines()] if path.exists() else []


def _parse(line: str) -> Run:
    fields = json.loads(line)
    fields["phases"] = Phases(**fields["phases"]) if fields["phases"] else None
    fields["workload"] = Workload(**fields["workload"])
    return Run(**fields | {"steps": tuple(fields.get("steps", ()))})
