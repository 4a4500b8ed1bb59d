"""The workers of a node copy a snapshot together: it has the bytes that one worker would copy, or no record."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from spotrun.state import slots
from spotrun.state.control import NONE, Control
from spotrun.train import sections, snapshot
from spotrun.train.encoding import decode
from spotrun.train.parallel import Parallel
from spotrun.train.sections import Plan, Section, Sections, equal_tensors, place
from spotrun.train.slot_files import Reader, map_file
from spotrun.train.snapshot import Writer
from spotrun.train.staging import Staging
from tests.helpers import wait_for
from tests.train.blocks import block
from tests.train.forks import forked
from tests.train.late import Late
from tests.train.section_node import FILES, Node


@pytest.fixture(autouse=True)
def _share_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "MINIMUM", 0)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    found = Node(tmp_path / "slots")
    found.warm_up()
    return found


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=12), st.integers(1, 9))
def test_each_tensor_has_one_worker(tensors: list[tuple[int, bool]], workers: int) -> None:
    state = {f"{index}": torch.zeros(size) for index, (size, _) in enumerate(tensors)}
    plan = dataclasses.replace(
        Plan.of(state, set()), equal=frozenset(f"{index}" for index, (_, equal) in enumerate(tensors) if equal)
    )
    found = [plan.section(index, workers) for index in range(workers)]
    assert sorted(name for names in found for name in names) == sorted(plan.equal)
    sizes = [sum(state[name].nbytes for name in names) for names in found]
    assert max(sizes) <= sum(sizes) / workers + max((each.nbytes for each in state.values()), default=0)


def test_a_shared_snapshot_has_the_bytes_of_one_copied_alone(node: Node, tmp_path: Path) -> None:
    alone = Writer(tmp_path / "alone", "job", 1, block())
    for step in (4, 5, 6):
        assert node.writer.announce(step, exact=True)
        node.snapshot(step)
        assert [each.section for each in node.controls[1:]] == [step, step]
        assert alone.take(step, lambda encoder: encoder.encode(node.states[0], "state"), set(), wait=True)
        alone.settle()
        node.check(step)
        same = [slots.newest(folder, "job")[0][1].xxh3 for folder in (node.folder, tmp_path / "alone")]
        assert same[0] == same[1]
        assert node.controls[0].copied == node.controls[0].committed == step
        assert node.controls[1].committed == NONE


def test_a_generation_that_begins_at_an_earlier_step(node: Node) -> None:
    """The copy under way was of a step that does not count. Later snapshots are copied together again."""
    node.begin(49)
    assert node.writer.announce(50, exact=True)
    node.begin(50)
    for rank in range(1, node.workers):
        node.other(rank, 50)
    node.writer.settle()
    for each in node.others:
        each.settle()
    for control in node.controls:
        control.renew(2)
        control.step = 40
    node.writer.renew(2)
    for each in node.others:
        each.renew()
    node.begin(44)
    assert node.writer.announce(45, exact=True)
    node.snapshot(45)
    node.check(45)
    assert [each.section for each in node.controls[1:]] == [45, 45]


def test_each_worker_copies_its_section_only(node: Node) -> None:
    """What is not equal on all ranks is the writer's."""
    own = [set(each._slots[0].file.views) for each in node.others]
    assert own[0] | own[1] < {f"state.{name}" for name in node.states[0]}
    assert not own[0] & own[1]
    assert "state.own" not in own[0] | own[1]
    assert all(own)


def test_an_announced_slot_has_no_record_and_is_locked(node: Node) -> None:
    newest = slots.newest(node.folder, "job")[0][0]
    assert node.writer.announce(4, exact=True)
    assert [slot for slot, _ in slots.newest(node.folder, "job")] == [newest]
    with slots.writing(node.folder, 1 - newest) as free:
        assert not free
    node.writer.settle()  # a loader's worker may be forked now
    with slots.writing(node.folder, 1 - newest) as free:
        assert free
    node.snapshot(4)
    node.check(4)
    assert node.controls[1].section == NONE


@pytest.mark.parametrize("answer", ["late", "frozen", "of an older step"])
def test_a_missing_section_drops_the_snapshot(node: Node, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if answer != "late":
        monkeypatch.setattr(snapshot, "PATIENCE", 0.1)
    if answer == "of an older step":
        assert node.writer.announce(4, exact=True)
        node.snapshot(4)
    assert node.writer.announce(5, exact=True)
    node.begin(5)
    node.other(1, 5)
    assert node.take(5)
    if answer == "late":
        node.begin(6)
        node.other(2, 6)
    node.writer.settle()
    assert node.writer.dropped
    node.check(4 if answer == "of an older step" else 2)
    assert node.controls[0].begun == node.controls[0].committed
    for step in (7, 8):  # and the next ones are whole
        assert node.writer.announce(step, exact=True)
        node.snapshot(step)
        node.check(step)


def test_a_step_that_a_worker_has_passed_is_not_announced(node: Node) -> None:
    node.controls[2].step = 9
    assert not node.writer.announce(8, exact=True)
    assert node.controls[0].shared_step == NONE
    assert node.writer.announce(8, exact=False)
    assert node.writer.announced == 10


def test_a_worker_that_ends_drops_the_snapshot(tmp_path: Path) -> None:
    node = Node(tmp_path, 2)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    node.controls[1].pid = process.pid
    node.writer._sections = Sections(node.controls[0], node.controls[1:])
    node.warm_up()
    assert node.writer.announce(4, exact=True)
    node.begin(4)
    assert node.take(4)
    process.kill()
    process.wait()
    node.writer.settle()  # without its patience, though the worker said nothing
    node.check(2)


def test_snapshots_are_copied_alone_after_three_failures(node: Node) -> None:
    for step in (4, 5, 6):
        assert node.writer.announce(step, exact=True)
        node.begin(step)
        node.other(1, step)
        node.other(2, step, alone=True)
        assert node.take(step)
        node.writer.settle()
        node.check(2)
    assert not node.writer.announce(7, exact=True)
    node.snapshot(7)
    node.check(7)


def test_trouble_in_one_worker_drops_the_snapshot(node: Node) -> None:
    node.trouble[1] = "a process group was aborted"
    assert node.writer.announce(4, exact=True)
    node.begin(4)
    with pytest.raises(dist.DistBackendError, match="no snapshot of step 4: a process group was aborted"):
        node.other(1, 4)
    node.other(2, 4)
    assert node.take(4)
    node.writer.settle()
    node.check(2)


def test_a_copy_that_failed_does_not_reach_the_next_generation(tmp_path: Path) -> None:
    """A worker on a GPU whose copy was queued behind an aborted collective goes on."""
    node = Node(tmp_path, 2, stage=Late)
    node.warm_up()
    (rank_1,) = node.others
    assert node.writer.announce(4, exact=True)
    node.begin(4)
    node.trouble[1] = "a process group was aborted"
    node.other(1, 4)
    rank_1.guard()
    with pytest.raises(dist.DistBackendError, match="a process group was aborted"):
        rank_1.settle()
    rank_1.renew()
    rank_1.settle()


def test_a_worker_that_will_not_end_the_announced_step_says_so(node: Node) -> None:
    """The writer does not wait for its section."""
    assert node.writer.announce(4, exact=True)
    node.begin(4)
    node.others[0].refuse()
    node.other(2, 4)
    assert node.take(4)
    node.writer.settle()
    node.check(2)
    assert node.controls[1].refused == 4


def test_a_drain_does_not_wait_for_the_others(node: Node) -> None:
    inode = [slots.data_path(node.folder, slot).stat().st_ino for slot in slots.SLOTS]
    assert node.writer.announce(4, exact=True)
    node.begin(4)
    node.other(1, 4, alone=True)
    assert node.take(4, alone=True)
    node.writer.settle()
    node.check(4)
    assert inode == [slots.data_path(node.folder, slot).stat().st_ino for slot in slots.SLOTS]


def test_a_tensor_that_changes_early_costs_one_snapshot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = Node(tmp_path, 2, stage=Late)
    node.warm_up()
    rank_1 = node.others[0]
    torn = next(iter(rank_1._slots[0].file.views)).removeprefix("state.")
    for step in (4, 5):
        assert node.writer.announce(step, exact=True)
        node.begin(step)
        node.other(1, step)
        assert node.take(step)
        if step == 4:
            node.states[1][torn].zero_()
        rank_1.guard()
        node.writer.guard()
        node.writer.settle()
        rank_1.settle()
    assert caplog.text.count(f"the snapshot of step 4 is dropped: state.{torn} changed during the copy") == 1
    node.check(5)
    assert node.stages[1].beside[1] == node.stages[1].beside[0] - node.states[1][torn].nbytes


@pytest.mark.gpu
def test_cuda_workers_copy_together(memory: Path) -> None:
    node = Node(memory, 2, stage=lambda: Staging(torch.device("cuda", 0)), device="cuda")
    node.warm_up()
    for step in (4, 5, 6):
        assert node.writer.announce(step, exact=True)
        node.begin(step)
        node.other(1, step)
        assert node.take(step)
        for each in (node.others[0], node.writer):
            each.guard()
        for state in node.states:
            for tensor in state.values():
                tensor.zero_()
        node.writer.settle()
        node.others[0].settle()
        assert node.controls[1].section == step
        node.check(step)


def test_a_slot_in_which_another_worker_writes_gets_a_new_file(node: Node) -> None:
    target = 1 - slots.newest(node.folder, "job")[0][0]
    path = slots.data_path(node.folder, target)
    before = path.stat().st_ino
    late = node.others[0]._slots[target].file.views
    with ExitStack() as held:
        assert held.enter_context(slots.filling(node.folder, target, alone=False))
        node.begin(4)
        assert not node.take(4, wait=False)
        assert node.take(4, wait=True)
        for view in late.values():
            view.zero_()
    node.writer.settle()
    assert path.stat().st_ino != before
    node.check(4)
    for step in (5, 6, 7, 8):
        node.writer.announce(step, exact=True)
        node.snapshot(step)
        for rank in (1, 2):
            node.other(rank, step + 1)
        node.check(step)
    assert node.controls[1].section == 8  # the others have mapped the new file


def test_a_worker_of_an_older_generation_copies_nothing(node: Node) -> None:
    """Its writer was killed when it had announced a step. It was suspended, and comes to that step now."""
    assert node.writer.announce(4, exact=True)
    node.writer._shared.held.close()  # type: ignore[union-attr]  # as the kernel does when it is killed
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    node.controls[0].pid = process.pid
    old = node.others[0]
    old._writer = sections._Process(process.pid)
    new = Node(node.folder, generation=2)
    new.snapshot(4)
    node.begin(9)
    node.controls[0].shared_step = 9
    node.other(1, 9)
    assert node.controls[1].refused == 9
    new.check(4)


def test_a_file_that_is_written_by_another_process_is_not_used_again(tmp_path: Path) -> None:
    path = slots.data_path(tmp_path, 0)
    old = map_file(path, 1000)
    with slots.filling(tmp_path, 0, alone=False):
        new = map_file(path, 1000)
    again = map_file(path, 1000)
    old[:3], new[:3] = b"old", b"new"
    assert again[:3] == b"new"


def snapshot_together_for_ever(folder: str, rank: int) -> None:
    """One of two workers that take a snapshot at every other step, until it or the other one is killed."""
    torch.set_num_threads(1)
    sections.MINIMUM = 0
    controls = [Control(Path(folder) / f"control-{each}") for each in (0, 1)]
    own, other, place_of = controls[rank], controls[1 - rank], Path(folder) / "slots"
    tensors = [torch.zeros(50_000) for _ in range(6)]
    encode = lambda encoder: encoder.encode(tensors, "state")  # noqa: E731
    equal = lambda: {place(tensor) for tensor in tensors}  # noqa: E731
    own.pid = os.getpid()
    wait_for(lambda: other.pid > 0, what="the other worker")
    writer = Writer(place_of, "job", own.generation, own, sections=Sections(own, [other]), equal=equal)
    section = Section(place_of, (rank, 2), own, controls[0], encode, equal)
    found = slots.newest(place_of, "job")
    step = found[0][1].step if found else 0
    while True:
        step += 1
        for tensor in tensors:
            tensor.fill_(step)
        own.step = step
        while other.step < step:  # as an exchange of gradients; the test kills this process
            time.sleep(1e-4)
        if rank > 0:
            section.end_step(step, set, alone=False)
        elif step % 2 or not writer.announce(step + 1, exact=True):
            writer.take(step, encode, set(), wait=False)


def test_workers_killed_at_any_moment_leave_a_whole_snapshot(tmp_path: Path) -> None:
    random.seed(2)
    last = 0
    for generation in range(1, 10):
        controls = [Control(tmp_path / f"control-{rank}", create=True) for rank in (0, 1)]
        for control in controls:
            control.generation = generation
            control.pid = 0
        processes = [
            forked.Process(target=snapshot_together_for_ever, args=(str(tmp_path), rank), daemon=True)
            for rank in (0, 1)
        ]
        for process in processes:
            process.start()
        target = last + random.randint(10, 60)
        try:
            wait_for(lambda: controls[0].committed >= target, what=f"a snapshot of step {target}")  # noqa: B023
            wait_for(lambda: controls[1].section != NONE, what="a shared snapshot")  # noqa: B023
        finally:
            for process in random.sample(processes, 2):
                process.kill()
            for process in processes:
                process.join()
        slot, record = slots.newest(tmp_path / "slots", "job")[0]
        slots.verify(tmp_path / "slots", slot, record)
        values = decode(record.state, Reader(tmp_path / "slots", slot).tensor)
        assert all((tensor == record.step).all() for tensor in values)
        assert record.step >= target
        last = record.step
        assert {path.name for path in (tmp_path / "slots").iterdir()} <= FILES | {"0.part", "1.part"}


def test_a_small_state_is_copied_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "MINIMUM", 1 << 20)
    node = Node(tmp_path)
    node.warm_up()
    assert not node.writer.announce(4, exact=True)
    assert node.controls[1].layout_0 == NONE


def test_workers_with_other_tensors_copy_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.states[2]["more"] = torch.zeros(3)
    node.warm_up()
    assert not node.writer.announce(4, exact=True)
    assert node.controls[1].layout_0 != NONE
    assert node.controls[2].layout_0 == NONE


def test_shapes_that_change_are_shared_again(node: Node) -> None:
    assert node.writer.announce(4, exact=True)
    for state in node.states:
        state["weight"] = torch.zeros(500)
    for rank, state in enumerate(node.states):
        node.controls[rank].step = 4
        state["weight"].fill_(4)
    for rank in (1, 2):
        node.other(rank, 4)
    assert node.controls[1].refused == 4
    assert node.take(4)
    node.writer.settle()
    assert node.read()[1]["weight"].tolist() == [4.0] * 500
    for step in range(5, 9):
        node.writer.announce(step, exact=True)
        for rank in (1, 2):
            node.other(rank, step)
        assert node.take(step)
        node.writer.settle()
        for rank in (1, 2):
            node.other(rank, step)
    assert node.controls[1].section == 8


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        ("", ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ("frozen", ["0.weight", "2.weight", "2.bias"]),
        ("ignored", ["0.weight", "2.weight", "2.bias"]),
        ("hook", []),
        ("not synchronized", []),
        ("no_sync", []),
    ],
)
def test_what_is_equal_is_what_ddp_keeps_equal(change: str, equal: list[str]) -> None:
    """Neither buffers, nor what is tracked beside the model: only the writer copies them."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    net[1].requires_grad_(False)
    if change == "frozen":
        net[0].bias.requires_grad_(False)
    if change == "ignored":
        net._ddp_params_and_buffers_to_ignore = ["0.bias"]  # type: ignore[assignment]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Parallel(net, torch.device("cpu"), **({"init_sync": False} if change == "not synchronized" else {}))
        model.__dict__["_ddp"] = nn.parallel.DistributedDataParallel(net)  # as where there are more workers
        if change == "hook":
            model.register_comm_hook(None, allreduce_hook)
        if change == "no_sync":
            with model.no_sync():
                pass
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        found = equal_tensors([model], [optimizer])
        # DDP must not end the process group: it waits for gloo's threads, which may wait for the interpreter's lock.
        del model
    finally:
        dist.destroy_process_group()
    named = dict(net.named_parameters()) | dict(net.named_buffers())
    assert [name for name, tensor in named.items() if place(tensor) in found] == equal
    moments = [name for name in equal if place(optimizer.state[named[name]]["exp_avg"]) in found]
    assert moments == equal
    assert len(found) == 4 * len(equal)  # with the second moment and the count of steps


def test_without_ddp_nothing_is_equal() -> None:
    net = nn.Linear(3, 3)
    assert equal_tensors([Parallel(net, torch.device("cpu"))], [torch.optim.SGD(net.parameters())]) == set()
