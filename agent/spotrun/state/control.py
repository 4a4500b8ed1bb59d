"""The control block: one small shared file between an agent and each of its workers.

The worker writes its progress (step, times, logged numbers). The agent writes the step at which to stop. Each number is
one aligned 8-byte store, so neither side waits for the other, and reading takes nanoseconds. The block is the heartbeat
and the hang detector. Standard library only: both the agent (without torch) and training scripts import it.
"""

from __future__ import annotations

import json
import mmap
import os
import time
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from time import perf_counter
from typing import Any

from spotrun.errors import SpotrunError
from spotrun.state import exit_note

SIZE = 4096
TEXT = 1024  # offset of the JSON text with the numbers of run.log()
LAYOUT = TEXT - 8  # offset of the number that tells the order of the numbers; older versions left it 0
NONE = -1
VISIBLE = 5e-6  # seconds
MOST = 1 << 53  # steps that are told: whole numbers up to here are exact in JSON
ABLE, NEEDS_RELEASE = 1, 2  # values of `able`; any other one above 0 counts as ABLE

# Exit codes of a worker. Python, shells and signals use none of these.
EXIT_DRAINED = 86  # stopped at the step it was told to, snapshot committed
EXIT_PEER = 87  # a collective failed: another rank is gone


class Control:
    """A mapped control block. Each number is an attribute, which reads and writes the file.

    The agent writes `stop_at` and `snapshot_at`, and the worker obeys when its step equals that number. The worker
    writes all other numbers, unless a line below names another writer; only `renew` is the agent's. `NONE`: nothing
    yet. Times are epoch seconds; 0: the event has not happened yet. In the file, the `int` numbers come before the
    `float` numbers, each group in the order below.
    """

    generation: int
    pid: int
    rank: int
    step: int  # steps completed since the job began; NONE until the state is restored
    stop_at: int  # drain at this step
    snapshot_at: int  # snapshot at this step
    profile: int  # steps that should be recorded (see train/profiling.py); only `spotrun profile` writes it
    copied: int  # step of the newest snapshot that is in memory
    committed: int  # step of the newest snapshot that has its record
    total_steps: int  # the script's estimate of the job's length
    exit: int  # exit code that the worker is about to use
    base: int  # step at which this process began: that of the restored state
    begun: int  # step of the newest snapshot that was begun
    # The workers of a node copy a snapshot together with these numbers (see train/sections.py).
    shared_step: int  # the coming step whose snapshot all of them copy; only local rank 0 writes it
    shared_slot: int  # the slot of that snapshot
    layout_0: int  # the layout of slot 0 that this worker has mapped
    layout_1: int  # the same of slot 1
    section: int  # step of the newest snapshot whose section this worker has copied
    refused: int  # step of the newest snapshot whose section this worker will not copy
    # A worker joins another generation without a restart by these numbers (see train/regroup.py).
    able: int  # ABLE: it can. NEEDS_RELEASE: it can, but it may not notice that a peer is gone. 0: it cannot
    left: int  # it has left its generation, and waits for the next one: the exit code that it would have used
    joins: int  # the generation that it should join; only the agent writes it
    released: int  # the generation to leave now: a member is gone, silent, or does not come; only the agent writes it
    seed: int  # that the script gave to `spotrun.init`
    stepped_at: float  # end of the newest step
    samples: float  # seen by this process
    stepping: float  # seconds spent in steps
    alone: float  # seconds spent in steps before their first gradients were due: until then, no worker waits for others
    forked: float
    entered: float  # `spotrun.init` was called
    grouped: float  # the process group was formed
    restored: float  # the state was restored
    stepped_first: float  # end of this process's first step
    stall: float  # seconds spent copying snapshots
    expected: float  # seconds that the snapshot under way may take until it is committed
    took: float  # seconds that the last snapshot took; 0: none yet
    _map: mmap.mmap
    _ints: memoryview
    _floats: memoryview[float]

    def __init__(self, path: Path, create: bool = False) -> None:
        flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if create else 0)
        handle = os.open(path, flags, 0o600)
        try:
            if create:
                # Not ftruncate: on a full tmpfs that succeeds, and the first store would end the process by SIGBUS.
                os.posix_fallocate(handle, 0, SIZE)
            self._map = mmap.mmap(handle, SIZE)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None  # with the path
        finally:
            os.close(handle)
        view = memoryview(self._map)
        start = len(_INT_AT) * 8
        self._ints = view[:start].cast("q")
        self._floats = view[start : start + len(_FLOAT_AT) * 8].cast("d")
        if create:
            self._map[LAYOUT:TEXT] = _LAYOUT
            for name in _INT_AT.keys() - _FROM_ZERO:
                setattr(self, name, NONE)

    def checked(self) -> Control:
        """This block. Raises `SpotrunError` if another version made it: then only its first three numbers are here.

        So it is if spotrun's code has been replaced on a machine while the machine's agent ran.
        """
        if self._map[LAYOUT:TEXT] != _LAYOUT:
            raise SpotrunError(
                "spotrun has been replaced by another version on this machine since the machine's agent started: "
                "take the cluster down, bring it up again and relaunch the job"
            )
        return self

    def renew(self, generation: int) -> None:
        """Begin another generation with the same worker, which waits for it (`left`).

        Meanwhile, the worker may still write the snapshot of its last step. If it does, the fields of this snapshot are
        kept.
        """
        kept = _SNAPSHOT if self.begun > self.committed else set[str]()
        for name in _INT_AT.keys() - _KEPT - kept:
            setattr(self, name, 0 if name in _FROM_ZERO else NONE)
        for name in _FLOAT_AT.keys() - kept:
            setattr(self, name, 0.0)
        self.generation, self.forked = generation, time.time()

    def end_step(self, step: int, now: float, samples: float, stepping: float, alone: float) -> tuple[int, int, int]:
        """Write what changes with each step, in less time than by the attributes.

        Returns `stop_at`, `snapshot_at` and `profile`, read after that. A processor may read ahead of its own writes.
        So the agent waits between its write and its read (`WorkerGroup.set_steps`): a fence here took 6 µs a step.
        """
        ints, floats = self._ints, self._floats
        floats[_STEPPED_AT], floats[_SAMPLES], floats[_STEPPING], floats[_ALONE] = now, samples, stepping, alone
        ints[_STEP] = step
        return ints[_STOP_AT], ints[_SNAPSHOT_AT], ints[_PROFILE]

    @staticmethod
    def wait_until_visible() -> None:
        """Wait until other processors see what this one has written. This is far longer than that takes."""
        until = perf_counter() + VISIBLE
        while perf_counter() < until:
            pass  # a sleep would take 80 µs: a worker that stops in this time counts as late

    def tell_total(self, steps: int) -> None:
        """Tell the agent how many steps the job has, as the script estimates it."""
        self.total_steps = min(int(steps), MOST)

    def write_metrics(self, metrics: dict[str, float]) -> None:
        """Publish the first numbers of run.log(), as many as fit. A reader sees all of them or none."""
        text = json.dumps(metrics).encode()
        if len(text) > SIZE - TEXT - 8:
            text = _first(metrics, SIZE - TEXT - 8)
        self._map[TEXT : TEXT + 8] = bytes(8)
        self._map[TEXT + 8 : TEXT + 8 + len(text)] = text
        self._map[TEXT : TEXT + 8] = len(text).to_bytes(8, "little")

    def read_metrics(self) -> dict[str, float]:
        """The numbers that the worker logged last; empty if there are none, or if they are being written."""
        size = int.from_bytes(self._map[TEXT : TEXT + 8], "little")
        if not 0 < size <= SIZE - TEXT - 8:
            return {}
        try:
            found = json.loads(self._map[TEXT + 8 : TEXT + 8 + size])
        except (ValueError, RecursionError):
            return {}
        return {name: value for name, value in found.items() if _is_number(value)} if isinstance(found, dict) else {}

    def close(self) -> None:
        self._ints.release()
        self._floats.release()
        self._map.close()


_INT_AT, _FLOAT_AT = (
    {name: at for at, name in enumerate(name for name, kind in Control.__annotations__.items() if kind == wanted)}
    for wanted in ("int", "float")
)
# A block of another version differs in this, unless its numbers have the same order.
_LAYOUT = (zlib.crc32(" ".join((*_INT_AT, *_FLOAT_AT)).encode()) + 1).to_bytes(8, "little")

_STEP, _STOP_AT, _SNAPSHOT_AT, _PROFILE = (_INT_AT[name] for name in ("step", "stop_at", "snapshot_at", "profile"))
_STEPPED_AT, _SAMPLES, _STEPPING, _ALONE = (_FLOAT_AT[name] for name in ("stepped_at", "samples", "stepping", "alone"))


def _int(at: int) -> property:
    """The attribute for one of the `int` numbers. A step uses a dozen of these, so they must be fast."""

    def read(control: Control) -> int:
        return control._ints[at]

    def write(control: Control, value: int) -> None:
        control._ints[at] = value

    return property(read, write)


def _float(at: int) -> property:
    """The same for one of the `float` numbers."""

    def read(control: Control) -> float:
        return control._floats[at]

    def write(control: Control, value: float) -> None:
        control._floats[at] = value

    return property(read, write)


for _kind, _places in ((_int, _INT_AT), (_float, _FLOAT_AT)):
    for _name, _at in _places.items():
        setattr(Control, _name, _kind(_at))

# The numbers that begin at 0, not at `NONE`.
_FROM_ZERO = {"generation", "pid", "rank", "total_steps"}
# What lasts as long as the worker's process.
_KEPT = {"pid", "able", "layout_0", "layout_1", "joins", "seed"}
# What is said of a snapshot under way.
_SNAPSHOT = {"begun", "copied", "committed", "expected", "took"}


def _is_number(value: object) -> bool:
    """Whether a report can hold the number: JSON allows integers of any size, a report does not."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 1000)


def worker_fifo(control: str | Path) -> Path:
    """The FIFO that wakes a worker when the agent has written `released` or `joins`. control: the path of its block."""
    return Path(f"{control}.wake")


def warm_up_store(control: str | Path) -> Path:
    """The file at which a node's workers meet while they warm up. control: the path of local rank 0's block."""
    return Path(f"{control}.store")


@dataclass(frozen=True)
class Invitation:
    """The way of a waiting worker into its next generation: a file beside its control block, written by the agent."""

    env: dict[str, str]  # variables that differ from those of the generation before
    log: str  # path of the rank's log

    @staticmethod
    def path_for(control: str | Path) -> Path:
        """The invitation of the worker with that control block."""
        return Path(f"{control}.next")

    def write(self, control: str | Path) -> None:
        """Write the file. Set `Control.joins` after it."""
        path = self.path_for(control)
        partial = Path(f"{path}.part")
        partial.write_text(json.dumps(asdict(self)))
        os.replace(partial, path)

    @classmethod
    def read(cls, control: str | Path) -> Invitation:
        return cls(**_known(cls, json.loads(cls.path_for(control).read_text())))


@dataclass(frozen=True)
class Context:
    """What the launcher tells a worker, in one environment variable (`SPOTRUN_CONTEXT`, JSON)."""

    job: str
    generation: int
    node: str
    control: str  # path of the worker's control block
    slots: str  # folder in tmpfs with this node's snapshots of this job (see `spotrun.state.slots`)
    bucket: str  # URL
    snapshot_interval: int = 0  # steps; 0: adaptive
    checkpoints: list[tuple[int, int]] = field(default_factory=list)  # (generation, step), complete, newest first
    controls: list[str] = field(default_factory=list)  # paths of the control blocks of this node's workers, in order
    regroups: bool = False  # whether the agent lets workers wait for the next generation, instead of ending
    metrics: str = ""  # folder for what the script logs, on the node's disk (see `spotrun.state.points`); empty: none
    wakeup: str = ""  # path of the FIFO that wakes the agent (see `spotrun.state.wakeup`); empty: there is none
    warm_up: bool = False  # whether the worker is in no generation yet: it waits for one when its set-up is done
    exact: bool = False  # the job file's key
    elastic: bool = False  # whether the number of workers may change

    VARIABLE = "SPOTRUN_CONTEXT"

    def to_env(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_env(cls) -> Context | None:
        """The context this process runs in; None under plain `python` or `torchrun`."""
        text = os.environ.get(cls.VARIABLE)
        return cls.from_text(text) if text else None

    @classmethod
    def from_text(cls, text: str) -> Context:
        """The context that `to_env` wrote."""
        values = json.loads(text)
        values["checkpoints"] = [(int(g), int(s)) for g, s in values["checkpoints"]]
        return cls(**_known(cls, values))


def _known(kind: type[Invitation] | type[Context], values: dict[str, Any]) -> dict[str, Any]:
    """The values that this version knows."""
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _first(metrics: dict[str, float], room: int) -> bytes:
    """The first numbers as JSON, as many as fit into `room` bytes."""
    parts: list[str] = []
    for name, value in metrics.items():
        part = f"{json.dumps(name)}: {json.dumps(value)}"
        room -= len(part) + 2  # ASCII, with a comma or a brace
        if room < 0:
            break
        parts.append(part)
    return f"{{{', '.join(parts)}}}".encode()


def remove_block(path: Path) -> None:
    """Remove a control block, and what lies beside it."""
    beside = exit_note.path_for, Invitation.path_for, warm_up_store, worker_fifo
    for each in (path, *(place(path) for place in beside)):
        each.unlink(missing_ok=True)
