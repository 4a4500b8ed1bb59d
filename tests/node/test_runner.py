"""How often a node looks at a job's workers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spotrun.node import runner
from spotrun.node.runner import POLL, STANDING_BY, interval
from spotrun.node.workers import STUCK, WorkerGroup, create
from spotrun.state.control import EXIT_DRAINED
from spotrun.wire import Generation, StateRef


def group(path: Path, number: int, **control: int) -> WorkerGroup:
    """A worker that lives: this process."""
    generation = Generation.model_construct(number=number, members=(), store="")
    found = create(generation, 0, 1, path / "control", path / "logs")
    found.started([os.getpid()])
    for name, value in control.items():
        setattr(found.workers[0].control, name, value)
    return found


@pytest.mark.parametrize(
    ("number", "control", "wanted"),
    [
        (3, {}, POLL),
        (3, {"able": 1, "left": EXIT_DRAINED}, POLL),
        (0, {"able": 1}, POLL),
        (0, {"able": 1, "left": EXIT_DRAINED}, STANDING_BY),
    ],
    ids=["in a generation", "between two", "warming up", "warmed up"],
)
def test_only_a_node_that_has_warmed_up_looks_seldom(
    tmp_path: Path, number: int, control: dict[str, int], wanted: float
) -> None:
    found = group(tmp_path, number, **control)
    assert interval(found) == wanted
    found.close()


def test_a_worker_that_cannot_be_ended(tmp_path: Path) -> None:
    """Its process is still there long after the agent has killed it, for example because a GPU does not answer."""
    found = group(tmp_path, 3)
    assert not found.stuck
    found._killed_at = time.monotonic() - STUCK / 2
    assert not found.stuck
    found._killed_at = time.monotonic() - STUCK
    assert found.stuck
    found._exited.set()
    assert found.stuck, "only the launcher is gone"
    found.close()
    assert not found.stuck


def test_nobody_looks_at_workers_that_are_gone(tmp_path: Path) -> None:
    assert interval(None) is None
    found = group(tmp_path, 0)
    found.exited(0, 0)
    found.close()
    assert interval(found) is None


@pytest.mark.parametrize(
    ("phase", "step"),
    [("running", 48), ("drained", 60), ("failed", 60), ("succeeded", 60)],
    ids=lambda value: str(value),
)
def test_the_report_that_workers_have_ended_has_their_newest_snapshot(
    monkeypatch: pytest.MonkeyPatch, phase: str, step: int
) -> None:
    """Also if one of them waits for another generation, and a look at the snapshots was a moment ago."""
    found: Any = runner.Runner.__new__(runner.Runner)
    found.id, found._slots, found._snapshot = "a", Path(), StateRef(generation=1, step=48)
    found._read_slots = (48, time.monotonic())
    monkeypatch.setattr(runner, "newest_snapshot", lambda folder, job: StateRef(generation=1, step=60))
    found._find_snapshot(SimpleNamespace(committed=60, alive=True, regroup="no", phase=phase))
    assert found._snapshot.step == step
