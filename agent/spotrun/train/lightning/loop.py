"""The training loop of a Lightning Trainer, with spotrun's step boundary.

When the members change, the Trainer leaves its loop over epochs, joins the next generation, and enters the loop again,
in the middle of an epoch. Its loops count what they have done; spotrun keeps these numbers. The loader skips the
batches that the epoch has had, without loading them.

A step is counted when the next one begins. So what the Trainer does after a step is not done again: its log, its
validation, its checkpoint.

Read in pytorch_lightning 2.6: `_FitLoop`, `_TrainingEpochLoop`, `_EvaluationLoop`, `_LoggerConnector`.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from spotrun.errors import MisuseError
from spotrun.train.attributes import Attributes
from spotrun.train.batches import Batch
from spotrun.train.changing import Changing
from spotrun.train.frameworks import LeaveLoop, until_it_ends
from spotrun.train.lightning.dealt import Deal
from spotrun.train.lightning.package import INSTEAD, pl
from spotrun.train.lightning.state import Rest
from spotrun.train.lightning.strategy import begin_at, places
from spotrun.train.parallel import include_unfrozen
from spotrun.train.rng import Generators, reseed

if TYPE_CHECKING:
    from spotrun.train.run import Run

_CALLBACKS = (  # they change what a snapshot does not have (as an optimizer's groups), or train by themselves
    pl.callbacks.BaseFinetuning,
    pl.callbacks.BatchSizeFinder,
    pl.callbacks.GradientAccumulationScheduler,
    pl.callbacks.LearningRateFinder,
    pl.callbacks.ModelPruning,
    pl.callbacks.OnExceptionCheckpoint,
    pl.callbacks.StochasticWeightAveraging,
    pl.callbacks.WeightAveraging,
)


def refuse_callbacks(trainer: Any) -> None:
    """Raise `MisuseError` if the Trainer has a callback that could not go on after an interruption."""
    for each in trainer.callbacks:
        if isinstance(each, _CALLBACKS):
            raise MisuseError(f"run.fit does not support {type(each).__name__} (leave it out, or {INSTEAD})")


class TrainingLoop:
    """Takes the place of the method `run` of a Trainer's loop over epochs, and of some others of its methods."""

    def __init__(self, run: Run, trainer: Any, deal: Deal | None) -> None:
        self._run, self._trainer, self._deal = run, trainer, deal
        self._rest = Rest(trainer, None if deal is None else deal.samples)
        self._steps = Steps(run, trainer, self._rest, deal)
        trainer.callbacks.insert(0, self._steps)
        self._again = False  # whether the loops must begin in the middle of an epoch
        self._generators = Generators()
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._loop, self._check_sanity = fit.run, trainer._run_sanity_check
        self._reset_fit, self._reset_epoch = fit.reset, epoch.reset
        self._start_epoch, self._advance = epoch.on_run_start, epoch.advance
        fit.run, fit.reset = self, self.reset_fit
        epoch.reset, epoch.on_run_start, epoch.advance = self.reset_epoch, self.start_epoch, self.advance
        trainer._run_sanity_check = lambda: None  # it comes when the state is known
        connector = trainer._logger_connector
        self._log, connector.log_metrics = connector.log_metrics, self.log

    def __call__(self) -> None:
        run, rest, boundary = self._run, self._rest, self._run._boundary
        if rest.begun:
            raise MisuseError("run.fit: this Trainer has trained. A script can have spotrun keep one training only")
        with boundary.exit_if_a_peer_fails:
            self._track()
            run._clock.resume()
            with boundary.loop, boundary.snapshots.guard or nullcontext():
                if not rest.begun:
                    self._check_sanity()
                    reseed(run._state.seed, "tracked")  # as `run.track` does
                until_it_ends(run, self._enter, self._join)
            boundary.profiling.end_loop()
            reseed(run._state.seed, run.step, 0, run.rank)  # after a restart, the code after this call draws the same
            boundary.metrics.flush()
            boundary.finish(True)

    def reset_fit(self) -> None:
        self._reset_fit()
        if self._again:
            self._trainer.fit_loop._restart_stage = pl.loops.fit_loop.RestartStage.RESTARTED_MID_EPOCH

    def reset_epoch(self) -> None:
        if not self._again:
            self._reset_epoch()
        elif self._deal is not None:
            self._deal.recount(self._rest.kept["batches"])
        self._again = False

    def start_epoch(self, fetcher: Any) -> None:
        """Begin to load the batches of an epoch, or what is left of them."""
        run, fit = self._run, self._trainer.fit_loop
        run._boundary.settle()  # a loader's worker, forked now, would inherit the slot's lock
        include_unfrozen(run._models, run._models)  # `on_train_epoch_start` may unfreeze layers
        # The loader draws its seed, and some samplers draw an order that must be the same on all ranks.
        reseed(run._state.seed, "epoch", self._trainer.current_epoch)
        begin_at(fit._combined_loader, fit.epoch_loop.batch_progress.current.ready)
        self._generators.begin_epoch(places(fit._combined_loader.flattened[0]), self._trainer.current_epoch)
        iter(fetcher)
        fit._resuming_from_checkpoint = True  # so Lightning does not do that again
        self._start_epoch(fetcher)
        fit._resuming_from_checkpoint = False
        if self._deal is not None:
            self._deal.begin_epoch()

    def advance(self, fetcher: Any) -> None:
        """A batch begins."""
        self._steps.begin()
        try:
            self._advance(fetcher)
        finally:
            if self._deal is not None:
                self._deal.stop_later()

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """What the Trainer logs is in the job's metrics, too."""
        self._log(metrics, step)
        self._run.log(**{name: each for name, each in metrics.items() if isinstance(each, int | float | torch.Tensor)})

    def _track(self) -> None:
        run, trainer, module = self._run, self._trainer, self._trainer.lightning_module
        if len(trainer.optimizers) != 1 or isinstance(trainer.optimizers[0], torch.optim.LBFGS):
            raise MisuseError(f"run.fit needs exactly one optimizer, which is not LBFGS ({INSTEAD})")
        whole = all(each.requires_grad for each in module.parameters())
        self._model = trainer.strategy.model if whole else Changing(module)
        self._forward = module.forward
        run.track(model=self._model, optimizer=trainer.optimizers[0], trainer=self._rest)
        run._boundary.loop.renews_samplers = True  # one that the set-up has made would have a newcomer's number
        if run._membership is not None:
            schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
            run._membership.see_tracked(*schedulers, getattr(trainer.precision_plugin, "scaler", None))
        if self._deal is not None:
            self._deal.check_schedulers()
            self._drop_loaders()  # the set-up may have asked for their length, in a worker that was alone
        self._settle_in()

    def _settle_in(self) -> None:
        trainer = self._trainer
        trainer.strategy.set_world_ranks()
        bar = trainer.progress_bar_callback  # only rank 0 shows it, and Lightning has asked for the rank once
        if isinstance(bar, pl.callbacks.TQDMProgressBar | pl.callbacks.RichProgressBar):
            (bar.enable if trainer.is_global_zero else bar.disable)()

    def _enter(self) -> None:
        rest = self._rest
        if rest.begun:
            rest.give()
        if rest.ended:
            return
        self._again = rest.begun
        if isinstance(self._model, Changing):
            self._model.begin()
        self._loop()
        self._steps.end(ended=True)

    def _join(self) -> None:
        """Join the next generation. Its state may be that of this process, or one that was loaded."""
        self._leave()
        self._run._join()
        self._settle_in()
        reseed(self._run._state.seed, "tracked")  # as `run.track` does

    def _leave(self) -> None:
        """Bring the Trainer back to where its loops begin. It asks for its loaders again then."""
        trainer, module = self._trainer, self._trainer.lightning_module
        self._steps.leave()
        module.forward = self._forward  # in the call that failed, it was another one
        val = trainer.fit_loop.epoch_loop.val_loop
        if trainer.validating:
            val._module_mode.restore(module)
        trainer.training = True
        val._results.reset()
        val._results.clear()  # the ranks meet for each entry, in order, and a newcomer has none
        self._drop_loaders()

    def _drop_loaders(self) -> None:
        fit = self._trainer.fit_loop
        for loop in (fit, fit.epoch_loop.val_loop):
            if loop._data_fetcher is not None:
                loop._data_fetcher.teardown()
                loop._data_fetcher = None
            loop._combined_loader = None


class Steps(pl.Callback):
    """The boundary between two steps of a Trainer."""

    def __init__(self, run: Run, trainer: Any, rest: Rest, deal: Deal | None) -> None:
        self._run, self._trainer, self._rest, self._deal = run, trainer, rest, deal
        self._done = False  # whether a step is done that is not counted yet
        self._timed = 0.0  # when that step ended
        self._validating: Attributes | None = None  # those from before the first validation after that step

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        refuse_callbacks(trainer)  # now it also has those of the module's `configure_callbacks`

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        run, self._done = self._run, False
        size = getattr(trainer.train_dataloader, "batch_size", None) or 0
        self._samples = size * trainer.accumulate_grad_batches
        if self._deal is not None:
            self._samples = self._deal.samples / run.world_size
        run._sizes, run._epochs = (0.0, self._samples * run.world_size), sys.maxsize
        total = trainer.estimated_stepping_batches
        if run._control is not None and total < sys.maxsize:
            run._control.tell_total(run.step + total - trainer.global_step)

    def begin(self) -> None:
        """A batch begins, and maybe a step."""
        run, trainer = self._run, self._trainer
        ready, end = trainer.fit_loop.epoch_loop.batch_progress.current.ready, trainer.global_step + 1
        number = ready % trainer.accumulate_grad_batches
        if number == 0:
            self.end()
            run._state.epoch = trainer.current_epoch
        run._batch, rank = Batch(1.0, True, end, self._samples, number), run.rank
        if self._deal is not None:
            run._batch, rank = self._deal.batch(ready, end), 0
        run._inside = True
        reseed(run._state.seed, run.step, run._batch.number, rank)

    def end(self, ended: bool = False) -> None:
        """Count the step that is done, if there is one. Raises `LeaveLoop` if the members change then.

        ended: whether training has ended.
        """
        run, rest, step, before = self._run, self._rest, self._run.step, self._rest.kept
        run._inside, self._validating = False, None
        if self._done or ended or not rest.begun:
            rest.note(ended)
        if self._done:
            self._done = False
            run._clock.leave_out(time.monotonic() - self._timed)
            run._clock.samples += self._samples
            run._boundary.end_step(None, int(self._trainer.global_step))
            if run.step == step:
                rest.kept = before
            if run._boundary.must_regroup:
                raise LeaveLoop

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        begin_at(trainer.fit_loop._combined_loader, 0)  # not sooner: a loader may be a generator, which begins late

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        begin_at(trainer.fit_loop._combined_loader, 0)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._rest.give_validated()
        own = [each for each in trainer.callbacks if not type(each).__module__.startswith((pl.__name__, __name__))]
        if self._validating is None and not trainer.sanity_checking:
            self._validating = Attributes((pl_module, *own))

    def leave(self) -> None:
        """The step does not count: its validation is made again."""
        if self._validating is not None:
            self._validating.put_back()
            self._validating = None

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """As at the end of `run.backward`."""
        boundary = self._run._boundary
        boundary.check(whole=True)
        if (guard := boundary.snapshots.guard) is not None:
            guard()

    def on_train_batch_end(self, *_: Any) -> None:
        if self._deal is not None:
            self._deal.end_batch()
        if not self._trainer.fit_loop._should_accumulate():
            self._done, self._timed = True, time.monotonic()
