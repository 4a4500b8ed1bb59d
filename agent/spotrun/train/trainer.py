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
import re
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from spotrun.errors import SpotrunError
from spotrun.train.batches import Batch
from spotrun.train.parallel import share_buffers
from spotrun.train.rng import reseed

if TYPE_CHECKING:
    from spotrun.train.run import Run

# In a Trainer's state, what differs between ranks: the times in its log, and the rank's place, which it sets itself.
_TIMES = ("_runtime", "_per_second")
_PLACE = ("is_local_process_zero", "is_world_process_zero")
_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")  # accelerate's names for what splits a state over the ranks
_OLDEST = (5, 24)  # of transformers


def train(run: Run, trainer: Any, options: dict[str, Any]) -> Any:
    """Have the Trainer train, from the restored state on. Returns what `trainer.train(**options)` returns.

    Raises `SpotrunError` for a Trainer that could not go on after an interruption.
    """
    if run._membership is not None:
        run._membership.restarts("a Trainer has a training loop of its own")
    _check(run, trainer, options)
    trainer.create_optimizer()
    rest = Rest(trainer, run.world_size)
    model = trainer.model if all(each.requires_grad for each in trainer.model.parameters()) else Changing(trainer.model)
    run.track(model=model, optimizer=trainer.optimizer, trainer=rest)
    boundary, steps = run._boundary, Steps(run, rest, trainer.optimizer)
    trainer.add_callback(steps)
    run._clock.resume()
    # A worker that is killed leaves the folder: here, the agent removes it with the job.
    place = Path(run._membership.context.control).parent if run._membership is not None else None
    with (
        tempfile.TemporaryDirectory(prefix="trainer-", dir=place) as folder,
        boundary.exit_if_a_peer_fails,
        boundary.loop,
        boundary.snapshots.guard or nullcontext(),
    ):
        if rest.saved:
            Path(folder, TRAINER_STATE_NAME).write_text(json.dumps(rest.saved["state"]), encoding="utf-8")
            trainer._load_from_checkpoint = lambda *_, **__: None  # the model has its state
            trainer.args.restore_callback_states_from_checkpoint = True
            options = {**options, "resume_from_checkpoint": folder}
        if rest.result is None:
            rest.result = trainer.train(**options)
            steps.end(trainer.state, trainer.model)
        else:  # one more call would train on, if training has stopped in the middle of an epoch
            rest.recall(Path(folder, TRAINER_STATE_NAME))
    boundary.profiling.end_loop()
    reseed(run._state.seed, run.step, 0, run.rank)  # after a restart, the code after this call draws the same
    boundary.metrics.flush()
    boundary.finish(True)
    return rest.result


def _check(run: Run, trainer: Any, options: dict[str, Any]) -> None:
    if not isinstance(trainer, Trainer):
        found = type(trainer)
        raise SpotrunError(f"run.train takes a transformers.Trainer, not a {found.__module__}.{found.__qualname__}")
    if tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2])) < _OLDEST:
        raise SpotrunError(
            f"run.train needs transformers {_OLDEST[0]}.{_OLDEST[1]} or newer, not {transformers.__version__}: name "
            f"transformers>={_OLDEST[0]}.{_OLDEST[1]} in requirements"
        )
    if run._models:
        raise SpotrunError("run.train: leave out run.ddp, and give the Trainer the module itself")
    if trainer.args.world_size != run.world_size:
        raise SpotrunError(
            f"run.train: there are {run.world_size} workers, and the Trainer knows of {trainer.args.world_size}: call "
            "spotrun.init() before TrainingArguments(…)"
        )
    for wrong, what in (
        ("trainer" in run._state.objects, "a second call in a script"),
        (bool(run._state.objects), "run.track before it (leave run.track out)"),
        (not hasattr(trainer, "_load_from_checkpoint"), f"transformers {transformers.__version__}"),
        (trainer.model_init is not None, "model_init (give the Trainer model= instead)"),
        (trainer.args.auto_find_batch_size, "auto_find_batch_size (set per_device_train_batch_size)"),
        (str(trainer.accelerator.distributed_type).endswith(_SHARDED), "FSDP or DeepSpeed"),
    ):
        if wrong:
            raise SpotrunError(f"run.train does not support {what}")
    if options.get("resume_from_checkpoint") is True and not _has_checkpoint(trainer.args.output_dir):
        raise SpotrunError(
            f"run.train: {trainer.args.output_dir} has no checkpoint. Leave out resume_from_checkpoint=True: after an "
            "interruption, run.train goes on without it"
        )
    if run._membership is not None and run._membership.context.elastic:
        raise SpotrunError(
            "run.train: a Trainer counts its steps by the number of workers, so it must not change: give nodes one "
            "number in the job file, such as nodes: 2"
        )


def _has_checkpoint(folder: str | None) -> bool:
    found = get_last_checkpoint(folder) if folder and Path(folder).is_dir() else None  # type: ignore[no-untyped-call]
    return found is not None


class Changing:
    """What training changes in a model with frozen parameters: the other parameters, and the buffers.

    The script makes the frozen ones. So a snapshot of a large model with adapters (LoRA) has the adapters only.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        trained = (name for name, each in self._model.named_parameters() if each.requires_grad)
        names = {*trained, *(name for name, _ in self._model.named_buffers())}
        return {name: each for name, each in self._model.state_dict().items() if name in names}

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        own = dict((*self._model.named_parameters(), *self._model.named_buffers()))
        with torch.no_grad():
            for name, values in saved.items():
                own[name].copy_(values)


class Rest:
    """What a Trainer has besides its model and its optimizer, as an object for `run.track`.

    saved: what was loaded; empty if nothing was. The Trainer makes its scheduler later: `give` has it load its part.
    result: what `trainer.train` has returned; None: training has not ended.
    """

    def __init__(self, trainer: Any, workers: int) -> None:
        self.saved: dict[str, Any] = {}
        self.result: TrainOutput | None = None
        self._trainer, self._workers = trainer, workers

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks, as far as what the script logs is."""
        callbacks = (*self._trainer.callback_handler.callbacks, self._trainer.control)
        exported = [each for each in callbacks if isinstance(each, ExportableState)]
        state = self._trainer.state
        history = [_timeless(each) for each in state.log_history]
        kept = asdict(replace(state, log_history=history, stateful_callbacks=exported))
        kept.update(dict.fromkeys(_PLACE, True))
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        if self.result is not None:
            parts["result"] = self.result._replace(metrics=_timeless(self.result.metrics))._asdict()
        return {"workers": self._workers, "state": kept, **parts}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Keep it for `give`. Raises `SpotrunError` if it is of another number of workers."""
        if saved["workers"] != self._workers:
            raise SpotrunError(
                f"run.train: the saved state is of {saved['workers']} workers, and there are {self._workers} now. A "
                "Trainer counts its steps by them: go on with as many, or submit a new job"
            )
        self.saved = saved
        if "result" in saved:
            self.result = TrainOutput(**saved["result"])

    def recall(self, path: Path) -> None:
        """Give the Trainer the state that it had when training ended. path: of a file with it."""
        trainer = self._trainer
        trainer.state = state = TrainerState.load_from_json(str(path))
        state.is_local_process_zero = trainer.is_local_process_zero()
        state.is_world_process_zero = trainer.is_world_process_zero()
        trainer._load_callback_state()

    def give(self) -> None:
        """Have the Trainer's scheduler and scaler load what was saved."""
        for name, part in self._parts().items():
            if name in self.saved:
                part.load_state_dict(self.saved[name])

    def _parts(self) -> dict[str, Any]:
        trainer = self._trainer
        found = {"scheduler": trainer.lr_scheduler, "scaler": getattr(trainer.accelerator, "scaler", None)}
        return {name: part for name, part in found.items() if part is not None}


def _timeless(values: dict[str, Any]) -> dict[str, Any]:
    """What the Trainer logs, without the times, which differ between ranks."""
    return {name: each for name, each in values.items() if not name.endswith(_TIMES)}


class Steps(TrainerCallback):
    """The boundary between two steps of a Trainer, and its log."""

    def __init__(self, run: Run, rest: Rest, optimizer: torch.optim.Optimizer) -> None:
        self._run, self._rest, self._optimizer = run, rest, optimizer
        self._done = False  # whether a step is done that is not counted yet
        self._samples = 0  # of this rank in a step
        # The scheduler, made after the optimizer has its state, sets the optimizer's first learning rate.
        self._groups = [{k: v for k, v in each.items() if k != "params"} for each in optimizer.param_groups]

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        run = self._run
        if self._rest.saved:
            self._rest.give()
            for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
                group.update(saved)
        self._samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
        run._sizes, run._epochs = (0.0, self._samples * run.world_size), state.num_train_epochs + 1
        if run._control is not None:
            run._control.tell_total(run.step + state.max_steps - state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reseed(self._run._state.seed, "epoch", int(state.epoch or 0), self._run.rank)  # the loader draws its seed

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
        if run.world_size > 1 and any(True for _ in model.buffers()):
            share_buffers(model)
        run._clock.samples += self._samples
        run._boundary.end_step(None, int(state.global_step))
