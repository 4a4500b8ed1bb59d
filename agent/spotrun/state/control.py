"""The control block: one small shared file between an agent and each of its workers.

The worker writes where it is (step, time, phases, what it logged); the agent writes where to stop. Each number is one
aligned 8-byte store, so neither side ever waits for the other, and reading costs nanoseconds. It is the heartbeat
and the hang detector. Standard library only: it is imported by the agent (no torch) and by training scripts.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

SIZE = 4096
TEXT = 1024  # from here on: the JSON text of what run.log() was given
NONE = -1

# Exit codes of a worker, chosen among those that neither Python, shells nor signals use.
EXIT_DRAINED = 86  # stopped at the step it was told to, snapshot committed
EXIT_PEER = 87  # a collective failed: another rank is gone

# Slot of each number (8 bytes each). Floats are kept as their bit pattern in a view of their own.
_INTS = (
    "generation",
    "pid",
    "rank",
    "step",
    "stop_at",
    "snapshot_at",
    "copied",
    "committed",
    "total_steps",
    "exit",
    "base",
    "begun",
)
_FLOATS = (
    "stepped_at",
    "forked",
    "entered",
    "grouped",
    "restored",
    "stepped_first",
    "stall",
    "stepping",
    "samples",
    "expected",
    "took",
)


class Control:
    """A mapped control block. Every name in `_INTS` and `_FLOATS` is an attribute that reads and writes the file.

    step: steps completed since the job began; `NONE` until the state is restored.
    stop_at, snapshot_at: written by the agent; `NONE` for nothing. The worker obeys when step == that number.
    begun, copied, committed: step of the newest snapshot that was begun, that is copied to memory, and whose record is
    written. expected: seconds that it may take to be committed. took: those that the last one took; 0: none yet.
    base: the step at which this process took up the work (what it restored); `NONE` until then.
    exit: exit code that the worker is about to use; `NONE` while it runs.
    """

    generation: int
    pid: int
    rank: int
    step: int
    stop_at: int
    snapshot_at: int
    copied: int
    committed: int
    total_steps: int
    exit: int
    base: int
    begun: int
    stepped_at: float
    forked: float
    entered: float
    grouped: float
    restored: float
    stepped_first: float
    stall: float
    stepping: float
    samples: float
    expected: float
    took: float

    def __init__(self, path: Path, create: bool = False) -> None:
        flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if create else 0)
        handle = os.open(path, flags, 0o600)
        try:
            if create:
                # Not ftruncate: on a full tmpfs that succeeds, and the first store would end the process by SIGBUS.
                os.posix_fallocate(handle, 0, SIZE)
            self.__dict__["_map"] = mmap.mmap(handle, SIZE)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None  # or it would not say where
        finally:
            os.close(handle)
        view = memoryview(self._map)
        self.__dict__["_ints"] = view[: len(_INTS) * 8].cast("q")
        start = len(_INTS) * 8
        self.__dict__["_floats"] = view[start : start + len(_FLOATS) * 8].cast("d")
        if create:
            for name in ("step", "stop_at", "snapshot_at", "copied", "committed", "exit", "base", "begun"):
                setattr(self, name, NONE)

    _map: mmap.mmap
    _ints: memoryview
    _floats: memoryview

    def __getattr__(self, name: str) -> float:
        if name in _INT_AT:
            return int(self._ints[_INT_AT[name]])
        if name in _FLOAT_AT:
            return float(self._floats[_FLOAT_AT[name]])
        raise AttributeError(name)

    def __setattr__(self, name: str, value: float) -> None:
        if name in _INT_AT:
            self._ints[_INT_AT[name]] = int(value)
        elif name in _FLOAT_AT:
            self._floats[_FLOAT_AT[name]] = float(value)  # type: ignore[call-overload]
        else:
            raise AttributeError(f"a control block has no {name}")

    def write_metrics(self, metrics: dict[str, float]) -> None:
        """Publish what run.log() was given; a reader that comes in between sees no metrics, never half of them."""
        text = json.dumps(metrics).encode()[: SIZE - TEXT - 8]
        self._map[TEXT : TEXT + 8] = bytes(8)
        self._map[TEXT + 8 : TEXT + 8 + len(text)] = text
        self._map[TEXT : TEXT + 8] = len(text).to_bytes(8, "little")

    def read_metrics(self) -> dict[str, float]:
        """What the worker logged last; empty if nothing, or if it is being written right now."""
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


_INT_AT = {name: index for index, name in enumerate(_INTS)}
_FLOAT_AT = {name: index for index, name in enumerate(_FLOATS)}


def _is_number(value: object) -> bool:
    """Whether it is a number that a report can hold. JSON allows whole numbers of any size, a report does not."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 1000)


@dataclass(frozen=True)
class Context:
    """What a worker is told by its launcher, in one environment variable (`SPOTRUN_CONTEXT`, JSON).

    slots: the folder in tmpfs that holds this node's snapshots of this job (see `spotrun.state.slots`).
    snapshot_interval: steps; 0: adaptive.
    checkpoints: (generation, step) of complete checkpoints in the bucket, newest first.
    """

    job: str
    generation: int
    node: str
    control: str
    slots: str
    bucket: str
    snapshot_interval: int = 0
    checkpoints: list[tuple[int, int]] = field(default_factory=list)

    VARIABLE = "SPOTRUN_CONTEXT"

    def to_env(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_env(cls) -> Context | None:
        """The context this process runs in; None under plain `python` or `torchrun`."""
        text = os.environ.get(cls.VARIABLE)
        if not text:
            return None
        values = json.loads(text)
        values["checkpoints"] = [(int(g), int(s)) for g, s in values["checkpoints"]]
        return cls(**values)
