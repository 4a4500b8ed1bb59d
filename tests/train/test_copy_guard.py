"""A snapshot that is copied beside training is whole, or it is dropped. The GPU is played by a stage on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import spotrun
from spotrun.state import slots
from spotrun.state.control import Context, Control
from spotrun.train import failures, schedule
from spotrun.train.encoding import decode
from spotrun.train.slot_files import Reader
from spotrun.train.snapshot import Writer
from spotrun.train.staging import Staging
from tests.train.blocks import block
from tests.train.late import Late


def read(folder: Path) -> tuple[int, Any]:
    """(step, state) of the newest snapshot."""
    slot, record = slots.newest(folder, "job")[0]
    slots.verify(folder, slot, record)
    return record.step, decode(record.state, Reader(folder, slot).tensor)


def take(writer: Writer, step: int, tensor: torch.Tensor, wait: bool = False) -> None:
    pointers = {tensor.data_ptr()}
    assert writer.take(step, lambda encoder: encoder.encode({"x": tensor}, "state"), pointers, wait)


def test_what_changes_after_the_guard_is_in_no_snapshot(tmp_path: Path) -> None:
    x, writer = torch.ones(4), Writer(tmp_path, "job", 1, block(), stage=Late())
    take(writer, 1, x)
    writer.guard()
    x.fill_(2)
    writer.settle()
    step, state = read(tmp_path)
    assert (step, state["x"].tolist()) == (1, [1] * 4)


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded later", "never guarded"])
def test_a_change_before_the_guard_drops_the_snapshot(
    tmp_path: Path, guarded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Late()
    control = Control(tmp_path / "control", create=True)
    x, writer = torch.ones(4), Writer(tmp_path / "slots", "job", 1, control, stage)
    take(writer, 1, x)
    writer.guard()
    take(writer, 2, x, wait=True)
    x.fill_(3)
    if guarded:
        writer.guard()
    else:
        stage.arrive()
    writer.settle()
    assert read(tmp_path / "slots")[0] == 1
    assert (control.copied, control.committed, writer.newest_step) == (1, 1, 1)
    assert "the snapshot of step 2 is dropped: state.x changed during the copy" in caplog.text
    assert writer.dropped
    take(writer, 4, x)  # what has changed early once is not copied beside training again
    assert not writer.dropped
    x.fill_(5)
    writer.settle()
    step, state = read(tmp_path / "slots")
    assert (step, state["x"].tolist()) == (4, [3] * 4)
    assert stage.beside == [16, 16, 0]


def test_a_tensor_without_versions_is_copied_first(tmp_path: Path) -> None:
    stage = Late()
    with torch.inference_mode():
        x, writer = torch.ones(4), Writer(tmp_path, "job", 1, block(), stage=stage)
        take(writer, 1, x)
        x.fill_(2)
    writer.settle()
    assert read(tmp_path)[1]["x"].tolist() == [1] * 4
    assert stage.beside == [0]


def test_what_the_device_waits_counts_as_stall(tmp_path: Path) -> None:
    stage = Late()
    stage.seconds = None
    control = Control(tmp_path / "control", create=True)
    x, writer = torch.ones(4), Writer(tmp_path / "slots", "job", 1, control, stage)
    for step in (1, 2):
        stage.seconds = 300.0
        take(writer, step, x, wait=True)
        writer.guard()
        assert writer.stall() == 0  # the first few are taken whatever they cost
    stage.seconds = None
    take(writer, 3, x, wait=True)
    writer.guard()
    on_host = control.stall
    assert writer.stall() is None  # the device has not come to the guard
    stage.seconds = 100.0
    for _ in range(2):
        found = writer.stall()
        assert found is not None
        assert 100 < found < 300  # the least of the last ones
        assert control.stall == pytest.approx(on_host + 100)


# One worker, in this process.


class Job:
    """A training script that looks at its snapshots."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.run = spotrun.init()
        self.model = self.run.ddp(nn.Linear(1, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.run.track(model=self.model, optimizer=self.optimizer)
        self.loader: DataLoader[torch.Tensor] = DataLoader(torch.arange(6.0).reshape(6, 1))  # type: ignore[arg-type]
        self.truth: dict[int, torch.Tensor] = {}  # by step: the weight at its boundary

    def step(self, x: torch.Tensor) -> None:
        self.run.backward(self.model(x).pow(2).mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def keep(self) -> None:
        """Call at the end of a step's body."""
        self.truth[self.run.step + 1] = self.model.module.weight.detach().cpu().clone()

    def look(self, folder: Path) -> int:
        """The newest snapshot's step; its weight is that step's."""
        assert self.run._boundary.snapshots.writer is not None
        self.run._boundary.snapshots.writer.settle()
        step, state = read(folder)
        assert torch.equal(state["objects"]["model"]["weight"], self.truth[step])
        return step


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Late:
    stage = Late()
    monkeypatch.setattr(schedule, "stage_for", lambda device: stage)
    return stage


@pytest.fixture
def folder(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    Control(memory / "control", create=True).close()
    context = Context("job", 1, "n", str(memory / "control"), str(memory / "slots"), "", 1)
    monkeypatch.setenv(Context.VARIABLE, context.to_env())
    yield memory / "slots"
    for settle in failures._settlers:  # otherwise a thread may write into the folder when it is gone
        with suppress(Exception):
            settle()


def test_what_the_device_waits_makes_snapshots_rarer(
    folder: Path, stage: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies delay the device for as long as a thousand steps take, and the host does not notice."""
    context = Context.from_env()
    assert context is not None
    monkeypatch.setenv(Context.VARIABLE, dataclasses.replace(context, snapshot_interval=0).to_env())
    stage.seconds = 1000.0
    job = Job()
    for x in job.run.steps(job.loader):
        job.step(x)
        assert job.run._boundary.snapshots.writer is not None
        job.run._boundary.snapshots.writer.settle()  # or the next one would not be taken
        job.keep()
    assert job.look(folder) == 3
    assert 3000 < Control(Path(context.control)).stall < 4000  # what the agent reports


def swap(job: Job) -> None:
    """Weights of a moving average, for an evaluation, and back."""
    own = {name: value.clone() for name, value in job.model.state_dict().items()}
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.zero_()
    job.model.load_state_dict(own)


def load(job: Job) -> None:
    job.model.load_state_dict({name: value * 2 for name, value in job.model.state_dict().items()})


def clamp(job: Job) -> None:
    with torch.no_grad():
        job.model.module.weight.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("change", [swap, load, clamp])
def test_a_change_before_the_forward_pass_costs_one_snapshot(
    folder: Path, stage: Late, change: Callable[[Job], None], caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()
    found = []
    for x in job.run.steps(job.loader):
        if job.run.step == 3:
            change(job)
        job.step(x)
        if job.truth:
            found.append(job.look(folder))
        job.keep()
    assert found == [1, 2, 2, 4, 5]
    assert caplog.text.count("is dropped") == 1
    state = 2 * 4 + 2 * 4  # weight, bias and their momenta
    assert stage.beside[:3] == [state] * 3
    assert all(0 < late < state for late in stage.beside[3:5])


def test_a_change_after_the_backward_pass_or_the_loop_costs_none(folder: Path, stage: Late) -> None:
    job = Job()
    for x in job.run.steps(job.loader):
        job.run.backward(job.model(x).pow(2).mean())
        with torch.no_grad():  # an optimizer that nobody knows
            for parameter in job.model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1).clamp_(-1, 1)
        job.optimizer.step()
        job.keep()
    load(job)
    assert job.look(folder) == 6
    assert stage.beside == [16] * 6


def test_a_loop_left_early_is_guarded_too(folder: Path, stage: Late) -> None:
    job = Job()
    for x in job.run.steps(job.loader):
        if job.run.step == 2:
            break
        job.step(x)
        job.keep()
    load(job)
    assert job.look(folder) == 2


def test_an_optimizer_in_a_graph_is_not_trusted(folder: Path, stage: Late) -> None:
    """Its step was recorded once; from then on neither hooks nor versions tell when it changes the weights."""
    job = Job()
    for x in job.run.steps(job.loader):
        stage.graph = job.run.step == 2
        job.step(x)
        if stage.graph:
            stage.arrive()
            assert job.run._boundary.snapshots.writer is not None
            job.run._boundary.snapshots.writer.settle()
            assert read(folder)[0] == 1  # that of step 2 was in flight
        stage.graph = False
        job.keep()
    assert job.look(folder) == 6
    assert stage.beside == [16, 16, 0, 0, 0, 0]


def test_steps_without_a_guard_are_not_trusted(folder: Path, stage: Late) -> None:
    job = Job()
    for x in job.run.steps(job.loader):
        job.model(x).pow(2).mean().backward()
        for parameter in job.model.parameters():
            parameter.data -= 0.1 * parameter.grad  # type: ignore[operator]
        job.keep()
    assert job.look(folder) == 6
    assert stage.beside == [0] * 6


# On a device.


@pytest.mark.gpu
def test_cuda_a_change_before_the_guard_drops_the_snapshot(memory: Path) -> None:
    writer = Writer(memory, "job", 1, block(), stage=Staging(torch.device("cuda", 0)))
    x = torch.ones(50_000_000, device="cuda")
    take(writer, 1, x, wait=True)
    writer.guard()
    take(writer, 2, x, wait=True)
    x.fill_(-1)
    writer.guard()
    writer.settle()
    assert read(memory)[0] == 1
    take(writer, 3, x, wait=True)
    x.fill_(-2)
    writer.settle()
    step, state = read(memory)
    assert step == 3
    assert (state["x"] == -1).all()


@pytest.mark.gpu
def test_cuda_the_wait_at_the_guard_is_measured(memory: Path) -> None:
    writer = Writer(memory, "job", 1, block(), stage=Staging(torch.device("cuda", 0)))
    x = torch.ones(250_000_000, device="cuda")
    for step in (1, 2, 3):  # the delays of the last three count, and at first they are 0
        take(writer, step, x, wait=True)
        writer.guard()  # at once: the current stream waits for all of the copy
        x.add_(1)
        writer.settle()
    torch.cuda.synchronize()
    found = writer.stall()
    assert found is not None
    assert found > x.nbytes / 500e9  # no link to a host is that fast


@pytest.mark.gpu
def test_cuda_a_captured_step_changes_no_snapshot(folder: Path) -> None:
    """The graph is recorded in the loop, and replayed without a hook, a guard or a new version."""
    job = Job()
    graph = torch.cuda.CUDAGraph()
    still = torch.zeros(1, 1, device="cuda")
    for x in job.run.steps(job.loader):
        still.copy_(x)
        if job.run.step < 3:
            job.step(still)
        else:
            if job.run.step == 3:
                job.optimizer.zero_grad()
                assert job.run._boundary.snapshots.writer is not None
                # Its thread may wait for no event while a graph is recorded.
                job.run._boundary.snapshots.writer.settle()
                with torch.cuda.graph(graph):
                    job.step(still)
            graph.replay()
        job.keep()
    assert job.look(folder) == 6
