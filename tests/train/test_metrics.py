"""What run.log does with numbers: all of them reach the disk, and nothing that a script logs harms its training."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spotrun.state import points
from spotrun.state.control import Control
from spotrun.state.points import Block, Call, Header
from spotrun.train import extras, metrics
from spotrun.train.metrics import Clock, Metrics


def header(generation: int = 1, base: int = 0, rank: int = 0, epoch: int = 0) -> Header:
    return Header("j", generation, rank, base, epoch)


def begun(folder: Path) -> tuple[Metrics, Control]:
    control = Control(folder / "control", create=True)
    found = Metrics(control, str(folder / "metrics"))
    found.begin(header())
    return found, control


def written(folder: Path, generation: int = 1) -> list[Block[Call]]:
    paths = [path for _, path in points.blocks(folder / "metrics" / f"{generation:04d}")]
    return [points.read(points.compress(path.read_bytes()), str(path)) for path in paths]


def values(folder: Path, generation: int = 1) -> list[dict[str, float]]:
    calls = [call for block in written(folder, generation) for call in block.calls]
    return [{name: points.from_json(value) for name, value in call.values.items()} for call in calls]


def test_each_call_is_kept_bit_for_bit(tmp_path: Path) -> None:
    numbers, control = begun(tmp_path)
    wanted = [1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 2**53 + 0.0]
    for step, value in enumerate(wanted, 1):
        numbers.log(step, 2, 8.0 * step, False, {"loss": value, "double": torch.tensor(value, dtype=torch.float64)})
    numbers.flush()
    (block,) = written(tmp_path)
    assert block.header == header()
    assert [(call.step, call.epoch, call.samples) for call in block.calls] == [(n, 2, 8.0 * n) for n in range(1, 6)]
    assert [each["loss"].hex() for each in values(tmp_path)] == [each.hex() for each in wanted]
    assert [each["double"].hex() for each in values(tmp_path)] == [each.hex() for each in wanted]
    assert control.read_metrics() == {"loss": wanted[-1], "double": wanted[-1]}


def test_a_number_is_kept_as_it_was_when_it_was_logged(tmp_path: Path) -> None:
    numbers, _ = begun(tmp_path)
    total = torch.zeros((), requires_grad=True)
    for step in (1, 2, 3):
        with torch.no_grad():
            total += 0.5
        numbers.log(step, 0, None, False, {"total": total})
    numbers.flush()
    assert [each["total"] for each in values(tmp_path)] == [0.5, 1.0, 1.5]


def test_what_is_no_number_is_left_out_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Odd:
        def __float__(self) -> float:
            raise KeyError("of the script's own class")

    numbers, control = begun(tmp_path)
    odd = {"rates": [0.1], "name": "0.5", "many": torch.ones(3), "i": 1j, "odd": Odd(), "none": None, "big": 10**400}
    good = {"int": 3, "true": True, "numpy": np.float32(0.5), "one": torch.ones(1), "half": torch.tensor(0.5).half()}
    for step in (1, 2):
        numbers.log(step, 0, None, False, {**odd, **good})
    numbers.flush()
    wanted = {"int": 3.0, "true": 1.0, "numpy": 0.5, "one": 1.0, "half": 0.5}
    assert values(tmp_path) == [wanted, wanted]
    assert control.read_metrics() == wanted
    assert caplog.text.count("is not a number") == len(odd)


def test_nan_and_infinities_are_kept_and_displayed(tmp_path: Path) -> None:
    """A loss that has become NaN must not be shown as what it was before."""
    numbers, control = begun(tmp_path)
    numbers.log(1, 0, None, False, dict.fromkeys("abcd", 0.5))
    numbers.flush()
    numbers.log(2, 0, None, False, {"a": math.nan, "b": math.inf, "c": torch.tensor(-math.inf), "d": 1.0})
    numbers.flush()
    for found in (values(tmp_path)[1], control.read_metrics()):
        assert math.isnan(found["a"])
        assert (found["b"], found["c"], found["d"]) == (math.inf, -math.inf, 1.0)


def test_odd_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    numbers, _ = begun(tmp_path)
    names = ["a/b c", "line\nbreak", "\0", 'ä{}[]"\\', "\ud800", "", "x" * 201]
    numbers.log(1, 0, None, False, dict.fromkeys(names, 1.0))
    numbers.flush()
    assert list(values(tmp_path)[0]) == [*names[:4], "?"]
    assert caplog.text.count("a name has 1 to 200 characters") == 2


def test_ten_thousand_names(tmp_path: Path) -> None:
    """The display gets as many as fit, instead of none."""
    numbers, control = begun(tmp_path)
    for step in (1, 2):
        numbers.log(step, 0, None, False, {f"name {n}": float(n + step) for n in range(10_000)})
    numbers.flush()
    assert [len(each) for each in values(tmp_path)] == [10_000, 10_000]
    shown = control.read_metrics()
    assert 100 < len(shown) < 10_000
    assert shown["name 7"] == 9.0


def test_a_new_name_in_each_step(tmp_path: Path) -> None:
    """The display costs the same however many names there have been: the thread that writes holds Python's GIL."""
    numbers, control = begun(tmp_path)
    for step in range(200_000):
        numbers.log(step, 0, None, False, {f"loss of step {step}": 1.0})
    numbers.flush(60.0)
    began = time.thread_time()
    for step in range(20):
        numbers.log(step, 0, None, False, {"loss of step 0": float(step)})
        numbers.flush()
    assert time.thread_time() - began < 0.5
    assert control.read_metrics()["loss of step 0"] == 19.0


def test_names_take_a_limited_part_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "NAMES", 10)
    numbers, _ = begun(tmp_path)
    for step in range(100):
        numbers.log(step, 0, None, False, {"loss": 1.0, f"\ud800 of step {step}": 2.0})
    numbers.flush()
    assert [list(each) for each in values(tmp_path)] == [["loss", f"? of step {step}"] for step in range(100)]
    assert len(numbers._names) <= 10
    assert len(numbers._plain) <= 10


def test_calls_belong_to_the_generation_in_which_they_are_made(tmp_path: Path) -> None:
    """What is logged before the state is restored is logged again by each process, so it is at the base."""
    control = Control(tmp_path / "control", create=True)
    numbers = Metrics(control, str(tmp_path / "metrics"))
    numbers.log(0, 0, None, True, {"rate": 0.1})
    numbers.begin(header(1, base=40, epoch=2))
    numbers.log(41, 2, None, False, {"loss": 1.0})
    numbers.begin(header(2, base=41, epoch=2))
    numbers.log(42, 2, None, False, {"loss": 2.0})
    numbers.begin(header(3, base=42, rank=1))  # this process is another rank now
    numbers.log(43, 2, None, False, {"loss": 3.0})
    numbers.flush()
    first, second = written(tmp_path, 1)[0], written(tmp_path, 2)[0]
    assert [(call.step, call.epoch, call.between, call.values) for call in first.calls] == [
        (40, 2, True, {"rate": 0.1}),
        (41, 2, False, {"loss": 1.0}),
    ]
    assert (second.header.base, second.header.base_epoch) == (41, 2)
    assert [call.values for call in second.calls] == [{"loss": 2.0}]
    assert not (tmp_path / "metrics" / "0003").exists()
    assert control.read_metrics() == {"rate": 0.1, "loss": 3.0}, "each rank shows its own"


def test_a_substitute_writes_beside_rank_0(tmp_path: Path) -> None:
    numbers, _ = begun(tmp_path)
    numbers.begin(header(2, base=7, rank=8), substitute=True)
    numbers.log(8, 0, None, False, {"loss": 0.5})
    numbers.flush()
    (path,) = (path for _, path in points.blocks(tmp_path / "metrics" / "0002" / "rank-0008"))
    block = points.read(points.compress(path.read_bytes()), str(path))
    assert (block.header.rank, block.header.base, [call.step for call in block.calls]) == (8, 7, [8])
    assert points.blocks(tmp_path / "metrics" / "0002") == []


@pytest.mark.parametrize(
    ("workers", "ranks"),
    [
        pytest.param(1, [1, 2], id="one worker on each node"),
        pytest.param(8, [8, 16], id="eight workers on each node"),
    ],
)
def test_the_first_workers_of_two_nodes_are_substitutes(workers: int, ranks: list[int]) -> None:
    found = [rank for rank in range(5 * workers) if points.is_substitute(rank, rank % workers, workers)]
    assert found == ranks


def test_a_generation_that_logs_nothing_still_says_where_it_began(tmp_path: Path) -> None:
    numbers, _ = begun(tmp_path)
    numbers.begin(header(2, base=30))
    (block,) = written(tmp_path, 2)
    assert (block.header.base, block.calls) == (30, [])


def test_numbers_do_not_wait_for_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot waits a moment until what was logged before it is on the disk: images take longer than that."""
    numbers, _ = begun(tmp_path)
    complete, begun_one = extras.complete, threading.Event()

    def slow(*arguments: Any) -> None:
        begun_one.set()
        time.sleep(0.2)
        complete(*arguments)

    monkeypatch.setattr(extras, "complete", slow)
    for number in range(50):
        numbers.log_extra("image", 1, 0, False, {f"image{number}": np.zeros((2, 2), np.uint8)})
    assert begun_one.wait(60)
    numbers.log(2, 0, None, False, {"loss": 0.5})
    numbers.flush(5.0)
    assert values(tmp_path) == [{"loss": 0.5}]
    assert numbers._extras, "the images are not written yet"


def test_a_full_disk_delays_the_numbers_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit for a file's size stands for the full disk. The part of a line that fits does not stay."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    numbers, _ = begun(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, limits[1]))
    try:
        for step in range(1, 21):
            numbers.log(step, 0, None, False, {"loss": float(step)})
        numbers.flush()
        numbers.flush()
        assert [call for block in written(tmp_path) for call in block.calls] == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    numbers.log(21, 0, None, False, {"loss": 21.0})
    numbers.flush()
    assert [each["loss"] for each in values(tmp_path)] == [float(n) for n in range(1, 22)]
    assert caplog.text.count("wait for the disk") == 1


def test_a_disk_that_stays_full_takes_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "UNSENT", 1000)
    (tmp_path / "metrics").write_text("a file where the folder should be")
    numbers, _ = begun(tmp_path)
    for step in range(1, 201):
        numbers.log(step, 0, None, False, {"loss": 1.0})
        numbers.flush()
    assert 900 < len(numbers._unsent) <= 1000
    (tmp_path / "metrics").unlink()
    numbers.flush()
    steps = [call.step for block in written(tmp_path) for call in block.calls]
    assert steps == sorted(steps), "a later line is kept only if it is short enough for what room is left"
    assert steps[:10] == list(range(1, 11))


def test_a_script_that_logs_too_fast_loses_numbers_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "MOST", 1000)
    numbers, _ = begun(tmp_path)
    with numbers._lock:  # the disk hangs
        for step in range(1, 5001):
            numbers.log(step, 0, None, False, {"loss": 1.0})
        numbers.flush(patience=0.0)
    numbers.flush()
    assert 1000 <= len(values(tmp_path)) <= 1002
    assert caplog.text.count("more numbers than this node can write") == 1


SCRIPT = """
import os, signal, sys
from pathlib import Path
from spotrun.state.control import Control
from spotrun.state.points import Header
from spotrun.train.metrics import Metrics

folder = Path(sys.argv[1])
numbers = Metrics(Control(folder / "control", create=True), str(folder / "metrics"))
numbers.begin(Header("j", 1, 0, 0))
for step in range(1, 1001):
    numbers.log(step, 0, None, False, {"loss": float(step)})
if sys.argv[2] == "kill":
    numbers.flush()
    numbers.log(1001, 0, None, False, {"loss": 1.0})
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_what_was_logged_survives_the_process(tmp_path: Path, end: str) -> None:
    code = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path), end], timeout=120).returncode
    assert code == (-signal.SIGKILL if end == "kill" else 0)
    assert [each["loss"] for each in values(tmp_path)][:1000] == [float(n) for n in range(1, 1001)]


def test_blocks_are_taken_while_they_grow(tmp_path: Path) -> None:
    """No line is lost or doubled between the process and the agent, and each block has the header."""
    numbers, _ = begun(tmp_path)
    folder, stop, taken = tmp_path / "metrics" / "0001", threading.Event(), threading.Semaphore(0)

    def take() -> None:
        while not stop.is_set():
            for _, path in points.blocks(folder):
                if path.suffix == points.PART and points.take(path):
                    taken.release()

    taker = threading.Thread(target=take)
    taker.start()
    for step in range(1, 3001):
        numbers.log(step, 0, None, False, {"loss": float(step)})
        if step % 10 == 0:
            numbers.flush()
        if step % 1000 == 0:
            assert taken.acquire(timeout=60), "a block is taken while the process goes on"
    stop.set()
    taker.join()
    found = written(tmp_path)
    assert len(found) >= 3
    assert {block.header for block in found} == {header()}
    assert [each["loss"] for each in values(tmp_path)] == [float(n) for n in range(1, 3001)]


def test_a_long_block_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "LONGEST", 500)
    numbers, _ = begun(tmp_path)
    for step in range(1, 31):
        numbers.log(step, 0, None, False, {"loss": float(step)})
        numbers.flush()
    paths = [path for _, path in points.blocks(tmp_path / "metrics" / "0001")]
    assert len(paths) > 3
    assert all(path.stat().st_size < 700 for path in paths)
    assert {path.suffix for path in paths[:-1]} == {".jsonl"}
    assert [each["loss"] for each in values(tmp_path)] == [float(n) for n in range(1, 31)]


def test_without_spotrun_nothing_is_kept() -> None:
    numbers = Metrics(None)
    numbers.log(1, 0, None, False, {"loss": 1.0})
    numbers.begin(header())
    numbers.flush()
    assert not numbers._waiting


@pytest.mark.gpu
def test_numbers_of_a_gpu_are_those_of_the_moment(tmp_path: Path) -> None:
    """Reading them does not wait, and what the script does with the tensor later does not change them."""
    numbers, control = begun(tmp_path)
    device = torch.device("cuda")
    total, other = torch.zeros((), device=device), torch.zeros((), device=device, dtype=torch.float64)
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for step in range(1, 1001):
            torch.cuda._sleep(100_000)  # type: ignore[no-untyped-call]
            total += 1
            other += 0.5
            numbers.log(step, 0, None, False, {"total": total, "other": other, "many": torch.ones(3, device=device)})
    assert numbers._waiting, "the training thread is ahead of the device"
    torch.cuda.synchronize()
    numbers.flush()
    assert values(tmp_path) == [{"total": float(n), "other": n / 2} for n in range(1, 1001)]
    assert control.read_metrics() == {"total": 1000.0, "other": 500.0}


def test_a_child_of_the_script_does_not_hold_the_block(tmp_path: Path) -> None:
    """A DataLoader forks workers at any moment. The agent can take the block while they live."""
    numbers, _ = begun(tmp_path)
    numbers.log(1, 0, None, False, {"loss": 1.0})
    numbers.flush()
    child = os.fork()
    if not child:
        signal.pause()
    try:
        (path,) = [path for _, path in points.blocks(tmp_path / "metrics" / "0001")]
        assert points.take(path) is not None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


FORKS = """
import os, pathlib, sys
from tests.train.test_metrics import begun

found, _ = begun(pathlib.Path(sys.argv[1]))
with found._lock:  # the thread that writes waits
    for step in range(5):
        found.log(step + 1, 0, None, False, {"loss": float(step)})
    child = os.fork()
    if child:
        os.waitpid(child, 0)
"""


def test_a_child_of_the_script_writes_no_number_again(tmp_path: Path) -> None:
    """It has a copy of all that waits for the disk."""
    subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], timeout=120, check=True)
    assert [call["loss"] for call in values(tmp_path)] == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("after", [0.0, 0.5])
def test_time_that_is_left_out_of_a_step(tmp_path: Path, after: float) -> None:
    """Also if the worker has waited for the others before: `after` seconds, from its first gradients on."""
    control, clock = Control(tmp_path / "control", create=True), Clock()
    clock.resume()
    began = time.monotonic()
    clock.due_at = began + 3 if after else 0.0
    clock.leave_out(2.0)
    clock.leave_out(-5.0 - after)  # as if this time had passed
    clock.tick(control, 1)
    assert control.stepping == pytest.approx(3 + after, abs=0.5)
    assert control.alone == pytest.approx(3 if after else 3 + after, abs=0.5)


def test_the_samples_of_a_step_that_does_not_count_are_not_counted(tmp_path: Path) -> None:
    """The step is done again. Otherwise, the first step of a generation would seem to have both tries' samples."""
    control, clock = Control(tmp_path / "control", create=True), Clock()
    clock.resume()
    clock.samples += 8
    clock.begin()
    clock.resume()
    clock.samples += 8
    clock.tick(control, 1)
    clock.samples += 8
    clock.tick(control, 2)
    assert control.samples == 16
