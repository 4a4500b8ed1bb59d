"""Scripts for a Trainer of Hugging Face. A plan names one of them, as those of `tests.train.scripts`."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as torch_ddp
from torch import nn
from torch.utils.data import WeightedRandomSampler
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

import spotrun
from bench.soak.job import as_gpu
from spotrun.errors import SpotrunError
from tests.train.scripts import SAMPLES, Script

BATCH, EPOCHS, ACCUMULATE = 8, 3, 2  # with two workers: 4 steps an epoch


class Samples(torch.utils.data.Dataset[Any]):
    """Samples with their numbers, as a Trainer takes them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.randn(16, generator=torch.Generator().manual_seed(index)), "labels": index}


class Net(nn.Module):
    """Its forward pass is what a Trainer asks for. script: sees the numbers of the samples in training."""

    def __init__(self, script: Trained | None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 4))
        self._script = script

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._script is not None and (self.training or self._script.plan.die_in == "evaluation"):
            self._script.see(labels, self.training)
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels % 4), "logits": logits}


class Trained(Script):
    """A script with a Trainer: it evaluates, logs, and may stop early."""

    def __init__(
        self, plan: Any, out: Path, kind: type[Trainer] = Trainer, callback: Any = None, **options: Any
    ) -> None:
        self.run, self.plan, self.out = spotrun.init(seed=5), plan, out
        given = {
            "num_train_epochs": EPOCHS,
            "per_device_train_batch_size": BATCH,
            "gradient_accumulation_steps": ACCUMULATE,
            "learning_rate": 1e-2,
            "warmup_steps": 3,
            "logging_steps": 1,
            "eval_strategy": "epoch",
            "save_strategy": "no",
            "metric_for_best_model": "loss",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
        }
        args = TrainingArguments(str(out / "trainer"), **{**given, **options})
        torch.manual_seed(5)
        self.net = Net(self)
        print("set up by", os.getpid(), flush=True)
        callbacks = [callback or EarlyStoppingCallback(9)]
        self.trainer = kind(self.net, args, train_dataset=Samples(), eval_dataset=Samples(), callbacks=callbacks)
        if plan.on_gpu:
            as_gpu.hold_later(self.run, lambda: filter(None, [self.trainer.optimizer]))

    def see(self, labels: torch.Tensor, training: bool) -> None:
        if self.run.step == self.plan.die_at and self.plan.die_in == ("" if training else "evaluation"):
            os.kill(os.getpid(), signal.SIGKILL)
        if training:
            self.note(ids=labels.tolist())

    def save(self, **more: Any) -> None:
        keep = ("loss", "eval_loss", "learning_rate", "grad_norm", "step", "epoch")
        log = [each for each in self.trainer.state.log_history if "train_loss" not in each]  # without the summary
        history = [{key: each[key] for key in keep if key in each} for each in log]
        state = {"model": self.trainer.model.state_dict(), "optimizer": self.trainer.optimizer.state_dict()}
        torch.save({**state, "history": history, **more}, self.out / f"final-{self.run.rank}.pt")


def trained(plan: Any, out: Path) -> None:
    """Like most scripts with a Trainer."""
    script = Trained(plan, out)
    script.run.train(script.trainer)
    script.save()


def adapted(plan: Any, out: Path) -> None:
    """Most of its model is frozen, as with LoRA."""
    script = Trained(plan, out)
    script.net.layers[0].requires_grad_(False)
    script.run.train(script.trainer)
    script.save()


def random_base(plan: Any, out: Path) -> None:
    """As `adapted`, but each process makes other frozen parameters. It counts how often DDP sends the whole model."""
    sync = torch_ddp._sync_module_states

    def noted(*args: Any, **options: Any) -> None:
        print("the model is sent", flush=True)
        sync(*args, **options)

    torch_ddp._sync_module_states = noted  # type: ignore[attr-defined]
    script = Trained(plan, out)
    base = script.net.layers[0].requires_grad_(False)
    if plan.script == "random_base":
        nn.init.normal_(base.weight, generator=torch.Generator().manual_seed(os.getpid()))
    script.run.train(script.trainer)
    script.save()


equal_base = random_base


def stopped(plan: Any, out: Path) -> None:
    """Training stops in the middle of an epoch, and more follows."""
    script = Trained(plan, out, max_steps=6, load_best_model_at_end=True, save_strategy="epoch")
    result = script.run.train(script.trainer)
    if script.run.rank == 0:
        print("result:", result.global_step, result.training_loss, sorted(result.metrics), flush=True)
    script.trainer.evaluate()
    if plan.fail_at == script.run.step:
        raise ValueError("a bug in the script")
    script.save(rates=script.trainer.lr_scheduler.get_last_lr())


def part_of_an_epoch(plan: Any, out: Path) -> None:
    """Its training ends within an epoch."""
    script = Trained(plan, out, num_train_epochs=0.6)
    script.run.train(script.trainer)
    script.save()


def stopping(plan: Any, out: Path) -> None:
    """Its training stops early: its loss never counts as better."""
    options = {"greater_is_better": True, "eval_strategy": "steps", "eval_steps": 2}
    script = Trained(plan, out, callback=EarlyStoppingCallback(2, 100.0), **options)
    script.run.train(script.trainer)
    script.save()


def dependent(plan: Any, out: Path) -> None:
    """It computes its accumulation from the number of workers."""
    script = Trained(plan, out, gradient_accumulation_steps=4 // int(os.environ["WORLD_SIZE"]))
    script.run.train(script.trainer)
    script.save()


class Counting(TrainerCallback, ExportableState):
    """Counts its calls. The Trainer saves it."""

    def __init__(self, begun: int = 0, parts: int = 0) -> None:
        self.begun, self.parts = begun, parts

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"begun": self.begun, "parts": self.parts}}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun += 1

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.parts += 1


def counting(plan: Any, out: Path) -> None:
    """One of its callbacks counts what happens in steps that count. Each entry of its log has the time of training."""
    script = Trained(plan, out, callback=Counting(), include_num_input_tokens_seen="all")
    script.run.train(script.trainer)
    (found,) = (each for each in script.trainer.callback_handler.callbacks if isinstance(each, Counting))
    script.save(counted=[found.begun, found.parts])


class Counted(Trainer):
    """What it computes depends on its count of batches, as in TRL's GRPOTrainer."""

    batches = 0  # an epoch has 7, so a newcomer that begins with an epoch counts as the others

    def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> torch.Tensor:
        factor = 1 + self.batches % 7 % ACCUMULATE  # an epoch has 7 batches
        loss = super().training_step(model, {**inputs, "x": factor * inputs["x"]}, *args, **options)
        self.batches += 1
        return loss


def counted(plan: Any, out: Path) -> None:
    script = Trained(plan, out, Counted)
    script.run.train(script.trainer)
    script.save()


def fused(plan: Any, out: Path) -> None:
    """It uses autocast, and Liger's kernels, which take the place of the model's forward pass when training begins."""
    script = Trained(plan, out, bf16=True)
    net, forward = script.net, Net.forward

    def cast(self: Net, x: torch.Tensor, labels: torch.Tensor, skip_logits: Any = None) -> Any:
        assert torch.is_autocast_enabled("cpu")
        return forward(self, x, labels)

    def apply(model: Any, config: Any) -> None:
        print("Liger's kernels", flush=True)
        model.forward = MethodType(cast, model)

    script.trainer.args.use_liger_kernel = True
    with patch("transformers.trainer.apply_liger_kernel", apply):
        script.run.train(script.trainer)
    assert net is script.trainer.model
    script.save()


class Tracker(TrainerCallback):
    """As those of transformers for W&B and others: it sets itself up once, and logs on rank 0."""

    def __init__(self) -> None:
        self._initialized = self.open = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._initialized:
            self._initialized, self.open = True, state.is_world_process_zero

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.open or not state.is_world_process_zero


def tracked(plan: Any, out: Path) -> None:
    """It has a tracker."""
    script = Trained(plan, out, callback=Tracker())
    script.run.train(script.trainer)
    script.save()


class Keeping(Trainer):
    """It keeps its loader."""

    own: Any = None

    def get_train_dataloader(self) -> Any:
        self.own = self.own or super().get_train_dataloader()
        return self.own


def keeping_loaders(plan: Any, out: Path) -> None:
    """Processes load its samples, and stay from epoch to epoch."""
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    script = Trained(plan, out, Keeping, per_device_eval_batch_size=7, **options)
    script.run.train(script.trainer)
    script.save()


def decaying(plan: Any, out: Path) -> None:
    """It computes its weight decay from the number of workers."""
    script = Trained(plan, out, weight_decay=0.5 * int(os.environ["WORLD_SIZE"]))
    script.run.train(script.trainer)
    script.save()


class Meeting(Trainer):
    """The ranks meet when they have loaded a step's samples. For language models, they then add up their labels."""

    script: Any = None

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        found = super().get_batch_samples(*args, **options)
        if self.script.plan.die_in == "loading" and self.state.global_step == self.script.plan.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return found


def meeting(plan: Any, out: Path) -> None:
    """A worker may die before its ranks meet."""
    script = Trained(plan, out, Meeting)
    vars(script.trainer)["script"] = script
    script.run.train(script.trainer)
    script.save()


class Precise(torch.optim.SGD):
    """Its state has more precision than the parameters."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter, dtype=torch.float64))
            mean.lerp_(parameter.grad.double(), 0.1)
            parameter.grad.copy_(mean)
        return super().step(closure)


class Unusual(Trainer):
    """It makes an optimizer in each call, draws an order for the samples, and logs what is no number.

    It asks for the module in its model, as label smoothing does.
    """

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = Precise(self.model.parameters(), lr=0.1)
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return Drawn()

    def compute_loss(self, model: Any, *args: Any, **options: Any) -> Any:
        assert self.accelerator.unwrap_model(model) is self.model
        self.log({"tensor": torch.ones(2), "object": Samples(), "number": torch.tensor(1.5)})  # type: ignore[dict-item]
        return super().compute_loss(model, *args, **options)


class Drawn(torch.utils.data.Sampler[int]):
    """An order from the global generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        return iter(torch.randperm(SAMPLES).tolist())


class Weighted(Trainer):
    """Its sampler has a generator of its own."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        own = torch.Generator().manual_seed(3)
        return WeightedRandomSampler([1 + number % 3 for number in range(SAMPLES)], SAMPLES, generator=own)


def weighted(plan: Any, out: Path) -> None:
    script = Trained(plan, out, Weighted)
    script.run.train(script.trainer)
    script.save()


def unusual(plan: Any, out: Path) -> None:
    """Its Trainer is not like others, and evaluates before the first step."""
    script = Trained(plan, out, Unusual, eval_on_start=True)
    script.run.train(script.trainer)
    log = script.trainer.state.log_history
    assert not any("eval_model_preparation_time" in each for each in log)  # as with `trainer.train`
    entries = [each for each in log if "tensor" in each]
    script.save(logged=[[*torch.as_tensor(each["tensor"]), float(each["number"])] for each in entries])


def choosing(plan: Any, out: Path) -> None:
    """It ends with its best model, which only the node of rank 0 has. No later one counts as better."""
    node = out / os.environ["RANK"]
    node.mkdir(exist_ok=True)
    os.chdir(node)
    options = {"save_strategy": "epoch", "load_best_model_at_end": True, "greater_is_better": True}
    script = Trained(plan, Path(), **options)
    script.out = out
    script.net.layers[0].requires_grad_(False)
    script.run.train(script.trainer)
    script.save()


class Mean(TrainerCallback):
    """Makes a frozen layer the average of a trained one."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        with torch.no_grad():
            model.mean.weight.lerp_(model.layers[0].weight, 0.1)


def averaging(plan: Any, out: Path) -> None:
    """Its model has two frozen layers. One of them changes."""
    script = Trained(plan, out, callback=Mean())
    script.net.mean = nn.Linear(16, 32).requires_grad_(False)
    script.net.still = nn.Linear(16, 32).requires_grad_(False)
    script.run.train(script.trainer)
    script.save()


def refused(plan: Any, out: Path) -> None:
    """It prints what is wrong with its calls, and trains in between."""
    script = Trained(plan, out)
    run, trainer = script.run, script.trainer
    _attempt(run, run)
    _attempt(run, type("Trainer", (), {"__module__": "lightning.pytorch.trainer.trainer"})())
    _attempt(run, trainer, resume_from_checkpoint=True)
    _attempt(run, Trainer(model_init=partial(Net, None), args=trainer.args, eval_dataset=Samples()))
    trainer.args.auto_find_batch_size = True
    _attempt(run, trainer)
    trainer.args.auto_find_batch_size = False
    trainer.args.enable_jit_checkpoint = True
    _attempt(run, trainer)
    trainer.args.enable_jit_checkpoint = False
    _attempt(run, trainer)
    _attempt(run, trainer)
    try:
        trainer.train()
    except SpotrunError as error:
        print("refused:", error, flush=True)


def refused_after(plan: Any, out: Path) -> None:
    """It prints what is wrong with `run.train` after other calls, and with another version of transformers."""
    script = Trained(plan, out)
    run, trainer = script.run, script.trainer
    with patch("spotrun.train.hugging_face.train._OLDEST", (99, 5)):
        _attempt(run, trainer)
    run.ddp(nn.Linear(2, 2))
    _attempt(run, trainer)
    run._models.clear()
    run.track(net=script.net)
    _attempt(run, trainer)


def too_early(plan: Any, out: Path) -> None:
    """Its TrainingArguments come before `spotrun.init`."""
    os.environ.pop("ACCELERATE_USE_CPU", None)  # another test's `spotrun.init` may have set it in this process
    args = TrainingArguments(str(out / "trainer"), report_to="none")
    _attempt(spotrun.init(), Trainer(Net(None), args, train_dataset=Samples()))


def _attempt(run: Any, trainer: Any, **options: Any) -> None:
    try:
        run.train(trainer, **options)
    except SpotrunError as error:
        print(f"refused: {error}\n", end="", flush=True)  # in one piece: two workers write to this log
