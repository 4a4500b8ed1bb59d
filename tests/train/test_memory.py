"""What a restore costs in memory: eight workers of a node load one state, and none of them copies it first."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spotrun
from spotrun.state import slots
from spotrun.state.control import EXIT_DRAINED, Context, Control
from spotrun.train import sections
from spotrun.train.sections import Section, Sections
from spotrun.train.slot_files import Reader
from spotrun.train.snapshot import Writer
from spotrun.train.training_state import load
from tests.helpers import SLOW
from tests.train.blocks import block, encoding
from tests.train.forks import forked
from tests.train.meeting import meeting

RANKS = 8
STATE = 16 << 20  # bytes


def own_memory() -> int:
    """Bytes of memory that this process has for itself: not what it maps together with others."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) << 10


class Large(nn.Module):
    """Most of it is not trained, so that neither gradients nor an optimizer cost memory."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Parameter(torch.zeros(STATE // 4), requires_grad=False)
        self.trained = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.trained(x)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.loading = own_memory()  # everything that is loaded is there now
        return super().load_state_dict(*args, **kwargs)


def work(environment: dict[str, str], out: str) -> None:
    """Restore, one step, a snapshot; writes how far this process's own memory rose above what it was before."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    run = spotrun.init()
    model = run.ddp(Large(), init_sync=False)
    model.fixed.fill_(1.0)  # has all its pages
    optimizer = torch.optim.SGD(model.trained.parameters(), lr=0.1)
    before = model.module.loading = own_memory()
    run.track(model=model, optimizer=optimizer)
    peak = max(model.module.loading, own_memory())
    value = float(model.fixed.sum() / (STATE // 4))
    for x in run.steps([torch.ones(1, 4)] * 3):
        model.fixed.fill_(2.0)
        run.backward(model(x).sum())
        optimizer.step()
        peak = max(peak, own_memory())
        Path(out).write_text(json.dumps({"rose": peak - before, "fixed": value}))


def launch(folder: Path, ranks: int, stop_at: int) -> list[dict[str, Any]]:
    paths = [str(folder / f"control-{stop_at}-{rank}") for rank in range(ranks)]
    for path in paths:
        Control(Path(path), create=True).stop_at = stop_at
    with meeting(ranks) as group:
        processes = []
        for rank, path in enumerate(paths):
            context = Context("job", stop_at, "a", path, str(folder / "slots"), "", 0, controls=paths)
            ranked = {"RANK": str(rank), "LOCAL_RANK": str(rank), Context.VARIABLE: context.to_env()}
            out = str(folder / f"{rank}.json")
            processes.append(forked.Process(target=work, args=({**group, **ranked}, out), daemon=True))
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(60 * SLOW)
            assert [process.exitcode for process in processes] == [EXIT_DRAINED] * ranks
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def test_eight_workers_restore_without_a_copy_each(tmp_path: Path) -> None:
    launch(tmp_path, 1, 1)
    found = launch(tmp_path, RANKS, 2)
    assert [each["fixed"] for each in found] == [2.0] * RANKS
    rose = [round(each["rose"] / STATE, 2) for each in found]
    # Besides the workers' own models: a small part of the state for each of them, and the two slots, once for all.
    assert max(rose) < 0.5, rose
    files = sum(path.stat().st_size for path in (tmp_path / "slots").glob("*.safetensors"))
    assert files < 2.1 * STATE


def test_a_section_is_copied_without_memory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "MINIMUM", 0)
    state = {f"{index}": torch.ones(STATE // 64) for index in range(16)}
    places = {sections.place(tensor) for tensor in state.values()}
    encode = lambda encoder: encoder.encode(state, "state")  # noqa: E731
    lead, own = block(), block()
    lead.pid = own.pid = os.getpid()
    writer = Writer(tmp_path, "job", 1, lead, sections=Sections(lead, [own]), equal=lambda: places)
    section = Section(tmp_path, (1, 2), own, lead, encode, lambda: places)
    before = own_memory()
    for step in range(1, 7):
        lead.step = own.step = step
        assert writer.take(step, encode, set(), wait=True)
        section.end_step(step, set, alone=False)
        Writer.settle(writer)
        section.settle()
        writer.announce(step + 1, exact=True)
    assert own.section == 6
    assert own_memory() - before < 0.1 * STATE


class Keeping(nn.Module):
    """A module that does as no module should: it keeps what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("large", torch.zeros(10_000))

    def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> Any:
        self._buffers["large"] = state_dict["large"]


class Average:
    """A moving average of one's own; it keeps what it loads, too."""

    def __init__(self) -> None:
        self.large = torch.zeros(10_000)

    def state_dict(self) -> Any:
        return {"large": self.large}

    def load_state_dict(self, state: Any) -> None:
        self.large = state["large"]


@pytest.mark.parametrize("make", [Keeping, Average])
def test_what_keeps_a_loaded_tensor_has_a_copy(tmp_path: Path, make: Any) -> None:
    writer = Writer(tmp_path, "job", 1, block())
    for step in (1, 2, 3):
        state = {"large": torch.full((10_000,), float(step))}
        assert writer.take(step, encoding(state), set(), wait=True)
        writer.settle()
        if step == 1:
            slot, record = slots.newest(tmp_path, "job")[0]
            item = make()
            load(item, record.state, Reader(tmp_path, slot))
    assert set(item.large.tolist()) == {1.0}  # though the slot was written again


def test_an_optimizer_keeps_no_view(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(10_000))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(10_000)
    optimizer.step()
    writer = Writer(tmp_path, "job", 1, block())
    writer.take(1, lambda encoder: encoder.encode(optimizer.state_dict(), "state"), set(), wait=True)
    writer.settle()
    slot, record = slots.newest(tmp_path, "job")[0]
    reader = Reader(tmp_path, slot)
    again = torch.optim.AdamW([parameter])
    load(again, record.state, reader)
    kept = again.state[parameter]
    assert kept["exp_avg"].equal(optimizer.state[parameter]["exp_avg"])
    assert not any(reader.holds(tensor) for tensor in kept.values())
