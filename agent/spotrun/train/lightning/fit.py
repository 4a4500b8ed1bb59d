"""`run.fit(trainer, module)`: a Trainer of PyTorch Lightning trains, with spotrun's workers, state and step boundary.

The set-up is here: what is checked, and what the Trainer gets from spotrun. The loop is in `train/lightning/loop.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spotrun.errors import MisuseError, SpotrunError
from spotrun.train.frameworks import refuse_elastic
from spotrun.train.lightning.dealt import Deal
from spotrun.train.lightning.loop import TrainingLoop, refuse_callbacks
from spotrun.train.lightning.package import INSTEAD, pl
from spotrun.train.lightning.strategy import Workers, workers_per_node

if TYPE_CHECKING:
    from spotrun.train.run import Run


def fit(run: Run, trainer: Any, args: tuple[Any, ...], options: dict[str, Any], global_batch: int | None) -> None:
    """Have the Trainer train, from the restored state on.

    Raises `MisuseError` for a Trainer that could not go on after an interruption.
    """
    module = args[0] if args else options.get("model")
    module = getattr(module, "_orig_mod", module)  # `torch.compile` wraps it, and Lightning unwraps it
    _check(run, trainer, module)
    if global_batch is None:
        refuse_elastic(run, "run.fit", "write run.fit(trainer, module, …, global_batch=…), or ")
    deal = None if global_batch is None else Deal(trainer, global_batch)
    boundary = run._boundary
    boundary.loop.enters_again = True
    boundary.loop.renews_samplers = deal is not None  # if the set-up has Lightning make one, it fits all workers
    with boundary.exit_if_a_peer_fails:
        connector = trainer._accelerator_connector
        connector.strategy = Workers(run, trainer.strategy, connector._layer_sync, deal)
        # Lightning's handler, and its message in each step, would wait for workers that are gone.
        trainer._signal_connector.register_signal_handlers = lambda: None
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        TrainingLoop(run, trainer, deal)
        trainer.fit(*args, **options)


def _check_module(module: Any) -> None:
    if isinstance(module, pl.LightningModule):
        return
    advice = "write run.fit(trainer, module, …)"
    if any(each.__module__.startswith(("lightning.", "pytorch_lightning.")) for each in type(module).__mro__):
        advice = "import the Trainer and the module from one package"
    raise MisuseError(f"run.fit takes a LightningModule of {pl.__name__}, not {type(module).__name__}: {advice}")


def _check(run: Run, trainer: Any, module: Any) -> None:
    again = isinstance(trainer.strategy, Workers) or run._boundary.loop.renews_samplers
    if run._models and not again:
        raise MisuseError("run.fit: leave out run.ddp, and give run.fit the module itself")
    _check_module(module)
    strategy = trainer.strategy
    for wrong, what in (
        (again, "a second call in a script"),
        (bool(run._state.objects), "run.track before it (leave run.track out)"),
        (
            type(strategy) not in (pl.strategies.DDPStrategy, pl.strategies.SingleDeviceStrategy),
            type(strategy).__name__,
        ),
        (getattr(strategy, "_ddp_comm_hook", None) is not None, "a communication hook"),
        (not module.automatic_optimization, f"manual optimization ({INSTEAD})"),
        (
            trainer.reload_dataloaders_every_n_epochs > 0,
            f"reload_dataloaders_every_n_epochs ({INSTEAD})",
        ),
        (
            getattr(trainer, "_val_check_time_interval", None) is not None,
            "a val_check_interval that is a time (give a number)",
        ),
    ):
        if wrong:
            raise MisuseError(f"run.fit does not support {what}")
    refuse_callbacks(trainer)
    if (devices := len(getattr(strategy, "parallel_devices", None) or [0])) not in (1, workers_per_node()):
        raise SpotrunError(
            f"run.fit: the Trainer has devices={devices}, and the number of workers on each node is "
            f"{workers_per_node()}: leave out devices and num_nodes, because the job file or torchrun decides"
        )
    if (trainer.strategy.root_device.type == "cpu") != (run.device.type == "cpu"):
        raise SpotrunError(
            f"run.fit: this worker has the device {run.device}, and the Trainer has {trainer.strategy.root_device}: "
            'leave accelerator="auto"'
        )
