"""Leaving a generation and joining the next one in the same process (a regroup): nothing of the script runs again.

A worker leaves at its stop step, or when a peer is gone. It says so in its control block (`left`) and waits. The agent
writes an `Invitation` and the number of the next generation (`joins`). If the agent wants no regroup, it ends the
worker, and a fork takes its place: the worker need not know which of the two comes.

On a GPU, a collective does not notice that a peer is gone. So the agent tells the worker, whose thread aborts what is
under way. An aborted kernel returns as if it had succeeded, and the host may have queued the optimizer's step: all that
is in the device's memory counts as lost, except in exact mode (`train/exactness.py`). What the script tracks comes back
from the newest snapshot that was committed before the abort. If a model has a changing tensor that no snapshot has, if
the device goes on for too long, or if it reports an error, the worker ends, and a fork takes its place.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.data import DistributedSampler

from spotrun.state import exit_note
from spotrun.state.control import (
    ABLE,
    EXIT_DRAINED,
    EXIT_PEER,
    NEEDS_RELEASE,
    Context,
    Control,
    Invitation,
    worker_fifo,
)
from spotrun.state.wakeup import wake
from spotrun.train import connections, failures, group_health
from spotrun.train.batches import obstacle
from spotrun.train.distributed import (
    LEAVE_WAIT,
    Meeting,
    abort_in_time,
    join_process_group,
    leave_in_time,
    leave_process_group,
    make_room,
    rank_and_world,
)
from spotrun.train.noted_state import inside
from spotrun.train.parallel import Parallel
from spotrun.train.sections import place

log = logging.getLogger(__name__)

QUEUED = 5.0  # seconds for which a device may still work on steps that the host has queued, at most
LOOK = 0.5  # seconds between two looks whether a collective on a GPU has failed
DEPTH, WIDTH = 4, 100  # how far a tracked object is searched, and the most things in one that is searched
POLL = 0.05  # seconds between two looks at the control block while this worker waits; the agent wakes it sooner

_WATCHED = (torch.optim.Optimizer, lr_scheduler.LRScheduler, torch.amp.GradScaler, DistributedDataParallel)


class Loop:
    """A script's loops over `run.steps`. check: called at a loop's end. inside: whether the script is in one.

    enters_again: whether the script leaves its loop when the members change, and enters it again, in any epoch.
    renews_samplers: whether it then makes its samplers again, for the present members.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self.inside = self.enters_again = self.renews_samplers = False
        self._check = check

    def __enter__(self) -> None:
        self.inside = True

    def __exit__(self, *_: object) -> None:
        self.inside = False
        self._check()


class Membership:
    """This worker's place in its generation. context: of that generation. backend: as in `spotrun.init`."""

    def __init__(
        self, context: Context, control: Control, device: torch.device, backend: str | None, models: Sequence[Parallel]
    ) -> None:
        self.context = context
        self.obstacle = ""  # why the script cannot go on in another generation; empty: nothing is known
        self.survives = survives_failure(device)  # whether what is in the device's memory survives a peer's failure
        self._control, self._device, self._backend, self._models = control, device, backend, models
        self._woken = threading.Event()  # set each time that the agent wakes this worker
        self._leaving = threading.Lock()  # held while connections of the generation are broken
        self._has_left = False  # whether this process has left its generation
        self.loop = Loop(lambda: None)
        self._size_read = ""  # what told the script the number of workers, before it began the steps of an epoch
        self._saved: dict[int, torch.Tensor] = {}  # tensors of `run.ddp`'s models that snapshots have, by id
        self._unsaved: dict[int, tuple[torch.Tensor, int]] = {}  # the others, with their version at `run.track`
        failures.void = False
        self._tracked: tuple[object, ...] = ()
        self._inside: tuple[object, ...] = ()  # see `see_tracked`
        self._watch_steps()
        self._watch_samplers()
        if device.type == "cuda":
            self._watch_graphs()
        if context.regroups:
            fifo = -1
            # Without the FIFO, this worker joins up to `POLL` later. On the CPU, it restarts if a peer is silent.
            with contextlib.suppress(OSError):
                os.mkfifo(worker_fifo(context.control), 0o600)
                fifo = os.open(worker_fifo(context.control), os.O_RDWR)  # so it always has a writer
            if fifo >= 0 or not self.survives:
                threading.Thread(target=self._obey, args=(fifo,), name="spotrun-wake", daemon=True).start()

    def able(self) -> int:
        """Whether this worker can join another generation without a restart: as `Control.able`; 0: it cannot.

        0 if the script has made process groups of its own, because only the script can make them again. 0 also if the
        script does not call `run.ddp`, because it is not known how the script exchanges gradients. See also `restarts`
        and `Parallel.obstacle`.
        """
        whole = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        own = [whole] if whole is not None else []
        foreign = [each for each in dist.distributed_c10d._world.pg_map if each not in own]
        if not self.context.regroups or whole is None or not self._models or foreign or self.why_not():
            return 0
        return ABLE if self.survives else NEEDS_RELEASE

    def look_at(self, objects: Iterable[object], tensors: Iterable[torch.Tensor]) -> None:
        """Note what the script tracks, and whether that would work in another generation. tensors: those in it."""
        self._tracked = tuple(part for each in objects for part in _parts(each, DEPTH))
        places = {place(each) for each in tensors}
        for each in self._tensors():
            if place(each) in places or not each.numel():
                self._saved[id(each)] = each
            else:
                self._unsaved[id(each)] = each, each._version
        if any(isinstance(each, DistributedDataParallel) for each in self._tracked):
            self.restarts("run.track names a DistributedDataParallel that run.ddp has not made")
        optimizers = (each for each in self._tracked if isinstance(each, torch.optim.Optimizer))
        groups = (group for each in optimizers for group in each.param_groups)
        optimized = {id(parameter) for group in groups for parameter in group["params"]}
        for model in self._models:  # it need not optimize all layers of a model
            trained = {id(each) for each in model.parameters() if each.requires_grad and id(each) in self._saved}
            if trained and trained.isdisjoint(optimized):
                name = type(model.module).__name__
                self.restarts(f"run.track names no optimizer of a model ({name}), so no optimizer's state is saved")

    def see_tracked(self, *items: object) -> None:
        """The saved state has these, too, as parts of a tracked object. They replace those of an earlier call."""
        self._inside = tuple(part for each in items for part in _parts(each, DEPTH))

    def see_size_read(self, by: str, tracked: bool) -> None:
        """The script asks for the number of workers before it begins the steps of an epoch. by: how."""
        if not tracked:
            self.restarts(f"the script reads {by} before run.track")
        self._size_read = by

    def see_loader(self, loader: Any) -> None:
        """The script begins the steps of an epoch. What the loader reads may have been made for this worker's rank."""
        if why := obstacle(loader, self._size_read):
            self.restarts(why)
        optimizes = any(isinstance(each, torch.optim.Optimizer) for each in self._tracked)
        if optimizes and not self._models and rank_and_world()[1] > 1:
            self.restarts("the script does not call run.ddp: unless it averages gradients, each worker trains alone")

    def restarts(self, why: str) -> None:
        """From now on, this worker does not join another generation without a restart."""
        if not self.obstacle:
            log.warning("after an interruption, all workers will restart: %s", why)
        self.obstacle = self.obstacle or why
        self._control.able = 0

    def why_not(self) -> str:
        """Why the script cannot go on in another generation; empty: nothing is known."""
        return self.obstacle or next((each.obstacle for each in self._models if each.obstacle), "")

    def can_go_on(self) -> bool:
        """Whether this worker can join another generation after a failure. Any thread may ask.

        On a GPU, it cannot if a model has a tensor that changes and that is in no snapshot: nothing could restore it.
        An example is a buffer with `persistent=False` that each step copies from rank 0.
        """
        try:
            return bool(self.able()) and (self.survives or not any(map(self._cannot_be_restored, self._tensors())))
        except Exception:  # the script is changing its modules
            return False

    def unsaved(self, objects: Collection[object]) -> list[torch.Tensor]:
        """What no state has of the models that are not among these objects, such as frozen parameters."""
        models = [model for model in self._models if all(each is not model for each in objects)]
        tensors = (each for model in models for each in chain(model.parameters(), model.buffers()))
        return [each for each in tensors if self._saved.get(id(each)) is not each]

    def _tensors(self) -> Iterator[torch.Tensor]:
        return (each for model in self._models for each in chain(model.parameters(), model.buffers()))

    def _cannot_be_restored(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has changed since `run.track`, or is new, and no snapshot has it."""
        before, version = self._unsaved.get(id(tensor), (None, -1))
        return self._saved.get(id(tensor)) is not tensor and (before is not tensor or version != tensor._version)

    def disconnect(self, failed: bool) -> bool:
        """Leave the process group at once, so that peers which still wait for this worker fail, too.

        failed: collectives may be under way. False: the end of the group takes too long, or the device reports an
        error, so this process must end.
        """
        for model in self._models:
            model.unwrap()
        with self._leaving:
            self._has_left = True
            if self.survives:
                leave_process_group()
                return True
            return leave_in_time(self._device, failed, self._patience())

    def _patience(self) -> float:
        """Seconds in which a device must have done its work: it may still work on steps that the host has queued."""
        steps = self._control.step - max(self._control.base, 0)
        queued = 2 * self._control.stepping / steps if steps > 0 else 0.0
        return LEAVE_WAIT + min(queued, QUEUED)

    def wait(self, step: int, error: BaseException | None) -> None:
        """Say that this worker has left, and wait until the agent lets it join the next generation.

        step: the newest that this worker has completed. error: why it left; None: it was told to. The wait ends in any
        case: if there is no such generation, the agent ends this process. If the launcher ends, the kernel does it.
        """
        control = self._control
        if error is not None:
            message = f"step {step}: another worker is gone: {exit_note.summary(str(error))}"
            log.warning("%s", message)
            trace = "".join(traceback.format_exception(error))
            exit_note.write(self.context.control, "peer", control.rank, message, trace)
        control.left = EXIT_DRAINED if error is None else EXIT_PEER
        wake(self.context.wakeup)
        while control.joins <= self.context.generation:
            self._woken.wait(POLL)
            self._woken.clear()

    def join(self) -> None:
        """Join the generation of the invitation. Every member must call this.

        Raises `NotBegun` if not all members come: the agent has released this worker, or `TIMEOUT` is over. Raises
        another `DistError` if the store or a member is gone.
        """
        invitation = Invitation.read(self.context.control)
        os.environ.update(invitation.env)
        with self._leaving:
            self.context = Context.from_text(invitation.env[Context.VARIABLE])
            failures.void = self._has_left = False
        _print_to(invitation.log)
        self._control.entered = time.time()
        meeting = Meeting(str(self.context.generation), self._is_released)
        make_room(self._device)
        join_process_group(self._device, self._backend, meeting=meeting)
        if self._is_released():  # while the group was formed, which cannot be interrupted
            raise dist.DistError("the generation has been given up")
        self._control.rank = rank_and_world()[0]
        self._control.grouped = time.time()

    def _watch_graphs(self) -> None:
        """From now on, a script that captures a CUDA graph restarts.

        The graph has collectives of the old group, or addresses of gradients that the next generation does not use.
        """
        capture: Any = torch.cuda.CUDAGraph.capture_begin

        def noted(graph: torch.cuda.CUDAGraph, *args: Any, **options: Any) -> None:
            self.restarts("the script captures CUDA graphs")
            capture(graph, *args, **options)

        torch.cuda.CUDAGraph.capture_begin = noted  # type: ignore[assignment,method-assign]

    def _watch_steps(self) -> None:
        """From now on, a script that uses a scheduler or a `GradScaler` without tracking it restarts.

        A newcomer's scheduler would have another learning rate. With scalers of different scales, DDP would add
        gradients of different scales.
        """
        known: list[Any] = [each for each in vars(lr_scheduler).values() if isinstance(each, type)]
        kinds = [each for each in known if issubclass(each, lr_scheduler.LRScheduler) and "step" in vars(each)]
        for kind in (torch.amp.GradScaler, *kinds):
            kind.step = self._noting(kind.step)

    def _noting(self, step: Any) -> Any:
        """The method `step` of a scheduler or a scaler, which notes whether the script tracks the object."""

        @functools.wraps(step)
        def noted(item: Any, *args: Any, **options: Any) -> Any:
            # A step before `run.track` is one of the set-up, and the object may still be tracked. So may one that is
            # being made (torch 2.13 says so).
            early = not self._tracked or getattr(item, "_is_initial", False)
            if not early and not any(each is item for each in (*self._tracked, *self._inside)):
                scaler = isinstance(item, torch.amp.GradScaler)
                if not scaler or item.is_enabled():
                    name = "GradScaler" if scaler else type(item).__name__
                    self.restarts(f"run.track does not name the {name}, so its state is not saved")
            return step(item, *args, **options)

        return noted

    def _watch_samplers(self) -> None:
        """From now on, a script that makes a `DistributedSampler` restarts: the sampler keeps the number of workers."""
        make: Any = DistributedSampler.__init__

        def noted(sampler: DistributedSampler[Any], *args: Any, **options: Any) -> None:
            if not self.loop.renews_samplers:
                self.restarts("the script uses torch's DistributedSampler, which keeps the number of workers")
            make(sampler, *args, **options)

        DistributedSampler.__init__ = noted  # type: ignore[assignment,method-assign]

    def _obey(self, fifo: int) -> None:
        """Wake this worker if it waits. End the collectives if the agent releases it, or if one fails on a GPU."""
        poll = select.poll()
        if fifo >= 0:
            poll.register(fifo, select.POLLIN)
        while True:
            if poll.poll(None if self.survives else 1e3 * LOOK):
                os.read(fifo, 1)
                self._woken.set()
            with self._leaving:
                if self._is_released() or self._has_failed():
                    self._end_collectives()

    def _has_failed(self) -> bool:
        """Whether a process group of this generation reports an error. Only NCCL's do."""
        if self.survives or self._has_left:
            return False
        with contextlib.suppress(Exception):  # the script may be about to end a group of its own
            return bool(group_health.error())
        return False

    def _end_collectives(self) -> None:
        """Have the collectives of this generation end. On a GPU, the step under way does not count from now on.

        A communicator that the script's thread makes at this moment is not aborted. So each later look aborts again,
        until this process has left. Outside a loop over `run.steps`, the script would not know that a result means
        nothing: the process ends.
        """
        if self.survives or self._has_left:
            connections.break_all()
            return
        failures.void = True  # before the abort, and before the look whether the script is in the loop
        group_health.note_abort()  # before the connection to the store is broken
        connections.break_all()
        can_go_on = self.loop.inside and self.can_go_on()
        if dist.is_initialized() and not (can_go_on and abort_in_time(self._device, self._patience())):
            self._control.able = 0  # now: nobody should wait for this worker
            what = f"step {self._control.step}: a collective has failed"
            why = dist.DistError(self.why_not() or "this worker cannot go on in the same process")
            failures.end(self.context, self._control, self._control.rank, what, why)

    def _is_released(self) -> bool:
        return self._control.released == self.context.generation


def _parts(item: object, depth: int) -> Iterator[object]:
    """The optimizers, schedulers, scalers and DDP models that the state of a tracked object may have, and itself.

    These are the schedulers in a scheduler, and all in a list, a dict or an object of the script. depth: of the search.
    """
    if isinstance(item, _WATCHED):
        yield item
    inner: Collection[object] = ()
    if isinstance(item, lr_scheduler.LRScheduler):  # its state does not have its optimizer
        inner = [each for each in (*inside(item), *vars(item).values()) if isinstance(each, lr_scheduler.LRScheduler)]
    elif isinstance(item, Mapping):
        inner = item.values()
    elif isinstance(item, list | tuple):
        inner = item
    elif not type(item).__module__.startswith(("torch.", "spotrun.")):
        inner = getattr(item, "__dict__", {}).values()
    if depth and len(inner) <= WIDTH:
        for each in inner:
            yield from _parts(each, depth - 1)


def survives_failure(device: torch.device) -> bool:
    """Whether a failed collective leaves the device's memory as it was: gloo fails before it changes a tensor."""
    return device.type == "cpu"


def _print_to(path: str) -> None:
    """From now on, write the output to this file."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
