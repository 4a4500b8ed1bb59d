"""The workers of one node, which copy sections of a snapshot."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from spotrun.state import slots
from spotrun.train.encoding import decode
from spotrun.train.sections import Place, Section, Sections, place
from spotrun.train.slot_files import Reader
from spotrun.train.snapshot import Writer
from tests.train.blocks import block

State = dict[str, torch.Tensor]
FILES = {"0.safetensors", "0.json", "0.lock", "1.safetensors", "1.json", "1.lock"}


def values(step: int, rank: int) -> State:
    """A state whose first tensors are equal on all ranks."""
    return {
        "weight": torch.full((300,), float(step)),
        "second": torch.arange(300) * 0.5 + step,
        "bias": torch.full((70,), step, dtype=torch.bfloat16),
        "own": torch.full((50,), step * 100 + rank),
        "moment": torch.full((30, 7), step / 3, dtype=torch.float64).t(),
        "empty": torch.zeros(0),
        "flag": torch.tensor(step % 2 == 1),
    }


class Node:
    """The workers of a node in one process. A test lets each of them come to a boundary."""

    def __init__(
        self,
        folder: Path,
        workers: int = 3,
        generation: int = 1,
        stage: Callable[[], Any] = lambda: None,
        device: str = "cpu",
    ) -> None:
        self.folder, self.workers = folder, workers
        self.controls = [block() for _ in range(workers)]
        for control in self.controls:
            control.pid = os.getpid()
        self.states = [{name: each.to(device) for name, each in values(0, rank).items()} for rank in range(workers)]
        self.stages = [stage() for _ in range(workers)]
        self.trouble = ["" for _ in range(workers)]
        self.writer = Writer(
            folder,
            "job",
            generation,
            self.controls[0],
            self.stages[0],
            lambda: self.trouble[0],
            Sections(self.controls[0], self.controls[1:]),
            lambda: self._equal(0),
        )
        self.others = [self._section(rank) for rank in range(1, workers)]

    def _section(self, rank: int) -> Section:
        return Section(
            self.folder,
            (rank, self.workers),
            self.controls[rank],
            self.controls[0],
            lambda encoder: encoder.encode(self.states[rank], "state"),
            lambda: self._equal(rank),
            self.stages[rank],
            lambda: self.trouble[rank],
        )

    def _equal(self, rank: int) -> set[Place]:
        return {place(each) for name, each in self.states[rank].items() if name != "own"}

    def _beside(self, rank: int) -> set[int]:
        return {each.data_ptr() for each in self.states[rank].values()}

    def begin(self, step: int) -> None:
        """All workers end the step, and are at its boundary."""
        for rank, state in enumerate(self.states):
            for name, tensor in values(step, rank).items():
                state[name].copy_(tensor)
            self.controls[rank].step = step

    def other(self, rank: int, step: int, alone: bool = False) -> None:
        """One of the others does everything that must be done at the boundary."""
        section = self.others[rank - 1]
        section.end_step(step, lambda: self._beside(rank), alone)
        if self.stages[rank] is None:
            section.settle()

    def take(self, step: int, wait: bool = True, alone: bool = False) -> bool:
        encode = lambda encoder: encoder.encode(self.states[0], "state")  # noqa: E731
        return self.writer.take(step, encode, self._beside(0), wait, alone)

    def snapshot(self, step: int, alone: bool = False) -> None:
        """One snapshot, in which all workers do what they should."""
        self.begin(step)
        for rank in range(1, self.workers):
            self.other(rank, step, alone)
        assert self.take(step, alone=alone)
        self.writer.settle()

    def warm_up(self) -> None:
        """Two snapshots of the writer alone; then the others have mapped both slots."""
        for step in (1, 2):
            self.begin(step)
            assert self.take(step)
            self.writer.guard()
            self.writer.settle()
            for rank in range(1, self.workers):
                self.other(rank, step)
                self.others[rank - 1].settle()

    def read(self) -> tuple[int, Any]:
        """(step, state) of the newest snapshot, whose data is whole."""
        slot, record = slots.newest(self.folder, "job")[0]
        slots.verify(self.folder, slot, record)
        return record.step, decode(record.state, Reader(self.folder, slot).tensor)

    def check(self, step: int) -> None:
        """The newest snapshot is of this step, and has the writer's state in every byte."""
        found, state = self.read()
        assert found == step
        for name, tensor in values(step, 0).items():
            assert torch.equal(state[name], tensor), name
        assert {path.name for path in self.folder.iterdir()} <= FILES
