"""`run.train(trainer)`: the loop of a `transformers.Trainer`, with spotrun's step boundary.

A Trainer has its own loop, model wrapper and loader, so its workers do not regroup. After an interruption they are
forked again, run the script up to this call, and go on at the step of the newest state. spotrun gives the model and the
optimizer their state. The Trainer gets its position in its own way: from a checkpoint, which has only the file with the
Trainer's state. It then skips the samples that it has had, without loading them.

A step ends when the next one begins. So what the Trainer does in between is done once: it logs, evaluates and saves.

Read in transformers 5.24: `Trainer.train`, `_inner_training_loop`, `_init_training_state`, `_run_epoch`.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from spotrun.errors import SpotrunError
from spotrun.train.batches import Batch
from spotrun.train.parallel import share
from spotrun.train.rng import reseed

if TYPE_CHECKING:
    from spotrun.train.run import Run

# In a Trainer's state, what differs between ranks: the times in its log, and the rank's place, which it sets itself.
_TIMES = ("_runtime", "_per_second")
_PLACE = ("is_local_process_zero", "is_world_process_zero")
_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")  # accelerate's names for what splits a state over the ranks


def train(run: Run, trainer: Any, options: dict[str, Any]) -> Any:
    """Have the Trainer train, from the restored state on. Returns what `trainer.train(**options)` returns.

    Raises `SpotrunError` for a Trainer that could not go on after an interruption.
    """
    _check(run, trainer)
    _prepare(trainer)
    rest = Rest(trainer, run.world_size)
    if run._membership is not None:
        run._membership.restarts("a Trainer has a training loop of its own")
    model = trainer.model if all(each.requires_grad for each in trainer.model.parameters()) else Changing(trainer.model)
    run.track(model=model, optimizer=trainer.optimizer, trainer=rest)
    boundary, steps = run._boundary, Steps(run, trainer, rest, model)
    trainer.add_callback(steps)
    run._clock.resume()
    with (
        tempfile.TemporaryDirectory(prefix="spotrun-") as folder,
        boundary.exit_if_a_peer_fails,
        boundary.loop,
        boundary.snapshots.guard or nullcontext(),
    ):
        if rest.saved:
            Path(folder, TRAINER_STATE_NAME).write_text(rest.text(), encoding="utf-8")
            trainer._load_from_checkpoint = lambda *_, **__: None  # the model has its state
            trainer.args.restore_callback_states_from_checkpoint = True
            trainer.args.eval_on_start = False  # it was done
            options = {**options, "resume_from_checkpoint": folder}
        result = trainer.train(**options)
        rest.ended = True
        if trainer.args.load_best_model_at_end and run.world_size > 1:
            share(model.state_dict().values())  # it may be on the disk of rank 0's node only
        steps.end(trainer.state, trainer.model)
    boundary.profiling.end_loop()
    reseed(run._state.seed, run.step, 0, run.rank)  # after a restart, the code after this call draws the same
    boundary.metrics.flush()
    boundary.finish(True)
    return result


def _check(run: Run, trainer: Any) -> None:
    if not isinstance(trainer, Trainer):
        raise SpotrunError(f"run.train takes a transformers.Trainer, not a {type(trainer).__name__}")
    if trainer.args.world_size != run.world_size:
        raise SpotrunError(
            f"run.train: there are {run.world_size} workers, and the Trainer knows of {trainer.args.world_size}: call "
            "spotrun.init() before TrainingArguments(…)"
        )
    for wrong, what in (
        (bool(run._state.objects), "a second call, nor one after run.track"),
        (not hasattr(trainer, "_load_from_checkpoint"), "this version of transformers"),
        (trainer.model_init is not None, "model_init (give the Trainer model= instead)"),
        (trainer.args.auto_find_batch_size, "auto_find_batch_size (set per_device_train_batch_size)"),
        (str(trainer.accelerator.distributed_type).endswith(_SHARDED), "FSDP or DeepSpeed"),
    ):
        if wrong:
            raise SpotrunError(f"run.train does not support {what}")
    if run._membership is not None and run._membership.context.elastic:
        raise SpotrunError(
            "run.train: a Trainer counts its steps by the number of workers, so it must not change: give nodes one "
            "number in the job file, such as nodes: 2"
        )


def _prepare(trainer: Any) -> None:
    """What must not change any more when the state is restored: the model's device, and which optimizer there is."""
    args = trainer.args
    if (args.fp16_full_eval or args.bf16_full_eval) and not trainer.is_model_parallel:
        trainer._move_model_to_device(trainer.model, args.device)  # otherwise `trainer.train` does it
    trainer.create_optimizer()
    trainer.create_optimizer = lambda *_, **__: trainer.optimizer  # a subclass may make another one in each call


class Changing:
    """What training changes in a model with frozen parameters: the other parameters, and the buffers.

    The script makes the frozen ones. So a snapshot of a large model with adapters (LoRA) has the adapters only. A
    parameter that was ever trained belongs to it, and so does a frozen one that has changed, such as an average.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {name for name, _ in model.named_buffers()}
        self._versions: dict[str, int] = {}  # of the parameters, when training begins

    def begin(self) -> None:
        """Training begins: from now on, a change of a parameter counts."""
        self._versions = {name: each._version for name, each in self._model.named_parameters()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        for name, each in self._model.named_parameters():
            if each.requires_grad or self._versions.get(name, each._version) != each._version:
                self._names.add(name)
        return {name: each for name, each in self._model.state_dict().items() if name in self._names}

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        own = dict((*self._model.named_parameters(), *self._model.named_buffers()))
        if lost := sorted((saved.keys() - own.keys()) | (self.state_dict().keys() - saved.keys())):
            where = "saved state" if lost[0] in saved else "model"
            raise SpotrunError(f"run.train: only the {where} has {lost[0]}. Submit a changed script as a new job")
        self._names |= saved.keys()
        with torch.no_grad():
            for name, values in saved.items():
                own[name].copy_(values)


class Rest:
    """What a Trainer has besides its model and its optimizer, as an object for `run.track`.

    saved: what was loaded; empty if nothing was. The Trainer makes its scheduler later: `give` has it load its part.
    ended: whether the training has ended.
    """

    def __init__(self, trainer: Any, workers: int) -> None:
        self.saved: dict[str, Any] = {}
        self.ended = False
        self._trainer, self._workers = trainer, workers
        self._history: list[Any] = []  # the Trainer's log, and as lines: each snapshot has all of it
        self._lines: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks, as far as what the script logs is."""
        callbacks = (*self._trainer.callback_handler.callbacks, self._trainer.control)
        exported = [each for each in callbacks if isinstance(each, ExportableState)]
        kept = vars(replace(self._trainer.state, log_history=[], stateful_callbacks=exported))
        kept.update(dict.fromkeys(_PLACE, True))
        if step := kept["best_global_step"]:  # not all nodes have its checkpoint
            kept["best_model_checkpoint"] = os.path.join(
                self._trainer.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}"
            )
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        return {"workers": self._workers, "ended": self.ended, "state": kept, "log": self._log(), **parts}

    def _log(self) -> str:
        """The Trainer's log, a line for each entry. The summary is not in it: its loss is this rank's."""
        history = self._trainer.state.log_history
        if history is not self._history or len(history) < len(self._lines):
            self._history, self._lines = history, []
        for each in history[len(self._lines) :]:
            kept = {} if "train_runtime" in each else {k: v for k, v in each.items() if not k.endswith(_TIMES)}
            self._lines.append(json.dumps(kept, default=_plain))
        return "\n".join(self._lines)

    def text(self) -> str:
        """The saved state of the Trainer, as in a file of its own."""
        log = [entry for line in self.saved["log"].splitlines() if (entry := json.loads(line))]
        return json.dumps({**self.saved["state"], "log_history": log}, default=_plain)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Keep it for `give`. Raises `SpotrunError` if it is of another number of workers."""
        if saved["workers"] != self._workers:
            raise SpotrunError(
                f"run.train: the saved state is of {saved['workers']} workers, and there are {self._workers} now. A "
                "Trainer counts its steps by them: go on with as many, or submit a new job"
            )
        self.saved = saved

    def give(self) -> None:
        """Have the Trainer's scheduler and scaler load what was saved."""
        for name, part in self._parts().items():
            if name in self.saved:
                part.load_state_dict(self.saved[name])

    def _parts(self) -> dict[str, Any]:
        trainer = self._trainer
        found = {"scheduler": trainer.lr_scheduler, "scaler": getattr(trainer.accelerator, "scaler", None)}
        return {name: part for name, part in found.items() if part is not None}


def _plain(value: Any) -> Any:
    """For JSON: numbers for a tensor or an array, and a text for any other object that a script has logged."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


class Steps(TrainerCallback):
    """The boundary between two steps of a Trainer, and its log."""

    def __init__(self, run: Run, trainer: Any, rest: Rest, model: Any) -> None:
        self._run, self._trainer, self._rest, self._model = run, trainer, rest, model
        self._optimizer: torch.optim.Optimizer = trainer.optimizer
        self._done = False  # whether a step is done that is not counted yet
        self._samples = 0  # of this rank in a step
        # The optimizer has its state. Then accelerate converts this to the parameters' types, and the scheduler, when
        # it is made, sets the first learning rate.
        self._groups = [{k: v for k, v in each.items() if k != "params"} for each in self._optimizer.param_groups]
        self._values = dict(self._optimizer.state)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        run = self._run
        if self._rest.ended:
            raise SpotrunError("run.train: this Trainer has trained. A script can have spotrun keep one training only")
        if self._rest.saved:
            self._rest.give()
            for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
                group.update(saved)
            self._optimizer.state.update(self._values)
            if self._rest.saved["ended"]:  # otherwise the Trainer would do one step more
                control.should_training_stop, self._trainer._run_epoch = True, lambda **_: None
        self._values.clear()
        if isinstance(self._model, Changing):
            self._model.begin()
        self._samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
        run._sizes, run._epochs = (0.0, self._samples * run.world_size), state.num_train_epochs + 1
        if run._control is not None:
            run._control.tell_total(run.step + state.max_steps - state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.dataloader_num_workers:
            self._run._boundary.settle()  # a loader's worker, forked now, would inherit the slot's lock
        # The loader draws its seed, and some samplers draw an order that must be the same on all ranks.
        reseed(self._run._state.seed, "epoch", int(state.epoch or 0))

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        run = self._run
        self.end(state, model)
        run._state.epoch = int(state.epoch or 0)
        run._batch = Batch(1.0, True, state.global_step + 1, self._samples)
        run._inside = True
        reseed(run._state.seed, run.step, 0, run.rank)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if (guard := self._run._boundary.snapshots.guard) is not None:
            guard()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._done = True

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._run.log(**{name: each for name, each in given["logs"].items() if isinstance(each, int | float)})

    def end(self, state: Any, model: Any) -> None:
        """Count the step that is done, if there is one. As with `run.ddp`, the snapshots of all nodes are the same."""
        run = self._run
        run._inside = False
        if not self._done:
            return
        self._done = False
        if run.world_size > 1:
            share(model.buffers())
        run._clock.samples += self._samples
        run._boundary.end_step(None, int(state.global_step))
