"""What is kept of a Lightning Trainer besides its model and its optimizer."""

from __future__ import annotations

import builtins
import copy
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist

from spotrun.errors import MisuseError
from spotrun.train.distributed import rank_and_world
from spotrun.train.frameworks import check_size
from spotrun.train.lightning.package import pl, results
from spotrun.train.rng import derive

# What a ModelCheckpoint has besides its state_dict. It decides by these whether it saves, for which all ranks meet.
_SAVED = ("dirpath", "_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
_PYTHON = (max, min, sum)
_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the second is the older name
ROWS = 256  # metrics of a training step that are kept


class Rest:
    """What a Lightning Trainer has besides its model and its optimizer, as an object for `run.track`.

    kept: its state after the newest step that counts, or the state that was loaded. It has no loops if training has
    not begun. ended: whether training has ended. global_batch: samples of a step; None: the number of workers is fixed.
    """

    changes_with_optimizer = True  # and what changes before, `give` puts back

    def __init__(self, trainer: Any, global_batch: int | None) -> None:
        self._trainer, self._global_batch = trainer, global_batch
        self._means = Means(trainer)
        self._validated: dict[int, int] = {}
        self._parameters: list[torch.nn.Parameter] = []
        self.kept: dict[str, Any] = {"workers": rank_and_world()[1], "ended": False}

    @property
    def begun(self) -> bool:
        return "loops" in self.kept

    @property
    def ended(self) -> bool:
        return bool(self.kept["ended"])

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Keep it for `give`. Raises `SpotrunError` if the Trainer would not go on with the same steps."""
        check_size(saved["workers"], saved.get("global_batch"), self._global_batch, "run.fit")
        self.kept = saved

    def note(self, ended: bool) -> None:
        """Note the state of now. Every rank must call this."""
        trainer = self._trainer
        connector, loops = trainer._logger_connector, trainer.fit_loop
        self._parameters = self._parameters or list(trainer.lightning_module.parameters())  # once: the search is slow
        states = {each.state_key: each.state_dict() for each in trainer.callbacks}
        self.kept = {
            "workers": rank_and_world()[1],
            "global_batch": self._global_batch,
            "batches": trainer.accumulate_grad_batches,  # of a worker in a step
            "ended": ended,
            "loops": _counts(loops),
            "stops": trainer.should_stop,
            "frozen": [index for index, each in enumerate(self._parameters) if not each.requires_grad],
            "callbacks": {key: _copied(state) for key, state in states.items() if state},
            "checkpoints": [{name: getattr(each, name) for name in _SAVED} for each in self._checkpoints()],
            "schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
            "precision": _scale(trainer.precision_plugin),
            "metrics": [dict(each) for each in _metrics(connector)],
            "place": [connector._first_loop_iter, connector._current_fx],
            "validated": {**self._validated, **loops.epoch_loop.val_loop._seen_batches_per_dataloader},
            "means": self._means.state_dict(),
        }

    def give(self) -> None:
        """Give the Trainer what is kept."""
        kept, trainer = self.kept, self._trainer
        connector, loops = trainer._logger_connector, trainer.fit_loop
        loops.load_state_dict(kept["loops"])
        for each in (loops, loops.epoch_loop, loops.epoch_loop.val_loop, loops.epoch_loop.automatic_optimization):
            each.on_iteration_done()  # otherwise it would look for its place itself
        trainer.should_stop = kept["stops"]
        frozen = set(kept["frozen"])
        for index, parameter in enumerate(trainer.lightning_module.parameters()):
            parameter.requires_grad_(index not in frozen)
        for callback, state in zip(self._checkpoints(), kept["checkpoints"], strict=True):
            vars(callback).update(state)  # before `load_state_dict`, which compares the folders
        for callback in trainer.callbacks:
            if (state := kept["callbacks"].get(callback.state_key)) is not None:
                callback.load_state_dict(_copied(state))
        for config, state in zip(trainer.lr_scheduler_configs, kept["schedulers"], strict=True):
            config.scheduler.load_state_dict(copy.deepcopy(state))
        if kept["precision"]:
            numbers = kept["precision"].items()
            numbers = {name: each.item() if isinstance(each, torch.Tensor) else each for name, each in numbers}
            trainer.precision_plugin.load_state_dict(numbers)
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            scaler._per_optimizer_states.clear()  # of a step that does not count
        for each, values in zip(_metrics(connector), kept["metrics"], strict=True):
            each.clear()
            each.update(values)
        connector._first_loop_iter, connector._current_fx = kept["place"]
        self._means.load_state_dict(kept["means"])
        self._validated = kept["validated"]
        trainer.strategy.optimizers = trainer.strategy.optimizers  # Lightning's own have references to the state

    def _checkpoints(self) -> list[pl.callbacks.ModelCheckpoint]:
        return [each for each in self._trainer.callbacks if isinstance(each, pl.callbacks.ModelCheckpoint)]

    def give_validated(self) -> None:
        """A validation begins, and has its loaders: give it the numbers of batches that it has had from them."""
        self._trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader.update(self._validated)
        self._validated = {}


def _counts(loop: Any, prefix: str = "") -> dict[str, Any]:
    """As `loop.state_dict()`, which is slow: it copies each number with `copy.deepcopy`."""
    found = {f"{prefix}state_dict": loop.on_save_checkpoint()}
    found[f"{prefix}state_dict"].pop("combined_loader", None)  # the loader begins where the counts say
    for name, each in vars(loop).items():
        if isinstance(each, pl.loops.progress._BaseProgress):
            found[prefix + name] = _plain(each)
        elif isinstance(each, pl.loops.loop._Loop):
            found |= _counts(each, f"{prefix}{name}.")
    return found


def _plain(progress: Any) -> dict[str, Any]:
    known = pl.loops.progress._BaseProgress
    return {name: _plain(each) if isinstance(each, known) else each for name, each in vars(progress).items()}


def _scale(plugin: Any) -> dict[str, Any]:
    """As `plugin.state_dict()`, which would wait for a GPU in each step: a scaler's numbers stay tensors."""
    scaler = getattr(plugin, "scaler", None)
    if not isinstance(scaler, torch.amp.GradScaler) or scaler._scale is None or scaler._growth_tracker is None:
        return dict(plugin.state_dict())
    return {
        "scale": scaler._scale.clone(),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": scaler._growth_tracker.clone(),
    }


def _copied(state: Any) -> Any:
    """A copy of a callback's state. It may have the callback's own lists and tensors, which the next step changes."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_copied, state))
    return copy.deepcopy(state)


def _metrics(connector: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    return connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics


class Means:
    """What the training steps of an epoch have logged so far.

    Each rank has sums of its own, and no other one could tell them later. So all ranks exchange them in each step. The
    message always has the same size, because a rank may log what others do not.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Every rank must call this."""
        names = self._names()
        results = self._trainer.fit_loop.epoch_loop._results
        return {
            "metrics": [_describe(name, results[name]) for name in names],
            "sums": self._gather(names) if self._trainer.world_size > 1 else self._own(names)[None],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer, results = self._trainer, self._trainer.fit_loop.epoch_loop._results
        rank, world = rank_and_world()
        names = [each["name"] for each in saved["metrics"]]
        # One of this rank, unless the number of workers has changed.
        sums = [each for each in saved["sums"][rank::world].tolist() if each[0] == _number(names)]
        # A newcomer does not have the metric objects. Lightning's ranks meet for each entry, in order: all drop these.
        for item in results.values():
            if not item.is_tensor:
                item.value.reset()
        results.clear()
        results.batch = results.batch_size = None
        for index, each in enumerate(saved["metrics"]):
            item = _made(each, trainer)
            item.to(trainer.strategy.root_device)
            _fill(item, each, [own[1 + index :: ROWS] for own in sums])
            results[each["name"]] = item

    def _names(self) -> list[str]:
        """Those that matter for an epoch's means, or for which all ranks meet, come first."""
        results = self._trainer.fit_loop.epoch_loop._results
        found = {name: each.meta for name, each in results.items() if each.is_tensor}
        plain = {name: meta for name, meta in found.items() if not meta.sync.rank_zero_only}
        needed = {name: meta for name, meta in plain.items() if meta.on_epoch or meta.sync.should}
        if len(needed) > ROWS:
            raise MisuseError(
                f"run.fit: training_step logs {len(needed)} metrics with on_epoch or sync_dist; at most {ROWS} can be "
                "kept: log the others with self.log(…, on_epoch=False)"
            )
        return list({**needed, **plain})[:ROWS]

    def _own(self, names: list[str]) -> torch.Tensor:
        results, device = self._trainer.fit_loop.epoch_loop._results, self._trainer.strategy.root_device
        found = torch.zeros(1 + 3 * ROWS, dtype=torch.float64, device=device)
        found[0] = _number(names)
        items = [results[name] for name in names]
        for place, kind in enumerate(("value", "cumulated_batch_size", "_forward_cache") if names else ()):
            values = [getattr(each, kind, None) for each in items]
            found[1 + place * ROWS :][: len(names)] = _joined(values, device)
        return found

    def _gather(self, names: list[str]) -> torch.Tensor:
        own = self._own(names)
        found = own.new_empty(self._trainer.world_size * len(own))
        _gather(found, own)  # `all_gather` would copy the numbers of each rank once more
        return found.view(-1, len(own))


def _number(names: list[str]) -> float:
    """A number for these names, which a float64 holds exactly."""
    return float(derive(*names) >> 11)


def _joined(values: list[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """One tensor of these numbers, with 0 for None. On a GPU, they usually take one operation together."""
    kinds = {each.dtype for each in values if each is not None}
    kind = kinds.pop() if len(kinds) == 1 else torch.float64
    zero = torch.zeros((), dtype=kind, device=device)
    return torch.stack([zero if each is None else each.detach().reshape(()).to(device, kind, True) for each in values])


def _describe(name: str, item: Any) -> dict[str, Any]:
    meta = item.meta
    if meta.sync.group is not None:
        raise MisuseError(f"run.fit does not support self.log({meta.name!r}, …, sync_dist_group=…)")
    plain = {each.name: getattr(meta, each.name) for each in fields(meta) if each.name not in ("reduce_fx", "_sync")}
    return {
        "name": name,
        "meta": {**plain, "reduce_fx": meta.reduce_fx.__name__},
        "python": meta.reduce_fx in _PYTHON,  # Lightning compares the functions
        "sync": meta.sync.should,
        "reset": item.has_reset,
        "updates": item._update_count,
        "cached": item._forward_cache is not None,
        "double": item.value.dtype == torch.float64,
        "begins_double": item._defaults["value"].dtype == torch.float64,  # in each epoch
    }


def _made(described: dict[str, Any], trainer: Any) -> Any:
    given = dict(described["meta"])
    name = given.pop("reduce_fx")
    meta = results._Metadata(**given, reduce_fx=getattr(builtins if described["python"] else torch, name))
    meta.sync = results._Sync(_should=described["sync"], fn=trainer.strategy.reduce)
    item = results._ResultMetric(meta, is_tensor=True)
    default = item._defaults["value"]
    item._defaults["value"] = default.to(torch.float64 if described["begins_double"] else torch.float32)
    return item


def _fill(item: Any, described: dict[str, Any], numbers: list[list[float]]) -> None:
    """numbers: of each rank whose part this rank takes over, value, count and cache."""
    kind = {"dtype": torch.float64 if described["double"] else torch.float32, "device": item.value.device}
    values, counts, caches = zip(*numbers, strict=True) if numbers else ((), (), ())
    if values:
        join = max if item.meta.is_max_reduction else min if item.meta.is_min_reduction else sum
        item.value = torch.tensor(join(values), **kind)
    if item.meta.is_mean_reduction:
        item.cumulated_batch_size = torch.tensor(int(sum(counts)), device=item.value.device)
    item._forward_cache = torch.tensor(caches[0] if caches else 0.0, **kind) if described["cached"] else None
    item.has_reset, item._update_count = described["reset"], described["updates"]
