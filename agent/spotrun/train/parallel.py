"""The model as the training script holds it: the user's module, with a replaceable DDP instance behind it."""

from __future__ import annotations

import gc
import inspect
import logging
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import is_grad_enabled, nn
from torch.distributed.distributed_c10d import _get_default_group
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from spotrun.train import collectives
from spotrun.train.unused import Spare, Used

# Whether DDP copies buffers before each forward pass. Older versions of torch call it broadcast_buffers.
_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_SYNC = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"
_CONSTANT = (type(None), bool, int, float, str, bytes, PurePath)  # what a hook cannot change
_BUCKET = 250 << 20  # bytes a broadcast of buffers takes at once, as DDP does
log = logging.getLogger(__name__)


class Parallel(nn.Module):
    """Runs `module` through DDP where there is more than one worker; otherwise the module itself.

    Neither is a registered submodule: parameters, names, submodules and state_dict are those of the user's module.
    Buffers (such as the running statistics of a BatchNorm) are copied from rank 0 at the end of each step, not at the
    beginning of the next. So every rank's state is the same when a snapshot is taken.
    """

    def __init__(self, module: nn.Module, device: torch.device, **options: Any) -> None:
        super().__init__()
        # A quantized model of transformers is on its device, and does not allow `to`.
        self.__dict__["module"] = module if getattr(module, "is_quantized", False) else module.to(device)
        # A module that contains this one loads its state by these, see `_load_from_state_dict`.
        self.__dict__["_modules"] = module._modules
        # Whether DDP exchanges it, by parameter. The next DDP instance may begin while some are frozen, as in GANs.
        self.__dict__["_trained"] = {each: each.requires_grad for each in module.parameters()}
        self.__dict__["_options"] = dict(options)
        self.__dict__["_device"] = device
        # DDP has two names for this option.
        shares = (self._options.pop(name, True) for name in ("broadcast_buffers", "forward_sync_buffers"))
        # As in DDP: if the module has no buffers now, no step searches the submodules for them.
        self.__dict__["shares_buffers"] = all(list(shares)) and any(True for _ in module.buffers())
        self.__dict__["_used"] = None
        self.__dict__["_left"] = None  # a weak reference to the DDP instance that was given up
        self.__dict__["_equal"] = []  # its `equal_parameters`
        self.__dict__["_hooks"] = []  # arguments of `register_comm_hook`
        self.__dict__["_watches"] = False  # whether it has looked for gradients that DDP does not average
        self.__dict__["_by_hand"] = False  # whether the script has ever kept gradients from the other ranks
        self.training = module.training
        self.rebuild()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_left": None}  # a weak reference cannot be pickled

    @property
    def obstacle(self) -> str:
        """Why another DDP instance would not do the same as this one; empty: it would.

        A newcomer's hook begins with a new state, such as `PowerSGDState`, so it would exchange other numbers than the
        hooks of the others. A method or another object that is a hook may have a state, too. A state that is a process
        group ends with its generation.
        """
        if any(not (isinstance(state, _CONSTANT) and inspect.isfunction(hook)) for state, hook in self._hooks):
            return "a hook of run.ddp's model has a state that can change"
        # With these, DDP leaves hooks of its own on the module, or on a parameter (torch 2.13).
        left = (each for each in ("mixed_precision", "delay_all_reduce_named_params") if self._options.get(each))
        return next((f"run.ddp({each}=…) is used" for each in left), "")

    def unwrap(self) -> None:
        """Give up the DDP instance: its process group ends. `rebuild` makes another one."""
        if self._ddp is not None:
            self.__dict__["_equal"] = self.equal_parameters()
            self.__dict__["_left"] = weakref.ref(self._ddp)
        self.__dict__["_ddp"] = None
        if self._used is not None:
            self._used.forget()
        if self._left is not None and self._left() is not None:
            # The old reducer's hooks are on the parameters until it is destroyed. If this call comes from within the
            # forward pass, the instance is still in use: the next call ends it.
            gc.collect()

    def rebuild(self, equal: bool = False) -> None:
        """Wrap the module for the current process group. Every rank must call this.

        equal: all ranks have the same parameters and buffers, so DDP need not compare and send them.
        """
        with _trainable(self.module, self._trained):
            self.__dict__["_ddp"] = self._wrap(equal)
        self.__dict__["_equal"] = []

    def layout(self) -> Iterator[str]:
        """What the ranks must have in common: the parameters, and the buffers if they are shared."""
        shared = self.module.named_buffers() if self.shares_buffers else ()
        for name, each in (*self.module.named_parameters(), *shared):
            yield f"{name} {each.dtype} {'lazy' if is_lazy(each) else tuple(each.shape)}"

    @property
    def exchanged(self) -> list[bool]:
        """For each parameter, in order, whether DDP exchanges its gradient."""
        return [bool(self._trained.get(each, each.requires_grad)) for each in self.module.parameters()]

    @exchanged.setter
    def exchanged(self, values: Iterable[bool]) -> None:
        """Takes effect with `rebuild`."""
        self._trained.update(zip(self.module.parameters(), values, strict=True))

    def include(self) -> bool:
        """Exchange the gradients of further parameters, which the script has unfrozen or added. True: there are some.

        A DDP instance never exchanges those of parameters that were frozen when it was made. Every rank must call this.
        """
        more = [each for each in self.module.parameters() if each.requires_grad and not self._trained.get(each)]
        equal = all(each in self._trained for each in more)  # an earlier instance has made them so
        self._trained.update(dict.fromkeys(more, True))
        if more:
            self.unwrap()
            self.rebuild(equal)
        return bool(more)

    def _wrap(self, equal: bool) -> DistributedDataParallel | None:
        ddp = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            module, options = self.module, {_SYNC: False, **self._options}
            if equal:
                options["init_sync"] = False
            if self._device.type == "cuda":
                options.setdefault("device_ids", [self._device.index])
            elif "find_unused_parameters" not in options and dist.get_world_size() > 2:
                # DDP rearranges its buckets after the first iteration, unless it looks for unused parameters. That
                # changes the order in which gloo adds three or more ranks: a restarted run would differ by a bit. It
                # costs a search of the graph and one more collective in each step, so two ranks go without.
                options["find_unused_parameters"] = True
                if self._used is None:
                    self.__dict__["_used"] = Used()
                self._used.include(module)
                module = Spare(module, bool(options.get("static_graph")))
            ddp = DistributedDataParallel(module, **options)
            for state, hook in self._hooks:
                ddp.register_comm_hook(state, hook)
            if not self._watches:
                self.__dict__["_watches"] = True
                _watch_first_gradient(self.module, weakref.ref(ddp))
        self._trained.update({each: each.requires_grad for each in self.module.parameters()})
        return ddp

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ddp, used = self._ddp, self._used  # once: reading an attribute of a module is slow
        # Without gradients there is nothing to exchange, and ranks may evaluate different numbers of batches.
        if ddp is None or not is_grad_enabled():
            return self.module(*args, **kwargs)
        if used is not None:
            used.begin(ddp.require_backward_grad_sync)
        try:
            found = ddp.forward(*args, **kwargs)  # its __call__ looks for hooks, and it has none
            if used is None or not isinstance(spare := ddp.module, Spare):  # with fewer workers now
                return found
            return spare.take(found)
        except Exception as error:  # DDP has a collective here in an early step
            if not collectives.handled(error):
                raise
            return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As in DDP: gradients computed in this context are added up, and averaged over the ranks later."""
        self.__dict__["_by_hand"] = True
        with nullcontext() if self._ddp is None else self._ddp.no_sync():
            yield

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """As in DDP. The hook is registered again when the members change, with the same state."""
        self._hooks.append((state, hook))
        if self._ddp is not None:
            self._ddp.register_comm_hook(state, hook)

    def exchange(self, on: bool) -> None:
        """Set whether the next backward pass averages gradients over the ranks, which ends an accumulation."""
        if self._ddp is not None and self._ddp.require_backward_grad_sync != on:
            self._ddp.require_backward_grad_sync = on

    def drop_gradients(self) -> None:
        """Make the gradients zero, because they are not valid. The script may still use them, so they are not None."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.detach().zero_()
            elif parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def equal_parameters(self) -> list[nn.Parameter]:
        """The parameters that DDP keeps equal on all ranks, or has kept equal until `unwrap`.

        Parameters without gradients are left out: DDP does nothing with them. The list is empty if each rank begins
        with its own values, or if a hook or the script (`no_sync`) decides which gradients are exchanged.
        """
        ddp = self._ddp
        if ddp is None:
            return self._equal  # type: ignore[no-any-return]
        if self._by_hand or not self._options.get("init_sync", True) or self._hooks or ddp.mixed_precision:
            return []
        ignored = ddp.parameters_to_ignore
        mine = ((name, each) for name, each in self.module.named_parameters() if self._trained.get(each))
        return [each for name, each in mine if each.requires_grad and name not in ignored]

    def share_buffers(self) -> None:
        """Give every rank the buffers of rank 0. Called only if `shares_buffers`.

        The mode does not matter: rank 0 alone may have evaluated the model at the end of the step.
        """
        if self._ddp is not None:
            share(self.module.buffers())

    # nn.Module does these by walking registered submodules. Here they go to the user's module.

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return self.module.named_modules(*args, **kwargs)  # type: ignore[no-any-return]

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.module.named_children()  # type: ignore[no-any-return]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.__dict__["_modules"] = self.module._modules  # a container makes another dict when it loses a module
        self.module._load_from_state_dict(*args)

    def train(self, mode: bool = True) -> Parallel:
        self.training = mode
        self.module.train(mode)
        return self

    def apply(self, fn: Any) -> Parallel:
        self.module.apply(fn)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Parallel:
        self.module._apply(fn, recurse)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def __repr__(self) -> str:
        return f"Parallel({self.module!r})"


class Exchange:
    """Says which backward passes average gradients over the ranks: those of the last batch of each step."""

    def __init__(self, models: Sequence[Parallel]) -> None:
        self._models = models
        self._before: int | None = None  # of the parameters, when a batch began that does not complete its step
        self._checks = True  # until one such batch has ended

    def begin(self, last: bool) -> None:
        """The next batch of a step begins. last: it completes the step."""
        if self._before is not None and self._checks:
            self._checks = False
            if self._before != self._versions():
                log.warning(
                    "a parameter has changed in a batch that does not complete its step, so the workers' models differ "
                    "from now on: call the optimizer only if run.completes_step"
                )
        self._turn(last)
        self._before = None if last or not self._checks else self._versions()

    def end(self) -> None:
        """The loop over steps ends, or begins: later code may change the parameters."""
        self._before = None
        self._turn(True)

    def _turn(self, on: bool) -> None:
        for model in self._models:
            model.exchange(on)

    def _versions(self) -> int:
        return sum(each._version for model in self._models for each in model.parameters())


def _watch_first_gradient(module: nn.Module, ddp: weakref.ref[DistributedDataParallel]) -> None:
    """Say so if the module gets gradients, and its DDP instance was not called: it does not average them then."""
    parameter = next((each for each in module.parameters() if each.requires_grad and not is_lazy(each)), None)
    if parameter is None:
        return

    def look(_: torch.Tensor) -> None:
        hook.remove()  # it would cost time in each step
        made = ddp()
        if made is not None and not getattr(made, "_lazy_init_ran", True):  # set by its first call (torch 2.13)
            log.warning(
                "%s has gradients that are not averaged, so each worker trains alone: call what run.ddp has returned, "
                "model(…), and neither a method of the module, model.loss(…), nor model.module(…)",
                type(module).__name__,
            )

    hook = parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]


def share(tensors: Iterable[torch.Tensor]) -> None:
    """Give every rank rank 0's values of these tensors. Every rank must call this."""
    if shared := [each.detach() for each in tensors]:
        dist._broadcast_coalesced(_get_default_group(), shared, _BUCKET, 0)


def include_unfrozen(models: Iterable[Parallel], tracked: Collection[object]) -> bool:
    """`Parallel.include` for each model. True: one that is not tracked has changed, so a newcomer's would differ."""
    changed = [model for model in models if model.include()]
    return any(all(each is not model for each in tracked) for model in changed)


@contextmanager
def _trainable(module: nn.Module, trained: Mapping[nn.Parameter, bool]) -> Iterator[None]:
    """In this context, the parameters require gradients as `trained` says. New ones stay as they are."""
    before = [(each, each.requires_grad) for each in module.parameters()]
    changed = [(each, required) for each, required in before if trained.get(each, required) != required]
    for each, required in changed:  # only these: a lazy parameter does not allow it
        each.requires_grad_(not required)
    try:
        yield
    finally:
        for each, required in changed:
            each.requires_grad_(required)
