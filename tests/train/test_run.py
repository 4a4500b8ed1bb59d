"""Training through `spotrun.init()`: exactness, drains, deaths of peers, and the same script everywhere.

Workers are real processes with a gloo group, one per "node", each with a slots folder and a control block of its own.
The test is head and agent: it writes stop steps, kills, and starts the next generation.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import spotrun
from spotrun.errors import SpotrunError
from spotrun.state import exit_note, slots
from spotrun.state.control import EXIT_DRAINED, EXIT_PEER, Context, Control
from spotrun.train import boundary, distributed, failures, restore
from spotrun.train.failures import is_peer_failure
from spotrun.train.snapshot import Writer
from spotrun.wire import Failure
from tests.helpers import wait_for

ROOT = Path(__file__).parents[2]
SAMPLES, BATCH, EPOCHS = 104, 8, 3  # with 3 workers: 5 steps an epoch, the last of 8 samples (3, 3, 2)

forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(["torch", "torch._dynamo", "numpy", "spotrun.train.run"])


class Noisy(Dataset[Any]):
    """Samples with random noise added when they are fetched, so that the order of random numbers matters."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=generator) + 0.1 * torch.randn(16), index % 4


@dataclass(frozen=True)
class Plan:
    """What one worker does."""

    out: str  # folder for what it saw
    die_at: int = -1  # step in which it kills itself, before the gradients are exchanged
    fail_at: int = -1  # step in which its script raises
    accumulate: int = 1
    gate: str = ""  # a FIFO from which it reads before it says that it is done
    patience: float = 600.0  # seconds that it waits for the others when it leaves a drain


def train(environment: dict[str, str], plan: Plan) -> None:
    """The training script, in a process of its own."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    out = Path(plan.out)
    out.mkdir(exist_ok=True)
    log = (out / "log.txt").open("a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    boundary.leave_together = functools.partial(leave_together, plan)  # type: ignore[attr-defined]
    run = spotrun.init(seed=5)
    hidden = 700  # more than one DDP bucket of 1 MB
    model = run.ddp(
        nn.Sequential(
            nn.Linear(16, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 4),
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    dataset = Noisy()
    sampler = spotrun.ElasticSampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    with (out / f"seen-{os.environ.get('GENERATION', '0')}-{run.rank}.jsonl").open("w") as seen:
        for epoch in run.epochs(EPOCHS):
            for x, y in run.steps(loader, accumulate=plan.accumulate):
                if run.step == plan.fail_at:
                    raise ValueError("a bug in the script")
                loss = nn.functional.cross_entropy(model(x), y)
                if run.step == plan.die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                run.backward(loss)
                if run.completes_step:
                    optimizer.step()
                    optimizer.zero_grad()
                run.log(loss=loss, nothing=float("nan"))
                print(json.dumps({"epoch": epoch, "step": run.step, "ids": run.batch_ids}), file=seen, flush=True)
            scheduler.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.rand(1)}
    torch.save(state, out / f"final-{run.rank}.pt")


def leave_together(plan: Plan, device: torch.device, group: Any) -> None:
    if plan.gate:
        Path(plan.gate).read_text()
    distributed.leave_together(device, group, plan.patience)


@dataclass
class Cluster:
    """Nodes with their tmpfs folders; each `launch` is a generation."""

    path: Path
    generation: int = 0
    controls: list[Control] = field(default_factory=list)

    def context(self, node: str, rank: int, interval: int) -> Context:
        control = self.path / f"control-{self.generation}-{rank}"
        self.controls.append(Control(control, create=True))
        return Context("job", self.generation, node, str(control), str(self.slots(node)), "", interval)

    def slots(self, node: str) -> Path:
        return self.path / f"slots-{node}"

    def newest(self, node: str) -> slots.Record:
        return slots.newest(self.slots(node), "job")[0][1]

    @contextmanager
    def launch(
        self,
        nodes: list[str],
        plans: dict[int, dict[str, Any]] | None = None,
        interval: int = 0,
        stop_at: int = -1,
        per_node: int = 1,
        **common: Any,
    ) -> Iterator[list[Any]]:
        """Start a generation on these nodes; `plans` by rank, `common` for all."""
        self.generation += 1
        self.controls = []
        world = len(nodes) * per_node
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        processes = []
        for rank in range(world):
            context = self.context(nodes[rank // per_node], rank, interval)
            self.controls[rank].stop_at = stop_at
            environment = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank % per_node),
                "GENERATION": str(self.generation),
                Context.VARIABLE: context.to_env(),
            }
            plan = Plan(str(self.path / "out"), **common, **(plans or {}).get(rank, {}))
            processes.append(forked.Process(target=train, args=(environment, plan), daemon=True))
        for process in processes:
            process.start()
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.join()

    def run(self, nodes: list[str], *args: Any, **values: Any) -> list[int | None]:
        """Start a generation; exit codes of its workers, in rank order."""
        with self.launch(nodes, *args, **values) as processes:
            for process in processes:
                process.join(60)
            codes = [process.exitcode for process in processes]
        assert None not in codes, self.log()
        return codes

    def log(self) -> str:
        return (self.path / "out" / "log.txt").read_text()

    def final(self, rank: int = 0) -> Any:
        return torch.load(self.path / "out" / f"final-{rank}.pt")

    def seen(self) -> dict[int, list[int]]:
        """Samples of each epoch, sorted; of a step done twice only the later generation counts."""
        steps: dict[tuple[int, int], tuple[int, list[int]]] = {}
        for path in sorted((self.path / "out").glob("seen-*.jsonl")):
            generation = int(path.name.split("-")[1])
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                key = (entry["epoch"], entry["step"])
                before, ids = steps.get(key, (0, []))
                if generation >= before:
                    steps[key] = (generation, entry["ids"] + (ids if generation == before else []))
        epochs: dict[int, list[int]] = {}
        for (epoch, _), (_, ids) in steps.items():
            epochs.setdefault(epoch, []).extend(ids)
        return {epoch: sorted(ids) for epoch, ids in epochs.items()}


def flatten(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in value for leaf in [key, *flatten(value[key])]]
    if isinstance(value, list):
        return [leaf for item in value for leaf in flatten(item)]
    return [value.tolist()] if isinstance(value, torch.Tensor) else [value]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Final state of three workers that nothing happened to."""
    cluster = Cluster(tmp_path_factory.mktemp("undisturbed"))
    assert cluster.run(["a", "b", "c"]) == [0, 0, 0], cluster.log()
    assert cluster.seen() == {epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)}
    final = cluster.final()
    assert flatten(final["model"]) == flatten(cluster.final(2)["model"])  # buffers too
    return final


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


everything = {epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)}


def test_kills_change_no_bit(cluster: Cluster, undisturbed: Any) -> None:
    """Every rank dies once; its node comes back empty and gets the state from a peer."""
    for rank, step in ((1, 3), (0, 5), (2, 9)):
        codes = cluster.run(["a", "b", "c"], {rank: {"die_at": step}}, interval=1)
        assert codes[rank] == -signal.SIGKILL, cluster.log()
        assert [code for other, code in enumerate(codes) if other != rank] == [EXIT_PEER, EXIT_PEER], cluster.log()
        survivor = "abc"[(rank + 1) % 3]
        assert cluster.newest(survivor).step == step
        shutil.rmtree(cluster.slots("abc"[rank]))
    assert cluster.run(["a", "b", "c"]) == [0, 0, 0], cluster.log()
    assert cluster.seen() == everything
    for rank in range(3):
        assert flatten(cluster.final(rank)["model"]) == flatten(undisturbed["model"])
    assert flatten(cluster.final()) == flatten(undisturbed)
    assert "Warning" not in cluster.log()


@pytest.mark.parametrize("stop_at", [2, 5])
def test_a_drain_stops_at_its_step_and_changes_no_bit(cluster: Cluster, undisturbed: Any, stop_at: int) -> None:
    """5 is the last step of an epoch: what follows the loop comes after the restart."""
    assert cluster.run(["a", "b", "c"], stop_at=stop_at) == [EXIT_DRAINED] * 3, cluster.log()
    for rank, node in enumerate("abc"):
        assert cluster.newest(node).step == stop_at
        control = cluster.controls[rank]
        assert (control.exit, control.step, control.committed) == (EXIT_DRAINED, stop_at, stop_at)
        assert 0 < control.entered <= control.grouped <= control.restored <= control.stepped_first <= control.stepped_at
        assert control.total_steps == 15
        assert set(control.read_metrics()) == {"loss"}
    shutil.rmtree(cluster.slots("a"))
    # The one without state is now the middle one.
    assert cluster.run(["b", "a", "c"]) == [0, 0, 0], cluster.log()
    assert cluster.seen() == everything
    assert flatten(cluster.final()) == flatten(undisturbed)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


def test_who_leaves_a_drain_waits_until_the_others_have_what_it_sent(cluster: Cluster, gate: Path) -> None:
    with cluster.launch(["a", "b", "c"], {1: {"gate": str(gate)}}, stop_at=3) as processes:
        wait_for(lambda: all(each.committed == 3 for each in cluster.controls), what="the snapshots")
        for rank in (0, 2):
            processes[rank].join(0.5)
            assert processes[rank].exitcode is None, f"{rank} did not wait: {cluster.log()}"
        gate.write_text("")
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [EXIT_DRAINED] * 3, cluster.log()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_who_leaves_a_drain_waits_for_no_dead_worker(cluster: Cluster, gate: Path, end: int) -> None:
    patience = 0.2 if end == signal.SIGSTOP else 600.0
    plans = {0: {"patience": patience}, 1: {"gate": str(gate)}}
    with cluster.launch(["a", "b"], plans, stop_at=3) as processes:
        wait_for(lambda: cluster.controls[1].committed == 3, what="a snapshot")
        os.kill(processes[1].pid, end)
        processes[0].join(120)
        assert processes[0].exitcode == EXIT_DRAINED, cluster.log()
    assert "leaving before every other worker is done" in cluster.log()
    assert cluster.newest("a").step == 3


def test_each_sample_once_while_the_world_changes(cluster: Cluster) -> None:
    assert cluster.run(["a", "b"], stop_at=3) == [EXIT_DRAINED] * 2, cluster.log()
    assert cluster.run(["a", "b", "c"], {1: {"die_at": 8}}) == [EXIT_PEER, -signal.SIGKILL, EXIT_PEER], cluster.log()
    assert cluster.run(["c"], stop_at=12) == [EXIT_DRAINED], cluster.log()
    assert cluster.run(["a", "c"]) == [0, 0], cluster.log()
    assert cluster.seen() == everything


def test_two_workers_on_a_node_share_its_snapshot(cluster: Cluster) -> None:
    assert cluster.run(["a", "b"], stop_at=3, per_node=2) == [EXIT_DRAINED] * 4, cluster.log()
    shutil.rmtree(cluster.slots("a"))
    assert cluster.run(["a", "b"], stop_at=4, per_node=2) == [EXIT_DRAINED] * 4, cluster.log()
    assert cluster.newest("a").step == 4
    assert cluster.controls[1].committed == 3  # what it restored; it writes none itself
    assert cluster.seen()[0] != []


def bring(environment: dict[str, str], out: str) -> None:
    """Restore the state; say so, and how many bytes were sent for that."""
    os.environ.update(environment)
    sent = []
    real = dist.isend
    dist.isend = lambda tensor, *args, **kwargs: sent.append(tensor.nbytes) or real(tensor, *args, **kwargs)  # type: ignore[func-returns-value,misc]
    dist.init_process_group("gloo")
    context = Context.from_env()
    assert context is not None
    found = restore.restore(context, 0, None)
    assert found is not None
    slots.verify(Path(context.slots), *found)
    Path(out).write_text(str(sum(sent)))
    os._exit(0)


def test_who_needs_no_state_takes_no_part_in_a_transfer(cluster: Cluster) -> None:
    """Two nodes lack the state. They cannot take it yet: who has it goes on, and the donor sends it once."""
    state = {"x": torch.arange(100_000)}
    for node in "bc":
        writer = Writer(cluster.slots(node), "job", 1)
        assert writer.take(7, lambda encoder: encoder.encode(state, "state"), set(), wait=True)
        writer.settle()
    with socket.create_server(("127.0.0.1", 0)) as server:
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1]), "WORLD_SIZE": "4"}
    processes, done = [], [cluster.path / f"done-{rank}" for rank in range(4)]
    with ExitStack() as held:
        for rank, node in enumerate("abcd"):
            if node in "ad":
                cluster.slots(node).mkdir()
                held.enter_context(slots.reading(cluster.slots(node), 0))
            environment = {**group, "RANK": str(rank), Context.VARIABLE: cluster.context(node, rank, 0).to_env()}
            processes.append(forked.Process(target=bring, args=(environment, str(done[rank])), daemon=True))
            processes[-1].start()
        wait_for(done[2].exists, what="the end of the one that has the state")
        assert not done[0].exists()
        assert not done[3].exists()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    size = cluster.newest("b").size
    sent = [int(path.read_text()) for path in done]
    assert size < sent[1] < 2 * size
    assert sent[2] == 0
    assert cluster.newest("a") == cluster.newest("b") == cluster.newest("d")


@pytest.mark.parametrize(
    ("offers", "chain", "waiting"),
    [
        ([(1, 5, 0), (1, 5, 0)], (0,), {}),
        ([(-1, -1, 0), (1, 5, 0), (1, 4, 0)], (1, 0, 2), {}),
        ([(1, 5, 0), (-1, -1, 1), (-1, -1, 0), (-1, -1, 1)], (0, 2), {3: 2}),
        ([(-1, -1, 0), (-1, -1, 1), (1, 5, 0), (-1, -1, 1)], (2, 0), {1: 0}),
    ],
)
def test_the_way_of_a_state(offers: list[tuple[int, ...]], chain: tuple[int, ...], waiting: dict[int, int]) -> None:
    assert restore.route(offers) == restore.Route(chain, waiting)


def test_a_fixed_interval_bounds_what_is_lost(cluster: Cluster) -> None:
    assert cluster.run(["a", "b"], {1: {"die_at": 11}}, interval=4) == [EXIT_PEER, -signal.SIGKILL], cluster.log()
    assert cluster.newest("a").step == 8


def test_a_damaged_snapshot_is_passed_over(cluster: Cluster) -> None:
    assert cluster.run(["a"], interval=3, stop_at=6) == [EXIT_DRAINED], cluster.log()
    slot, record = slots.newest(cluster.slots("a"), "job")[0]
    path = slots.data_path(cluster.slots("a"), slot)
    os.truncate(path, record.size // 2)
    assert cluster.run(["a"], interval=3) == [0], cluster.log()
    assert f"snapshot {path} (step 6) is damaged" in cluster.log()
    assert cluster.seen() == everything


def test_uneven_shares_weigh_as_one_batch(cluster: Cluster) -> None:
    """17 samples over 2 workers, 4 each: two whole steps and one in which a worker only pads."""
    alone = weigh({}, "", 8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    out = [str(cluster.path / f"{rank}.pt") for rank in range(2)]
    processes = [
        forked.Process(target=weigh, args=({**group, "RANK": str(rank)}, out[rank], 4), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    pairs = [torch.load(path) for path in out]
    assert [padding for padding, _ in pairs] == [[False] * 3, [False, False, True]]
    for _, weights in pairs:
        assert torch.allclose(weights, alone[1], rtol=1e-5)


def weigh(environment: dict[str, str], out: str, batch: int) -> tuple[list[bool], torch.Tensor]:
    """(padding in each step, weights after them)."""
    os.environ.update(environment)
    data = torch.linspace(-1, 1, 17).reshape(17, 1)
    run = spotrun.init()
    model = run.ddp(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    padding = []
    loader = DataLoader(data, batch_size=batch, sampler=spotrun.ElasticSampler(data))  # type: ignore[arg-type]
    for x in run.steps(loader):
        run.backward(((model(x) - x**2) ** 2).mean())
        optimizer.step()
        optimizer.zero_grad()
        padding.append(run.padding)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    if out:
        torch.save((padding, weights), out)
    return padding, weights


class Partly(nn.Module):
    """Uses one of its parameters, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        found: torch.Tensor = self.always(x) + (self.sometimes(x) if both else 0)
        return found


def ddp_options(environment: dict[str, str], out: str) -> None:
    os.environ.update(environment)
    run = spotrun.init()
    said: dict[str, Any] = {}
    x = torch.tensor([[run.rank + 1.0]])
    for options in ({}, {"find_unused_parameters": True}, {"find_unused_parameters": False}):
        model = run.ddp(Partly(), **options)
        said[str(options)] = ""
        try:
            for both in (True, False, True):
                model(x, both).sum().backward()
        except RuntimeError as error:
            said[str(options)] = f"torch: {error}"
        except SpotrunError as error:
            said[str(options)] = str(error)
    model = run.ddp(Partly())
    model(x, True)  # a forward pass without a backward pass is none of DDP's business
    model(x, True).sum().backward()
    plain = run.ddp(nn.Linear(1, 1, bias=False))
    with plain.no_sync():
        plain(x).sum().backward()
    said["alone"] = plain.weight.grad.item()
    plain(x).sum().backward()
    said["together"] = plain.weight.grad.item()
    Path(out).write_text(json.dumps(said))


def test_unused_parameters_and_no_sync_are_as_in_ddp_on_gpus(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1]), "WORLD_SIZE": "2"}
    paths = [cluster.path / str(rank) for rank in range(2)]
    processes = [
        forked.Process(target=ddp_options, args=({**group, "RANK": str(rank)}, str(paths[rank])), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    for rank, path in enumerate(paths):
        said = json.loads(path.read_text())
        assert said["{}"].startswith("parameter sometimes.weight got no gradient in the last step."), said
        assert said["{'find_unused_parameters': True}"] == ""
        assert said["{'find_unused_parameters': False}"].startswith("torch: Expected to have finished reduction")
        assert said["alone"] == rank + 1
        assert said["together"] == 3.0


def test_a_bug_in_the_script_is_no_peer_failure(cluster: Cluster) -> None:
    codes = cluster.run(["a", "b"], {0: {"fail_at": 4}})
    assert codes == [1, EXIT_PEER], cluster.log()
    assert "ValueError: a bug in the script" in cluster.log()
    said = Failure(**json.loads(exit_note.path_for(cluster.path / "control-1-1").read_text()))
    assert (said.kind, said.rank) == ("peer", 1)
    assert said.message.startswith("step 4: another worker is gone: ")
    assert "RuntimeError" in said.traceback


def test_what_a_peers_death_looks_like() -> None:
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234"
    assert is_peer_failure(RuntimeError(gloo))
    assert is_peer_failure(torch.distributed.DistNetworkError("The client socket has timed out"))
    wrapped = ValueError("while training")
    wrapped.__cause__ = RuntimeError(gloo)
    assert is_peer_failure(wrapped)
    assert not is_peer_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x2 and 4x5)"))
    assert not is_peer_failure(ConnectionResetError("Connection reset by peer"))
    assert not is_peer_failure(None)


# One worker, in this process.


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process as the only worker of a job; the result is its slots folder."""
    control = tmp_path / "control"
    Control(control, create=True).close()
    context = Context("job", 1, "n", str(control), str(tmp_path / "slots"), "", 1)
    monkeypatch.setenv(Context.VARIABLE, context.to_env())
    return tmp_path / "slots"


def settle(run: spotrun.Run) -> None:
    """Wait for the snapshot under way, as the end of the process would."""
    assert run._boundary.writer is not None
    run._boundary.writer.settle()


def values(loader: Any, epochs: int, stop: int | None = None, accumulate: int = 1) -> tuple[list[Any], torch.Tensor]:
    """(batches seen, weights) of a linear model trained on them; leaves at step `stop`, as a crash would."""
    run = spotrun.init(seed=2)
    model = run.ddp(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    extra = {"sampler": loader.sampler} if isinstance(loader.sampler, spotrun.ElasticSampler) else {}
    run.track(model=model, optimizer=optimizer, **extra)
    seen = []
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


def test_accumulating_equals_a_larger_batch() -> None:
    data = torch.arange(23.0).reshape(23, 1)
    results = []
    for batch, accumulate in ((8, 1), (4, 2), (2, 4)):
        run = spotrun.init()
        model = run.ddp(nn.Linear(1, 1))
        loader = DataLoader(data, batch_size=batch, sampler=spotrun.ElasticSampler(data))  # type: ignore[arg-type]
        for x in run.steps(loader, accumulate):
            run.backward((model(x) ** 2).mean())
        assert run.step == 3
        results.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(results[0], results[1])
    assert torch.allclose(results[0], results[2])


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


def test_mistakes_are_said_clearly(alone: Path) -> None:
    data = [1.0, 2.0]
    sampler = spotrun.ElasticSampler(data)
    loader = DataLoader(data, sampler=sampler)  # type: ignore[arg-type]
    model = nn.Linear(1, 1)
    run = spotrun.init()
    with pytest.raises(SpotrunError, match="tracks nothing"):
        run.track()
    with pytest.raises(SpotrunError, match=r"run\.track\(note=…\): a str has no state_dict"):
        run.track(note="x")  # type: ignore[arg-type]
    with pytest.raises(SpotrunError, match="nothing is tracked"):
        next(iter(run.steps(loader)))
    run = spotrun.init()
    run.track(model=model)
    with pytest.raises(SpotrunError, match="called before"):
        run.track(sampler=sampler)
    with pytest.raises(SpotrunError, match="not tracked: add sampler="):
        next(iter(run.steps(loader)))
    run = spotrun.init()
    run.track(sampler=sampler)
    with pytest.raises(SpotrunError, match="does not use it"):
        next(iter(run.steps(DataLoader(data))))  # type: ignore[arg-type]
    run = spotrun.init()
    run.track(sampler=sampler)
    assert len(list(run.steps(loader))) == 2
    with pytest.raises(SpotrunError, match="twice in epoch 0"):
        next(iter(run.steps(loader)))
    settle(run)
    with pytest.raises(SpotrunError, match=r"has no 'model', which run\.track names; it has sampler"):
        spotrun.init().track(sampler=sampler, model=model)


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
        with pytest.raises(SpotrunError, match=r"model\.weight is a DTensor: sharded training .* not supported yet"):
            run.track(model=model)
        with pytest.raises(SpotrunError, match=r"model is or has a FSDPLinear: sharded training"):
            spotrun.init().track(model=fully_shard(nn.Linear(2, 2), mesh=mesh))
        sharing = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(SpotrunError, match=r"optimizer is or has a ZeroRedundancyOptimizer: sharded training"):
            spotrun.init().track(optimizer=sharing)
    finally:
        torch.distributed.destroy_process_group()
    assert slots.newest(alone, "job") == []


# The same scripts under plain python and torchrun.


@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--nproc-per-node=2"]])
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


def test_importing_spotrun_imports_no_torch() -> None:
    code = "import spotrun, spotrun.state.shards, spotrun.state.checkpoints, sys; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": "agent"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT).returncode == 0
