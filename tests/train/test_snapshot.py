"""Snapshots: what goes in comes out, whichever process dies when."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import mmap
import os
import random
import signal
import threading
import time
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from spotrun.errors import CorruptError, SpotrunError
from spotrun.state import shards, slots
from spotrun.state.control import SIZE, Control
from spotrun.train import slot_files
from spotrun.train.encoding import DTYPES, Encoder, decode
from spotrun.train.group_health import GroupHealth
from spotrun.train.schedule import CHECK_EVERY, next_check, pays
from spotrun.train.slot_files import ASIDE, Reader, SlotFile, layout
from spotrun.train.snapshot import EAGER, Writer
from spotrun.train.staging import Staging
from tests.helpers import wait_for
from tests.train.blocks import block, encoding
from tests.train.forks import forked


def round_trip(value: Any) -> Any:
    encoder = Encoder()
    text = json.dumps(encoder.encode(value, "state"), allow_nan=False)
    return decode(json.loads(text), lambda name: encoder.tensors[name].clone())


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def write(folder: Path, step: int, state: Any, generation: int = 1) -> Writer:
    writer = Writer(folder, "job", generation, block())
    assert writer.take(step, lambda encoder: encoder.encode(state, "state"), set(), wait=True)
    writer.settle()
    return writer


def read(folder: Path) -> Any:
    slot, record = slots.newest(folder, "job")[0]
    slots.verify(folder, slot, record)
    return decode(record.state, Reader(folder, slot).tensor)


def test_a_reader_takes_the_map_that_its_process_has(tmp_path: Path) -> None:
    state = {"a": torch.arange(5000.0)}
    writer = write(tmp_path, 1, state)
    slot, record = slots.newest(tmp_path, "job")[0]
    mapped = writer.mapped(slot)
    assert mapped is not None
    reader = Reader(tmp_path, slot, mapped)
    assert reader.view("state.a").data_ptr() == mapped.views["state.a"].data_ptr()
    assert torch.equal(decode(record.state, reader.tensor)["a"], state["a"])
    path = slots.data_path(tmp_path, slot)
    other = path.with_suffix(".other")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)
    assert writer.mapped(slot) is None, "the file is not the one that it has mapped"


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.just("$") | st.integers() | st.tuples(st.integers(), st.text()), inner)
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_values_survive(value: Any) -> None:
    assert repr(round_trip(value)) == repr(value)  # repr tells True from 1, -0.0 from 0.0, and equates NaNs


def test_special_values_survive() -> None:
    value = {
        "counter": Counter({3: 2}),
        "size": torch.Size([1, 2]),
        "array": numpy.arange(6, dtype=numpy.int16).reshape(2, 3)[:, ::2],
        "scalar": numpy.float32(0.1),
        "foreign": numpy.array([1.5, -2.0], ">f4"),
    }
    found = round_trip(value)
    assert (found["foreign"] == value["foreign"]).all()
    assert type(found["counter"]) is Counter
    assert found["counter"] == value["counter"]
    assert found["size"] == value["size"]
    assert found["array"].dtype == numpy.int16
    assert (found["array"] == value["array"]).all()
    assert found["scalar"] == value["scalar"]
    module = torch.nn.BatchNorm1d(2).state_dict()
    again = round_trip(module)
    assert type(again) is OrderedDict
    assert vars(again)["_metadata"] == vars(module)["_metadata"]


class Scaled(torch.Tensor):
    """A tensor that is more than its values."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"x": torch.ones(2).as_subclass(Scaled)},
            r"optimizer\.x is a tests\.train\.test_snapshot\.Scaled; a snapshot can hold",
        ),
        (torch.nn.LazyLinear(3).state_dict(), r"optimizer\.weight has no values yet: call the module once"),
        ({"x": torch.nested.nested_tensor([torch.ones(2)])}, r"optimizer\.x is a tensor that a snapshot cannot hold"),
        ({"param_groups": [{"foo": {1, 2}}]}, r"optimizer\.param_groups\[0\]\.foo is a set; a snapshot can hold"),
        ({"state": {0: {"x": torch.zeros(2, dtype=torch.complex128)}}}, r"optimizer\.state\[0\]\.x is a tensor that"),
        ({"x": torch.eye(2).to_sparse()}, r"optimizer\.x is a tensor that a snapshot cannot hold"),
        ({"x": numpy.array(["a"])}, r"optimizer\.x is a numpy"),
        ({"x": numpy.ma.array([1, 2], mask=[0, 1])}, r"optimizer\.x is a numpy\.ma\S*MaskedArray; a snapshot"),
        ({"x": lambda: 0}, r"optimizer\.x is a function"),
    ],
)
def test_what_cannot_be_kept_is_named(value: Any, message: str) -> None:
    with pytest.raises(SpotrunError, match=message):
        Encoder().encode(value, "optimizer")


def test_tensors_survive_and_any_tool_reads_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tied = torch.randn(3, 5)
    state: dict[str, Any] = {
        f"{dtype}": torch.randint(0, 2, (3, 7)).to(dtype) for dtype in DTYPES if dtype != torch.float8_e8m0fnu
    }
    state |= {
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
        "transposed": torch.randn(4, 6).t(),
        "strided": torch.randn(10)[::3],
        "expanded": torch.randn(1, 3).expand(4, 3),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "tied": [tied, tied],
    }
    write(tmp_path, 7, state)
    found = read(tmp_path)
    for name, tensor in state.items():
        if name != "tied":
            assert found[name].dtype == tensor.dtype, name
            assert found[name].shape == tensor.shape, name
            assert raw(found[name]).equal(raw(tensor)), name
    assert found["tied"][0] is found["tied"][1]
    loaded = load_file(slots.data_path(tmp_path, slots.newest(tmp_path, "job")[0][0]))
    assert torch.equal(loaded["state.transposed"], state["transposed"])
    assert torch.equal(loaded["state.torch.bfloat16"], state["torch.bfloat16"])


def test_views_of_one_memory_with_other_values_are_kept_apart() -> None:
    """A conjugate is a view that torch resolves when it is read."""
    tensor = torch.randn(4, dtype=torch.complex64)
    views = {"plain": tensor, "conjugate": tensor.conj(), "imaginary": tensor.imag, "negative": tensor.conj().imag}
    found = round_trip(views)
    for name, view in views.items():
        assert torch.equal(found[name], view), name


def test_loaded_tensors_are_copies(tmp_path: Path) -> None:
    writer = write(tmp_path, 1, {"x": torch.ones(4)})
    found = read(tmp_path)
    for step in (2, 3):
        writer.take(step, lambda encoder: encoder.encode({"x": torch.zeros(4)}, "state"), set(), wait=True)
    writer.settle()
    assert found["x"].tolist() == [1, 1, 1, 1]


def test_slots_are_written_in_turn_and_follow_new_shapes(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "job", 1, block())
    for step in range(1, 9):
        value = {"x": torch.full((step,), float(step))}
        writer.take(step, encoding(value), set(), wait=True)
        writer.settle()
        assert read(tmp_path)["x"].tolist() == [float(step)] * step
        assert slots.newest(tmp_path, "job")[0][1].step == step


def test_a_slot_being_read_is_passed_over(tmp_path: Path) -> None:
    writer = write(tmp_path, 1, {"x": torch.ones(4)})
    encode = lambda encoder: encoder.encode({"x": torch.ones(4)}, "state")  # noqa: E731
    assert writer.take(2, encode, set(), wait=True)
    writer.settle()
    older = slots.newest(tmp_path, "job")[1][0]
    with slots.reading(tmp_path, older):
        assert not writer.take(3, encode, set(), wait=False)
    assert writer.take(4, encode, set(), wait=False)
    writer.settle()
    assert [record.step for _, record in slots.newest(tmp_path, "job")] == [4, 2]


def test_an_urgent_snapshot_does_not_wait_long_for_a_reader(tmp_path: Path) -> None:
    """It takes the slot of the newest one instead: what is being read is whole and remains."""
    writer = write(tmp_path, 1, {"x": torch.ones(4)})
    encode = lambda encoder: encoder.encode({"x": torch.ones(4)}, "state")  # noqa: E731
    assert writer.take(2, encode, set(), wait=True)
    writer.settle()
    with slots.reading(tmp_path, slots.newest(tmp_path, "job")[1][0]):
        assert writer.take(3, encode, set(), wait=True)
        writer.settle()
    assert [record.step for _, record in slots.newest(tmp_path, "job")] == [3, 1]


def test_a_step_has_one_snapshot(tmp_path: Path) -> None:
    """The finished state replaces the one that was taken at the last step's boundary."""
    writer = write(tmp_path, 5, {"x": torch.ones(4)})
    assert writer.take(5, lambda encoder: encoder.encode({"x": torch.zeros(4)}, "state"), set(), wait=True)
    writer.settle()
    assert [record.step for _, record in slots.newest(tmp_path, "job")] == [5]
    assert read(tmp_path)["x"].tolist() == [0, 0, 0, 0]


def test_a_snapshot_the_agent_asked_for_stays_until_it_had_time(tmp_path: Path) -> None:
    control = Control(tmp_path / "control", create=True)
    writer = Writer(tmp_path / "slots", "job", 1, control)
    encode = lambda encoder: encoder.encode({"x": torch.ones(4)}, "state")  # noqa: E731
    control.snapshot_at = 1
    for step in (1, 2):
        assert writer.take(step, encode, set(), wait=True)
        writer.settle()
    assert (control.copied, control.committed) == (2, 2)
    assert not writer.take(3, encode, set(), wait=False)
    with slots.reading(tmp_path / "slots", slots.newest(tmp_path / "slots", "job")[1][0]):
        assert not writer.take(3, encode, set(), wait=False)
    assert writer.take(4, encode, set(), wait=False)
    writer.settle()


def test_a_record_that_cannot_be_written_ends_no_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another job may have filled the memory for a moment. The snapshot before stays, and the next one counts again."""
    control = Control(tmp_path / "control", create=True)
    folder = tmp_path / "slots"
    writer = Writer(folder, "job", 1, control)
    encode = lambda encoder: encoder.encode({"x": torch.ones(4)}, "state")  # noqa: E731
    assert writer.take(1, encode, set(), wait=True)
    writer.settle()
    obstacles = [slots.record_path(folder, slot).with_suffix(".part") for slot in slots.SLOTS]
    for each in obstacles:
        each.mkdir()
    assert writer.take(2, encode, set(), wait=True)
    writer.settle()
    assert writer.dropped
    assert (control.committed, slots.newest(folder, "job")[0][1].step) == (1, 1)
    assert "the snapshot of step 2 is dropped: its record cannot be written" in caplog.text
    for each in obstacles:
        each.rmdir()
    assert writer.take(3, encode, set(), wait=True)
    writer.settle()
    assert (control.committed, slots.newest(folder, "job")[0][1].step) == (3, 3)


def test_no_room_is_said_clearly(tmp_path: Path) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(SpotrunError, match="no room for a snapshot of 8 MB"):
            write(tmp_path, 1, {"x": torch.ones(2_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("aside", [True, False])
def test_without_room_a_slot_gives_its_pages_back(memory: Path, monkeypatch: pytest.MonkeyPatch, aside: bool) -> None:
    """Otherwise half a slot would keep a full file system full. Once there is room, the slot is filled."""
    allocate, room = slot_files._allocate, [3 << 20]

    def limited(file: Any, start: int, stop: int) -> None:
        if stop > room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(file, start, stop)

    monkeypatch.setattr(slot_files, "_allocate", limited)
    path, wanted = memory / "slot", layout({"x": torch.ones(2 << 20)})
    file = SlotFile.create(path, wanted)
    assert path.stat().st_blocks == 0, "nothing before fill"
    with pytest.raises(SpotrunError, match=r"no room for a snapshot of 8 MB in .*: No space left"):
        file.fill(threading.Event() if aside else None)
    assert (path.stat().st_blocks, file.filled) == (0, False)
    room[0] = 1 << 30
    file.fill()
    assert file.filled
    assert path.stat().st_size == len(file.mapped)
    assert shards.read_header(path)[0] == wanted


def test_too_many_tensors_are_refused_before_the_snapshot_is_written(tmp_path: Path) -> None:
    """Nobody could read such a file. The names' lengths count: a million short ones are too many, too."""
    write(tmp_path, 1, {"x": torch.ones(4)})
    with pytest.raises(SpotrunError, match="11 tensors are too many for a snapshot"):
        write(tmp_path, 2, {f"{number}" * 5_000_000: torch.ones(4) for number in range(10, 21)})
    assert [record.step for _, record in slots.newest(tmp_path, "job")] == [1]


@pytest.mark.parametrize("damage", ["junk", "flip", "odd", "deep", "folder"])
def test_damage_to_a_record_is_found(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 1, {"x": torch.ones(4), "lr": 0.001})
    slot, record = slots.newest(tmp_path, "job")[0]
    path = slots.record_path(tmp_path, slot)
    if damage == "junk":
        path.write_text('{"job": ')
    elif damage == "flip":
        path.write_text(path.read_text().replace("0.001", "0.003"))
    elif damage == "odd":
        slots.commit(tmp_path, slot, dataclasses.replace(record, step=None))  # type: ignore[arg-type]
    elif damage == "deep":
        path.write_text("[" * 100_000)
    else:
        path.unlink()
        path.mkdir()
    assert slots.newest(tmp_path, "job") == []
    assert str(path) in caplog.text


def test_a_control_block_has_its_room_from_the_start(tmp_path: Path) -> None:
    """On a tmpfs that is full, a block without it would end the agent by SIGBUS."""
    Control(tmp_path / "control", create=True).close()
    assert os.stat(tmp_path / "control").st_blocks * 512 >= SIZE
    with pytest.raises(OSError, match="nowhere/control"):
        Control(tmp_path / "nowhere/control", create=True)


def test_a_snapshot_of_an_aborted_step_is_not_committed(tmp_path: Path) -> None:
    write(tmp_path, 4, {"x": torch.ones(3)})
    control = Control(tmp_path / "control", create=True)
    said: list[str] = []
    writer = Writer(tmp_path, "job", 1, control, trouble=lambda: "".join(said))
    # As on a GPU, the error shows once the device has done its work.
    copying = SimpleNamespace(land=lambda: said.append("COMM_ERROR"))
    writer._copy = lambda *_: copying  # type: ignore[assignment,method-assign,return-value]
    assert writer.take(5, lambda encoder: encoder.encode({"x": torch.ones(3)}, "state"), set(), wait=True)
    with pytest.raises(torch.distributed.DistBackendError, match="no snapshot of step 5: COMM_ERROR"):
        writer.settle()
    assert [record.step for _, record in slots.newest(tmp_path, "job")] == [4]
    assert control.copied == control.committed  # nobody waits for it
    control.close()


def test_the_agent_is_told_how_long_a_snapshot_may_take(tmp_path: Path) -> None:
    control = Control(tmp_path / "control", create=True)
    writer = Writer(tmp_path, "job", 1, control)
    seen = []
    writer._trouble = lambda: seen.append((control.begun, control.committed)) or ""  # type: ignore[func-returns-value]
    state = {"x": torch.zeros(50_000_000, dtype=torch.uint8)}
    assert control.begun == control.committed
    assert control.took == 0
    for step in (3, 4):
        expected = 0.1 if step == 3 else control.took
        assert writer.take(step, lambda encoder: encoder.encode(state, "state"), set(), wait=True)
        assert control.expected == pytest.approx(expected, rel=0.01)
        writer.settle()
    assert seen == [(3, -1), (4, 3)]
    assert control.begun == control.committed == 4
    assert control.took > 0
    control.close()


class Backend:
    """A backend that says what NCCL's says."""

    def __init__(self, error: str) -> None:
        self.error = error

    def get_error(self) -> Any:
        return getattr(torch._C._distributed_c10d.ErrorType, self.error)  # type: ignore[attr-defined]


@pytest.mark.gpu
def test_nccl_says_of_itself_whether_it_failed() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    standing, tensor = GroupHealth(), torch.ones(4, device="cuda")
    try:
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        backend = dist.group.WORLD._get_backend(tensor.device)
        assert backend.get_error().name == "SUCCESS"
        assert standing.trouble() == ""
    finally:
        dist.distributed_c10d._abort_process_group()
    assert standing.trouble() == "a process group was aborted"


@pytest.mark.parametrize("error", ["SUCCESS", "TIMEOUT", "COMM_ERROR", "REMOTE_ERROR"])
def test_a_group_is_believed_until_its_backend_reports_an_error(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {torch.device("cpu"): object(), torch.device("cuda"): Backend(error)}
    group = SimpleNamespace(_device_types=list(devices), _get_backend=devices.get)
    world = SimpleNamespace(pg_map=[group])
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_world", world)
    expected = "" if error == "SUCCESS" else f"a process group reports an error: {error}"
    assert GroupHealth().trouble() == expected


@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_damage_is_found(tmp_path: Path, damage: str) -> None:
    write(tmp_path, 1, {"x": torch.ones(1000)})
    slot, record = slots.newest(tmp_path, "job")[0]
    path = slots.data_path(tmp_path, slot)
    if damage == "cut":
        os.truncate(path, record.size - 1)
    elif damage == "flip":
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    with pytest.raises(CorruptError, match=str(path)):
        slots.verify(tmp_path, slot, record)


def test_training_goes_on_while_a_slot_is_filled_with_pages(memory: Path) -> None:
    """A thread that held the interpreter's lock in each call would let others run only once per 32 MiB."""
    size = 512 << 20
    slot_files.map_file(memory / "slot", size).close()
    with (memory / "slot").open("r+b") as file, ThreadPoolExecutor(1) as pool:
        mapped = mmap.mmap(file.fileno(), size)
        filled = pool.submit(slot_files._populate, mapped, 0, size)
        turns = 0
        while not filled.done():
            time.sleep(0)  # gives the lock away, as most of training's calls do
            turns += 1
    assert turns > 5 * (size >> 25)


@pytest.mark.parametrize("hurries_at", [0, 3, 1 << 20], ids=["at once", "midway", "never"])
def test_a_slot_is_filled_with_time_that_nobody_needs(
    memory: Path, monkeypatch: pytest.MonkeyPatch, hurries_at: int
) -> None:
    """Otherwise the first steps after a newcomer has joined take twice as long."""
    populate, allocate, hurry = slot_files._populate, slot_files._allocate, threading.Event()
    places: list[tuple[int, int]] = []
    allocated: list[tuple[int, int]] = []
    priorities = []

    def note(mapped: mmap.mmap, start: int, stop: int) -> None:
        populate(mapped, start, stop)
        places.append((start, stop))
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        if len(places) == hurries_at:
            hurry.set()

    def note_allocated(file: Any, start: int, stop: int) -> None:
        allocate(file, start, stop)
        allocated.append((start, stop))

    if hurries_at == 0:
        hurry.set()
    monkeypatch.setattr(slot_files, "_populate", note)
    monkeypatch.setattr(slot_files, "_allocate", note_allocated)
    file = SlotFile.create(memory / "slot", layout({"x": torch.ones(2 << 20)}))
    file.fill(hurry)
    aside = len(places)
    assert file.filled == (hurries_at > aside)
    file.fill()
    assert file.filled
    assert [places[0][0], places[-1][1]] == [0, len(file.mapped)]
    assert all(one[1] == other[0] for one, other in itertools.pairwise(places))
    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert allocated == places, "to allocate takes most of the time"
    assert priorities == [19] * aside + [usual] * (len(places) - aside)
    assert usual < 19
    assert aside == min(hurries_at, len(places)) == min(hurries_at, 9)  # 8 MB, and the header


def test_a_slot_does_not_wait_long_for_free_time(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose processors are all busy, there would be no snapshot for a long time."""
    populate = slot_files._populate
    aside = []

    def note(mapped: mmap.mmap, start: int, stop: int) -> None:
        aside.append(threading.current_thread().name == "slot-pages")
        if len(aside) == 2:
            monkeypatch.setattr(slot_files, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ASIDE))
        populate(mapped, start, stop)

    monkeypatch.setattr(slot_files, "_populate", note)
    file = SlotFile.create(memory / "slot", layout({"x": torch.ones(2 << 20)}))
    file.fill(threading.Event())
    assert file.filled
    assert aside == [True] * 2 + [False] * 7


@pytest.mark.parametrize("wait", [True, False])
def test_nobody_waits_until_a_slot_is_filled(memory: Path, monkeypatch: pytest.MonkeyPatch, wait: bool) -> None:
    """A thread that gets no processor must delay neither a stop nor those that join the next generation."""
    populate, begun, goes_on = slot_files._populate, threading.Event(), threading.Event()
    aside = []

    def note(mapped: mmap.mmap, start: int, stop: int) -> None:
        aside.append(threading.current_thread().name == "slot-pages")
        begun.set()
        assert goes_on.wait(60)
        populate(mapped, start, stop)

    writer = Writer(memory, "job", 1, block())
    tensors = [torch.ones(EAGER // 4 + 1)]
    monkeypatch.setattr(slot_files, "_populate", note)
    monkeypatch.setattr(slot_files, "_LOWEST", 0)  # other programs may use all processors for longer than `ASIDE`
    writer.make_room(encoding(tensors))
    assert begun.wait(60)
    with ThreadPoolExecutor(1) as pool:
        settled = pool.submit(writer.settle, 60)
        assert writer._hurry.wait(60)
        goes_on.set()
        settled.result(60)
    assert aside == [True]  # of 65 parts
    if wait:
        assert writer.take(1, encoding(tensors), set(), wait=True)
        assert aside[:65] == [True] + [False] * 64
    else:
        assert not writer.take(1, encoding(tensors), set(), wait=False)  # its slot is filled beside training
        wait_for(lambda: len(aside) == 65)
        assert all(aside)
        wait_for(lambda: writer.take(1, encoding(tensors), set(), wait=False))
    writer.settle(60)
    slot, record = slots.newest(memory, "job")[0]
    slots.verify(memory, slot, record)
    assert record.step == 1


def test_a_slot_that_is_never_left_alone(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In loops with one step each, every loop stops what is under way. There must be snapshots all the same."""
    writer = Writer(memory, "job", 1, block())
    tensors, taken = [torch.ones(EAGER // 4 + 1)], []
    monkeypatch.setattr(SlotFile, "_fill_aside", lambda file, hurry: hurry.wait(60))
    for step in range(1, 9):
        taken.append(writer.take(step, encoding(tensors), set(), wait=False))
        writer.settle(60)
    assert taken == [False, False, False, True, False, False, True, True]  # one slot, then the other
    assert slots.newest(memory, "job")[0][1].step == 8


def snapshot_for_ever(folder: str) -> None:
    torch.set_num_threads(1)
    folder_path = Path(folder)
    found = slots.newest(folder_path, "job")
    step = found[0][1].step if found else 0
    writer = Writer(folder_path, "job", 1, block())
    while True:
        step += 1
        # Sizes change now and then, so that laying out is interrupted as well.
        tensors = [torch.full((100_000 + 50_000 * (step // 16 % 2),), float(step)) for _ in range(4)]
        writer.take(step, encoding(tensors), set(), wait=False)


def test_a_writer_killed_at_any_moment_leaves_a_whole_snapshot(tmp_path: Path) -> None:
    random.seed(1)
    last = 0
    for _ in range(12):
        process = forked.Process(target=snapshot_for_ever, args=(str(tmp_path),), daemon=True)
        process.start()
        target = last + random.randint(1, 40)

        def beyond(target: int = target) -> bool:
            return any(record.step >= target for _, record in slots.newest(tmp_path, "job"))

        try:
            wait_for(beyond, what=f"a snapshot of step {target}")
        finally:
            process.kill()
            process.join()
        slot, record = slots.newest(tmp_path, "job")[0]
        slots.verify(tmp_path, slot, record)
        values = decode(record.state, Reader(tmp_path, slot).tensor)
        assert all((tensor == record.step).all() for tensor in values)
        assert record.step >= target - 1  # at most the one being written is lost
        last = record.step


@pytest.mark.parametrize(
    ("stall", "step_seconds", "interval"), [(0.0, 0.1, 1), (0.001, 0.1, 1), (0.03, 0.1, 30), (5.0, 1.0, 500)]
)
def test_the_interval_keeps_the_stall_under_one_percent(stall: float, step_seconds: float, interval: int) -> None:
    assert pays(interval, stall, step_seconds * 1.01)
    assert interval == 1 or not pays(interval - 1, stall, step_seconds)


def test_while_the_time_of_a_step_is_not_known_a_snapshot_is_due() -> None:
    assert pays(1, stall=1.0, step_seconds=0.0)


@pytest.mark.parametrize(
    ("stall", "step_seconds"), [(0.0002, 0.001), (0.003, 0.005), (0.03, 0.05), (0.03, 0.1), (5.0, 1.0)]
)
def test_no_step_at_which_a_snapshot_is_due_goes_without_a_check(stall: float, step_seconds: float) -> None:
    for newest in (0, 37):
        step = newest + 1
        while not pays(step - newest, stall, step_seconds):
            after = next_check(step, newest, 0, stall, step_seconds)
            assert step < after <= step + CHECK_EVERY
            assert not any(pays(each - newest, stall, step_seconds) for each in range(step + 1, after))
            step = after


@pytest.mark.parametrize("fixed", [1, 2, 7, 8, 9, 20])
def test_with_a_fixed_interval_each_of_its_steps_has_a_check(fixed: int) -> None:
    steps = list(itertools.accumulate(range(100), lambda step, _: next_check(step, 0, fixed, 0.1, 0.01), initial=1))
    assert all(0 < after - step <= CHECK_EVERY for step, after in itertools.pairwise(steps))
    assert set(range(fixed, steps[-1], fixed)) <= set(steps)


@pytest.mark.parametrize("fixed", [0, 1000])
def test_after_a_long_step_there_is_always_a_check(fixed: int) -> None:
    """A snapshot that was dropped is taken again at the next check. Eight steps of a minute would be long."""
    assert next_check(5, 0, fixed, stall=100.0, step_seconds=0.001) == 5 + CHECK_EVERY
    assert next_check(5, 0, fixed, stall=100.0, step_seconds=60.0) == 6


@pytest.mark.gpu
def test_cuda_snapshot_is_of_the_step_it_was_taken_at(memory: Path) -> None:
    writer = Writer(memory, "job", 1, block(), stage=Staging(torch.device("cuda", 0)))
    optimized, other = torch.ones(50_000_000, device="cuda"), torch.ones(1000, device="cuda")
    state = {"optimized": optimized, "other": other, "half": torch.ones(4, 3, device="cuda", dtype=torch.bfloat16).t()}
    for step in range(1, 5):
        optimized.fill_(step)
        other.fill_(step)
        writer.take(step, lambda encoder: encoder.encode(state, "state"), {optimized.data_ptr()}, wait=True)
        other.fill_(-1)  # on the current stream: behind the copy
        writer.guard()
        optimized.fill_(-1)
        writer.settle()
        found = read(memory)
        assert (found["optimized"] == step).all()
        assert (found["other"] == step).all()
        assert torch.equal(found["half"], state["half"].cpu())
