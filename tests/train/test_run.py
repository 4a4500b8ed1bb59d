"""Training through `spotrun.init()` in one process, and the same script everywhere."""

from __future__ import annotations

import copy
import importlib
import io
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import spotrun
from bench.processes import STANDALONE
from spotrun.errors import MisuseError, SpotrunError
from spotrun.state import points, slots
from spotrun.state.control import EXIT_PEER, Context, Control
from spotrun.train import batches, distributed, failures, frameworks, metrics, schedule

ROOT = Path(__file__).parents[2]


# One worker, in this process.


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process as the only worker of a job; the result is its slots folder."""
    control = tmp_path / "control"
    Control(control, create=True).close()
    context = Context("job", 1, "n", str(control), str(tmp_path / "slots"), "", 1)
    monkeypatch.setenv(Context.VARIABLE, context.to_env())
    return tmp_path / "slots"


@pytest.mark.parametrize("seed", ["1", None, 1.5])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(MisuseError, match=r"spotrun\.init\(seed=.*\): give a whole number"):
        spotrun.init(seed=seed)


@pytest.mark.parametrize("epochs", ["5", None, 1.5])
def test_a_number_of_epochs_is_a_whole_number(epochs: Any) -> None:
    """An argument of a script is text, if its parser is not told otherwise."""
    with pytest.raises(MisuseError, match=r"run\.epochs\(.*\): give a whole number"):
        next(spotrun.init().epochs(epochs))


def test_an_epoch_without_steps_is_said_once(alone: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing would be saved, and an interruption would lose everything."""
    run = spotrun.init()
    run.track(model=run.ddp(nn.Linear(1, 1)))
    for _ in run.epochs(3):
        pass
    settle(run)
    assert [each.message for each in caplog.records if each.name == "spotrun.train.batches"] == [
        "epoch 0 had no step, so no snapshot is taken: go through the batches with run.steps(loader)"
    ]


def test_a_process_that_a_worker_has_started_is_no_worker(alone: Path) -> None:
    """It would train under the worker's rank, and write its snapshots. `torch.multiprocessing.spawn` does so."""
    spotrun.init()
    command = [sys.executable, "-c", "import spotrun; spotrun.init()"]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (child.returncode, "a worker has started this process" in child.stderr) == (1, True), child.stderr


def test_a_script_may_start_the_process_that_trains(alone: Path) -> None:
    Control(alone.with_name("control")).pid = os.getpid()  # this process does not call spotrun.init
    spawned = multiprocessing.get_context("spawn").Process(target=spotrun.init)
    spawned.start()
    spawned.join()
    assert spawned.exitcode == 1, "torch.multiprocessing.spawn starts several"
    subprocess.run([sys.executable, "-c", "import spotrun; spotrun.init()"], check=True)


def test_odd_numbers_that_plain_scripts_may_use(alone: Path) -> None:
    """A seed of NumPy, and as many epochs as there can be."""
    run = spotrun.init(seed=np.int64(2))  # type: ignore[arg-type]
    model = run.ddp(nn.Linear(2, 2))
    run.track(model=model)
    for _ in run.epochs(sys.maxsize):
        for x in run.steps(DataLoader(torch.ones(4, 2))):
            run.backward(model(x).mean())
        break
    settle(run)
    ((_, record),) = slots.newest(alone, "job")[:1]
    assert (record.step, record.state["run"]["seed"]) == (4, 2)


def test_the_last_snapshot_is_tried_again(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the job's result would be an older state."""
    monkeypatch.setattr(schedule, "AGAIN", 0.0)
    run = spotrun.init()
    model = run.ddp(nn.Linear(2, 2))
    run.track(model=model)
    commit, refused = slots.commit, list[int]()

    def full(*arguments: Any, **more: Any) -> None:
        if run.step == 4 and len(refused) < 3:
            refused.append(run.step)
            raise OSError(28, "No space left on device")
        commit(*arguments, **more)

    monkeypatch.setattr(slots, "commit", full)
    for _ in run.epochs(1):
        for x in run.steps(DataLoader(torch.ones(4, 2))):
            run.backward(model(x).mean())
    assert len(refused) == 3
    assert slots.newest(alone, "job")[0][1].step == 4


def settle(run: spotrun.Run) -> None:
    """Wait for the snapshot under way, as the end of the process would."""
    assert run._boundary.snapshots.writer is not None
    run._boundary.snapshots.writer.settle()


def values(loader: Any, epochs: int, stop: int | None = None, accumulate: int = 1) -> tuple[list[Any], torch.Tensor]:
    """(batches seen, weights) of a linear model trained on them; leaves at step `stop`, as a crash would."""
    run = spotrun.init(seed=2)
    model = run.ddp(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    extra = {"sampler": loader.sampler} if isinstance(loader.sampler, spotrun.ElasticSampler) else {}
    run.track(model=model, optimizer=optimizer, **extra)
    seen: list[Any] = []
    for _ in run.epochs(epochs):
        for x in run.steps(loader, accumulate):
            if run.step == stop:
                settle(run)
                return seen, torch.empty(0)
            seen.append(x.flatten().tolist())
            run.backward((model(x + torch.rand(())) ** 2).mean())
            if run.completes_step:
                optimizer.step()
                optimizer.zero_grad()
    settle(run)
    return seen, torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def test_nothing_is_committed_after_an_abort(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the aborted collective returned may be garbage, though no error shows."""
    left = []

    def leave(code: int) -> None:
        left.append(code)
        raise SystemExit

    monkeypatch.setattr(failures, "leave", leave)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = spotrun.init()
        model = run.ddp(nn.Linear(1, 1))
        run.track(model=model)
        for x in spoil(run, 4):
            run.backward(model(x).mean())
        pytest.fail("a snapshot was committed")
    except SystemExit:
        pass
    finally:
        dist.destroy_process_group()
    assert left == [EXIT_PEER]
    assert slots.newest(alone, "job")[0][1].step == 4
    control = Control(alone.parent / "control")
    assert control.copied == control.committed == 4
    control.close()


def test_what_was_logged_is_on_the_disk_before_a_state_counts(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody repeats the steps before a state, so nobody logs them again."""
    monkeypatch.setattr(metrics, "EVERY", 3600.0)
    folder = alone.parent / "metrics"
    context = replace(Context.from_text(os.environ[Context.VARIABLE]), metrics=str(folder))
    monkeypatch.setenv(Context.VARIABLE, context.to_env())
    run = spotrun.init()
    run.track(model=run.ddp(nn.Linear(1, 1)))
    for _ in run.steps(DataLoader(torch.ones(3, 1))):  # type: ignore[arg-type]
        run.log(number=run.step + 1)
        if run.step == 2:
            break
    settle(run)
    assert slots.newest(alone, "job")[0][1].step == 2
    path = folder / "0001" / "000001.part"
    assert [call.step for call in points.read(points.compress(path.read_bytes()), str(path)).calls][:2] == [1, 2]


def spoil(run: spotrun.Run, at: int) -> Iterator[Any]:
    """Batches of some steps; the process group is aborted in the step after step `at`."""
    for x in run.steps(DataLoader(torch.ones(9, 1))):  # type: ignore[arg-type]
        yield x
        if run.step == at:
            settle(run)
            dist.group.WORLD.abort()


@pytest.mark.parametrize(
    ("cuda", "reason"),
    [(None, "it is built without CUDA"), ("13.0", "Found no NVIDIA driver"), ("13.0", "it finds no device")],
)
def test_gpus_that_torch_cannot_use_are_an_error(
    cuda: str | None, reason: str, alone: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def initialize() -> None:
        if "driver" in reason:
            raise RuntimeError(f"{reason}\nmore")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(distributed, "gpu_count", lambda: 8)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", initialize)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SpotrunError, match=rf"this machine has 8 GPUs, but torch .* cannot use them: {reason}\."):
        spotrun.init()
    with monkeypatch.context() as without:  # as under plain python
        without.delenv(Context.VARIABLE)
        assert spotrun.init().device.type == "cpu"
    assert reason in caplog.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert spotrun.init().device.type == "cpu"


def test_a_worker_of_a_local_machine_uses_no_gpu(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if torch sees one: the devices of such a machine are only numbers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("SPOTRUN_DEVICES", "4")
    assert distributed.choose_device(0, insist=True).type == "cpu"


@pytest.mark.parametrize("kind", ["elastic", "elastic, workers", "plain", "plain, shuffled"])
def test_resuming_equals_going_on(alone: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    data = torch.arange(23.0).reshape(23, 1)

    def loader() -> Any:
        if kind.startswith("plain"):
            return DataLoader(data, batch_size=4, shuffle="shuffled" in kind)  # type: ignore[arg-type]
        sampler = spotrun.ElasticSampler(data, seed=1)
        return DataLoader(data, batch_size=4, sampler=sampler, num_workers=2 * ("workers" in kind))  # type: ignore[arg-type]

    seen, weights = values(loader(), 3)
    shutil.rmtree(alone)
    first, _ = values(loader(), 3, stop=8)
    assert ("skipping the" in caplog.text) is False
    second, again = values(loader(), 3)
    assert first + second == seen
    assert torch.equal(weights, again)
    assert ("skipping the 2 batches" in caplog.text) is kind.startswith("plain")
    third, same = values(loader(), 3)  # nothing left to do
    assert third == []
    assert torch.equal(weights, same)


def test_code_after_a_loop_draws_the_same_after_a_restart(alone: Path) -> None:
    """Also if nothing of the loop is left to do, and between two loops over epochs."""
    data = torch.arange(5.0).reshape(5, 1)

    def draws() -> list[float]:
        run, sampler, found = spotrun.init(seed=2), spotrun.ElasticSampler(data), []  # type: ignore[arg-type]
        model = run.ddp(nn.Linear(1, 1))
        run.track(model=model, sampler=sampler)
        for end in (1, 2):
            for _ in run.epochs(end):
                for x in run.steps(DataLoader(data, sampler=sampler)):  # type: ignore[arg-type]
                    run.backward(model(x).mean())
                torch.rand(run.step)
            found.append(torch.rand(1).item())
        settle(run)
        return found

    first = draws()
    assert len(set(first)) == 2
    assert draws() == first


def test_accumulating_equals_a_larger_batch() -> None:
    data = torch.arange(23.0).reshape(23, 1)
    results = []
    for batch, accumulate in ((8, 1), (4, 2), (2, 4)):
        run = spotrun.init()
        model = run.ddp(nn.Linear(1, 1))
        loader: DataLoader[Any] = DataLoader(data, batch_size=batch, sampler=spotrun.ElasticSampler(data))  # type: ignore[arg-type]
        for x in run.steps(loader, accumulate):
            run.backward((model(x) ** 2).mean())
        assert run.step == 3
        results.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(results[0], results[1])
    assert torch.allclose(results[0], results[2])


def test_a_step_of_a_fixed_number_of_samples() -> None:
    data = torch.arange(23.0).reshape(23, 1)
    results = []
    for batch in (8, 4, 2):
        run = spotrun.init()
        model = run.ddp(nn.Linear(1, 1))
        loader: DataLoader[Any] = DataLoader(data, batch_size=batch, sampler=spotrun.ElasticSampler(data))  # type: ignore[arg-type]
        ends = []
        for x in run.steps(loader, global_batch=8):
            run.backward((model(x) ** 2).mean())
            ends.append(run.completes_step)
        assert run.step == sum(ends) == 3
        assert len(ends) == -(-23 // batch)
        results.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(results[0], results[1])
    assert torch.allclose(results[0], results[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 12}, "global_batch=12): give a multiple of the loader's batch_size, 8"),
        ({"global_batch": 0}, "global_batch=0): give a multiple of the loader's batch_size, 8"),
        ({"global_batch": 8, "accumulate": 2}, "leave out accumulate: it follows from the number of workers"),
        ({"global_batch": 1.5}, "global_batch=1.5): give a whole number"),
        ({"accumulate": 0}, "accumulate=0): give a number above 0"),
    ],
)
def test_sizes_of_steps_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    data = torch.zeros(23, 1)
    loader: DataLoader[Any] = DataLoader(data, batch_size=8, sampler=spotrun.ElasticSampler(data))  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match=re.escape(message)):
        next(iter(spotrun.init().steps(loader, **options)))


def test_a_fixed_number_of_samples_needs_an_elastic_sampler() -> None:
    with pytest.raises(MisuseError, match="give the DataLoader an ElasticSampler and a batch_size"):
        next(iter(spotrun.init().steps(DataLoader(torch.zeros(23, 1), batch_size=8), global_batch=8)))  # type: ignore[arg-type]


def test_a_loader_whose_batches_come_in_another_order_is_refused() -> None:
    """What a step was said to have would not be what it had, and a restart would lose and repeat samples."""
    data = torch.zeros(23, 1)
    loader: DataLoader[Any] = DataLoader(data, sampler=spotrun.ElasticSampler(data), in_order=False)  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="leave out in_order=False"):
        next(iter(spotrun.init().steps(loader)))
    steps = spotrun.init().steps(DataLoader(data, in_order=False))  # type: ignore[arg-type]
    assert len(list(steps)) == 23


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"global_batch": 8}])
@pytest.mark.parametrize("asks", [True, False])
def test_an_optimizer_that_does_not_wait_for_the_end_of_a_step_gets_a_warning(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any], asks: bool
) -> None:
    run, data = spotrun.init(), torch.zeros(23, 1)
    model = run.ddp(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = spotrun.ElasticSampler(data)  # type: ignore[arg-type]
    loader: DataLoader[Any] = DataLoader(data, batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    for _ in run.epochs(2):
        for x in run.steps(loader, **options):
            run.backward(model(x).mean())
            if run.completes_step or not asks:
                optimizer.step()
        with torch.no_grad():
            model.module.weight.clamp_(-1, 1)
    assert caplog.text.count("call the optimizer only if run.completes_step") == (not asks)


def test_a_warning_of_idle_workers_comes_when_their_number_changes(caplog: pytest.LogCaptureFixture) -> None:
    batches.warn_of_idle.cache_clear()
    for world in (1, 2, 3, 3, 2, 3, 4):
        batches.warn_of_idle(batches.StepSize(global_batch=16), 8, world)
    assert [each.getMessage().split(":")[0] for each in caplog.records] == [
        "a step has only 2 batches for 3 workers, so some of them only repeat samples",
        "a step has only 2 batches for 3 workers, so some of them only repeat samples",
        "a step has only 2 batches for 4 workers, so some of them only repeat samples",
    ]


def test_the_wrapper_is_like_the_module() -> None:
    run = spotrun.init()
    inner = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    inner.note = "hello"  # type: ignore[assignment]
    model = run.ddp(inner)
    assert list(model.state_dict()) == list(inner.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in inner.named_parameters()]
    assert model.note == "hello"
    model.eval()
    assert not inner.training
    assert not inner[1].training
    model.double()
    assert inner[0].weight.dtype == torch.float64
    assert len(list(model.children())) == 2
    with model.no_sync():  # there is nobody to exchange gradients with
        assert model(torch.ones(2, 2).double()).shape == (2, 3)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = model.nonsense


def test_the_wrapper_can_be_saved_and_copied_as_a_whole() -> None:
    model, file, x = spotrun.init().ddp(nn.Linear(2, 2)), io.BytesIO(), torch.ones(1, 2)
    torch.save(model, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(model)):
        assert other is not model
        assert torch.equal(other(x), model(x))


def test_mistakes_are_said_clearly(alone: Path) -> None:
    data = [1.0, 2.0]
    sampler = spotrun.ElasticSampler(data)
    loader: DataLoader[float] = DataLoader(data, sampler=sampler)  # type: ignore[arg-type]
    model = nn.Linear(1, 1)
    run = spotrun.init()
    with pytest.raises(MisuseError, match="tracks nothing"):
        run.track()
    with pytest.raises(MisuseError, match=r"run\.track\(note=…\): a str lacks state_dict"):
        run.track(note="x")  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match=r"a DataLoader lacks .*; leave it out, and track its ElasticSampler"):
        run.track(loader=loader)  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match=r"a DistributedSampler lacks .*; use spotrun\.ElasticSampler"):
        run.track(sampler=DistributedSampler(data, 1, 0))  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="nothing is tracked"):
        next(iter(run.steps(loader)))
    run = spotrun.init()
    run.track(model=model)
    with pytest.raises(MisuseError, match="called before"):
        run.track(sampler=sampler)
    with pytest.raises(MisuseError, match="not tracked: add sampler="):
        next(iter(run.steps(loader)))
    run = spotrun.init()
    run.track(sampler=sampler)
    with pytest.raises(MisuseError, match="does not use it"):
        next(iter(run.steps(DataLoader(data))))  # type: ignore[arg-type]
    run = spotrun.init()
    run.track(sampler=sampler)
    assert len(list(run.steps(loader))) == 2
    with pytest.raises(MisuseError, match="twice in epoch 0"):
        next(iter(run.steps(loader)))
    settle(run)
    with pytest.raises(MisuseError, match=r"has no 'model', which run\.track names; it has sampler"):
        spotrun.init().track(sampler=sampler, model=model)


@pytest.mark.parametrize(
    ("call", "trainer", "right"),
    [
        ("train", "lightning.pytorch.trainer.trainer", "run.fit(trainer, module, …)"),
        ("train", "pytorch_lightning.trainer.trainer", "run.fit(trainer, module, …)"),
        ("fit", "transformers.trainer", "run.train(trainer)"),
        ("train", "builtins", "run.train(trainer)"),
    ],
)
def test_a_trainer_of_another_framework_is_named_without_this_framework(
    alone: Path, monkeypatch: pytest.MonkeyPatch, call: str, trainer: str, right: str
) -> None:
    for name in ("transformers", "lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    own = type("Own", (type("Trainer", (), {"__module__": trainer}),), {"__module__": "__main__"})
    with pytest.raises(MisuseError, match=rf"run\.{call} takes .* not __main__\.Own: write {re.escape(right)}"):
        getattr(spotrun.init(), call)(own())


def test_only_a_missing_module_is_the_scripts_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine's libraries may be why a module cannot be loaded."""
    trainer = type("Trainer", (), {"__module__": "transformers.trainer"})()
    monkeypatch.delitem(sys.modules, "spotrun.train.hugging_face.train", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MisuseError, match=r"run\.train: name transformers>=5\.24 in requirements"):
        frameworks.load(trainer, "hugging_face.train", "run.train")
    broken = ImportError("libcudart.so: cannot open shared object file")
    monkeypatch.setattr(importlib, "import_module", Mock(side_effect=broken))
    with pytest.raises(SpotrunError, match="libcudart") as caught:
        frameworks.load(trainer, "hugging_face.train", "run.train")
    assert not isinstance(caught.value, MisuseError)


@pytest.mark.parametrize("more", [3, 2])
def test_a_second_loop_counts_on(alone: Path, more: int) -> None:
    """For example, for each fold of a cross-validation. Without an error, such a loop would silently train nothing."""
    run, model = spotrun.init(), nn.Linear(2, 2)
    run.track(model=model)
    assert list(run.epochs(3)) == [0, 1, 2]
    said = rf"run\.epochs\({more}\) after run\.epochs\(3\) has no epochs: .* write run\.epochs\({3 + more}\)"
    with pytest.raises(MisuseError, match=said):
        next(iter(run.epochs(more)))
    assert list(run.epochs(3 + more)) == list(range(3, 3 + more))
    settle(run)


def test_sharded_training_is_refused_by_name(alone: Path) -> None:
    """Its state is one rank's share; a snapshot of it would look whole. Said before anything is restored."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
        assert isinstance(model.weight, DTensor)
        run = spotrun.init()
        with pytest.raises(MisuseError, match=r"model\.weight is a DTensor: sharded training .* not supported yet"):
            run.track(model=model)
        with pytest.raises(MisuseError, match=r"model is or has a FSDPLinear: sharded training"):
            spotrun.init().track(model=fully_shard(nn.Linear(2, 2), mesh=mesh))
        sharing = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(MisuseError, match=r"optimizer is or has a ZeroRedundancyOptimizer: sharded training"):
            spotrun.init().track(optimizer=sharing)
    finally:
        torch.distributed.destroy_process_group()
    assert slots.newest(alone, "job") == []


# The same scripts under plain python and torchrun.


@pytest.mark.parametrize("launcher", [[], [*STANDALONE, "--nproc-per-node=2"]])
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (["digits/train.py", "--epochs=1"], "test accuracy "),
        (
            [
                "vit/train.py",
                "--batch-size=2",
                "--depth=1",
                "--dim=32",
                "--steps=20",
                "--image-size=64",
                "--classes=10",
            ],
            "samples/s",
        ),
    ],
)
def test_examples_run_without_a_cluster(launcher: list[str], script: list[str], said: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "agent"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(ROOT / "examples" / script[0]), *script[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


LEAVING = """
import atexit, os, pathlib, spotrun, torch

def look():
    names = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    threads = sum("gloo" in name for name in names)
    # At once: two processes write to the same pipe.
    os.write(1, f"left {not torch.distributed.is_initialized()} threads {threads}\\n".encode())

atexit.register(look)  # runs after what `spotrun.init` registers
run = spotrun.init()
model = run.ddp(torch.nn.Linear(2, 2))
loss = model(torch.ones(1, 2)).sum()
loss.backward()
"""


@pytest.mark.parametrize("end", ["", "raise ValueError"], ids=["ends well", "fails"])
def test_a_script_that_ends_well_leaves_its_process_group(end: str, tmp_path: Path) -> None:
    """Otherwise gloo's threads abort a process now and then while its interpreter ends, on a busy machine."""
    script = tmp_path / "train.py"
    script.write_text(LEAVING + end)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "agent"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *STANDALONE, "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    found = re.findall(r"left (True|False) threads ([0-9]+)\n", done.stdout)
    if end:  # torchrun may end the other rank before it looks
        assert ("False", True) in {(left, threads != "0") for left, threads in found}, done.stdout + done.stderr
    else:
        assert found == [("True", "0")] * 2, done.stdout + done.stderr
    assert (done.returncode == 0) is (not end)


def test_importing_spotrun_imports_no_torch() -> None:
    code = "import spotrun, spotrun.state.shards, spotrun.state.checkpoints, sys; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": "agent"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT).returncode == 0
