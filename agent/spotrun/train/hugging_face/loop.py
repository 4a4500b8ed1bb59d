"""The training loop of a `transformers.Trainer`, with spotrun's step boundary.

When the members change, the Trainer leaves its loop, joins the next generation, and enters the loop again: in the same
process, as from a checkpoint that has only the file with the Trainer's state. spotrun gives the model and the optimizer
their state. The Trainer then skips the samples that it has had, without loading them. So a newcomer calls the same
collectives as the others from there on.

A step is counted when the next epoch begins, or when the Trainer begins to load the next step's samples. So what it
does after a step is not done again: its log, its evaluation, its checkpoint. Many Trainers have a collective when the
samples are there (the number of tokens on all ranks): if a peer is gone then, the step before counts.

Read in transformers 5.24: `_inner_training_loop`, `_init_training_state`, `_run_epoch`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput

from spotrun.errors import MisuseError
from spotrun.train.batches import Batch
from spotrun.train.changing import Changing
from spotrun.train.frameworks import LeaveLoop, until_it_ends
from spotrun.train.hugging_face.dealt import Deal
from spotrun.train.hugging_face.state import Rest, is_summary
from spotrun.train.parallel import share
from spotrun.train.rng import Generators, reseed

if TYPE_CHECKING:
    from spotrun.train.run import Run


class TrainingLoop:
    """Takes the place of a Trainer's `_inner_training_loop`.

    model: what `run.track` names. folder: an empty one, for the checkpoint from which the Trainer goes on. deal: deals
    the batches of a step to the workers; None: each worker has its own.
    """

    def __init__(self, run: Run, trainer: Any, rest: Rest, model: Any, folder: str, deal: Deal | None) -> None:
        self._run, self._trainer, self._rest, self._model, self._folder = run, trainer, rest, model, Path(folder)
        self._deal, self._steps = deal, Steps(run, trainer, rest, model, deal)
        trainer.callback_handler.callbacks.insert(0, self._steps)  # what others do in a step belongs to that step
        self._loop = trainer._inner_training_loop
        trainer._inner_training_loop = self
        self._load = trainer.get_batch_samples
        trainer.get_batch_samples = self._end_step_and_load
        self._open = trainer.get_train_dataloader
        if deal is None:
            trainer.get_train_dataloader = self._open_own
        self._settle_in()

    def __call__(self, *args: Any, **options: Any) -> TrainOutput:
        rest = self._rest
        if rest.result is not None:
            raise MisuseError("run.train: this Trainer has trained. A script can have spotrun keep one training only")
        trainer = self._trainer
        if trainer.args.use_liger_kernel:  # `trainer.train` has just given the model another forward, without autocast
            trainer.model._is_accelerate_prepared = False
            trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)

        def enter() -> None:
            if rest.result is not None:
                return
            rest.result = self._agree(self._loop(*args, **options))
            if isinstance(self._model, Changing):
                self._model.begin()  # the best model, loaded on some nodes, is no change of what is frozen
            self._steps.end()

        def join() -> None:
            self._join()
            options["resume_from_checkpoint"] = self.write_state()

        until_it_ends(self._run, enter, join)
        assert rest.result is not None
        return rest.result

    def write_state(self) -> str:
        """Have the Trainer go on from the saved state. Returns the folder from which it does so."""
        trainer, path = self._trainer, self._folder / TRAINER_STATE_NAME
        path.write_text(self._rest.text(), encoding="utf-8")
        trainer._load_from_checkpoint = lambda *_, **__: None  # the model has its state
        trainer.args.restore_callback_states_from_checkpoint = True
        trainer.args.eval_on_start = False  # it was done
        if self._deal is not None or hasattr(trainer.train_dataset, "__len__"):
            trainer.args.ignore_data_skip = False  # to skip samples, it need not load them
        if self._rest.result is not None:
            self._rest.recall(path)
            trainer.create_scheduler(trainer.state.max_steps)  # the script may ask for its learning rates
            self._steps.give()
        return str(self._folder)

    def _end_step_and_load(self, *args: Any, **options: Any) -> Any:
        """Takes the place of a Trainer's `get_batch_samples`, which it calls at the beginning of a step."""
        self._steps.end()
        return self._load(*args, **options)

    def _open_own(self) -> Any:
        """Takes the place of a Trainer's `get_train_dataloader`. The Trainer may keep a loader of another rank."""
        loader = self._open()
        inner = getattr(loader, "base_dataloader", loader)
        for shard in (getattr(inner, "batch_sampler", None), getattr(inner, "dataset", None)):
            if isinstance(shard, BatchSamplerShard | IterableDatasetShard) and shard.num_processes > 1:
                shard.process_index = self._run.rank
        return loader

    def _join(self) -> None:
        """Join the next generation. Its state may be that of this process, or one that was loaded."""
        rest = self._rest
        rest.put_back()
        rest.saved = {}
        self._run._join()
        self._settle_in()
        rest.saved = rest.saved or rest.state_dict()
        self._steps.note_optimizer()
        reseed(self._run._state.seed, "tracked")  # as `run.track` does: accelerate's sampler keeps the seed

    def _settle_in(self) -> None:
        """Tell the Trainer and accelerate this worker's rank, and the number of workers."""
        args, handler = self._trainer.args, self._trainer.callback_handler
        if self._run.rank == 0 and args.process_index != 0:
            for each in handler.callbacks:
                if hasattr(each, "_initialized"):  # a tracker, such as that of W&B, begins a run on rank 0 only
                    each._initialized = False
        place = {"process_index": self._run.rank, "num_processes": self._run.world_size}
        for state in (args.distributed_state, self._trainer.accelerator.state):
            vars(state).update(place)
        vars(self._trainer).pop("_eval_dataloaders", None)  # a loader that stays has the samples of another rank
        self._rest.workers = self._run.world_size
        if self._deal is not None:
            self._deal.settle_in(self._run.rank, self._run.world_size)

    def _agree(self, result: TrainOutput) -> TrainOutput:
        """Give all ranks the model with which rank 0 has ended, and rank 0's result. Returns that result.

        The best model (`load_best_model_at_end`) may be on the disk of rank 0's node only.
        """
        trainer, run = self._trainer, self._run
        numbers = {name: each for name, each in result.metrics.items() if isinstance(each, int | float)}
        values = torch.tensor([result.training_loss, *numbers.values()], dtype=torch.float64, device=run.device)
        if run.world_size > 1:
            best = trainer.model.state_dict().values() if trainer.args.load_best_model_at_end else ()
            share(each for each in (values, *best) if isinstance(each, torch.Tensor))
        loss, *found = values.tolist()
        return TrainOutput(result.global_step, loss, {**result.metrics, **dict(zip(numbers, found, strict=True))})


class Steps(TrainerCallback):
    """The boundary between two steps of a Trainer, and its log."""

    def __init__(self, run: Run, trainer: Any, rest: Rest, model: Any, deal: Deal | None) -> None:
        self._run, self._trainer, self._rest, self._model, self._deal = run, trainer, rest, model, deal
        self._done = False  # whether a step is done that is not counted yet
        self._timed = 0.0  # when that step ended, or the last evaluation or checkpoint after it
        self._epoch = -1  # passes over the dataset that have begun, from 0
        self._samples = 0  # of this rank in a step
        self._groups: list[dict[str, Any]] = []
        self._values: dict[Any, Any] = {}
        self._optimizer, self._generators = trainer.optimizer, Generators()
        self.note_optimizer()

    def note_optimizer(self) -> None:
        """The optimizer has its state.

        Then accelerate converts this to the parameters' types, and the scheduler, when it is made, sets the first
        learning rate.
        """
        self._groups = [{k: v for k, v in each.items() if k != "params"} for each in self._optimizer.param_groups]
        self._values = dict(self._optimizer.state)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        run, self._epoch, self._done = self._run, int(state.epoch or 0) - 1, False
        self._trainer.accelerator._models = [self._trainer.model]  # so an evaluation does not prepare it again
        if run._membership is not None:
            run._membership.see_tracked(self._trainer.lr_scheduler, self._trainer.accelerator.scaler)
        if self._rest.saved:
            self.give()
        self._values = {}
        self._rest.note()
        if isinstance(self._model, Changing):
            self._model.begin()
        whole = args.per_device_train_batch_size * args.gradient_accumulation_steps * run.world_size
        whole = whole if self._deal is None else self._deal.samples
        self._samples = whole // run.world_size
        run._sizes, run._epochs = (0.0, whole), state.num_train_epochs + 1
        if run._control is not None:
            run._control.tell_total(run.step + state.max_steps - state.global_step)

    def give(self) -> None:
        """Have the scheduler load its state, and put the optimizer's own back: see `note_optimizer`."""
        self._rest.give()
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(saved)
        self._optimizer.state.update(self._values)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        self.end()
        if args.dataloader_num_workers:
            self._run._boundary.settle()  # a loader's worker, forked now, would inherit the slot's lock
        # The loader draws its seed, and some samplers draw an order that must be the same on all ranks.
        self._epoch += 1
        if self._deal is not None:
            self._deal.begin_epoch(self._epoch)
        self._generators.begin_epoch(_places(train_dataloader), self._epoch)
        reseed(self._run._state.seed, "epoch", self._epoch)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        run = self._run
        self.end()  # a Trainer may load its samples in another way
        run._state.epoch = int(state.epoch or 0)
        run._batch = Batch(1.0, True, state.global_step + 1, self._samples)
        run._inside = True
        self._begin_batch(0)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._deal is not None:
            self._begin_batch(self._deal.number + 1)

    def _begin_batch(self, number: int) -> None:
        run = self._run
        if self._deal is None:
            reseed(run._state.seed, run.step, 0, run.rank)
        else:  # the same numbers, whichever rank has the batch
            reseed(run._state.seed, run.step, self._deal.begin_batch(number), 0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """As at the end of `run.backward`."""
        boundary = self._run._boundary
        boundary.check(whole=True)
        if (guard := boundary.snapshots.guard) is not None:
            guard()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._done, self._timed = True, time.monotonic()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What the Trainer has done since the step's end takes time that is not a step's. So for `on_save`."""
        if self._done:
            now = time.monotonic()
            self._run._clock.leave_out(now - self._timed)
            self._timed = now

    on_save = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if is_summary(given["logs"]) and isinstance(self._model, Changing):
            self._model.note()  # training has ended, and the best model is not loaded yet
        self._run.log(**{name: each for name, each in given["logs"].items() if isinstance(each, int | float)})

    def end(self) -> None:
        """Count the step that is done, if there is one. Raises `LeaveLoop` if the members change then."""
        run = self._run
        run._inside = False
        if self._done:
            self._done, step = False, run.step
            run._clock.samples += self._samples
            run._boundary.end_step(None, int(self._trainer.state.global_step))
            if run.step > step:
                self._rest.note()
            if run._boundary.must_regroup:
                raise LeaveLoop


def _places(loader: Any) -> tuple[object, ...]:
    """This loader and its samplers, which accelerate may have wrapped."""
    inner = getattr(loader, "base_dataloader", loader)
    whole: Any = getattr(inner, "batch_sampler", None)
    while hasattr(whole, "batch_sampler"):
        whole = whole.batch_sampler
    return inner, getattr(inner, "sampler", None), whole, getattr(whole, "sampler", None)
