"""A trace of some steps, with torch's profiler, when `spotrun profile` asks for it (`make profile`).

The profiler begins and stops between two steps. Without a request, a boundary costs one look at the control block.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from spotrun.state.control import NONE, Context, Control
from spotrun.state.profile import TRACE, Answer, Request

log = logging.getLogger(__name__)

# Events of a trace. The profiler keeps them in memory, and then this process pauses to write them: for 100,000 events,
# it paused for 1 s on 2 slow cores, and wrote 26 MB. A step of a small network has a few hundred.
MOST = 100_000


class Profiling:
    """This worker's part of `make profile`. control, context: None without spotrun; then it does nothing.

    profiler: it records now, and needs `end_step`; None: only a request in the control block does.
    """

    def __init__(self, control: Control | None, context: Context | None, device: torch.device) -> None:
        self._control, self._context, self._device = control, context, device
        self._request: Request | None = None  # the one under way
        self.profiler: torch.profiler.profile | None = None
        self._wanted = 0  # steps to record; 0: the first step is recorded, to see how many events a step has
        self._first = self._steps = 0  # the first step of the trace, and how many steps it has

    def end_step(self, step: int) -> None:
        """A step has ended: begin, go on or stop. An error of the profiler ends the profile, and not the training.

        Called only if a profiler records, or the control block has a request.
        """
        assert self._control is not None
        with self._answering():
            if self._control.profile != NONE:
                self._begin(step)
            elif self._request is None:
                self._stop()  # it was dropped
            else:
                self._advance(self._request, step)

    def end_loop(self) -> None:
        """The script has left its loop over steps. What it does there is not a step, and may have very many events."""
        if self.profiler is None or self._control is None:
            return
        with self._answering():
            request, profiler = self._request, self._stop()
            if request is not None and self._steps:
                self._save(profiler, request)
            elif request is not None:
                self._control.profile = request.steps  # it begins again after the next step

    def drop(self, why: str) -> None:
        """The steps under way do not count. The profiler stops later, because other workers wait for this one now."""
        if self._request is not None:
            log.warning("the profile of rank %d is dropped: %s", self._control.rank if self._control else 0, why)
            self._answer(self._request, problem=why)

    def _begin(self, step: int) -> None:
        """Take a request."""
        assert self._control is not None
        assert self._context is not None
        self._control.profile = NONE
        self._stop()
        self._request = request = Request.read(self._context.control)
        self._wanted, self._steps = 0, 0
        if torch._C._autograd._profiler_enabled():  # torch has one for each process: a second one ends the first
            self._answer(request, problem="the script uses torch.profiler itself at the moment; ask again later")
        elif time.time() < request.until:
            self._start(step)
        else:
            self._answer(request, problem="no step has ended in time; `make stacks` says where the worker is")

    def _start(self, step: int) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities)
        profiler.start()
        self.profiler, self._first, self._steps = profiler, step + 1, 0

    def _advance(self, request: Request, step: int) -> None:
        """Another step is recorded."""
        self._steps += 1
        late = time.time() >= request.until
        if self._wanted:
            if self._steps >= self._wanted or late:
                self._save(self._stop(), request)
            return
        profiler = self._stop()
        events = _count(profiler)
        if events == 0:
            self._answer(request, problem="the profiler has seen nothing: does the script use torch.profiler itself?")
        elif request.steps == 1 or late or 2 * events > MOST:
            self._save(profiler, request)
        else:
            self._wanted = min(request.steps, MOST // events)
            self._start(step)

    def _stop(self) -> torch.profiler.profile | None:
        """Stop the profiler. Returns it with what it has recorded; None: it did not run."""
        found, self.profiler = self.profiler, None
        if found is not None:
            found.stop()
        return found

    def _save(self, profiler: torch.profiler.profile | None, request: Request) -> None:
        assert profiler is not None
        path = Path(request.folder, TRACE)
        profiler.export_chrome_trace(str(path))
        if not path.is_file():  # the profiler only logs that it cannot write
            raise OSError(f"the profiler could not write {path}: is the disk full?")
        self._answer(request, steps=self._steps, first=self._first)

    def _answer(self, request: Request, steps: int = 0, first: int = 0, problem: str = "") -> None:
        """The request is done."""
        self._request = None
        assert self._context is not None
        with contextlib.suppress(OSError):  # nobody waits any longer, and the folder is gone
            region = os.environ.get("AWS_REGION", "")
            where = self._context.node, self._context.bucket, region
            Answer(steps, first, problem, *where).write(request.folder)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Answer with an error of the profiler or of the disk."""
        try:
            yield
        except Exception as error:
            log.warning("the profile failed; training goes on: %s", error)
            request, self.profiler = self._request, None
            if request is not None:
                self._answer(request, problem=f"the profiler failed: {str(error)[:500] or repr(error)}")


def _count(profiler: torch.profiler.profile | None) -> int:
    """How many events were recorded."""
    results = profiler.profiler.kineto_results if profiler is not None and profiler.profiler is not None else None
    return len(results.events()) if results is not None else 0
