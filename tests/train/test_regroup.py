"""Workers that join the next generation without a restart: exactness, deaths at bad moments, warm newcomers."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DistributedSampler

from spotrun.state import exit_note
from spotrun.state.control import (
    ABLE,
    EXIT_DRAINED,
    EXIT_PEER,
    NEEDS_RELEASE,
    NONE,
    Context,
    Control,
    worker_fifo,
)
from spotrun.train.parallel import Parallel
from spotrun.train.regroup import Membership
from tests.helpers import wait_for
from tests.train import faults
from tests.train.forks import forked
from tests.train.generations import EPOCHS, Cluster, everything, flatten, network
from tests.train.regroups import Regroups, release, undisturbed_final

ON_GPU = {"on_gpu": True}  # the plan of a worker whose device counts as a GPU
EXACT = {"exact": True, **ON_GPU}
# Otherwise DDP looks for unused parameters, and exchanges buffers, over gloo, which fails when a peer is gone.
SUMS_ONLY = {"ddp": {"find_unused_parameters": False, "broadcast_buffers": False}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Final state of three workers that nothing happened to."""
    cluster = Cluster(tmp_path_factory.mktemp("undisturbed"))
    assert cluster.run(["a", "b", "c"]) == [0, 0, 0], cluster.log()
    return cluster.final()


def test_a_worker_that_waits_wakes_the_agent(job: Regroups) -> None:
    """The pause of all others contains the time until the agent sees it."""
    job.begin("ab", stop_at=2)
    wait_for(lambda: all(each.control.left == EXIT_DRAINED for each in job.members), 60)
    found = bytearray()

    def both() -> bool:
        with contextlib.suppress(BlockingIOError):
            found.extend(os.read(job.wakes, 100))
        return len(found) == 2

    wait_for(both, 60, "two wakes")


@pytest.mark.parametrize(("plan", "able"), [({}, ABLE), (ON_GPU, NEEDS_RELEASE)], ids=["on the CPU", "on a GPU"])
def test_a_planned_change_loses_nothing_and_loads_nothing(
    job: Regroups, undisturbed: Any, plan: dict[str, Any], able: int
) -> None:
    """Twice, once at the end of an epoch. The state in memory goes on as it is."""
    job.begin("abc", stop_at=2, a=plan, b=plan, c=plan)
    job.regroup(job.members, stop_at=5)
    job.regroup(job.members)
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert [each.control.pid for each in job.members] == job.pids()
    assert [each.control.able for each in job.members] == [able] * 3
    assert job.cluster.seen() == everything
    assert flatten(job.cluster.final()) == flatten(undisturbed)


def test_a_newcomer_on_a_gpu_takes_the_place_of_one_that_leaves(job: Regroups, undisturbed: Any) -> None:
    """It has warmed up, and gets the state from those that stay."""
    job.begin("abc", stop_at=4, a=ON_GPU, b=ON_GPU, c=ON_GPU)
    first, leaves, last = job.members
    job.regroup([first, job.warm_up("d", **ON_GPU), last])
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert leaves.control.left == EXIT_DRAINED
    assert flatten(job.cluster.final()) == flatten(undisturbed)


@pytest.mark.parametrize("interval", [1, 2])
def test_a_peers_death_on_a_gpu(job: Regroups, undisturbed: Any, interval: int) -> None:
    """The others notice nothing until they are told. The tracked state comes back from the newest snapshot."""
    job.begin("abc", interval, a=ON_GPU, b={"die_at": 3, **ON_GPU}, c=ON_GPU)
    survivors = job.survivors()
    spare = job.warm_up("d", interval, **ON_GPU)
    assert all(each.control.left == NONE for each in survivors)
    for each in survivors:
        release(each, job.cluster.generation)
    job.regroup([*survivors, spare])
    assert [each.control.base for each in job.members] == [NONE] * 3
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert [each.control.pid for each in job.members] == job.pids()
    assert [each.control.base for each in job.members] == [3 // interval * interval] * 3
    assert job.cluster.seen() == everything
    assert flatten(job.cluster.final()) == flatten(undisturbed)


def test_workers_on_gpus_restart_if_the_store_goes_while_they_join(job: Regroups) -> None:
    """They do not wait for another generation, as workers on the CPU do."""
    job.begin("ab", stop_at=2, a=ON_GPU, b=ON_GPU)
    members = job.members
    job.regroup(members, missing=1)
    wait_for(lambda: all(each.control.entered > 0 for each in members), 60)
    job.close_groups()  # what the agents do: the store goes
    assert job.end() == [EXIT_PEER, EXIT_PEER], job.cluster.log()


def test_buffers_on_a_gpu_that_no_snapshot_has(job: Regroups) -> None:
    """An aborted collective may have changed them, so the worker restarts. After a stop, it goes on."""
    plan = {"cache": True, **ON_GPU}
    job.begin("abc", 1, stop_at=2, a=plan, b={"die_at": 3, **plan}, c=plan)
    job.regroup(job.members)
    for each in job.survivors():
        release(each, job.cluster.generation)
    assert job.end() == [EXIT_PEER, -signal.SIGKILL, EXIT_PEER], job.cluster.log()


def test_a_collective_on_a_gpu_that_fails_outside_of_the_loop(job: Regroups) -> None:
    """The script would not know that its result means nothing: the worker ends."""
    job.begin("ab", 1, a={"nccl_fails_at": 0, **ON_GPU}, b=ON_GPU)
    job.members[0].process.join(60)
    assert job.members[0].process.exitcode == EXIT_PEER, job.cluster.log()


def test_a_device_that_fails_while_the_state_comes_back(job: Regroups) -> None:
    """A fork has a context of its own on the device."""
    plan = {"device_fails": True, **ON_GPU}
    job.begin("abc", 1, a=plan, b={"die_at": 3, **ON_GPU}, c=plan)
    survivors = job.survivors()
    for each in survivors:
        release(each, job.cluster.generation)
    job.regroup(survivors)
    assert job.end() == [EXIT_PEER, EXIT_PEER], job.cluster.log()
    assert "the device is lost" in job.cluster.log()


def test_a_worker_on_a_gpu_without_a_fifo(job: Regroups, undisturbed: Any) -> None:
    """Nobody can wake it, so it looks by itself whether it is released."""
    for rank in range(3):
        Path(worker_fifo(str(job.cluster.path / f"control-1-{rank}"))).touch()
    job.begin("abc", 1, a=ON_GPU, b={"die_at": 3, **ON_GPU}, c=ON_GPU)
    survivors = job.survivors()
    for each in survivors:
        each.control.released = job.cluster.generation
    job.regroup([*survivors, job.warm_up("d", 1, **ON_GPU)])
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert [each.control.pid for each in job.members] == job.pids()
    assert flatten(job.cluster.final()) == flatten(undisturbed)


def test_an_abort_that_takes_too_long(job: Regroups) -> None:
    """The worker ends, although its script still waits for the collective."""
    plan = {"abort_takes": 60.0, **ON_GPU}
    job.begin("abc", 1, a=plan, b={"die_at": 3, **ON_GPU}, c=plan)
    for each in job.survivors():
        release(each, job.cluster.generation)
    assert job.end() == [EXIT_PEER, -signal.SIGKILL, EXIT_PEER], job.cluster.log()
    assert "the collectives under way do not end: not done after 1 s" in job.cluster.log()


def test_a_collective_on_a_gpu_that_fails_by_itself(job: Regroups, undisturbed: Any) -> None:
    """NCCL reports an error to one worker, which leaves. The others are told."""
    job.begin("abc", 1, a=ON_GPU, b={"nccl_fails_at": 3, **ON_GPU}, c=ON_GPU)
    wait_for(lambda: job.members[1].control.left == EXIT_PEER, 60)
    for each in job.members:
        release(each, job.cluster.generation)
    job.regroup(job.members)
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert [each.control.pid for each in job.members] == job.pids()
    assert flatten(job.cluster.final()) == flatten(undisturbed)


def test_a_collective_on_a_gpu_that_fails_where_the_script_cannot_go_on(job: Regroups) -> None:
    plan = {"reads_size": True, **ON_GPU}
    job.begin("ab", 1, a={"nccl_fails_at": 3, **plan}, b=plan)
    job.members[0].process.join(60)
    assert job.members[0].process.exitcode == EXIT_PEER, job.cluster.log()


@pytest.mark.parametrize(("seconds", "why"), [(60.0, "not done after 2 s"), (0.01, "NCCL says no")])
def test_a_process_group_on_a_gpu_that_does_not_end_well(job: Regroups, seconds: float, why: str) -> None:
    """The workers end, as they would without a regroup."""
    plan = {"stays": seconds, **ON_GPU}
    job.begin("ab", stop_at=2, a=plan, b=plan)
    assert job.end() == [EXIT_DRAINED, EXIT_DRAINED], job.cluster.log()
    assert f"the process group does not end: {why}" in job.cluster.log()


@pytest.mark.parametrize("late", [0, 1])
def test_a_worker_on_a_gpu_does_not_wait_if_another_may_still_need_its_group(
    job: Regroups, tmp_path: Path, late: int
) -> None:
    """The other one comes to the stop step, and does not say that its device has finished."""
    os.mkfifo(gate := tmp_path / "gate")
    plans = {"patience": 0.2, **ON_GPU}, {"gate": str(gate), **ON_GPU}
    job.begin("ab", stop_at=2, a=plans[1 - late], b=plans[late])
    first = job.members[1 - late].process
    first.join(60)
    assert first.exitcode == EXIT_DRAINED, job.cluster.log()
    gate.write_text("")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, ""),
        ({"mixed_precision": object()}, "mixed_precision"),
        ({"delay_all_reduce_named_params": [("weight", torch.ones(1))]}, "delay_all_reduce_named_params"),
    ],
    ids=["none", "mixed precision", "delayed gradients"],
)
def test_an_option_of_ddp_that_needs_a_restart(options: dict[str, Any], why: str) -> None:
    found = Parallel(torch.nn.Linear(2, 2), torch.device("cpu"), **options).obstacle
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize(
    ("state", "hook", "obstacle"),
    [
        (None, flatten, False),
        (8, flatten, False),
        ([], flatten, True),
        (None, partial(flatten, []), True),
        (None, Cluster(Path()).final, True),
    ],
)
def test_a_hook_that_needs_a_restart(state: Any, hook: Any, obstacle: bool) -> None:
    """Its state can change: the object that it gets, or the one that it belongs to."""
    model = Parallel(torch.nn.Linear(2, 2), torch.device("cpu"))
    model.register_comm_hook(state, hook)
    assert bool(model.obstacle) == obstacle


def keep_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A membership replaces these methods. Put them back after the test."""
    kinds: list[Any] = [torch.amp.GradScaler, *vars(lr_scheduler).values()]
    for kind in kinds:
        if isinstance(kind, type) and "step" in vars(kind):
            monkeypatch.setattr(kind, "step", vars(kind)["step"])


class Warmup(lr_scheduler.LRScheduler):
    """A scheduler of a script, which calls another one."""

    def __init__(self, optimizer: torch.optim.Optimizer, after: lr_scheduler.LRScheduler) -> None:
        self.after_scheduler = after
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        self.after_scheduler.step()


class Several:
    """Optimizers or schedulers that a script keeps together."""

    def __init__(self, *parts: Any) -> None:
        self.parts = {"all": list(parts)}


class Quantized(torch.nn.Linear):
    is_quantized = True

    def to(self, *_: Any, **__: Any) -> Any:
        raise ValueError("`.to` is not supported")


def test_a_quantized_model_stays_where_it_is() -> None:
    module = Quantized(2, 2)
    assert Parallel(module, torch.device("cpu")).module is module


def test_what_a_tracked_object_of_the_script_keeps_is_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_steps(monkeypatch)
    model = Parallel(torch.nn.Linear(2, 2), torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters())
    schedulers = [lr_scheduler.StepLR(optimizer, 5), Warmup(optimizer, lr_scheduler.StepLR(optimizer, 5))]
    control = Control(tmp_path / "control", create=True)
    membership = Membership(Context("job", 1, "n", "", "", ""), control, torch.device("cpu"), None, [model])
    membership.look_at([model, Several(optimizer), Several(*schedulers)], [])
    for each in schedulers:
        each.step()
    later = lr_scheduler.StepLR(optimizer, 5)
    assert not membership.obstacle
    later.step()
    assert membership.obstacle == "run.track does not name the StepLR, so its state is not saved"


def test_a_scaler_in_the_set_up_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_steps(monkeypatch)
    model, scaler = torch.nn.Linear(2, 2), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters())
    control = Control(tmp_path / "control", create=True)
    membership = Membership(Context("job", 1, "n", "", "", ""), control, torch.device("cpu"), None, [])

    def step() -> None:
        scaler.scale(model(torch.ones(2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    step()
    membership.look_at([optimizer, scaler], [])
    step()
    assert not membership.obstacle
    membership.look_at([optimizer], [])
    step()
    assert membership.obstacle == "run.track does not name the GradScaler, so its state is not saved"


def test_a_script_that_captures_a_graph_on_a_gpu_needs_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_steps(monkeypatch)
    captured: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda graph, *given: captured.append((graph, *given)))
    control = Control(tmp_path / "control", create=True)
    control.able = NEEDS_RELEASE
    membership = Membership(Context("job", 1, "n", "", "", ""), control, torch.device("cuda", 0), None, [])
    assert not membership.obstacle
    graph = object()
    torch.cuda.CUDAGraph.capture_begin(graph, "pool")  # type: ignore[arg-type]
    assert (captured, control.able, membership.obstacle) == ([(graph, "pool")], 0, "the script captures CUDA graphs")


def change_the_weight(module: torch.nn.Module) -> None:
    with torch.no_grad():
        module.weight.mul_(2)  # type: ignore[operator]


def change_the_table(module: torch.nn.Module) -> None:
    module.table.mul_(2)  # type: ignore[operator]


def replace_the_table(module: torch.nn.Module) -> None:
    module.table = torch.ones(2)


@pytest.mark.parametrize(
    ("change", "goes_on"), [(change_the_weight, True), (change_the_table, False), (replace_the_table, False)]
)
def test_a_tensor_that_changes_and_that_no_snapshot_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.nn.Module], None], goes_on: bool
) -> None:
    """After an abort on a GPU, nothing brings it back."""
    keep_steps(monkeypatch)
    monkeypatch.setattr(DistributedSampler, "__init__", DistributedSampler.__init__)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", torch.cuda.CUDAGraph.capture_begin)
    monkeypatch.setattr(Membership, "able", lambda _: NEEDS_RELEASE)
    module = torch.nn.Linear(2, 2)
    module.register_buffer("table", torch.ones(2), persistent=False)
    model, control = Parallel(module, torch.device("cpu")), Control(tmp_path / "control", create=True)
    membership = Membership(Context("job", 1, "n", "", "", ""), control, torch.device("cuda", 0), None, [model])
    membership.look_at([model], model.state_dict().values())
    assert membership.can_go_on()
    change(module)
    assert membership.can_go_on() == goes_on


VIEWS: dict[str, Any] = {"ddp": {"gradient_as_bucket_view": True}}  # gradients are parts of DDP's own memory


@pytest.mark.parametrize(
    "plan",
    [{}, ON_GPU, VIEWS, {**ON_GPU, **VIEWS}],
    ids=["on the CPU", "on a GPU", "views on the CPU", "views on a GPU"],
)
def test_kills_change_no_bit(job: Regroups, undisturbed: Any, plan: dict[str, Any]) -> None:
    """Every node dies once; a worker that has warmed up takes its place, and gets the state from a peer."""
    job.begin("abc", 1, b={"die_at": 3, **plan}, a={"die_at": 6, **plan}, c={"die_at": 9, **plan})
    for node in "bac":
        dead = next(each for each in job.members if each.context.node == node)
        dead.process.join(60)
        assert dead.process.exitcode == -signal.SIGKILL, job.cluster.log()
        survivors = [each for each in job.members if each is not dead]
        for each in survivors if plan.get("on_gpu") else ():
            release(each, job.cluster.generation)
        job.regroup([*survivors, job.warm_up(f"another-{node}", 1, **plan)])
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert job.cluster.seen() == everything
    assert flatten(job.cluster.final()) == flatten(undisturbed)


PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 3},
    "two models": {"two_models": True},
    "compiled": {"compiles": True},
    "exact on a GPU": EXACT,
    "exact on a GPU, accumulate": {"accumulate": 3, **EXACT},
    "exact on a GPU, a collective of its own": {"collective": "last", **EXACT},
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_a_death_costs_no_step_before_it(job: Regroups, tmp_path: Path, plan: dict[str, Any]) -> None:
    """The survivors go on from their own memory, and a newcomer gets that state. No snapshot is taken before."""
    job.begin("ab", 1000, a=plan, b={"die_at": 8, **plan})
    survivors = job.survivors()
    newcomer = job.warm_up("d", 1000, **plan)
    for each in survivors if plan.get("on_gpu") else ():
        release(each, job.cluster.generation)
    job.regroup([*survivors, newcomer])
    assert job.end() == [0, 0], job.cluster.log()
    assert [each.control.pid for each in job.members] == job.pids()
    assert [each.control.base for each in job.members] == [8, 8]
    assert job.cluster.seen() == everything
    assert flatten(job.cluster.final()) == flatten(undisturbed_final(tmp_path / "whole", "ab", 1000, plan))


def test_a_step_counts_once_its_gradients_are_exchanged(job: Regroups, tmp_path: Path) -> None:
    """In exact mode, a worker on a GPU dies in the rest of a step. The others go on from this step."""
    plan = {"ddp": {"broadcast_buffers": False}, **EXACT}
    job.begin("ab", 1000, a=plan, b={"die_at": 8, "die_in": "last", **plan})
    (survivor,) = job.survivors()
    newcomer = job.warm_up("d", 1000, **plan)
    release(survivor, job.cluster.generation)
    job.regroup([survivor, newcomer])
    assert job.end() == [0, 0], job.cluster.log()
    assert [each.control.base for each in job.members] == [9] * 2
    assert flatten(job.cluster.final()) == flatten(undisturbed_final(tmp_path / "whole", "ab", 1000, plan))


@pytest.mark.parametrize("spoilt", [False, True], ids=["both aborted", "one aborted, one spoilt by that"])
def test_a_sum_that_another_workers_abort_has_spoilt(job: Regroups, tmp_path: Path, spoilt: bool) -> None:
    """NCCL marks what an aborted kernel sends as valid. Nothing but the workers' meeting shows that it is wrong."""
    plan = {**SUMS_ONLY, **EXACT}
    job.begin("abc", 1000, a=plan, b={"die_at": 8, **plan}, c={"spoilt": str(tmp_path) if spoilt else "", **plan})
    first, last = job.survivors()
    newcomer = job.warm_up("d", 1000, **plan)
    release(first, job.cluster.generation)
    wait_for(lambda: first.control.left == EXIT_PEER, 60)
    if not spoilt:
        release(last, job.cluster.generation)
    job.regroup([first, last, newcomer])
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert [each.control.pid for each in job.members] == job.pids()
    assert [each.control.base for each in job.members] == [8] * 3
    assert job.cluster.seen() == everything
    assert all(bool(each.isfinite().all()) for each in job.cluster.final()["model"].values())


def test_no_snapshot_has_a_sum_that_another_workers_abort_has_spoilt(job: Regroups, tmp_path: Path) -> None:
    """The worker that got the sum has no error, and the agent has not told it yet that a peer is gone."""
    plan, aborted = {**SUMS_ONLY, **ON_GPU}, tmp_path / "aborted"
    job.begin("abc", 1, a=plan, b={"die_at": 8, **plan}, c={"spoilt": str(aborted), **plan})
    first, last = job.survivors()
    release(first, job.cluster.generation)
    wait_for(lambda: first.control.left == EXIT_PEER, 60)
    aborted.touch()
    wait_for(lambda: last.control.left == EXIT_PEER or last.control.committed > 8, 60)
    release(last, job.cluster.generation)
    job.regroup([first, last, job.warm_up("d", 1, **plan)])
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert {each.control.base for each in job.members} <= {7, 8}
    assert job.cluster.seen() == everything
    assert all(bool(each.isfinite().all()) for each in job.cluster.final()["model"].values())


def test_a_second_death_while_they_join(job: Regroups, undisturbed: Any) -> None:
    """In exact mode, workers on GPUs keep their state, as on the CPU."""
    job.begin("abc", 1000, a=EXACT, b={"die_at": 8, **EXACT}, c=EXACT)
    survivors = job.survivors()
    for each in survivors:
        release(each, job.cluster.generation)
    job.lose_a_newcomer(survivors, 1000, **EXACT)
    job.regroup([*survivors, job.warm_up("e", 1000, **EXACT)])
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert [each.control.base for each in job.members] == [8] * 3
    assert flatten(job.cluster.final()) == flatten(undisturbed)


@pytest.mark.parametrize("plan", [{}, EXACT], ids=["on the CPU", "exact, on a GPU"])
def test_a_newcomers_death_in_its_first_step(job: Regroups, undisturbed: Any, plan: dict[str, Any]) -> None:
    """The others have just sent it the state. They still have it."""
    job.begin("abc", 1000, a=plan, b={"die_at": 8, **plan}, c=plan)
    survivors = job.survivors()
    newcomer = job.warm_up("d", 1000, die_at=8, **plan)
    for each in survivors if plan else ():
        release(each, job.cluster.generation)
    job.regroup([*survivors, newcomer])
    newcomer.process.join(60)
    assert newcomer.process.exitcode == -signal.SIGKILL, job.cluster.log()
    for each in survivors if plan else ():
        release(each, job.cluster.generation)
    job.regroup([*survivors, job.warm_up("e", 1000, **plan)])
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert [each.control.base for each in job.members] == [8] * 3
    assert flatten(job.cluster.final()) == flatten(undisturbed)


def test_a_rank_that_cannot_be_exact(job: Regroups) -> None:
    """Then none is: the others would wait for it."""
    job.begin("ab", 1, a={"reads_size": True, **EXACT}, b=EXACT)
    assert job.end() == [0, 0], job.cluster.log()
    assert job.cluster.seen() == everything


def test_deaths_again_and_again_cost_no_step(job: Regroups, undisturbed: Any) -> None:
    """Also that of a member that is about to get the state."""
    job.begin("abc", 1000, a={"die_at": 9}, b={"die_at": 8})
    survivors = job.survivors()
    job.lose_a_newcomer(survivors, 1000)
    job.regroup([*survivors, job.warm_up("e", 1000)])
    job.members[0].process.join(60)
    survivors = job.members[1:]
    job.regroup([*survivors, job.warm_up("f", 1000)])
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert [each.control.base for each in job.members] == [9] * 3
    assert flatten(job.cluster.final()) == flatten(undisturbed)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_early_step_is_done_again_by_fewer_workers(job: Regroups, accumulate: int) -> None:
    """Each sample counts once. Snapshots are adaptive, so some steps are done again."""
    plan = {"accumulate": accumulate}
    job.begin("abc", a=plan, b={"die_at": 3, **plan}, c=plan)
    job.regroup(job.survivors())
    assert job.end() == [0, 0], job.cluster.log()
    assert job.cluster.seen() == everything
    assert "Warning" not in job.cluster.log()


@pytest.mark.parametrize("plan", [{}, EXACT], ids=["cpu", "exact on a GPU"])
def test_the_samples_of_a_step_do_not_depend_on_the_number_of_workers(
    job: Regroups, tmp_path: Path, plan: dict[str, Any]
) -> None:
    """Three workers train, then two, then three. One worker alone has the same steps, and nearly the same weights."""
    plan = {"global_batch": 32, "ddp": {"broadcast_buffers": False}, **plan}
    job.begin("abc", 1000, a=plan, b={"die_at": 3, **plan}, c=plan)
    survivors = job.survivors()
    for each in survivors if plan.get("on_gpu") else ():
        release(each, job.cluster.generation)
    job.regroup(survivors, stop_at=7)
    job.regroup([*survivors, job.warm_up("d", 1000, **plan)])
    assert job.end() == [0, 0, 0], job.cluster.log()
    found, whole = job.cluster.final(), undisturbed_final(tmp_path / "whole", "a", 1000, plan)
    assert job.cluster.seen() == everything
    assert len(job.cluster.seen_in_steps()) == 4 * EPOCHS
    assert "completes_step" not in job.cluster.log()  # a state that was loaded is no mistake of the script
    first = network().state_dict()
    for name in ("4.weight", "6.weight"):
        moved = (whole["model"][name] - first[name]).norm()
        assert (found["model"][name] - whole["model"][name]).norm() < 0.01 * moved, name


def test_a_state_of_another_epoch_needs_a_restart(job: Regroups) -> None:
    """The script is past its place. All members say so, and wait for what the agent decides."""
    job.begin("abc", 1, b={"die_at": 5})  # the newest snapshot is that of the first epoch's last step
    survivors = job.survivors()
    job.regroup(survivors)
    wait_for(lambda: all(each.control.left == EXIT_PEER for each in survivors), 60)
    for each in survivors:
        assert "another epoch" in exit_note.path_for(each.context.control).read_text()


def test_a_state_of_before_a_second_loop_over_epochs_needs_a_restart(job: Regroups) -> None:
    """What the script has changed between the two loops is not in it, although it is of the same epoch."""
    plan = {"script": "phases"}
    job.begin("abc", 1, a=plan, b={"die_at": 5, **plan}, c=plan)
    survivors = job.survivors()
    job.regroup(survivors)
    wait_for(lambda: all(each.control.left == EXIT_PEER for each in survivors), 60)


def test_a_member_that_dies_while_it_joins(job: Regroups, undisturbed: Any) -> None:
    """The others wait for the next generation, and nothing that the failed one has loaded stays."""
    job.begin("abc", 1, b={"die_at": 3})
    survivors = job.survivors()
    job.lose_a_newcomer(survivors, 1)
    job.regroup([*survivors, job.warm_up("e", 1)])
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert flatten(job.cluster.final()) == flatten(undisturbed)


def test_a_store_that_is_gone_before_the_members_reach_it(job: Regroups, undisturbed: Any) -> None:
    """They do not try for as long as a collective may take, but wait for the next generation."""
    job.begin("abc", 1, b={"die_at": 3})
    survivors = job.survivors()
    job.regroup(survivors, missing=1, store=False)
    wait_for(lambda: all(each.control.entered > 0 for each in survivors), 60)
    job.regroup([*survivors, job.warm_up("d", 1)])
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert flatten(job.cluster.final()) == flatten(undisturbed)


@pytest.mark.parametrize("plan", [{}, ON_GPU], ids=["on the CPU", "on a GPU"])
@pytest.mark.parametrize("answers", [True, False], ids=["a member is missing", "the store does not answer"])
def test_members_are_called_back_from_a_generation_that_does_not_begin(
    job: Regroups, undisturbed: Any, answers: bool, plan: dict[str, Any]
) -> None:
    """The members keep their state, and end with the same result."""
    job.begin("abc", stop_at=5, a=plan, b=plan, c=plan)
    pids = job.pids()
    job.regroup(job.members, missing=1, answers=answers)
    wait_for(lambda: all(each.control.entered > 0 for each in job.members), 60)
    for each in job.members:
        release(each, job.cluster.generation)
    wait_for(lambda: all(each.control.left == EXIT_DRAINED for each in job.members), 10)
    job.regroup(job.members)
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert job.pids() == pids
    assert flatten(job.cluster.final()) == flatten(undisturbed)


def test_a_donor_that_dies_while_it_sends(job: Regroups, undisturbed: Any) -> None:
    """The newcomer has a part of the state. It gets the whole state in the next generation, from another one."""
    job.begin("abc", 1, a={"sends": "a part"}, b={"die_at": 3})
    donor, dead, survivor = job.members
    dead.process.join(60)
    spare = job.warm_up("d", 1)
    job.regroup([donor, survivor, spare])
    donor.process.join(60)
    assert donor.process.exitcode == -signal.SIGKILL, job.cluster.log()
    job.regroup([survivor, spare, job.warm_up("e", 1)])
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert flatten(job.cluster.final()) == flatten(undisturbed)


def test_a_state_that_arrives_damaged(job: Regroups, undisturbed: Any) -> None:
    """The checksums show it. The newcomer gets the state in the next generation."""
    job.begin("abc", 1, a={"sends": "wrongly"}, b={"die_at": 3})
    survivors = job.survivors()
    job.regroup([*survivors, job.warm_up("d", 1)])
    members = job.members
    wait_for(lambda: all(each.control.left == EXIT_PEER for each in members), 60)
    assert "the state of step 3 that rank 0 has sent is damaged" in job.cluster.log()
    job.regroup(members)
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert flatten(job.cluster.final()) == flatten(undisturbed)


def test_a_newcomer_with_a_part_of_a_lost_state_needs_a_restart(job: Regroups) -> None:
    """The script's own first state is overwritten, so it cannot begin from that."""
    job.begin("ab", 1, a={"sends": "a part"}, b={"die_at": 3})
    donor, dead = job.members
    dead.process.join(60)
    spare = job.warm_up("d", 1)
    job.regroup([donor, spare])
    donor.process.join(60)
    job.regroup([spare])
    wait_for(lambda: spare.control.left == EXIT_PEER, 60)
    assert "is lost: the script must start again" in exit_note.path_for(spare.context.control).read_text()


def test_newcomers_that_get_no_state_begin_as_new(job: Regroups) -> None:
    """What they have made of their optimizers to receive a state is forgotten."""
    job.regroup([job.warm_up(node) for node in "abc"])
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert job.cluster.seen() == everything
    assert all(state["step"] == 15 for state in job.cluster.final()["optimizer"]["state"].values())


def test_a_loaders_processes_stay(job: Regroups) -> None:
    """With `persistent_workers=True`. They load what the new generation asks for."""
    plan = {"keeps_loaders": True}
    job.begin("abc", 1, a=plan, b={"die_at": 3}, c=plan)  # no agent would end the process that loads data for b
    survivors = job.survivors()
    wait_for(lambda: all(each.control.left == EXIT_PEER for each in survivors), 60)
    before = [psutil.Process(each.process.pid).children() for each in survivors]
    for loader in (each for own in before for each in own):
        job.stack.callback(end, loader)  # an agent ends what a worker leaves behind
    job.regroup(survivors, stop_at=6)
    wait_for(lambda: all(each.control.left == EXIT_DRAINED for each in survivors), 60)
    assert [psutil.Process(each.process.pid).children() for each in survivors] == before
    assert [len(each) for each in before] == [1, 1]
    job.regroup(survivors)
    assert job.end() == [0, 0], job.cluster.log()
    assert job.cluster.seen() == everything


def test_a_peers_death_shows_although_loaders_have_processes(job: Regroups) -> None:
    """A loader's process is a fork of its worker. Not all of four workers exchange gradients with the dead one.

    The others notice the death only when their neighbours leave, so a fork must not keep the neighbours' connections.
    """
    plan = {"keeps_loaders": True}
    job.begin("abcd", 1, a=plan, b={"die_at": 2}, c=plan, d=plan)
    survivors = job.survivors()
    wait_for(lambda: all(each.control.left == EXIT_PEER for each in survivors), 60)
    for each in survivors:
        for loader in psutil.Process(each.process.pid).children():
            job.stack.callback(end, loader)
    job.regroup(survivors)
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert job.cluster.seen() == everything


def test_a_hook_stays(job: Regroups) -> None:
    """One that the script has registered with `model.register_comm_hook`. A peer's death shows in it, too."""
    plan = {"hooks": True}
    job.begin("abc", 1, a=plan, b={"die_at": 3, **plan}, c=plan)
    survivors = job.survivors()
    job.regroup([*survivors, job.warm_up("d", 1, **plan)])
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert job.cluster.seen() == everything
    for each in job.members:
        calls = (job.cluster.path / "out" / f"hook-{each.process.pid}").read_text().split()
        assert len(calls) >= 12
        assert set(calls) == {"3"}


def test_a_compiled_model_is_not_compiled_again(job: Regroups) -> None:
    """Survivors compile in their first generation only, also if the number of workers changes."""
    plan = {"compiles": True}
    job.begin("abc", 1, a=plan, b={"die_at": 3, **plan}, c=plan)
    survivors = job.survivors()
    job.regroup([*survivors, job.warm_up("d", 1, **plan)], stop_at=6)
    job.regroup(survivors)
    assert job.end() == [0, 0], job.cluster.log()
    assert job.cluster.seen() == everything
    for each in survivors:
        assert set((job.cluster.path / "out" / f"compiled-{each.process.pid}").read_text().split()) == {"1"}


@pytest.mark.parametrize("plan", [{}, ON_GPU], ids=["on the CPU", "on a GPU"])
def test_a_frozen_peer(job: Regroups, undisturbed: Any, plan: dict[str, Any]) -> None:
    """Its connections stay, so nobody notices. The others leave the generation when they are told, and it follows."""
    job.begin("abc", 1, a=plan, b={"die_at": 3, "freezes": True, **plan}, c=plan)
    frozen = job.members[1]
    wait_for(lambda: psutil.Process(frozen.process.pid).status() == psutil.STATUS_STOPPED, 60)
    survivors = [each for each in job.members if each is not frozen]
    spare = job.warm_up("d", 1, **plan)
    assert all(each.control.left == NONE for each in survivors)
    for each in survivors:
        release(each, job.cluster.generation)
    job.regroup([*survivors, spare])
    release(spare, job.cluster.generation - 1)  # it comes late
    os.kill(frozen.process.pid, signal.SIGCONT)
    if plan:  # it does not notice that the others have left
        release(frozen, frozen.context.generation)
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert flatten(job.cluster.final()) == flatten(undisturbed)
    wait_for(lambda: frozen.control.left == EXIT_PEER, 60)


def end(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


@pytest.mark.parametrize(("collective", "die_in"), [("first", "last"), ("middle", ""), ("last", "middle")])
def test_collectives_of_the_script_after_a_peers_death(
    job: Regroups, undisturbed: Any, collective: str, die_in: str
) -> None:
    """They return without a result, and the step is done again: bit for bit, wherever in it the peer has died."""
    plan = {"collective": collective}
    job.begin("abc", 1, a=plan, b={"die_at": 3, "die_in": die_in, **plan}, c=plan)
    job.regroup([*job.survivors(), job.warm_up("d", 1, **plan)])
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert flatten(job.cluster.final()) == flatten(undisturbed)


def test_a_second_backward_after_a_peers_death(job: Regroups) -> None:
    """Its graph leads through a DDP instance that the first one's failure has ended. The step is done again."""
    plan = {"two_models": True}
    job.begin("abc", 1, a=plan, b={"die_at": 3, **plan}, c=plan)
    job.regroup(job.survivors())
    assert job.end() == [0, 0], job.cluster.log()
    assert job.cluster.seen() == everything


def test_a_process_ends_although_a_collective_of_an_old_group_hangs(tmp_path: Path) -> None:
    both = [
        forked.Process(target=faults.leave_in_a_collective_that_hangs, args=(tmp_path / "meeting", rank), daemon=True)
        for rank in (0, 1)
    ]
    for each in both:
        each.start()
    leaver, peer = both
    try:
        leaver.join(60)
        assert leaver.exitcode == 0
        assert peer.is_alive()
    finally:
        for each in both:
            each.kill()
            each.join()


@pytest.mark.parametrize(
    "what", [["reads_size"], ["own_ddp"], ["own_group"], ["scales"], ["hooks", "stateful"]], ids="-".join
)
def test_a_script_that_cannot_go_on_needs_a_restart(job: Regroups, what: list[str]) -> None:
    """What it made of the number of workers, or of their group, would be wrong in another generation.

    So would a scale, or the state of a hook, that a newcomer does not have.
    """
    plan = dict.fromkeys(what, True)
    job.begin("ab", stop_at=2, a=plan, b=plan)
    assert job.end() == [EXIT_DRAINED, EXIT_DRAINED], job.cluster.log()
    assert [each.control.able for each in job.members] == [0, 0]
