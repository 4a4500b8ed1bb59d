"""A job's workers as real processes with a gloo group, each with a slots folder and a control block of its own.

The test is head and agent: it writes stop steps, kills, and starts the next generation.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import spotrun
from bench.soak.job import as_gpu
from spotrun.state import slots
from spotrun.state.control import Context, Control
from spotrun.state.slots import Record
from spotrun.train import (
    boundary,
    distributed,
    failures,
    group_health,
    noted_state,
    regroup,
    sections,
    streams,
    training_state,
    transfer,
)
from spotrun.train.copier import Copier
from spotrun.train.schedule import Snapshots
from tests.helpers import wait_for
from tests.train import faults, scripts
from tests.train.forks import forked
from tests.train.meeting import meeting

SAMPLES, BATCH, EPOCHS = 104, 8, 3  # with 3 workers: 5 steps an epoch, the last of 8 samples (3, 3, 2)

everything = {epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)}


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
    global_batch: int | None = None  # samples of all workers in a step
    gate: str = ""  # a FIFO from which it reads before it says that it is done
    patience: float = 240.0  # seconds that it waits for the others when it leaves a drain
    own_ddp: bool = False  # its script makes the DDP instance itself
    own_group: bool = False  # its script makes a process group
    reads_size: bool = False  # its set-up asks for the number of workers
    collective: str = ""  # its script has a collective of its own in each step: "first", "middle" or "last" in it
    die_in: str = ""  # where in step `die_at` it does so: "" before the gradients are exchanged, or as `collective`
    keeps_loaders: bool = False  # a process loads its data, and stays from epoch to epoch
    hooks: bool = False  # its script has a hook that exchanges gradients as DDP does, and writes down each call
    stateful: bool = False  # that hook has a state of its own
    scales: bool = False  # its script uses a GradScaler and does not track it
    compiles: bool = False  # its model is compiled, and each compilation is written down
    freezes: bool = False  # it does not kill itself, but stops, so that its connections stay
    ddp: dict[str, Any] = field(default_factory=dict)  # its script's options for `run.ddp`
    two_models: bool = False  # its script makes a step's second loss before the first one's backward, as GANs do
    together: bool = False  # the workers of a node copy each snapshot together, as soon as they can
    sends: str = ""  # how it sends the state to another worker: "a part", and dies, "wrongly", once; empty: well
    backend: str = ""  # of its process group; empty: the default one
    gpu: str = ""  # the only GPU that it sees; empty: all
    on_gpu: bool = False  # its device counts as a GPU (see bench/soak/job/as_gpu.py)
    exact: bool = False  # its job file says so
    spoilt: str = ""  # a file: once it is there, a sum that a peer's abort has spoilt seems right to it
    cache: bool = False  # its model has a buffer that no state_dict has
    device_fails: bool = False  # its device fails when it gets a state again
    abort_takes: float = 0.0  # seconds that an abort takes; 0: no time
    nccl_fails_at: int = -1  # step of the first generation in which its process group reports an error
    stays: float = 0.0  # seconds that the end of its process group takes, which then fails; 0: it ends well
    script: str = ""  # another script, of `tests.train.scripts`
    die_copied: int = -1  # step whose snapshot it copies, or its section, before it kills itself


def train(environment: dict[str, str], plan: Plan) -> None:
    """The plan's script, in a process of its own."""
    os.environ.update(environment)
    out = Path(plan.out)
    prepare(plan, out)
    module, _, name = plan.script.rpartition(".")
    if module or (name and not hasattr(scripts, name)):  # imported here: transformers and Lightning take seconds
        found = importlib.import_module(f"tests.train.{module or 'trainers'}")
        return getattr(found, name)(plan, out)  # type: ignore[no-any-return]
    script = getattr(scripts, plan.script) if plan.script else usual
    script(plan, out)


def usual(plan: Plan, out: Path) -> None:
    """The script of most tests."""
    run = spotrun.init(seed=5, backend=plan.backend or None)
    if plan.nccl_fails_at >= 0:
        group_health.error = lambda: "COMM_ERROR" if (run.generation, run.step) == (1, plan.nccl_fails_at) else ""
    if plan.reads_size:
        print("set up for", run.world_size, "workers", flush=True)
    module = build(plan, out)
    model: Any = nn.parallel.DistributedDataParallel(module) if plan.own_ddp else run.ddp(module, **plan.ddp)
    if plan.own_group:
        dist.new_group()
    if plan.hooks:
        note: Any = out / f"hook-{os.getpid()}"
        model.register_comm_hook(State(note) if plan.stateful else note, hook)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=8.0)
    if plan.on_gpu:
        as_gpu.hold([model], [optimizer])
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    dataset = Noisy()
    sampler = spotrun.ElasticSampler(dataset, seed=1)
    own = {"num_workers": 1, "persistent_workers": True} if plan.keeps_loaders else {}
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, **own)  # type: ignore[arg-type]
    other = run.ddp(nn.Linear(16, 4)) if plan.two_models else None
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    step(plan, run, "outside")
    with (out / f"seen-{os.getpid()}.jsonl").open("w") as seen:
        for epoch in run.epochs(EPOCHS):
            for x, y in run.steps(loader, plan.accumulate, plan.global_batch):
                if run.step == plan.fail_at:
                    raise ValueError("a bug in the script")
                step(plan, run, "first")
                loss = nn.functional.cross_entropy(model(x), y)
                second = None if other is None else other(x).square().mean()
                step(plan, run, "")
                run.backward(scaler.scale(loss) if plan.scales else loss)
                if second is not None:
                    run.backward(second)
                step(plan, run, "middle")
                if run.completes_step:
                    optimize(optimizer, scaler if plan.scales else None)
                step(plan, run, "last")
                run.log(loss=loss, nothing=float("nan"))
                entry = {"generation": int(os.environ.get("GENERATION", "0")), "rank": run.rank, "ids": run.batch_ids}
                print(json.dumps(entry | {"epoch": epoch, "step": run.step}), file=seen, flush=True)
            scheduler.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.rand(1)}
    torch.save(state, out / f"final-{run.rank}.pt")


def build(plan: Plan, out: Path) -> Any:
    """The script's first model."""
    module = network()
    if plan.cache:
        module.register_buffer("cache", torch.ones(3), persistent=False)
    if not plan.compiles:
        return module
    backend = functools.partial(compiled, out / f"compiled-{os.getpid()}")
    return torch.compile(module, backend=backend, dynamic=True)  # once for the short batches, too


def prepare(plan: Plan, out: Path) -> None:
    """What comes before the script: one thread, a log, and what the plan changes in spotrun."""
    torch.set_num_threads(1)
    multiprocessing.set_start_method(None, force=True)  # as the launcher: loaders fork their workers (Python 3.11)
    out.mkdir(exist_ok=True)
    print_to(out / "log.txt")
    noted_state.SHARE = math.inf  # the steps of these scripts are short
    boundary.leave_together = functools.partial(leave_together, plan)  # type: ignore[attr-defined]
    if plan.together:
        copy_together(plan)
    if plan.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = plan.gpu
    if plan.on_gpu:
        as_gpu.imitate()
    if plan.spoilt:
        as_gpu.spoil(Path(plan.spoilt).exists)
    if plan.device_fails:
        training_state.TrainingState.load = faults.fail_on_device  # type: ignore[assignment,method-assign]
    if plan.abort_takes:
        distributed.abort_collectives = lambda group, device: time.sleep(plan.abort_takes)
        regroup.LEAVE_WAIT, regroup.QUEUED = 1.0, 0.0  # type: ignore[attr-defined]
    if plan.stays:
        distributed.leave_process_group = functools.partial(faults.fail_after, plan.stays)
        regroup.LEAVE_WAIT, regroup.QUEUED = 2.0, 0.0  # type: ignore[attr-defined]
    transfer.ALONE = 64  # the tensors of these scripts are small
    if plan.sends:
        streams._send_all = {"a part": faults.send_a_part, "wrongly": faults.send_wrongly}[plan.sends]


@dataclass
class State:
    """As PowerSGDState: what a hook keeps from step to step."""

    note: Path


def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are texts
    """DDP's own way, in Python: the mean over all workers of now."""
    with (state.note if isinstance(state, State) else state).open("a") as file:
        print(dist.get_world_size(), file=file)
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def optimize(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
    """The end of a step."""
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def compiled(note: Path, graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
    """A compiler that changes nothing, and writes down the generation in which it is called."""
    with note.open("a") as file:
        print(os.environ["GENERATION"], file=file)
    return graph.forward


def step(plan: Plan, run: Any, place: str) -> None:
    """What the script does here besides training: it dies, or has collectives of its own."""
    if run.step == plan.die_at and plan.die_in == place:
        os.kill(os.getpid(), signal.SIGSTOP if plan.freezes else signal.SIGKILL)
    if (run.generation, run.step) == (1, plan.nccl_fails_at):
        wait_for(lambda: failures.void and place != "outside")  # like a script that waits in a collective
    if plan.collective and plan.collective == place:
        total, parts = torch.ones(3), [torch.empty(3) for _ in range(dist.get_world_size())]
        calls: list[Callable[[], Any]] = [
            lambda: dist.all_gather_into_tensor(torch.empty(3 * len(parts)), total),
            lambda: poll(dist.all_gather(parts, total, async_op=True)),
            lambda: dist.all_reduce(total),
            lambda: dist.broadcast(total, 0),
            lambda: dist.all_reduce(total, async_op=True).wait(),  # type: ignore[union-attr]
            dist.barrier,
        ]
        first = ("first", "middle", "last").index(place)  # the one that finds the group broken
        for call in calls[first:] + calls[:first]:
            call()


def poll(work: Any) -> None:
    """Wait for the work as a script does that has other things to do meanwhile."""
    while not work.is_completed():
        time.sleep(0.001)
    work.wait()


def network() -> nn.Module:
    hidden = 700  # more than one DDP bucket of 1 MB
    return nn.Sequential(
        nn.Linear(16, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 4),
    )


def print_to(path: Path) -> None:
    log = path.open("a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)


def flatten(value: Any) -> list[Any]:
    """The leaves of a state, tensors as lists of numbers."""
    if isinstance(value, dict):
        return [leaf for key in value for leaf in [key, *flatten(value[key])]]
    if isinstance(value, list):
        return [leaf for item in value for leaf in flatten(item)]
    return [value.tolist()] if isinstance(value, torch.Tensor) else [value]


def copy_together(plan: Plan) -> None:
    """Share snapshots of any size, all but the first two. Each boundary waits for what runs beside training."""
    sections.MINIMUM = 0
    take_snapshot, copied = Snapshots.end_step, Copier._copy

    def snapshot(self: Snapshots, *args: Any, **kwargs: Any) -> None:
        for each in filter(None, (self.writer, self.section)):
            Copier.settle(each)
        take_snapshot(self, *args, **kwargs)
        if self.section is not None:
            self.section.settle()  # it has mapped what the writer laid out

    def copy(self: Copier, *args: Any) -> Any:
        found = copied(self, *args)
        if plan.die_copied == self._control.step:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    Snapshots.end_step = snapshot  # type: ignore[method-assign]
    Copier._copy = copy  # type: ignore[assignment, method-assign]


def leave_together(plan: Plan, device: torch.device, group: Any, _: float) -> bool:
    if plan.gate:
        Path(plan.gate).read_text()
    return distributed.leave_together(device, group, plan.patience)


@dataclass
class Cluster:
    """Nodes with their tmpfs folders; each `launch` is a generation."""

    path: Path
    generation: int = 0
    controls: list[Control] = field(default_factory=list)
    regroups: bool = False  # whether workers wait for the next generation, instead of ending
    elastic: bool = False  # whether their number may change

    def context(self, node: str, rank: int, interval: int, per_node: int = 1) -> Context:
        paths = [str(self.path / f"control-{self.generation}-{each}") for each in range(rank + per_node)]
        self.controls.append(Control(Path(paths[rank]), create=True))
        first = rank - rank % per_node
        return Context(
            job="job",
            generation=self.generation,
            node=node,
            control=paths[rank],
            slots=str(self.slots(node)),
            bucket="",
            snapshot_interval=interval,
            controls=paths[first : first + per_node],
            regroups=self.regroups,
            elastic=self.elastic,
        )

    def slots(self, node: str) -> Path:
        return self.path / f"slots-{node}"

    def newest(self, node: str) -> Record:
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
        with meeting(world) as group:
            processes = []
            for rank in range(world):
                context = self.context(nodes[rank // per_node], rank, interval, per_node)
                self.controls[rank].stop_at = stop_at
                environment = {
                    **group,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank % per_node),
                    "LOCAL_WORLD_SIZE": str(per_node),
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
        """Samples of each epoch, sorted."""
        epochs: dict[int, list[int]] = {}
        for (epoch, _), ids in self.seen_in_steps().items():
            epochs.setdefault(epoch, []).extend(ids)
        return {epoch: sorted(ids) for epoch, ids in epochs.items()}

    def seen_in_steps(self) -> dict[tuple[int, int], list[int]]:
        """Samples of each (epoch, step), sorted; of a step done twice only the later generation counts."""
        steps: dict[tuple[int, int], tuple[int, list[int]]] = {}
        for path in sorted((self.path / "out").glob("seen-*.jsonl")):
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                generation = entry["generation"]
                key = (entry["epoch"], entry["step"])
                before, ids = steps.get(key, (0, []))
                if generation >= before:
                    steps[key] = (generation, entry["ids"] + (ids if generation == before else []))
        return {place: sorted(ids) for place, (_, ids) in steps.items()}
