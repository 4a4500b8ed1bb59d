"""The same training with a Trainer of Hugging Face, for spotrun, and as a user writes it for torchrun.

Under torchrun, the Trainer saves a checkpoint every --save-every steps into a shared folder, and goes on from the
newest one.
"""

from __future__ import annotations

from typing import Any

import die_with_agent  # noqa: F401
import torch
import trainer_work
import work
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Model(nn.Module):
    """Its forward pass is what a Trainer asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = work.build_model()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


class Marks(TrainerCallback):
    """Says where the Trainer is, and keeps its pace."""

    def __init__(self) -> None:
        self._pace = work.Pace()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        work.mark("restored", state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pace.wait()
        work.mark("step", state.global_step)


def main() -> None:
    options, run = trainer_work.parse(), trainer_work.begin()
    saving: dict[str, Any] = {"save_strategy": "no"}
    if run is None:
        saving = {"save_strategy": "steps", "save_steps": options.save_every, "save_total_limit": 3}
    args = TrainingArguments(
        str(options.checkpoints),
        max_steps=options.steps,
        per_device_train_batch_size=work.BATCH,
        learning_rate=1e-3,
        ddp_find_unused_parameters=False,
        ddp_timeout=options.group_timeout,
        use_cpu=work.DEVICE == "cpu",
        logging_steps=50,
        report_to="none",
        disable_tqdm=True,
        **saving,
    )
    work.mark("grouped")
    work.set_up()
    data = [{"x": x, "labels": y} for x, y in work.build_data()]
    trainer = Trainer(Model(), args, train_dataset=data, callbacks=[Marks()])
    try:
        if run is not None:
            run.train(trainer)
        else:
            trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))  # type: ignore[no-untyped-call]
    except BaseException:
        work.mark("failed")
        raise


if __name__ == "__main__":
    main()
