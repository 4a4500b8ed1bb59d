"""The worker group of one generation on this node: its control blocks, how its workers ended, and how to end them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from spotrun.machine.processes import descendants, kill
from spotrun.node import cleanup, log_tail, worker_failure
from spotrun.node.phase import Phase, phase_of
from spotrun.node.snapshot_limits import pace, seconds_for_snapshot, steps_in_progress
from spotrun.state import exit_note
from spotrun.state.control import EXIT_DRAINED, EXIT_PEER, NEEDS_RELEASE, NONE, Control, remove_block
from spotrun.wire import Failure, Generation, Worker

log = logging.getLogger(__name__)

# Seconds, besides those of two steps, from a peer's end until all workers of a node have noticed the end, and wait.
GRACE = 1.0
GRACE_MOST = 10.0  # the same, at most, with the two steps
ABORT = 16.0  # more seconds on GPUs: 5 each, at most, for the abort, the queued steps and the group's end, and 1
REAP = 10.0  # seconds for killed workers to be gone
STUCK = 30.0  # seconds after which the kernel will not end them at all: a GPU or a disk does not answer
UNREPORTED = 5.0  # seconds from a worker's end until the launcher, on a busy machine, has reported the end
STACKS = 2.0  # seconds for the stacks to be in the log

STARTING = ("starting workers", "running the script's set-up", "forming the process group", "restoring the state")
JOINING = "joining the other workers"  # in place of the set-up, which a worker that regroups does not run again


@dataclass
class LocalWorker:
    """One worker of this node."""

    rank: int  # in the whole generation
    path: Path  # of the control block
    log: Path  # where its output goes
    control: Control
    pid: int = 0  # 0: not forked yet
    pidfd: int = -1  # a handle of the process: unlike a pid, it never names a later process
    code: int | None = None  # exit code; None: the worker has not ended
    killed: bool = False  # whether `end` killed the worker while it was alive
    gone_at: float = 0.0  # when `unreported` first found that the process had ended, by the monotonic clock; 0: not yet

    @property
    def left(self) -> int | None:
        """The code with which it has left its generation, to wait for another one; None: it has not."""
        return None if self.code is not None or self.control.left == NONE else self.control.left


@dataclass
class WorkerGroup:
    """This node's workers of one generation."""

    generation: Generation
    workers: list[LocalWorker]
    group_failure: Failure | None = None  # why the whole group ended, if no worker caused it
    stacks: str = ""  # bucket key of the stacks of workers that hang
    late: int | None = None  # a stop or save step that a worker had already passed when it was ordered
    stops: int | None = None  # a stop step that no worker had passed when it was ordered: all of them stop there
    previous: int = 0  # the generation in which the same workers were before; 0: they were in none
    before: tuple[Worker, ...] = ()  # what these workers reported at the end of `previous`
    released_at: float = 0.0  # when the workers were told to leave the generation, epoch seconds; 0: they were not
    origin: int = 0  # the generation for which the launcher has forked the workers; 0: this one
    _failures: list[Failure] = field(default_factory=list)
    _left: dict[int, Failure] = field(default_factory=dict)  # as `_peers_gone`, by rank
    _steps: tuple[int, int] = (NONE, NONE)  # where to stop, where to save
    _began: float = field(default_factory=time.time)
    _ending: bool = False  # whether the agent is ending the workers
    _killed_at: float = 0.0  # when all of them had been killed or were gone, by the monotonic clock; 0: not yet
    _cleaned_up: bool = False  # whether the workers' shared memory has been removed
    _exited: asyncio.Event = field(default_factory=asyncio.Event)  # set when all workers have ended

    @property
    def number(self) -> int:
        return self.generation.number

    @property
    def alive(self) -> bool:
        return not self._exited.is_set()

    @property
    def living(self) -> bool:
        """Whether a worker's process may exist. The kernel kills the workers of a launcher that has ended."""
        return self.alive or any(each.pidfd >= 0 and not _is_gone(each.pidfd) for each in self.workers)

    @property
    def stuck(self) -> bool:
        """Whether a worker's process is there long after it was killed. Its devices cannot be used again."""
        return 0 < self._killed_at < time.monotonic() - STUCK and self.living

    def ranks(self) -> dict[int, tuple[int, float, float]]:
        """By rank: steps of this generation, the seconds of these steps, and the part before the gradients were due.

        In that part, a worker waits for no other. So the last number tells which worker is slow.
        """
        controls = [(each.rank, each.control) for each in self.workers]
        return {rank: (max(0, c.step - max(c.base, 0)), c.stepping, c.alone) for rank, c in controls}

    @property
    def launcher_ended(self) -> bool:
        """Whether the group has ended with its launcher, so that no worker is at fault."""
        return self.group_failure is not None and self.group_failure.kind == "signal"

    @property
    def failure(self) -> Failure | None:
        """The first failure. A failure because of a dead peer counts only if there is no other."""
        found = [*self._failures, *self._peers_gone()]
        return self.group_failure or min(found, key=lambda each: (each.kind == "peer", each.at), default=None)

    @property
    def phase(self) -> Phase:
        restored = all(each.control.step != NONE for each in self.workers)
        # Those that have left are done when the snapshot of their last step is safe. They begin it before they leave.
        # So look first whether they have left: they may do so meanwhile.
        left = [each.left for each in self.workers]
        left = [None if steps_in_progress(w.control) else gone for w, gone in zip(self.workers, left, strict=True)]
        codes = [gone if each.code is None else each.code for each, gone in zip(self.workers, left, strict=True)]
        return phase_of(codes, self.failure, self.group_failure is not None, restored)

    @property
    def regroup(self) -> Literal["no", "able", "waiting"]:
        """Whether all workers could join another generation, or wait for it now."""
        if any(each.code is not None or not each.pid or each.control.able <= 0 for each in self.workers):
            return "no"
        return "waiting" if all(each.left is not None for each in self.workers) else "able"

    @property
    def needs_release(self) -> bool:
        """Whether a worker may not notice that a peer is gone, so that it must be released."""
        return any(each.control.able == NEEDS_RELEASE for each in self.workers)

    @property
    def joining(self) -> bool:
        """Whether the workers regroup, and have not formed the process group yet."""
        return self.regroup == "able" and self.forms

    @property
    def forms(self) -> bool:
        """Whether a regroup has not formed the process group yet. Its workers may have left the generation since."""
        return self.number > 0 and self.origin != 0 and any(not each.control.grouped for each in self.workers)

    def stopped_in(self, generation: int) -> bool:
        """Whether all workers of this node have left that generation at its stop step."""
        return self.number == generation and all(each.left == EXIT_DRAINED for each in self.workers)

    @property
    def broken(self) -> bool:
        """Whether a worker has failed while others still run."""
        if not self.alive or self.failure is None:
            return False
        if self.group_failure or self.regroup == "no":
            return True
        # The others of this node notice it, too, and then all of them wait.
        grace = min(GRACE + 2 * max(pace(each.control) for each in self.workers), GRACE_MOST)
        return self.regroup == "able" and time.time() - self.failure.at > grace + ABORT * self.needs_release

    def unreported(self) -> bool:
        """Whether the launcher does not report that a worker has ended: launcher or forkserver stands still."""
        now = time.monotonic()
        for each in self.workers:
            if each.code is None and not each.gone_at and each.pidfd >= 0 and _is_gone(each.pidfd):
                each.gone_at = now
        return any(each.code is None and 0 < each.gone_at < now - UNREPORTED for each in self.workers)

    @property
    def writes_snapshot(self) -> bool:
        """Whether a snapshot is under way."""
        return any(steps_in_progress(each.control) for each in self.workers)

    @property
    def committed(self) -> int:
        """The step of the newest snapshot that a worker has committed in this generation; -1: none."""
        return max((each.control.committed for each in self.workers), default=-1)

    @property
    def doing(self) -> tuple[str, float]:
        """What the slowest worker does before it trains, and since when, in epoch seconds."""
        done = [[c.forked, c.entered, c.grouped, c.restored] for c in (each.control for each in self.workers)]
        index = min((sum(at > 0 for at in times) for times in done), default=0)
        said = JOINING if index == 1 and self.number and self.origin else (*STARTING, "")[index]
        return said, max((times[index - 1] for times in done), default=0.0) if index else self._began

    def started(self, pids: Sequence[int]) -> None:
        """Record that the launcher has forked the workers."""
        for each, pid in zip(self.workers, pids, strict=True):
            each.pid = pid
            # It may have ended. Or this process has too many descriptors: then only its launcher's end can end it.
            with contextlib.suppress(OSError):
                each.pidfd = os.pidfd_open(pid)

    def exited(self, local_rank: int, code: int) -> None:
        """Record that a worker has ended. A kill by `end` counts only if the worker has reported a failure."""
        each = self.workers[local_rank]
        if code == EXIT_DRAINED and each.control.exit != EXIT_DRAINED:
            code = 1  # the script chose this code itself
        if each.killed and each.left is not None:
            code = each.left
        each.code = code
        killed = each.killed and code == -signal.SIGKILL and not exit_note.path_for(each.path).exists()
        if code not in (0, EXIT_DRAINED) and not killed:
            self._failures.append(worker_failure.read(each.path, each.log, each.rank, code))
        self._check_exited()

    def fail(self, failure: Failure) -> None:
        """Record that the whole group has ended, or never started."""
        if self.failure is None and not self._ending:
            self.group_failure = failure
        for each in self.workers:
            each.code = NONE if each.code is None else each.code
        self._check_exited()

    def set_steps(self, stop_at: int | None, save_at: int | None) -> None:
        """Tell the workers where to stop and to save. Sets `late` if one has passed that step already, else `stops`.

        If a stop step lower than the last one comes too late, the workers still stop after the last one.
        """
        wanted = (NONE if stop_at is None else stop_at, NONE if save_at is None else save_at)
        for name, value, before in zip(("stop_at", "snapshot_at"), wanted, self._steps, strict=True):
            if value == before:
                continue
            passed = value != NONE and any(each.control.step >= value for each in self.workers)
            if name == "stop_at" and passed and self.stops is not None and value < self.stops:
                self.late = value
                continue
            for each in self.workers:
                setattr(each.control, name, value)
            Control.wait_until_visible()
            # Write first, then read: a worker that passes the step in between is seen here, or sees the step itself.
            late = value != NONE and any(each.control.step >= value for each in self.workers)
            if name == "stop_at":
                self.stops = None if late or value == NONE else value
            if late:
                self.late = value
                for each in self.workers if name == "stop_at" else ():
                    each.control.stop_at = NONE  # or the workers would stop at the next step, each at another one
        self._steps = wanted
        if self.late not in wanted:
            self.late = None

    def report(self) -> tuple[Worker, ...]:
        return tuple(_report(each) for each in self.workers)

    async def end(self) -> None:
        """End the workers once a snapshot in progress is safe. Some may survive: see `alive`."""
        if self.alive:
            await self._end()
        for each in self.workers:  # also one that the launcher does not know any more
            _signal(each, signal.SIGKILL)
        self._killed_at = self._killed_at or time.monotonic()
        if not self.alive and not self._cleaned_up:
            self._cleaned_up = True
            await asyncio.to_thread(cleanup.remove_nccl_segments)

    async def _end(self) -> None:
        draining = self._steps[0] != NONE and self.failure is not None
        running = [each for each in self.workers if each.code is None]
        limits = [seconds_for_snapshot(each.control, draining or each.left == EXIT_DRAINED) for each in running]
        await _until(lambda: self._settled(draining), max(limits, default=0.0))
        self._ending = True
        deadline = time.monotonic() + REAP
        killed: set[int] = set()
        while self.alive and not self.unreported() and time.monotonic() < deadline:
            for each in self.workers:
                # In each round, as the launcher may be about to fork a worker.
                if each.code is None and each.pid not in killed and each.pidfd >= 0:
                    _kill(each)
                    killed.add(each.pid)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await self._exited.wait()

    async def dump_stacks(self) -> bytes:
        """The stacks of all workers, which the workers write to their logs. Call `end` after this."""
        before = [log_tail.size(each.log) for each in self.workers]
        for each in self.workers:
            _signal(each, signal.SIGUSR1)
        waiting = [(each, size) for each, size in zip(self.workers, before, strict=True) if each.code is None]
        await _until(lambda: all(log_tail.size(each.log) > size for each, size in waiting), STACKS)
        await _until(log_tail.Quiet([each.log for each in self.workers]), STACKS)
        self._ending = True
        texts = []
        for each, size in zip(self.workers, before, strict=True):
            text = await asyncio.to_thread(log_tail.read_from, each.log, size)
            texts.append(f"rank {each.rank}:\n".encode() + (text or b"(no answer: the process is stopped or gone)\n"))
        return b"\n".join(texts)

    def close(self) -> None:
        """Remove the control blocks. The group cannot be used after this."""
        for each in self.workers:
            each.control.close()
            if each.pidfd >= 0:
                os.close(each.pidfd)
                each.pidfd = -1
            remove_block(each.path)

    def _settled(self, draining: bool) -> bool:
        """Whether no snapshot is under way that a kill would spoil."""
        alive = [each for each in self.workers if each.code is None]
        leaves = draining and any(each.left is None for each in alive)
        return not leaves and all(steps_in_progress(each.control) == 0 for each in alive)

    def _peers_gone(self) -> list[Failure]:
        """Why workers have left this generation, and wait for the next one."""
        gone = [each for each in self.workers if each.left == EXIT_PEER]  # one look: others may leave meanwhile
        for each in gone:
            if each.rank not in self._left:
                self._left[each.rank] = worker_failure.read(each.path, each.log, each.rank, EXIT_PEER)
        return [self._left[each.rank] for each in gone]

    def _check_exited(self) -> None:
        if all(each.code is not None for each in self.workers):
            self._exited.set()


def create(generation: Generation, node_rank: int, procs: int, control: Path, logs: Path) -> WorkerGroup:
    """A group with new control blocks in folder `control`. Raises OSError if there is no room for them."""
    control.mkdir(parents=True, exist_ok=True)
    logs.mkdir(parents=True, exist_ok=True)
    found = WorkerGroup(generation, [])
    for local_rank in range(procs):
        rank = node_rank * procs + local_rank
        path = control / f"{generation.number}.{local_rank}"
        try:
            remove_block(path)  # a killed agent leaves those of its workers
            found.workers.append(LocalWorker(rank, path, logs / f"{rank}.log", Control(path, create=True)))
        except OSError:
            path.unlink(missing_ok=True)
            found.close()
            raise
    return found


def move(group: WorkerGroup, generation: Generation, node_rank: int, logs: Path) -> WorkerGroup:
    """The group's workers, which wait, in another generation. Invite them when the launcher has its store."""
    logs.mkdir(parents=True, exist_ok=True)
    before, origin = group.report() if group.number else (), group.origin or group.number
    found = WorkerGroup(generation, group.workers, previous=group.number, before=before, origin=origin)
    for local_rank, each in enumerate(group.workers):
        exit_note.path_for(each.path).unlink(missing_ok=True)
        each.rank = node_rank * len(group.workers) + local_rank
        each.log = logs / f"{each.rank}.log"
        each.control.renew(generation.number)
    return found


def _report(each: LocalWorker) -> Worker:
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
        alone=c.alone,
    )


def _kill(each: LocalWorker) -> None:
    """SIGKILL a worker and its descendants: a DataLoader's workers notice their parent's death only after seconds."""
    below = descendants(each.pid) if each.pid else []
    # If the process is dead already and its end has not been reported yet, something else ended it.
    each.killed = not _is_gone(each.pidfd)
    _signal(each, signal.SIGKILL)
    kill(below)


def _is_gone(pidfd: int) -> bool:
    """Whether the process has ended (pidfd_open(2))."""
    return bool(select.select([pidfd], [], [], 0)[0])


def _signal(each: LocalWorker, number: signal.Signals) -> None:
    if each.pidfd >= 0:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(each.pidfd, number)


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
