"""What is kept of a `transformers.Trainer` besides its model and its optimizer."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from spotrun.errors import SpotrunError
from spotrun.train.distributed import rank_and_world
from spotrun.train.frameworks import check_size
from spotrun.train.hugging_face.dealt import Deal

# In a Trainer's state, what differs between ranks: the times in its log, and the rank's place, which it sets itself.
_TIMES = ("_runtime", "_per_second", "_preparation_time")
_PLACE = ("is_local_process_zero", "is_world_process_zero")

_OWN_NUMBERS = ("local_rank", "dataloader_num_workers")  # of TrainingArguments: they may differ between machines


class Rest:
    """What a Trainer has besides its model and its optimizer, as an object for `run.track`.

    saved: what was loaded; empty if nothing was. The Trainer makes its scheduler later: `give` has it load its part.
    result: what `trainer.train` has returned; None: training has not ended. workers: that train together.
    """

    changes_with_optimizer = True  # and what changes before, `put_back` puts back

    def __init__(self, trainer: Any, deal: Deal | None) -> None:
        self.saved: dict[str, Any] = {}
        self.result: TrainOutput | None = None
        self.workers = rank_and_world()[1]
        self._trainer, self._deal = trainer, deal
        # The Trainer's state, its values, the length of its log; numbers of the Trainer; values of its callbacks.
        self._noted: tuple[TrainerState, dict[str, Any], int, dict[str, Any], list[Any]] | None = None
        self._history: list[Any] = []  # the Trainer's log, and as lines: each snapshot has all of it
        self._lines: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks, as far as what the script logs is."""
        kept = vars(replace(self._trainer.state, log_history=[], stateful_callbacks=self._exported()))
        kept.update(dict.fromkeys(_PLACE, True))
        if step := kept["best_global_step"]:  # ranks without the checkpoint must save the same path
            kept["best_model_checkpoint"] = os.path.join(
                self._trainer.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}"
            )
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        if self.result is not None:
            parts["result"] = self.result._asdict()
        return {"workers": self.workers, "plan": self._plan(), "state": kept, "log": self._log(), **parts}

    def _plan(self) -> dict[str, Any]:
        """What the steps follow from: all numbers of TrainingArguments, and of a subclass such as TRL's GRPOConfig."""
        args, data = self._trainer.args, self._trainer.train_dataset
        values = {each.name: getattr(args, each.name) for each in fields(args) if each.name not in _OWN_NUMBERS}
        numbers = {name: value for name, value in values.items() if type(value) in (int, float)}
        if self._deal is not None:  # then this one follows from the number of workers
            numbers |= {"gradient_accumulation_steps": 1, "global_batch": self._deal.samples}
        return {**numbers, "len(train_dataset)": len(data) if hasattr(data, "__len__") else None}

    def compare(self) -> None:
        """Raise `SpotrunError` if the other workers, whose state this one has got, have another plan."""
        saved, own = self.saved.get("plan", {}), self._plan()
        for name in (each for each in saved.keys() & own.keys() if saved[each] != own[each]):
            raise SpotrunError(
                f"run.train: {name} is {own[name]} in this new worker, and {saved[name]} in the others. A new worker "
                "is alone until run.train: do not compute it from the number of workers"
            )

    def note(self) -> None:
        """Note what changes in a step that may not count: the Trainer's state, its own numbers, and its callbacks.

        TRL's GRPOTrainer, for example, generates texts when its count of batches says so. Two workers whose counts
        differ would wait for each other.
        """
        state, own = self._trainer.state, vars(self._trainer)
        numbers = {name: value for name, value in own.items() if type(value) in (int, float)}
        callbacks = [(each, copy.deepcopy(each.state().get("attributes", {}))) for each in self._exported()]
        self._noted = state, dict(vars(state)), len(state.log_history), numbers, callbacks

    def put_back(self) -> None:
        """Put back what was noted."""
        if self._noted is not None:
            state, values, logged, numbers, callbacks = self._noted
            vars(state).update(values)
            vars(self._trainer).update(numbers)
            del state.log_history[logged:]
            self._trainer.state = state
            for each, kept in callbacks:
                for name, value in kept.items():
                    setattr(each, name, value)

    def _exported(self) -> list[Any]:
        """The callbacks that the Trainer can save."""
        callbacks = (*self._trainer.callback_handler.callbacks, self._trainer.control)
        return [each for each in callbacks if isinstance(each, ExportableState)]

    def _log(self) -> str:
        """The Trainer's log, a line for each entry. The summary is not in it: its loss is this rank's."""
        history = self._trainer.state.log_history
        if history is not self._history or len(history) < len(self._lines):
            self._history, self._lines = history, []
        for each in history[len(self._lines) :]:
            kept = {} if is_summary(each) else {k: v for k, v in each.items() if not k.endswith(_TIMES)}
            self._lines.append(json.dumps(kept, default=_plain))
        return "\n".join(self._lines)

    def text(self) -> str:
        """The saved state of the Trainer, as in a file of its own."""
        log = [entry for line in self.saved["log"].splitlines() if (entry := json.loads(line))]
        return json.dumps({**self.saved["state"], "log_history": log}, default=_plain)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Keep it for `give`. Raises `SpotrunError` if the Trainer would not go on with the same steps."""
        now = None if self._deal is None else self._deal.samples
        check_size(saved["workers"], saved.get("plan", {}).get("global_batch"), now, "run.train")
        self.saved = saved
        self.result = TrainOutput(**saved["result"]) if "result" in saved else None

    def recall(self, path: Path) -> None:
        """Give the Trainer the state that it had when training ended, from a file."""
        assert self.result is not None
        trainer = self._trainer
        trainer.state = state = TrainerState.load_from_json(str(path))
        state.is_local_process_zero = trainer.is_local_process_zero()
        state.is_world_process_zero = trainer.is_world_process_zero()
        state.log_history.append({**self.result.metrics, "step": state.global_step})
        trainer._load_callback_state()

    def give(self) -> None:
        """Have the Trainer's scheduler and scaler load what was saved."""
        for name, part in self._parts().items():
            if name in self.saved:
                part.load_state_dict(self.saved[name])
        if (scaler := self._trainer.accelerator.scaler) is not None:
            scaler._per_optimizer_states.clear()  # of a step that does not count

    def _parts(self) -> dict[str, Any]:
        trainer = self._trainer
        found = {"scheduler": trainer.lr_scheduler, "scaler": trainer.accelerator.scaler}
        return {name: part for name, part in found.items() if part is not None}


def is_summary(entry: dict[str, Any]) -> bool:
    """Whether this entry of a Trainer's log is the one at the end of training.

    With `include_num_input_tokens_seen`, each entry has the time of training.
    """
    return {"train_runtime", "train_loss"} <= entry.keys()


def _plain(value: Any) -> Any:
    """For JSON: numbers for a tensor or an array, and a text for any other object that a script has logged."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
