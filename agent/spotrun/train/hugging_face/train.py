"""`run.train(trainer)`: a `transformers.Trainer` trains, with spotrun's model wrapper, state and step boundary.

The set-up is here: what is checked, what the Trainer gets from spotrun, and the state with which it begins. The loop is
in `train/hugging_face/loop.py`.

Read in transformers 5.24 and accelerate 1.15: `Trainer.train`, `_prepare_for_training`, `Accelerator.prepare_model`.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from accelerate import DistributedDataParallelKwargs
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from spotrun.errors import MisuseError, SpotrunError
from spotrun.train.changing import Changing
from spotrun.train.frameworks import refuse_elastic
from spotrun.train.hugging_face.dealt import Deal
from spotrun.train.hugging_face.loop import TrainingLoop
from spotrun.train.hugging_face.state import Rest
from spotrun.train.metrics import Clock
from spotrun.train.parallel import Parallel
from spotrun.train.rng import reseed

if TYPE_CHECKING:
    from spotrun.train.run import Run

_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")  # accelerate's names for what splits a state over the ranks
_OLDEST = (5, 24)  # of transformers


def train(run: Run, trainer: Any, options: dict[str, Any], global_batch: int | None) -> Any:
    """Have the Trainer train, from the restored state on. Returns what `trainer.train(**options)` returns.

    global_batch: samples of all workers in a step; then their number may change. None: as many as the Trainer says.
    Raises `MisuseError` for a Trainer that could not go on after an interruption.
    """
    _check(run, trainer, options)
    if global_batch is None:
        refuse_elastic(run, "run.train", "write run.train(trainer, global_batch=…), or ")
    deal = None if global_batch is None else Deal(trainer, global_batch, run._state)
    whole, rest = _prepare(run, trainer), Rest(trainer, deal)
    model = whole if all(each.requires_grad for each in trainer.model.parameters()) else Changing(trainer.model)
    boundary = run._boundary
    boundary.loop.enters_again = True
    joins = run._membership is not None and run._membership.context.warm_up
    run.track(model=model, optimizer=trainer.optimizer, trainer=rest)
    if joins:
        rest.compare()
    run._clock.resume()
    # A worker that is killed may leave the folder: here, the agent removes it with the job.
    place = Path(run._membership.context.control).parent if run._membership is not None else None
    with (
        tempfile.TemporaryDirectory(prefix="trainer-", dir=place) as folder,
        boundary.exit_if_a_peer_fails,
        boundary.loop,
        boundary.snapshots.guard or nullcontext(),
    ):
        loop = TrainingLoop(run, trainer, rest, model, folder, deal)
        if rest.saved:
            options = {**options, "resume_from_checkpoint": loop.write_state()}
        if rest.result is None:  # one more call would train on, if training has stopped in the middle of an epoch
            trainer.train(**options)
    boundary.profiling.end_loop()
    reseed(run._state.seed, run.step, 0, run.rank)  # after a restart, the code after this call draws the same
    boundary.metrics.flush()
    boundary.finish(True)
    return rest.result


def _check(run: Run, trainer: Any, options: dict[str, Any]) -> None:
    if tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2])) < _OLDEST:
        raise MisuseError(
            f"run.train needs transformers {_OLDEST[0]}.{_OLDEST[1]} or newer, not {transformers.__version__}: name "
            f"transformers>={_OLDEST[0]}.{_OLDEST[1]} in requirements"
        )
    again = isinstance(run._state.objects.get("trainer"), Rest)
    if run._models and not again:
        raise MisuseError("run.train: leave out run.ddp, and give the Trainer the module itself")
    if trainer.args.world_size != run._world_size:  # of this node, while this worker warms up
        raise MisuseError(
            f"run.train: there are {run._world_size} workers, and the Trainer knows of {trainer.args.world_size}: call "
            "spotrun.init() before TrainingArguments(…)"
        )
    for wrong, what in (
        (again, "a second call in a script"),
        (bool(run._state.objects), "run.track before it (leave run.track out)"),
        (not hasattr(trainer, "_load_from_checkpoint"), f"transformers {transformers.__version__}"),
        (type(trainer)._inner_training_loop is not Trainer._inner_training_loop, "a Trainer with a loop of its own"),
        (trainer.model_init is not None, "model_init (give the Trainer model= instead)"),
        (trainer.args.n_gpu > 1, "several GPUs in one process (start the script with torchrun)"),
        (trainer.args.auto_find_batch_size, "auto_find_batch_size (set per_device_train_batch_size)"),
        # A machine's shutdown sends SIGTERM: its workers would then end training, and the others would wait for them.
        (trainer.args.enable_jit_checkpoint, "enable_jit_checkpoint (leave it out: spotrun keeps the state)"),
        (str(trainer.accelerator.distributed_type).endswith(_SHARDED), "FSDP or DeepSpeed"),
    ):
        if wrong:
            raise MisuseError(f"run.train does not support {what}")
    if options.get("resume_from_checkpoint") is True and not _has_checkpoint(trainer.args.output_dir):
        raise SpotrunError(  # another machine's disk may have one
            f"run.train: {trainer.args.output_dir} has no checkpoint. Leave out resume_from_checkpoint=True: after an "
            "interruption, run.train goes on without it"
        )


def _has_checkpoint(folder: str | None) -> bool:
    found = get_last_checkpoint(folder) if folder and Path(folder).is_dir() else None  # type: ignore[no-untyped-call]
    return found is not None


def _prepare(run: Run, trainer: Any) -> Parallel:
    """Make what must not change any more when the state is restored: the optimizer, and the model on its device.

    Returns the model that averages gradients. It takes the place of the one that accelerate would make.
    """
    args, accelerator = trainer.args, trainer.accelerator
    if (args.fp16_full_eval or args.bf16_full_eval) and not trainer.is_model_parallel:
        trainer._move_model_to_device(trainer.model, args.device)  # otherwise `trainer.train` does it
    trainer.create_optimizer()
    trainer.create_optimizer = lambda *_, **__: trainer.optimizer  # a subclass may make another one in each call
    prepared = accelerator.prepare_model(trainer.model, evaluation_mode=True)  # with autocast, without DDP
    handler = accelerator.ddp_handler or DistributedDataParallelKwargs()
    model = run.ddp(prepared, **handler.to_kwargs())
    handler.register_comm_hook(model)
    trainer.model_wrapped = model
    _teach(accelerator, model, run._clock)
    return model


def _teach(accelerator: Any, model: Parallel, clock: Clock) -> None:
    """Have accelerate use this model as it would use its own wrapper."""

    @contextmanager
    def no_sync(*_: Any, **__: Any) -> Iterator[None]:
        model.exchange(False)
        yield
        model.exchange(True)

    backward, unwrap = accelerator.backward, accelerator.unwrap_model

    def timed_backward(*args: Any, **options: Any) -> None:
        if accelerator.sync_gradients:
            clock.due_at = clock.due_at or time.monotonic()  # as `run.backward` does
        backward(*args, **options)

    def unwrap_model(given: Any, *args: Any, **options: Any) -> Any:
        """Label smoothing, for example, asks for the class of the module."""
        return unwrap(given.module if isinstance(given, Parallel) else given, *args, **options)

    accelerator.no_sync, accelerator.backward, accelerator.unwrap_model = no_sync, timed_backward, unwrap_model
