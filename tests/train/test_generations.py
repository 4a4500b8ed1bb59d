"""Generations of workers: exactness, drains, deaths of peers, transfers of the state."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import spotrun
from spotrun.errors import SpotrunError
from spotrun.state import exit_note, slots
from spotrun.state.control import EXIT_DRAINED, EXIT_PEER, NONE, Context
from spotrun.train import failures, restore, streams, transfer
from spotrun.train.encoding import Encoder, decode
from spotrun.train.failures import is_peer_failure
from spotrun.train.restore import NOTHING, Offer
from spotrun.train.rng import reseed
from spotrun.train.slot_files import layout
from spotrun.train.snapshot import Writer
from spotrun.train.transfer import OwnState
from spotrun.wire import Failure
from tests.helpers import wait_for
from tests.train.blocks import block
from tests.train.forks import forked
from tests.train.generations import EPOCHS, SAMPLES, Cluster, everything, flatten
from tests.train.meeting import meeting


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
        assert set(control.read_metrics()) == {"loss", "nothing"}  # a NaN is shown too
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
    plans = {0: {"patience": 0.2} if end == signal.SIGSTOP else {}, 1: {"gate": str(gate)}}
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
    assert cluster.controls[3].committed == 3  # what it restored; it writes none itself
    assert cluster.controls[1].committed == NONE  # it has got the state from another node, and no snapshot yet
    assert cluster.seen()[0] != []


def bring(environment: dict[str, str], trusted: restore.Order, gate: str, out: str) -> None:
    """Restore the state, once `gate` exists if the state is received; say what it is, and how many bytes were sent."""
    os.environ.update(environment)
    sent, send_all = list[int](), streams._send_all

    def count(data: streams.Data) -> streams.Data:
        sent.append(len(data))
        return data

    streams._send_all = lambda connection, items: send_all(connection, map(count, items))
    dist.init_process_group("gloo")
    context = Context.from_env()
    assert context is not None
    own = torch.zeros(100_000, dtype=torch.int64)

    def into() -> dict[str, torch.Tensor]:
        wait_for(Path(gate).exists, what="the gate")
        return {"state.x": own}

    try:
        found = restore.restore(context, int(os.environ["LOCAL_RANK"]), None, trusted, into)
    except dist.DistError as error:
        Path(out).write_text(str(error))
        os._exit(3)
    assert found is not None
    assert found.tensors is not None
    state = decode(found.record.state, found.tensors.tensor)
    assert state["x"].equal(torch.arange(100_000))
    assert state["y"].equal(torch.arange(3_000_000) % 7 == 0)
    assert [each.tolist() for each in state["small"]] == [[1.0, 2.0], 3, [], [1 + 2j]]
    assert found.kept or state["x"] is own
    found.settle()
    partial = Path(f"{out}.part")
    partial.write_text(str(sum(sent)))
    partial.rename(out)
    os._exit(0)


STATE = {
    "x": torch.arange(100_000),
    "y": torch.arange(3_000_000) % 7 == 0,
    "small": [torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor(3), torch.ones(0), torch.tensor([1 + 2j])],
}


def keep(cluster: Cluster, node: str, *steps: int) -> slots.Record:
    """Put snapshots of these steps into the node's slots."""
    writer = Writer(cluster.slots(node), "job", 1, block())
    for step in steps:
        assert writer.take(step, lambda encoder: encoder.encode(STATE, "state"), set(), wait=True)
        writer.settle()
    return cluster.newest(node)


@pytest.mark.parametrize("per_node", [1, 2])
def test_who_needs_no_state_takes_no_part_in_a_transfer(cluster: Cluster, per_node: int) -> None:
    """Two nodes lack the state, and cannot take it yet. Who has it goes on. Nobody sends it twice."""
    size = keep(cluster, "b", 7).size
    keep(cluster, "c", 7)
    world, gate = 4 * per_node, cluster.path / "gate"
    processes, done = [], [cluster.path / f"done-{rank}" for rank in range(world)]
    with meeting(world) as group:
        for rank in range(world):
            node, local_rank = "abcd"[rank // per_node], rank % per_node
            environment = {**group, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            environment[Context.VARIABLE] = cluster.context(node, rank, 0).to_env()
            arguments = (environment, (1, 7) if node in "bc" else restore.NOTHING, str(gate), str(done[rank]))
            processes.append(forked.Process(target=bring, args=arguments, daemon=True))
            processes[-1].start()
        has = [rank for rank in range(world) if "abcd"[rank // per_node] == "c"]
        wait_for(lambda: all(done[rank].exists() for rank in has), what="the end of those that have the state")
        assert not any(done[rank].exists() for rank in range(world) if "abcd"[rank // per_node] in "ad")
        gate.touch()
        for process in processes:
            process.join(120)
    assert [process.exitcode for process in processes] == [0] * world
    sent = [int(path.read_text()) for path in done]
    data = STATE["x"].nbytes + STATE["y"].nbytes  # type: ignore[attr-defined]
    first = sent[per_node]  # by the donor
    assert data < first < size + 1000
    assert sum(sent) == 2 * per_node * first  # once for each rank that lacks the state
    assert not any(sent[rank] for rank in has)
    assert all(not list(cluster.slots(node).glob("*.safetensors")) for node in "ad")


@pytest.mark.parametrize("damaged", ["bc", "b"])
def test_a_damaged_state_goes_to_nobody(cluster: Cluster, damaged: str) -> None:
    """It is found while the state is sent. Then the next best one is sent: here an older one."""
    keep(cluster, "b", 7)
    keep(cluster, "c", 6, 7)
    gate = cluster.path / "gate"
    gate.touch()
    for node in damaged:
        slot = next(slot for slot, record in slots.newest(cluster.slots(node), "job") if record.step == 7)
        with slots.data_path(cluster.slots(node), slot).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
    processes, done = [], [cluster.path / f"done-{rank}" for rank in range(3)]
    with meeting(3) as group:
        for rank, node in enumerate("abc"):
            environment = {**group, "RANK": str(rank), "LOCAL_RANK": "0"}
            environment[Context.VARIABLE] = cluster.context(node, rank, 0).to_env()
            arguments = (environment, restore.NOTHING, str(gate), str(done[rank]))
            processes.append(forked.Process(target=bring, args=arguments, daemon=True))
            processes[-1].start()
        for process in processes:
            process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert [record.step for _, record in slots.newest(cluster.slots("b"), "job")] == []
    assert cluster.newest("c").step == (6 if damaged == "bc" else 7)


def test_a_damaged_state_that_its_worker_has_written_is_noticed(cluster: Cluster) -> None:
    """That worker leaves the generation, so the next collective of the others fails."""
    keep(cluster, "b", 7)
    slot = slots.newest(cluster.slots("b"), "job")[0][0]
    with slots.data_path(cluster.slots("b"), slot).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    gate, done = cluster.path / "gate", [cluster.path / f"done-{rank}" for rank in range(2)]
    gate.touch()
    processes = []
    with meeting(2) as group:
        for rank, node in enumerate("ab"):
            environment = {**group, "RANK": str(rank), "LOCAL_RANK": "0"}
            environment[Context.VARIABLE] = cluster.context(node, rank, 0).to_env()
            arguments = (environment, (1, 7) if node == "b" else restore.NOTHING, str(gate), str(done[rank]))
            processes.append(forked.Process(target=bring, args=arguments, daemon=True))
            processes[-1].start()
        for process in processes:
            process.join(120)
    assert processes[1].exitcode == 3
    assert f"step 7 is damaged: snapshot {slots.data_path(cluster.slots('b'), slot)}" in done[1].read_text()


def agree(environment: dict[str, str], step: int, out: str) -> None:
    """Restore the state. step: of that in this process's memory; 0: it has none. Say what the process has then."""
    os.environ.update(environment)
    dist.init_process_group("gloo")
    context, own, encoder = Context.from_env(), torch.full((3_000_000,), float(step)), Encoder()
    assert context is not None
    tree = encoder.encode({"x": own}, "state")
    live = (
        OwnState(slots.Record("job", 1, step, 0, "", tree), layout(encoder.tensors), encoder.tensors) if step else None
    )
    found = restore.restore(context, 0, None, NOTHING, lambda: {"state.x": own}, live=live)
    assert found is not None
    x = own if found.tensors is None else decode(found.record.state, found.tensors.tensor)["x"]
    found.settle()
    Path(out).write_text(f"{found.record.step} {float(x.min())} {float(x.max())}")
    os._exit(0)


def test_a_state_in_memory_does_not_count_once_another_has_been_written_over_it(cluster: Cluster) -> None:
    """That other one was newer, and damaged."""
    writer = Writer(cluster.slots("b"), "job", 1, block())
    for step in (4, 6):
        state = {"x": torch.full((3_000_000,), float(step))}
        assert writer.take(step, lambda encoder, state=state: encoder.encode(state, "state"), set(), wait=True)  # type: ignore[misc]
        writer.settle()
    with slots.data_path(cluster.slots("b"), slots.newest(cluster.slots("b"), "job")[0][0]).open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0A")
    processes, out = [], [cluster.path / f"found-{rank}" for rank in range(2)]
    with meeting(2) as group:
        for rank, step in enumerate((5, 0)):
            environment = {**group, "RANK": str(rank), "LOCAL_RANK": "0"}
            environment[Context.VARIABLE] = cluster.context("ab"[rank], rank, 0).to_env()
            processes.append(forked.Process(target=agree, args=(environment, step, str(out[rank])), daemon=True))
            processes[-1].start()
        for process in processes:
            process.join(120)
    assert [path.read_text() for path in out] == ["4 4.0 4.0"] * 2


@pytest.mark.parametrize(
    ("offers", "chain"),
    [
        ([Offer((1, 5), 0), Offer((1, 5), 0)], (0,)),
        ([Offer(NOTHING, 0), Offer((1, 5), 0), Offer((1, 4), 0)], (1, 0, 2)),
        ([Offer((1, 5), 0), Offer(NOTHING, 1), Offer(NOTHING, 0), Offer(NOTHING, 1)], (0, 2, 3)),
        ([Offer(NOTHING, 0), Offer(NOTHING, 1), Offer((1, 5), 0), Offer(NOTHING, 1)], (2, 0, 1)),
        # Some ranks have the state in their memory.
        (
            [Offer((1, 4), 0, live=(1, 5)), Offer(NOTHING, 1, live=(1, 5)), Offer(NOTHING, 0), Offer(NOTHING, 1)],
            (0, 2, 3),
        ),
        (
            [Offer((1, 4), 0), Offer(NOTHING, 1, live=(1, 5)), Offer((1, 4), 0, live=(1, 5)), Offer(NOTHING, 1)],
            (1, 0, 3),
        ),
        ([Offer((1, 5), 0), Offer((1, 3), 0, live=(1, 5)), Offer(NOTHING, 0)], (1, 2)),
        ([Offer((2, 5), 0), Offer((1, 3), 0, live=(1, 9)), Offer(NOTHING, 0)], (0, 1, 2)),
    ],
)
def test_which_ranks_pass_the_state_on(offers: list[Offer], chain: tuple[int, ...]) -> None:
    """A node's slot is for all its ranks. A rank's memory is for itself, and it may be the donor."""
    assert restore.route(offers) == chain


SIZES = {"a": 90, "b": 400, "c": 130, "d": 60, "e": 0, "f": 30, "g": 40}


def test_small_tensors_share_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "ALONE", 100)
    monkeypatch.setattr(transfer, "PIECE", 200)
    pieces = transfer.pieces_of(layout({name: torch.zeros(size, dtype=torch.uint8) for name, size in SIZES.items()}))
    assert ["".join(entry.name for entry in each.entries) for each in pieces] == ["a", "b", "b", "c", "def", "g"]
    assert sum(each.stop - each.start for each in pieces) == sum(SIZES.values())


def test_a_restarted_donor_that_dies_while_it_sends(cluster: Cluster) -> None:
    """The other worker has a part of the state. It ends, and begins again with the state of the donor's node."""
    assert cluster.run(["a", "b"], stop_at=3) == [EXIT_DRAINED] * 2, cluster.log()
    shutil.rmtree(cluster.slots("b"))
    assert cluster.run(["a", "b"], {0: {"sends": "a part"}}) == [-signal.SIGKILL, EXIT_PEER], cluster.log()
    assert cluster.run(["a", "b"]) == [0, 0], cluster.log()
    assert cluster.seen() == everything


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
    out = [str(cluster.path / f"{rank}.pt") for rank in range(2)]
    run_all(weigh, [(path, 4) for path in out])
    pairs = [torch.load(path) for path in out]
    assert [padding for padding, _ in pairs] == [[False] * 3, [False, False, True]]
    for _, weights in pairs:
        assert torch.allclose(weights, alone[1], rtol=1e-5)


def run_all(work: Callable[..., Any], args: list[tuple[Any, ...]]) -> None:
    """Run it in workers of one process group; args: after the environment, by rank."""
    with meeting(len(args)) as group:
        ranked = [({**group, "RANK": str(rank)}, *each) for rank, each in enumerate(args)]
        processes = [forked.Process(target=work, args=each, daemon=True) for each in ranked]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0] * len(args)


def weigh(environment: dict[str, str], out: str, batch: int) -> tuple[list[bool], torch.Tensor]:
    """(padding in each step, weights after them)."""
    os.environ.update(environment)
    data = torch.linspace(-1, 1, 17).reshape(17, 1)
    run = spotrun.init()
    model = run.ddp(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    padding = []
    loader: DataLoader[Any] = DataLoader(data, batch_size=batch, sampler=spotrun.ElasticSampler(data))  # type: ignore[arg-type]
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


@pytest.mark.parametrize(
    ("workers", "refused"),
    [
        pytest.param(2, "torch: Expected to have finished reduction", id="two workers: DDP refuses"),
        pytest.param(3, "parameter sometimes.weight got no gradient in the last step.", id="three: run.ddp refuses"),
    ],
)
def test_unused_parameters_and_no_sync_are_as_in_ddp_on_gpus(cluster: Cluster, workers: int, refused: str) -> None:
    paths = [cluster.path / str(rank) for rank in range(workers)]
    run_all(ddp_options, [(str(path),) for path in paths])
    for rank, path in enumerate(paths):
        said = json.loads(path.read_text())
        assert said["{}"].startswith(refused), said
        assert said["{'find_unused_parameters': True}"] == ""
        assert said["{'find_unused_parameters': False}"].startswith("torch: Expected to have finished reduction")
        assert said["alone"] == rank + 1
        assert said["together"] == workers + 1.0


class WithLoss(nn.Linear):
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).sum()


def call_a_method(environment: dict[str, str], out: str) -> None:
    os.environ.update(environment)
    run = spotrun.init()
    said = io.StringIO()
    logging.getLogger("spotrun").addHandler(logging.StreamHandler(said))
    for call in ("itself", "its method"):
        model = run.ddp(WithLoss(1, 1))
        for _ in range(2):
            run.backward((model(torch.ones(1, 1)) if call == "itself" else model.loss(torch.ones(1, 1))).sum())
        print(call, said.getvalue().count("WithLoss has gradients that are not averaged"), file=said)
        assert not model.module.weight._post_accumulate_grad_hooks, "a hook would cost time in each step"
    Path(out).write_text(said.getvalue())


def test_gradients_that_are_not_averaged_are_said_once(cluster: Cluster) -> None:
    """DDP averages them if it is called itself. A method of the module does not call it."""
    paths = [cluster.path / str(rank) for rank in range(2)]
    run_all(call_a_method, [(str(path),) for path in paths])
    for path in paths:
        assert "itself 0\n" in path.read_text()
        assert "its method 1\n" in path.read_text()


class Layers(nn.Module):
    """Uses its parameters in one of several ways. Its loss always depends on all of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.heads = kind, nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 2), nn.Linear(1, 2)])
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, head: int) -> Any:
        if self.kind == "computed again":  # in a backward pass of its own
            found: torch.Tensor = checkpoint(self.heads[head], self.first(x), use_reentrant=True)
            return found
        found = self.heads[head](self.first(x))
        return torch.distributions.Categorical(logits=found) if self.kind == "a result of a class" else found

    def loss(self, call: Any) -> torch.Tensor:
        """call: as `forward`, of what `run.ddp` has returned."""
        first, second = (call(torch.tensor([[value]]), head) for head, value in enumerate((0.5, -1.5)))
        if self.kind == "a result of a class":
            first, second = (each.log_prob(torch.ones(())).sum() for each in (first, second))
        return (first.square().sum() + second.square().sum()) * self.scale  # used beside the module


KINDS = ("heads", "computed again", "a result of a class")


def use_in_many_ways(environment: dict[str, str], out: str) -> None:
    os.environ.update(environment)
    run = spotrun.init()
    found = {}
    for kind in KINDS:
        model = run.ddp(Layers(kind))
        for _ in range(2):  # in the second step, it is known which parameters got a gradient in the first
            model.zero_grad()
            run.backward(model.module.loss(model) * (run.rank + 1.0))
        found[kind] = [each.grad for each in model.parameters()]
    torch.save(found, out)


def test_three_workers_on_cpus_average_the_gradients_of_all_that_a_script_uses(cluster: Cluster) -> None:
    """DDP looks for unused parameters there. It would only look at the result of the newest forward pass."""
    paths = [cluster.path / str(rank) for rank in range(3)]
    run_all(use_in_many_ways, [(str(path),) for path in paths])
    reseed(0, "init")
    for kind in KINDS:
        model = Layers(kind)
        (model.loss(model) * 2.0).backward()
        for path in paths:
            for own, each in zip(torch.load(path)[kind], model.parameters(), strict=True):
                assert torch.allclose(own, each.grad)


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


def test_after_a_peers_death_any_error_is_its_consequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script may call a collective after `run.backward`. Its process group is gone by then."""
    monkeypatch.setattr(failures, "void", True)
    assert is_peer_failure(ValueError("Default process group has not been initialized"))
