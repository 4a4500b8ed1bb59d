"""What a script logs: every call's numbers go to this node's disk, and the newest ones to the agent's display.

The training thread only puts a call into a queue. A thread of this module encodes the calls and writes them, so neither
a slow disk nor a GPU delays a step. What is on the disk survives the end of this process: the agent uploads it (see
`spotrun.node.metrics_uploader`). Rank 0's calls are kept, and the last ones of its substitutes (see
`spotrun.state.points`).
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from itertools import islice
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any, NamedTuple, cast

from spotrun.state import points
from spotrun.state.control import Control
from spotrun.state.points import EXTRAS, BlockWriter, Call, Extra, Header
from spotrun.train import extras, failures
from spotrun.train.numbers import Group, Later, is_on_gpu, to_number

log = logging.getLogger(__name__)

EVERY = 0.2  # seconds between writes: what a killed process loses at most
MOST = 1_000_000  # numbers that wait for the disk; more of them are dropped
EXTRAS_WAITING = 100  # texts, images and histograms that wait for the disk; more of them are dropped
UNSENT = 16 << 20  # bytes of lines that wait for room on the disk; more of them are dropped
LONGEST = 200  # characters of a name
NAMES = 10_000  # names that are remembered; a script may log under a new name in each step
SHOWN = 1000  # names whose newest numbers are kept for the display; the display has room for fewer
PATIENCE = 2.0  # seconds that a worker waits for its last numbers before it ends


class _Waiting(NamedTuple):
    """A call that is not encoded yet."""

    step: int
    epoch: int
    samples: float | None
    between: bool
    time: float
    values: dict[str, float | Later]
    later: bool  # whether a value is a `Later`


class Metrics:
    """The calls of run.log in this process."""

    def __init__(self, control: Control | None, folder: str = "") -> None:
        """control: where the display reads the newest values; None: nothing is kept. folder: for blocks; empty: none.

        A thread writes, from `begin` to the end of the process.
        """
        self._control, self._folder = control, folder
        self._waiting: deque[_Waiting] = deque()
        self._extras: deque[tuple[Extra, extras.Array | None]] = deque()  # each with the array of which it will be made
        self._extra_writer: BlockWriter | None = None
        self._given = self._done = 0  # numbers put into the queue, and taken from it; each has one writing thread
        self._names: dict[str, str] = {}  # as they are written, by name as it was logged; "": left out
        self._plain: set[str] = set()  # names that are written as they were logged
        self._writer: BlockWriter | None = None
        self._base: tuple[int, int] | None = None  # epoch and step at which the generation began; None: not yet
        self._newest: dict[str, float] = {}
        self._shown = True  # whether the control block has the newest numbers
        self._unsent = b""
        self._told: set[str] = set()  # what there was a warning about
        self._lock = threading.Lock()  # held by the thread that writes
        self._thread: threading.Thread | None = None
        self._pid = 0  # of the process that writes

    def log(self, step: int, epoch: int, samples: float | None, between: bool, values: dict[str, Any]) -> None:
        """Take the numbers of a call. The arguments are as in `Call`. Never raises: a log must not end a job."""
        if self._control is None:
            return
        if self._given - self._done > MOST:
            return self._warn("slow", "run.log gets more numbers than this node can write: log less; some are left out")
        if not self._plain.issuperset(values):
            values = {self._names.get(name) or self._add_name(name): value for name, value in values.items()}
            values.pop("", None)
        found: dict[str, float | Later] = dict(values)
        gpu: list[tuple[str, Any]] = []
        for name in [name for name, value in values.items() if type(value) is not float]:
            value = values[name]
            if is_on_gpu(value):
                gpu.append((name, value))
            elif (number := self._number(name, value)) is not None:
                found[name] = number
                continue
            del found[name]
        if gpu:
            self._take_from_gpu(found, gpu)
        self._given += len(found)
        if found:
            self._waiting.append(_Waiting(step, epoch, samples, between, time(), found, bool(gpu)))

    def log_extra(self, kind: str, step: int, epoch: int, between: bool, values: dict[str, Any]) -> None:
        """Take the texts, images or histograms of a call. Never raises, as `log`."""
        if self._control is None or (self._base is not None and self._extra_writer is None):
            return
        for name, value in values.items():
            if len(self._extras) >= EXTRAS_WAITING:
                self._warn("many", "run.log_text, _image and _histogram are called too often: some are left out")
            elif known := self._names.get(name) or self._add_name(name):
                each = Extra(step, time(), kind, known, epoch=epoch, between=between)
                try:
                    self._extras.append((each, extras.prepare(each, value)))
                except Exception as error:  # of the value's own class
                    self._warn(f"{kind} {name}", f"run.log_{kind}({name}=…) is left out: {error}")

    def begin(self, header: Header, substitute: bool = False) -> None:
        """A generation begins: the calls from here on belong to it. substitute: see `points.is_substitute`."""
        if self._control is None:
            return
        self.flush()
        self._pid = os.getpid()
        with self._lock:
            before, self._base = self._base, (header.base_epoch, header.base)
            self._writer, self._unsent, self._extra_writer = None, b"", None
            folder = Path(self._folder, f"{header.generation:04d}")
            if self._folder and header.rank == 0:
                self._writer = BlockWriter(folder, points.line(header))
                self._extra_writer = BlockWriter(folder / EXTRAS, points.line(header))
            elif self._folder and substitute:
                self._writer = BlockWriter(folder / points.rank_folder(header.rank), points.line(header))
            if self._writer is not None:
                self._append([b""])  # the header says that the points after its base are void, even if none follow
        if before is None:  # the script has logged before its state was restored
            early = [each._replace(step=header.base, epoch=header.base_epoch, between=True) for each in self._waiting]
            self._waiting = deque(early)
            for extra, _ in self._extras:
                extra.step, extra.epoch, extra.between = header.base, header.base_epoch, True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spotrun-metrics", daemon=True)
            self._thread.start()
            atexit.register(self.flush)
            failures.before_ending(self.flush)

    def flush(self, patience: float = PATIENCE) -> None:
        """Write what was logged so far, but wait for the disk, or a GPU, at most `patience` seconds."""
        if os.getpid() != self._pid:
            return  # a child that the script has forked ends: what waits here is its parent's
        deadline, given = monotonic() + patience, self._given
        while self._base is not None and self._lock.acquire(timeout=max(0.0, deadline - monotonic())):
            try:
                self._write()
                while self._extras and monotonic() < deadline and self._write_extra():
                    pass
            finally:
                self._lock.release()
            if (self._done >= given and not self._extras) or monotonic() > deadline:
                return
            sleep(0.005)  # a GPU has not computed the numbers yet

    def _run(self) -> None:
        while True:
            sleep(EVERY)
            with self._lock:
                self._write()
            while self._extras:
                with self._lock:  # for one extra at a time: numbers can be written between two
                    self._write()
                    if not self._write_extra():
                        break
                sleep(0)  # otherwise this thread has the lock again before one that waits for it

    def _write(self) -> None:
        """Take what is ready from the queue, write it, and show the newest numbers."""
        lines: list[bytes] = []
        while self._waiting:
            each = self._waiting[0]
            try:
                if each.later and not all(value.ready() for value in each.values.values() if isinstance(value, Later)):
                    break
                numbers = _numbers(each)
            except RuntimeError as error:  # of CUDA: the script's next call raises it too
                self._warn("gpu", f"numbers of run.log are left out: {error}")
                numbers = {}
            self._waiting.popleft()
            self._done += len(each.values)
            self._newest.update(numbers)
            self._shown = self._shown and not numbers
            if self._writer is not None and numbers:
                values = points.all_to_json(numbers)
                lines.append(points.line(Call(each.step, each.time, values, each.epoch, each.samples, each.between)))
                if len(lines) >= 10_000:
                    self._append(lines)
                    lines = []
        self._append(lines)
        self._show()

    def _write_extra(self) -> bool:
        """Write the oldest text, image or histogram. False: there is none, or it waits for the disk."""
        if not self._extras:
            return False
        each, array = self._extras[0]
        try:
            extras.complete(each, array)
            if self._extra_writer is not None:
                self._extra_writer.append(points.line(each))
        except OSError as error:
            self._warn("disk", f"what run.log_{each.kind} was given waits for the disk: {error}")
            return False
        except Exception as error:
            self._warn(f"{each.kind} {each.name}", f"run.log_{each.kind}({each.name}=…) is left out: {error}")
        self._extras.popleft()
        return True

    def _append(self, lines: list[bytes]) -> None:
        if self._writer is None or not (lines or self._unsent):
            return
        self._unsent += b"".join(lines)
        try:
            self._writer.append(self._unsent)
            self._unsent = b""
            self._told.discard("disk")
        except OSError as error:
            self._warn("disk", f"numbers of run.log wait for the disk: {error}")
            if len(self._unsent) > UNSENT:
                self._unsent = self._unsent[: self._unsent.rfind(b"\n", 0, UNSENT) + 1]

    def _show(self) -> None:
        """Write the newest numbers to the control block."""
        if not self._shown and self._control is not None:
            self._shown = True
            # A script may log under a new name in each step.
            self._newest = dict(islice(self._newest.items(), SHOWN))
            self._control.write_metrics(self._newest)

    def _add_name(self, name: str) -> str:
        """The name as it is written; empty, with a warning, if it is too long. JSON has no lone surrogates."""
        known = name.encode(errors="replace").decode()
        if not 0 < len(known) <= LONGEST:
            self._warn(name, f"run.log({known[:20]}…=…): a name has 1 to {LONGEST} characters: left out")
            return ""
        if len(self._names) >= NAMES:
            self._names.clear()
            self._plain.clear()
        self._names[name] = known
        if known == name:
            self._plain.add(name)
        return known

    def _number(self, name: str, value: Any) -> float | None:
        """The value as a number; None, with a warning, if it is not one."""
        try:
            return to_number(value)
        except Exception as error:  # of the value's own class
            self._warn(f"value {name}", f"run.log({name}=…) is not a number, left out: {error}")
            return None

    def _take_from_gpu(self, found: dict[str, float | Later], values: list[tuple[str, Any]]) -> None:
        for name, value in values:
            if value.numel() != 1 or value.is_complex():
                self._number(name, value)
        good = [(name, value) for name, value in values if value.numel() == 1 and not value.is_complex()]
        try:
            for device in {value.device for _, value in good}:
                mine = [(name, value) for name, value in good if value.device == device]
                group = Group([value for _, value in mine])
                found.update({name: Later(group, index) for index, (name, _) in enumerate(mine)})
        except Exception as error:  # of the driver: the script's next call will raise it too
            self._warn("gpu", f"numbers of run.log are left out: {error}")

    def _warn(self, what: str, message: str) -> None:
        """Warn once. After 100 warnings, be silent: a script may log under a new name in each step."""
        if what not in self._told and len(self._told) < 100:
            self._told.add(what)
            log.warning("%s", message)


def _numbers(call: _Waiting) -> dict[str, float]:
    """The numbers of a call whose values are ready. Raises RuntimeError if a device has failed."""
    if not call.later:
        return cast(dict[str, float], call.values)
    return {name: value.number() if isinstance(value, Later) else value for name, value in call.values.items()}


class Clock:
    """Measures steps.

    step_seconds: of a usual step, without snapshots; 0 until two steps are done. samples: of the step under way.
    due_at: when its first gradients were due; from then on, this worker may wait for others. 0: not yet.
    """

    def __init__(self) -> None:
        self.step_seconds = 0.0
        self.samples = 0
        self.due_at = 0.0
        self._resumed = monotonic()
        self.begin()

    def begin(self) -> None:
        """A generation begins: what the control block has counts from here."""
        self._stepped = False
        self._stepping = self._alone = 0.0  # sums of seconds, as those of the control block
        self._seen = 0

    def tick(self, control: Control, step: int) -> tuple[int, int, int]:
        """A step is done, and the next one begins: report the number, time, duration and samples of the step.

        See `Control.end_step`. Call `resume` if something else comes before the next step.
        """
        now, ended = time(), monotonic()
        took = ended - self._resumed
        self._seen += self.samples
        self.samples = 0
        self._stepping += took
        self._alone += (self.due_at or ended) - self._resumed
        self._resumed, self.due_at = ended, 0.0
        if self._stepped:  # moving average over about five steps, without the first: it pays for lazy set-up
            self.step_seconds += (took - self.step_seconds) * (0.2 if self.step_seconds else 1.0)
        else:
            self._stepped = True
            control.stepped_first = now
        return control.end_step(step, now, self._seen, self._stepping, self._alone)

    def leave_out(self, seconds: float) -> None:
        """Time in which the script did something else does not belong to the step under way."""
        self._resumed += seconds
        self.due_at += seconds if self.due_at else 0.0

    def resume(self) -> None:
        """The next step begins. If the one before did not count, its samples do not count either."""
        self._resumed, self.due_at, self.samples = monotonic(), 0.0, 0
