"""Scripts as users may write them: no interruption changes a bit, or a worker says that it must restart."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler

from spotrun.errors import SpotrunError
from spotrun.state.control import EXIT_DRAINED, EXIT_PEER
from spotrun.train import batches, training_state
from spotrun.train.parallel import Parallel
from spotrun.train.training_state import _keep_groups
from tests.helpers import wait_for
from tests.train.generations import Cluster, flatten
from tests.train.regroups import Regroups, undisturbed_final
from tests.train.scripts import EPOCHS, SAMPLES

NODES = ["a", "b", "c"]
everything = list(range(SAMPLES))


def undisturbed(path: Path, script: str, nodes: list[str]) -> Cluster:
    path.mkdir()
    cluster = Cluster(path)
    assert cluster.run(nodes, script=script) == [0] * len(nodes), cluster.log()
    return cluster


def restarted(path: Path, script: str, nodes: list[str], lost: str = "", stop_at: int = 7) -> Cluster:
    """All workers stop after a step, and begin again. lost: nodes that have lost their memory."""
    path.mkdir()
    cluster = Cluster(path)
    assert cluster.run(nodes, stop_at=stop_at, script=script) == [EXIT_DRAINED] * len(nodes), cluster.log()
    for node in lost:
        shutil.rmtree(cluster.slots(node))
    assert cluster.run(nodes, script=script) == [0] * len(nodes), cluster.log()
    return cluster


@pytest.mark.parametrize("script", ["averaged", "wrapped", "drawing", "phases", "low_precision", "passing"])
def test_a_restart_changes_no_bit(tmp_path: Path, script: str) -> None:
    before = undisturbed(tmp_path / "before", script, ["a", "b"])
    after = restarted(tmp_path / "after", script, ["a", "b"], stop_at=10)  # in the second epoch
    for rank in (0, 1):
        assert flatten(before.final(rank)) == flatten(after.final(rank))
    assert before.seen() == after.seen() == dict.fromkeys(before.seen(), everything)
    if script == "passing":
        assert sorted(before.final()["again"] + before.final(1)["again"]) == everything


@pytest.mark.parametrize("script", ["seeded", "buffered", "generated"])
def test_a_loader_with_another_sampler_gives_each_sample_once(tmp_path: Path, script: str) -> None:
    before = undisturbed(tmp_path / "before", script, ["a"])
    after = restarted(tmp_path / "after", script, ["a"])
    assert after.seen() == dict.fromkeys(range(EPOCHS), everything)
    assert flatten(before.final()) == flatten(after.final())


def test_the_loader_itself_is_not_tracked() -> None:
    loader: Any = torch.utils.data.DataLoader([1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(SpotrunError, match="the loader is tracked: leave it out of"):
        batches.check(loader, [nn.Linear(1, 1), loader])


class Counted(torch.utils.data.IterableDataset[int]):
    """Has a state, as one that knows how many samples it has given."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_an_iterable_dataset_is_not_tracked() -> None:
    """It would go on at its place, and `run.steps` would skip as many samples again."""
    dataset = Counted()
    with pytest.raises(SpotrunError, match="the loader's IterableDataset is tracked: leave it out of"):
        batches.check(torch.utils.data.DataLoader(dataset), [nn.Linear(1, 1), dataset])


def test_a_step_may_end_in_the_mode_for_evaluation(tmp_path: Path) -> None:
    """On one rank only. All nodes have the same buffers then, so a lost one changes nothing."""
    before = undisturbed(tmp_path / "before", "evaluating", NODES)
    after = restarted(tmp_path / "after", "evaluating", NODES, lost="a")
    for rank in range(3):
        assert flatten(before.final(rank)) == flatten(after.final(rank)) == flatten(before.final(0))


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "killed"])
def test_a_step_may_end_with_a_frozen_model(tmp_path: Path, job: Regroups, planned: bool) -> None:
    """The survivors' new DDP instances exchange the same gradients as before."""
    before = undisturbed(tmp_path / "before", "frozen", NODES)
    plan = {"script": "frozen"}
    job.begin("abc", 1, stop_at=4 if planned else -1, a=plan, b=plan if planned else {"die_at": 4, **plan}, c=plan)
    newcomer = job.warm_up("d", 1, **plan)
    if planned:
        first, _, last = job.members
        members = [first, newcomer, last]
    else:
        members = [*job.survivors(), newcomer]
    job.regroup(members)
    assert job.end() == [0, 0, 0], job.cluster.log()
    for rank in range(3):
        assert flatten(job.cluster.final(rank)) == flatten(before.final())


def test_a_script_may_have_another_default_device(tmp_path: Path, job: Regroups) -> None:
    """What spotrun makes for the exchange of states stays in the host's memory."""
    before = undisturbed(tmp_path / "before", "elsewhere", ["a", "b"])
    plan = {"script": "elsewhere"}
    job.begin("ab", 1, a=plan, b={"die_at": 3, **plan})
    job.regroup([*job.survivors(), job.warm_up("d", 1, **plan)])
    assert job.end() == [0, 0], job.cluster.log()
    assert flatten(job.cluster.final()) == flatten(job.cluster.final(1)) == flatten(before.final())


def test_a_process_group_that_a_script_keeps(job: Regroups) -> None:
    """It ends with its generation. That is the script's mistake, and no peer is gone."""
    plan = {"script": "keeping"}
    job.begin("ab", 1, stop_at=5, a=plan, b=plan)
    job.regroup(job.members)
    assert job.end() == [1, 1], job.cluster.log()
    assert "leave `group` out of the call" in job.cluster.log()
    assert "gone" not in job.cluster.log()


def test_layers_that_are_unfrozen_later(tmp_path: Path, job: Regroups) -> None:
    """Their gradients are exchanged from then on, also after a change of nodes, and with a newcomer."""
    before = undisturbed(tmp_path / "before", "unfreezing", NODES)
    first = flatten(before.final())
    assert flatten(before.final(1)) == flatten(before.final(2)) == first
    assert flatten(restarted(tmp_path / "after", "unfreezing", NODES).final()) == first
    plan = {"script": "unfreezing"}
    job.begin("abc", 1, a=plan, b={"die_at": 8, **plan}, c=plan)
    newcomer = job.warm_up("d", 1, **plan)
    job.regroup([*job.survivors(), newcomer])
    assert job.end() == [0, 0, 0], job.cluster.log()
    for rank in range(3):
        assert flatten(job.cluster.final(rank)) == first


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def test_a_loaders_processes_know_the_place_of_their_worker(tmp_path: Path, job: Regroups) -> None:
    """Also if they stay (`persistent_workers=True`) and the worker has another rank now."""
    plan: dict[str, Any] = {"script": "parts", "keeps_loaders": True}
    before = undisturbed_final(tmp_path / "before", "ab", 0, plan)
    job.begin("ab", stop_at=9, a=plan, b=plan)  # in the second epoch
    wait_for(lambda: job.members[0].control.left == EXIT_DRAINED)
    for each in psutil.Process(job.members[0].process.pid).children():
        job.stack.callback(kill, each)  # an agent ends what a worker leaves behind
    job.regroup([job.members[1], job.warm_up("d", **plan)])
    assert job.end() == [0, 0], job.cluster.log()
    assert flatten(job.cluster.final()) == flatten(before)
    assert job.cluster.seen() == dict.fromkeys(range(EPOCHS), everything)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("lengths", "the script reads len(loader) before run.track"),
        ("distributed", "the script uses torch's DistributedSampler"),
    ],
)
def test_a_set_up_that_depends_on_the_number_of_workers_needs_a_restart(
    tmp_path: Path, job: Regroups, script: str, why: str
) -> None:
    """A newcomer would have another schedule, or other samples. With a restart, everything is exact."""
    newcomer = job.warm_up("d", 1, end=EXIT_PEER, script=script)
    newcomer.process.join(60)
    assert newcomer.process.exitcode == EXIT_PEER
    assert f"this worker cannot wait for a generation: {why}" in job.cluster.log()
    before = undisturbed(tmp_path / "before", script, ["a", "b"])
    after = restarted(tmp_path / "after", script, ["a", "b"])
    assert flatten(before.final()) == flatten(after.final())


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("unnamed_optimizer", "run.track names no optimizer of a model (Sequential), so no optimizer's state is saved"),
        ("unnamed_scheduler", "run.track does not name the CosineAnnealingWarmRestarts, so its state is not saved"),
        ("sharded", "the script reads run.world_size before run.steps, and the loader has no ElasticSampler"),
        ("generated", "run.steps got a generator, and an iterator cannot begin again"),
        ("unwrapped", "the script does not call run.ddp: unless it averages gradients, each worker trains alone"),
    ],
)
def test_what_a_new_generation_would_not_have_needs_a_restart(job: Regroups, script: str, why: str) -> None:
    """A newcomer would take other steps, or a survivor would go on with a rank that it had. Nothing would say so."""
    plan = {"script": script}
    job.begin("ab", stop_at=4, a=plan, b=plan)
    assert job.end() == [EXIT_DRAINED, EXIT_DRAINED], job.cluster.log()
    assert [each.control.able for each in job.members] == [0, 0]
    assert f"after an interruption, all workers will restart: {why}" in job.cluster.log()


def order(epoch: int, rank: int, own: int = 7, **loader: Any) -> list[int]:
    """The order of an epoch. own: the seed that the script has given its generator."""
    generator = torch.Generator().manual_seed(own)
    more = {"shuffle": True} if not loader else {name: make(generator) for name, make in loader.items()}
    found: Any = torch.utils.data.DataLoader(range(50), generator=generator, **more)  # type: ignore[arg-type]
    return [int(value) for value in batches.begin(found, seed=1, epoch=epoch, rank=rank)]


def test_the_order_of_an_epoch_follows_from_seed_epoch_and_rank() -> None:
    """Whatever the script's own seed is: a newcomer, or a worker that has another rank now, may have another one."""
    assert order(0, rank=0) == order(0, rank=0, own=8)
    assert order(0, rank=0) != order(0, rank=1)
    assert order(0, rank=0) != order(1, rank=0)


def batched(generator: torch.Generator) -> BatchSampler:
    return BatchSampler(RandomSampler(range(50), generator=generator), 1, drop_last=False)  # type: ignore[arg-type]


def alone(generator: torch.Generator) -> RandomSampler:
    return RandomSampler(range(50), generator=generator)  # type: ignore[arg-type]


@pytest.mark.parametrize("own", [{"batch_sampler": batched}, {"batch_size": lambda _: None, "sampler": alone}])
def test_the_order_of_torchs_samplers_follows_from_seed_epoch_and_rank(own: dict[str, Any]) -> None:
    """Also inside a batch sampler, and of a loader that makes no batches."""
    assert order(0, 0, **own) == order(0, 0, 8, **own)
    assert order(0, 0, **own) != order(0, 1, **own)
    assert order(0, 0, **own) != order(1, 0, **own)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Dealing(torch.utils.data.Sampler[int]):
    """Deals out one order to all ranks."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(50, generator=self.generator).tolist())


def test_a_sampler_that_deals_out_one_order_does_so_on_all_ranks() -> None:
    assert order(0, rank=0, sampler=Dealing) == order(0, rank=1, sampler=Dealing)


class Own(torch.utils.data.Sampler[int]):
    """Draws with a generator of its own, under any name."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.rng, torch.Generator):
            return iter(torch.randperm(50, generator=self.rng).tolist())
        order = list(range(50))
        self.rng.shuffle(order)
        return iter(order)


@pytest.mark.parametrize("make", [random.Random, numpy.random.default_rng, numpy.random.RandomState, seeded])
def test_the_order_of_another_sampler_follows_from_its_first_seed_and_the_epoch(make: Callable[[int], Any]) -> None:
    """So an epoch can begin again, in this process or in a new one."""

    def begin(loader: Any, epoch: int, rank: int = 0) -> list[int]:
        return [int(value) for value in batches.begin(loader, seed=1, epoch=epoch, rank=rank)]

    def loader(own: int = 3) -> Any:
        return torch.utils.data.DataLoader(range(50), sampler=Own(make(own)))  # type: ignore[arg-type]

    first = loader()
    orders = [begin(first, epoch) for epoch in (0, 1, 1)]
    assert orders[0] != orders[1] == orders[2] == begin(loader(), 1) == begin(loader(), 1, rank=1)
    assert begin(loader(4), 1) != orders[1]


def test_a_model_may_change_after_run_ddp() -> None:
    """Lazy parameters, a state that brings its own tensors, and a layer that is taken out."""
    lazy = Parallel(nn.LazyLinear(3), torch.device("cpu"))
    lazy(torch.ones(1, 4))
    assert not lazy.include()
    model = Parallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.device("cpu"))
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert model.include()
    assert not model.include()
    outer = nn.Sequential(model)
    del model.module[1]
    outer.load_state_dict(outer.state_dict())


class Counting(torch.optim.SGD):
    """As MADGRAD: it keeps a number that is no parameter's."""

    def step(self, closure: Any = None) -> Any:
        self.state.setdefault("k", torch.zeros(1, dtype=torch.int64)).add_(1)  # type: ignore[call-overload]
        return super().step(closure)


def test_an_optimizer_with_a_state_of_its_own() -> None:
    layer = nn.Linear(1, 1)
    optimizer, other = Counting(layer.parameters(), lr=1.0), Counting(nn.Linear(1, 1).parameters(), lr=1.0)
    optimizer.step()
    training_state._give(other, optimizer.state_dict())
    assert int(other.state["k"]) == 1  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float64, torch.float8_e5m2])
def test_the_state_of_an_optimizer_keeps_its_type(dtype: torch.dtype) -> None:
    """torch converts it to the type of its parameter."""
    layers = nn.Linear(1, 1, bias=False).bfloat16(), nn.Linear(1, 1, bias=False).bfloat16()
    first, second = (torch.optim.SGD(each.parameters(), lr=1.0) for each in layers)
    first.state[layers[0].weight]["mine"] = torch.tensor([[1]]).to(dtype)
    training_state._give(second, first.state_dict())
    found = second.state[layers[1].weight]["mine"]
    assert found.dtype == dtype
    assert float(found) == 1


class Around(torch.optim.SGD):
    """As SAM and Lookahead: it steps by another optimizer, and both have the same list of groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1.0)
        self.inner = torch.optim.SGD(self.param_groups, lr=1.0)
        self.param_groups = self.inner.param_groups

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.inner.param_groups = self.param_groups


def test_an_optimizer_in_an_optimizer_keeps_its_groups() -> None:
    """The scheduler sets the rate in the groups by which the inner one steps."""
    optimizer = Around(nn.Linear(1, 1).parameters())
    held = optimizer.param_groups[0]
    groups, saved = optimizer.param_groups, optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(saved)
    _keep_groups(optimizer, groups)
    assert held["lr"] == 0.25
    held["lr"] = 0.5
    assert [group["lr"] for group in optimizer.inner.param_groups] == [0.5]
    assert optimizer.param_groups[0] is held
