"""This node's workers of one generation: their control blocks, how they ended, stopping them, ending them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from spotrun.machine.processes import descendants, kill
from spotrun.node import cleanup
from spotrun.state import exit_note
from spotrun.state.control import EXIT_DRAINED, EXIT_PEER, NONE, Control
from spotrun.wire import Failure, Generation, Worker

log = logging.getLogger(__name__)

SETTLE = 2.0  # seconds that a snapshot on its way into memory gets at least before its worker is ended
LEAVE = 6.0  # seconds that a worker gets at least to leave a drain: it waits for the others, and for its snapshot
REAP = 10.0  # seconds for killed workers to be gone
TAIL = 1 << 16  # bytes at the end of a log in which NCCL's last words are looked for
STACKS = 2.0  # seconds for the stacks to be in the log

_FENCE = threading.Lock()  # taking it orders memory: a processor may else read ahead of its own writes

Phase = Literal["starting", "running", "drained", "failed", "succeeded"]


@dataclass
class Local:
    """One worker. code: its exit code once it has ended."""

    rank: int
    path: Path
    log: Path
    control: Control
    pid: int = 0
    pidfd: int = -1
    code: int | None = None
    killed: bool = False  # by `free`, and not dead before


@dataclass
class Group:
    """The workers of `generation` on the node that is number `node_rank` in it."""

    generation: Generation
    node_rank: int
    locals: list[Local]
    lost: Failure | None = None  # why the whole group ended, if not by a worker's own doing
    stacks: str = ""
    late: int | None = None
    _failures: list[Failure] = field(default_factory=list)
    _armed: tuple[int, int] = (NONE, NONE)
    _freed: bool = False
    _tidy: bool = False  # what its workers left in shared memory is removed
    _gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def number(self) -> int:
        return self.generation.number

    @property
    def alive(self) -> bool:
        return not self._gone.is_set()

    @property
    def failure(self) -> Failure | None:
        """The first, but somebody else's death only if there is no other."""
        return self.lost or min(self._failures, key=lambda found: (found.kind == "peer", found.at), default=None)

    @property
    def phase(self) -> Phase:
        restored = all(each.control.step != NONE for each in self.locals)
        return phase([each.code for each in self.locals], self.failure, self.lost is not None, restored)

    @property
    def broken(self) -> bool:
        """Whether a worker has failed while others go on."""
        return self.alive and self.failure is not None

    def started(self, pids: Sequence[int]) -> None:
        """The launcher has forked them."""
        for each, pid in zip(self.locals, pids, strict=True):
            each.pid = pid
            with contextlib.suppress(ProcessLookupError):
                each.pidfd = os.pidfd_open(pid)  # a number that no later process can come to have

    def exited(self, local_rank: int, code: int) -> None:
        """A worker has ended. That `free` has killed it does not count; what it said before that does."""
        each = self.locals[local_rank]
        if code == EXIT_DRAINED and each.control.exit != EXIT_DRAINED:
            code = 1  # the script's own choice of a code
        each.code = code
        killed = each.killed and code == -signal.SIGKILL and not exit_note.path_for(each.path).exists()
        if code not in (0, EXIT_DRAINED) and not killed:
            self._failures.append(_read_failure(each))
        self._check_gone()

    def give_up(self, failure: Failure) -> None:
        """The whole group is gone, or never came to be."""
        if self.failure is None and not self._freed:
            self.lost = failure
        for each in self.locals:
            each.code = NONE if each.code is None else each.code
        self._check_gone()

    def arm(self, stop_at: int | None, save_at: int | None) -> None:
        """Tell the workers where to stop and to save; `late` if one of them is past that already."""
        wanted = (NONE if stop_at is None else stop_at, NONE if save_at is None else save_at)
        for name, value, before in zip(("stop_at", "snapshot_at"), wanted, self._armed, strict=True):
            if value == before:
                continue
            with _FENCE:
                for each in self.locals:
                    setattr(each.control, name, value)
            # Written first, read then: a worker that passes in between is seen here, or sees it itself.
            if value != NONE and any(each.control.step >= value for each in self.locals):
                self.late = value
                for each in self.locals if name == "stop_at" else ():
                    each.control.stop_at = NONE  # or they would stop at the next step, each at its own
        self._armed = wanted
        if self.late not in wanted:
            self.late = None

    def view(self) -> tuple[Worker, ...]:
        return tuple(_show(each) for each in self.locals)

    async def free(self) -> None:
        """End the workers, once a snapshot that is under way is safe. Gives up after a while: see `alive`."""
        if self.alive:
            await self._end()
        if not self.alive and not self._tidy:
            self._tidy = True
            await asyncio.to_thread(cleanup.remove_nccl_segments)

    async def _end(self) -> None:
        draining = self._armed[0] != NONE and self.failure is not None
        limits = [patience(each.control, draining) for each in self.locals if each.code is None]
        await _until(lambda: self._settled(draining), max(limits, default=0.0))
        self._freed = True
        deadline = time.monotonic() + REAP
        killed: set[int] = set()
        while self.alive and time.monotonic() < deadline:
            for each in self.locals:
                # Again and again, as the launcher may be about to fork them.
                if each.code is None and each.pid not in killed and each.pidfd >= 0:
                    _kill(each)
                    killed.add(each.pid)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await self._gone.wait()

    async def dump(self) -> bytes:
        """The stacks of all workers, as they write them to their logs; then end them."""
        before = [_size(each.log) for each in self.locals]
        for each in self.locals:
            _signal(each, signal.SIGUSR1)
        waiting = [(each, size) for each, size in zip(self.locals, before, strict=True) if each.code is None]
        await _until(lambda: all(_size(each.log) > size for each, size in waiting), STACKS)
        await _until(_Quiet([each.log for each in self.locals]), STACKS)
        self._freed = True
        texts = []
        for each, size in zip(self.locals, before, strict=True):
            text = await asyncio.to_thread(_read_from, each.log, size)
            texts.append(f"rank {each.rank}:\n".encode() + (text or b"(no answer: the process is stopped or gone)\n"))
        return b"\n".join(texts)

    def close(self) -> None:
        """Let go of the control blocks. The group is of no use after that."""
        for each in self.locals:
            each.control.close()
            if each.pidfd >= 0:
                os.close(each.pidfd)
            each.path.unlink(missing_ok=True)
            exit_note.path_for(each.path).unlink(missing_ok=True)

    def _settled(self, draining: bool) -> bool:
        """Whether no worker has anything under way that ending it would spoil."""
        alive = [each for each in self.locals if each.code is None]
        if draining and alive:
            return False
        return all(_under_way(each.control) == 0 for each in alive)

    def _check_gone(self) -> None:
        if all(each.code is not None for each in self.locals):
            self._gone.set()


def create(generation: Generation, node_rank: int, procs: int, control: Path, logs: Path) -> Group:
    """A group with fresh control blocks in folder `control`. Raises OSError if there is no room for them."""
    control.mkdir(parents=True, exist_ok=True)
    logs.mkdir(parents=True, exist_ok=True)
    found = Group(generation, node_rank, [])
    for local_rank in range(procs):
        rank = node_rank * procs + local_rank
        path = control / f"{generation.number}.{local_rank}"
        try:
            found.locals.append(Local(rank, path, logs / f"{rank}.log", Control(path, create=True)))
        except OSError:
            path.unlink(missing_ok=True)
            found.close()
            raise
    return found


def phase(codes: Sequence[int | None], failure: Failure | None, lost: bool, restored: bool) -> Phase:
    """What the exit codes (None: still running) make of the group.

    During a drain a worker may lose its peers just before it stops itself; as long as one here has drained, the
    snapshot is there, and that is what a drain is for.
    """
    drained = EXIT_DRAINED in codes and (failure is None or failure.kind == "peer") and not lost
    if None in codes:
        if failure is not None and not drained:
            return "failed"
        return "running" if restored else "starting"
    if drained:
        return "drained"
    return "succeeded" if failure is None and not any(codes) else "failed"


def patience(control: Control, draining: bool) -> float:
    """Seconds for a snapshot under way: twice what it may take, but no more than the work that it holds took.

    draining: the worker leaves by itself once its snapshot is committed.
    """
    if draining:
        return max(LEAVE, 2 * control.expected)
    done = control.step - max(control.base, 0)
    pace = control.stepping / done if done > 0 else 0.0
    return max(SETTLE, min(2 * control.expected, _under_way(control) * pace))


def _under_way(control: Control) -> int:
    """How many steps a snapshot under way is ahead of the one that counts; 0: none is under way."""
    newest = max(control.begun, control.copied)
    return newest - max(control.committed, control.base, 0) if newest > control.committed else 0


def _show(each: Local) -> Worker:
    c = each.control
    return Worker(
        rank=each.rank,
        pid=each.pid,
        step=c.step,
        base=c.base,
        stepped_at=c.stepped_at,
        samples=c.samples,
        total_steps=c.total_steps,
        metrics={name: value for name, value in c.read_metrics().items() if isinstance(value, int | float)},
        phases=(c.forked, c.entered, c.grouped, c.restored, c.stepped_first),
        stall=c.stall,
        stepping=c.stepping,
        took=c.took,
    )


def _read_failure(each: Local) -> Failure:
    """What the worker said before it ended; else what its exit code tells."""
    code = each.code or 0
    with contextlib.suppress(OSError, ValueError, TypeError, ValidationError):
        return Failure(**json.loads(exit_note.path_for(each.path).read_text()))
    if code == -signal.SIGABRT:
        # So torch ends a worker whose collective has failed in NCCL: somebody else is gone.
        return Failure(kind="peer", rank=each.rank, at=time.time(), message=_aborted(each.log))
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return Failure(kind="signal", rank=each.rank, at=time.time(), message=f"ended by {name}{hint}")
    if code == EXIT_PEER:
        return Failure(kind="peer", rank=each.rank, at=time.time(), message="a collective failed")
    return Failure(kind="user", rank=each.rank, at=time.time(), message=f"the script exited with code {code}")


def _aborted(log: Path) -> str:
    why = exit_note.nccl_reason(_read_from(log, max(0, _size(log) - TAIL)).decode(errors="replace"))
    return f"ended by SIGABRT: {why}"[: exit_note.LONGEST] if why else "ended by SIGABRT"


def _kill(each: Local) -> None:
    """SIGKILL to a worker and all below it (a DataLoader's workers notice a parent's death only after seconds)."""
    below = descendants(each.pid) if each.pid else []
    # One that is dead already (its end has not been reported yet) was ended by something else.
    each.killed = not select.select([each.pidfd], [], [], 0)[0]
    _signal(each, signal.SIGKILL)
    kill(below)


def _signal(each: Local, number: signal.Signals) -> None:
    if each.code is None and each.pidfd >= 0:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(each.pidfd, number)


class _Quiet:
    """Whether the files have stopped growing since the last call, and the one before it."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._seen: list[list[int]] = []

    def __call__(self) -> bool:
        self._seen = [*self._seen[-4:], [_size(path) for path in self._paths]]
        return len(self._seen) == 5 and all(sizes == self._seen[0] for sizes in self._seen)


async def _until(condition: object, seconds: float) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_from(path: Path, start: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(1 << 20)
    except OSError:
        return b""
