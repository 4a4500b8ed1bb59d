"""`make profile` in a worker: it records the steps that were asked for, and never harms training."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scripts import trace_table
from spotrun.state.control import NONE, Context, Control
from spotrun.state.profile import TRACE, Answer, Request
from spotrun.train import profiling
from spotrun.train.profiling import Profiling


class Worker:
    """A training loop that can be asked. Its steps are counted by an operation of their own name."""

    def __init__(self, folder: Path) -> None:
        self.path, self.folder, self.done = folder / "1.0", folder / "answer", 0
        self.folder.mkdir()
        self.control = Control(self.path, create=True)
        context = Context("j", 1, "spot-1", str(self.path), "", "/bucket")
        self.profiling = Profiling(self.control, context, torch.device("cpu"))
        self.model = nn.Linear(4, 4)

    def ask(self, steps: int, seconds: float = 100.0) -> None:
        Request(steps, str(self.folder), time.time() + seconds).write(self.path)
        self.control.profile = steps

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randn(2, 4)).sum().backward()
            self.done += 1
            self.profiling.end_step(self.done)

    @property
    def answer(self) -> Answer | None:
        return Answer.find(self.folder)

    def trace(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / TRACE).read_text()))

    def recorded(self) -> int:
        """How many steps the trace has."""
        return next(row.calls for row in trace_table.processor(self.trace()) if row.name == "aten::randn")


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    found = Worker(tmp_path)
    yield found
    assert not torch.autograd._profiler_enabled()
    found.control.close()


def test_it_records_the_steps_that_were_asked_for(worker: Worker) -> None:
    worker.train(3)
    assert worker.answer is None
    worker.ask(5)
    worker.train(6)  # the first two: to take the request, and to see how large a step is
    assert worker.answer is None
    worker.train(2)
    assert worker.answer == Answer(5, 6, node="spot-1", bucket="/bucket")
    assert worker.recorded() == 5
    assert worker.control.profile == NONE
    (worker.folder / TRACE).unlink()
    worker.train(3)
    assert not (worker.folder / TRACE).exists()


def test_a_trace_that_the_script_records_itself_stays_whole(worker: Worker) -> None:
    with torch.profiler.profile() as own:
        worker.ask(2)
        worker.train(4)
    assert worker.answer is not None
    assert worker.answer.problem == "the script uses torch.profiler itself at the moment; ask again later"
    assert next(each.count for each in own.key_averages() if each.key == "aten::randn") == 4
    worker.ask(2)
    worker.train(5)
    assert worker.recorded() == 2


def test_one_step(worker: Worker) -> None:
    worker.ask(1)
    worker.train(2)
    assert worker.answer == Answer(1, 2, node="spot-1", bucket="/bucket")
    assert worker.recorded() == 1


def test_a_trace_has_a_largest_size(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps with many events, fewer are recorded."""
    worker.ask(1)
    worker.train(2)
    events = len([each for each in worker.trace()["traceEvents"] if each.get("cat") == "cpu_op"])
    monkeypatch.setattr(profiling, "MOST", 4 * events)
    worker.ask(100)
    worker.train(10)
    assert worker.answer is not None
    assert 2 <= worker.answer.steps == worker.recorded() <= 4
    monkeypatch.setattr(profiling, "MOST", events // 2)
    worker.ask(100)
    worker.train(2)
    assert worker.answer.steps == 1


@pytest.mark.parametrize("before", [1, 2, 4])
def test_time_is_up(worker: Worker, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """before: steps until then. The trace has what there is by then."""
    worker.ask(100)
    worker.train(before)
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 1000)
    worker.train(1)
    assert worker.answer is not None
    assert worker.answer.steps == worker.recorded() == max(1, before - 1)


def test_a_request_that_comes_too_late(worker: Worker) -> None:
    worker.ask(5, seconds=-1)
    worker.train(1)
    assert worker.answer is not None
    assert worker.answer.problem.startswith("no step has ended in time")


@pytest.mark.parametrize("before", [1, 2, 4])
def test_the_loop_ends(worker: Worker, before: int) -> None:
    """before: steps until then. What the script does outside of its loop is not recorded."""
    worker.ask(4)
    worker.train(before)
    worker.profiling.end_loop()
    torch.randn(1)
    if before == 4:
        assert worker.answer == Answer(2, 3, node="spot-1", bucket="/bucket")
        assert worker.recorded() == 2
        return
    worker.train(6)  # it begins again in the next loop
    assert worker.answer == Answer(4, before + 3, node="spot-1", bucket="/bucket")
    assert worker.recorded() == 4


def test_the_generation_ends(worker: Worker) -> None:
    """The operator is told at once. The profiler stops at the end of the next step: recovery does not wait."""
    worker.ask(5)
    worker.train(4)
    worker.profiling.drop("a node is gone")
    assert worker.answer == Answer(problem="a node is gone", node="spot-1", bucket="/bucket")
    assert torch.autograd._profiler_enabled()
    worker.train(1)
    assert not torch.autograd._profiler_enabled()
    assert not (worker.folder / TRACE).exists()
    worker.ask(2)
    worker.train(4)
    assert worker.recorded() == 2


def test_a_request_belongs_to_its_generation(worker: Worker) -> None:
    """Of what a worker has in its control block, the seed stays, and a request does not."""
    worker.control.seed = 7
    worker.ask(5)
    worker.control.renew(2)
    assert (worker.control.profile, worker.control.seed) == (NONE, 7)
    worker.train(3)
    assert worker.answer is None


def test_a_newer_request_replaces_an_older_one(worker: Worker) -> None:
    worker.ask(50)
    worker.train(4)
    worker.ask(2)
    worker.train(4)
    assert worker.recorded() == 2


@pytest.mark.parametrize("what", ["request", "folder", "start", "stop"])
def test_an_error_ends_the_profile_and_not_the_training(
    worker: Worker, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no more of this")

    worker.ask(3)
    if what == "request":
        Request.path_for(worker.path).write_text("{")
    elif what == "folder":
        worker.folder.rmdir()
    else:
        with monkeypatch.context() as context:
            context.setattr(torch.profiler.profile, what, fail)
            worker.train(2)
        torch.autograd._disable_profiler() if what == "stop" else None
        assert worker.answer is not None
        assert worker.answer.problem == "the profiler failed: no more of this"
    worker.train(8)
    assert worker.done >= 8
    worker.folder.mkdir(exist_ok=True)
    worker.ask(2)
    worker.train(4)
    assert worker.recorded() == 2


def test_the_table_equals_that_of_torch(tmp_path: Path) -> None:
    """Own times and calls, from the trace alone."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    profiler.export_chrome_trace(str(tmp_path / TRACE))
    rows = trace_table.processor(json.loads((tmp_path / TRACE).read_text()))
    wanted = {each.key: each for each in profiler.key_averages()}
    found = {row.name: row for row in rows}
    assert found.keys() == wanted.keys()
    assert found["aten::randn"].calls == 3
    for name, row in found.items():
        assert row.calls >= wanted[name].count  # torch counts a call within an equal one only once
        assert row.seconds * 1e6 == pytest.approx(wanted[name].self_cpu_time_total, abs=0.1 * row.calls)
