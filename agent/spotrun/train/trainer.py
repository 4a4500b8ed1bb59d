"""`run.train(trainer)`: the loop of a `transformers.Trainer`, with spotrun's step boundary.

A Trainer has its own loop, model wrapper and loader, so its workers do not regroup. After an interruption they are
forked again, run the script up to this call, and go on at the step of the newest state. spotrun gives the model and the
optimizer their state. The Trainer gets its position in its own way: from a checkpoint, which has only the file with the
Trainer's state. It then skips the samples that it has had, without loading them.

A step is counted when the next one begins. So what the Trainer does after a step is not done again: its log, its
evaluation, its checkpoint.

Read in transformers 5.24: `Trainer.train`, `_inner_training_loop`, `_init_training_state`, `_run_epoch`.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from spotrun.errors import SpotrunError
from spotrun.train.batches import Batch
from spotrun.train.parallel import share
from spotrun.train.rng import reseed
from spotrun.train.trainer_state import Changing, Rest

if TYPE_CHECKING:
    from spotrun.train.run import Run

_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")  # accelerate's names for what splits a state over the ranks
_OLDEST = (5, 24)  # of transformers


def train(run: Run, trainer: Any, options: dict[str, Any]) -> Any:
    """Have the Trainer train, from the restored state on. Returns what `trainer.train(**options)` returns.

    Raises `SpotrunError` for a Trainer that could not go on after an interruption.
    """
    if run._membership is not None:
        run._membership.restarts("a Trainer has a training loop of its own")
    _check(run, trainer, options)
    _prepare(trainer)
    rest = Rest(trainer, run.world_size)
    model = trainer.model if all(each.requires_grad for each in trainer.model.parameters()) else Changing(trainer.model)
    run.track(model=model, optimizer=trainer.optimizer, trainer=rest)
    boundary = run._boundary
    run._clock.resume()
    # A worker that is killed may leave the folder: here, the agent removes it with the job.
    place = Path(run._membership.context.control).parent if run._membership is not None else None
    with (
        tempfile.TemporaryDirectory(prefix="trainer-", dir=place) as folder,
        boundary.exit_if_a_peer_fails,
        boundary.loop,
        boundary.snapshots.guard or nullcontext(),
    ):
        steps = Steps(run, trainer.optimizer, rest, model, folder)
        trainer.add_callback(steps)
        if rest.saved:
            Path(folder, TRAINER_STATE_NAME).write_text(rest.text(), encoding="utf-8")
            trainer._load_from_checkpoint = lambda *_, **__: None  # the model has its state
            trainer.args.restore_callback_states_from_checkpoint = True
            trainer.args.eval_on_start = False  # it was done
            options = {**options, "resume_from_checkpoint": folder}
        if rest.result is None:
            rest.result = _agree(run, trainer, trainer.train(**options))
            if isinstance(model, Changing):
                model.begin()  # the best model, loaded on some nodes, is no change of what is frozen
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
        (isinstance(run._state.objects.get("trainer"), Rest), "a second call in a script"),
        (bool(run._state.objects), "run.track before it (leave run.track out)"),
        (not hasattr(trainer, "_load_from_checkpoint"), f"transformers {transformers.__version__}"),
        (type(trainer)._inner_training_loop is not Trainer._inner_training_loop, "a Trainer with a loop of its own"),
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


def _prepare(trainer: Any) -> None:
    """What must not change any more when the state is restored: the model's device, and which optimizer there is."""
    args = trainer.args
    if (args.fp16_full_eval or args.bf16_full_eval) and not trainer.is_model_parallel:
        trainer._move_model_to_device(trainer.model, args.device)  # otherwise `trainer.train` does it
    trainer.create_optimizer()
    trainer.create_optimizer = lambda *_, **__: trainer.optimizer  # a subclass may make another one in each call


def _agree(run: Run, trainer: Any, result: TrainOutput) -> TrainOutput:
    """Give all ranks the model with which rank 0 has ended, and rank 0's result. Returns that result.

    The best model (`load_best_model_at_end`) may be on the disk of rank 0's node only.
    """
    numbers = {name: each for name, each in result.metrics.items() if isinstance(each, int | float)}
    values = torch.tensor([result.training_loss, *numbers.values()], dtype=torch.float64, device=run.device)
    if run.world_size > 1:
        best = trainer.model.state_dict().values() if trainer.args.load_best_model_at_end else ()
        share(each for each in (values, *best) if isinstance(each, torch.Tensor))
    loss, *found = values.tolist()
    return TrainOutput(result.global_step, loss, {**result.metrics, **dict(zip(numbers, found, strict=True))})


class Steps(TrainerCallback):
    """The boundary between two steps of a Trainer, and its log."""

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer, rest: Rest, model: Any, folder: str) -> None:
        """folder: of the checkpoint from which the Trainer goes on; removed when it has been read."""
        self._run, self._optimizer, self._rest, self._model, self._folder = run, optimizer, rest, model, folder
        self._done = False  # whether a step is done that is not counted yet
        self._timed = 0.0  # when that step ended, or the last evaluation or checkpoint after it
        self._epoch = -1  # passes over the dataset that have begun, from 0
        self._samples = 0  # of this rank in a step
        # The optimizer has its state. Then accelerate converts this to the parameters' types, and the scheduler, when
        # it is made, sets the first learning rate.
        self._groups = [{k: v for k, v in each.items() if k != "params"} for each in self._optimizer.param_groups]
        self._values = dict(self._optimizer.state)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        run, self._epoch = self._run, int(state.epoch or 0) - 1
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._rest.result is not None:
            raise SpotrunError("run.train: this Trainer has trained. A script can have spotrun keep one training only")
        if self._rest.saved:
            self._rest.give()
            for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
                group.update(saved)
            self._optimizer.state.update(self._values)
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
        self._epoch += 1
        reseed(self._run._state.seed, "epoch", self._epoch)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        run = self._run
        self.end(state, model)
        run._state.epoch = int(state.epoch or 0)
        run._batch = Batch(1.0, True, state.global_step + 1, self._samples)
        run._inside = True
        reseed(run._state.seed, run.step, 0, run.rank)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if (guard := self._run._boundary.snapshots.guard) is not None:
            guard()  # as `run.backward` does

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._done, self._timed = True, time.monotonic()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if isinstance(self._model, Changing):
            self._model.note()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What the Trainer has done since the step's end takes time that is not a step's. So for `on_save`."""
        if self._done:
            now = time.monotonic()
            self._run._clock.leave_out(now - self._timed)
            self._timed = now

    on_save = on_evaluate

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
